"""`patch(cuda_graphs="auto")`: what is captured when, and what a handle says of a GPU that waits for the host.

Without a GPU, graphs, events and times are fake; see `helpers/cuda_graphs.py`.
"""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import tiny
import torch
from cuda_graphs import DEVICE, FakeEvent, cuda_graphs  # noqa: F401
from token_tiled_cases import IGNORED_WARNINGS

import nt_attention as nta
from nt_attention.graphs import policy as graph_policy
from nt_attention.graphs.capture import Sizes
from nt_attention.graphs.policy import (
    CAPTURES,
    DEVICE_BOUND,
    NO_GAIN,
    OFTEN,
    REPLAYS,
    SELDOM,
    TIMED,
    TOO_MANY,
    UNUSED,
    WARM_UP,
    HostWaits,
    Policy,
)

pytestmark = IGNORED_WARNINGS
CPU = torch.device("cpu")


class Times:
    """In place of spans: those that a policy begins take these times, in ms."""

    def __init__(self):
        self.host_ms = self.device_ms = 10.0
        self.is_known = True

    def __call__(self, device):
        waits = self.device_ms <= graph_policy.LATE * self.host_ms
        return SimpleNamespace(**vars(self), waits=waits, end=lambda: None)


@pytest.fixture
def times(monkeypatch):
    made = Times()
    monkeypatch.setattr(graph_policy, "Span", made)
    return made


def bucket(tokens, sequences=4, longest=32):
    return (Sizes(sequences, longest, tokens),)


def ask(policy, tokens, calls=1, key="key"):
    """The reasons of some calls. Those that come too seldom are timed."""
    reasons = []
    for _ in range(calls):
        reasons.append(policy.why_not(key, bucket(tokens)))
        if reasons[-1] == SELDOM:
            policy.time_call(key, bucket(tokens), CPU)
    return reasons


def replay(policy, tokens, calls=1):
    for _ in range(calls):
        policy.time_replay(policy.times_of("key", bucket(tokens)), CPU)


class TestPolicy:
    """What is captured, by the times of calls."""

    def test_a_bucket_that_comes_often(self, times):
        assert ask(Policy(), 128, OFTEN + 2) == [SELDOM] * OFTEN + [None, None]

    def test_a_device_that_takes_the_time(self, times):
        times.device_ms = 12.0
        assert ask(Policy(), 128, 8) == [SELDOM] * (WARM_UP + 1) + [DEVICE_BOUND] * (7 - WARM_UP)

    def test_the_first_calls_compile_kernels(self, times):
        """The host takes long in them, whatever the device does."""
        policy = Policy()
        times.host_ms = 1000.0
        ask(policy, 128, WARM_UP)
        times.host_ms, times.device_ms = 10.0, 12.0
        assert ask(policy, 128, 2) == [SELDOM, DEVICE_BOUND]

    def test_a_single_slow_call_of_the_host_decides_nothing(self, times):
        policy = Policy()
        ask(policy, 128, WARM_UP)
        times.host_ms = times.device_ms = 50.0
        policy.why_not("key", bucket(128))
        policy.time_call("key", bucket(128), CPU)
        times.host_ms, times.device_ms = 10.0, 12.0
        policy.time_call("key", bucket(128), CPU)
        assert ask(policy, 128) == [DEVICE_BOUND]

    def test_times_that_are_not_known_yet(self, times):
        times.is_known = False
        assert ask(Policy(), 128, 20) == [SELDOM] * 20

    def test_few_calls_are_timed(self, times):
        policy = Policy()
        policy.why_not("key", bucket(128))
        assert policy.time_call("key", bucket(128), CPU) is None
        ask(policy, 128, WARM_UP)  # times one
        timed = [policy.time_call("key", bucket(128), CPU) for _ in range(2 * TIMED)]
        assert len([span for span in timed if span is not None]) == TIMED - 1

    def test_smaller_batches_wait_if_a_larger_one_does(self, times):
        policy = Policy()
        ask(policy, 1024, OFTEN + 1)
        times.is_known = False
        assert ask(policy, 512, OFTEN + 1) == [SELDOM] * OFTEN + [None]
        assert ask(policy, 2048, OFTEN + 1) == [SELDOM] * (OFTEN + 1)

    def test_larger_batches_do_not_wait_if_a_smaller_one_does_not(self, times):
        policy = Policy()
        times.device_ms = 12.0
        ask(policy, 512, OFTEN + 1)
        times.is_known = False
        assert ask(policy, 1024) == [DEVICE_BOUND]
        assert ask(policy, 256) == [SELDOM]
        assert ask(policy, 1024, key="other") == [SELDOM]

    def test_a_graph_that_gains_nothing(self, times):
        policy = Policy()
        ask(policy, 128, OFTEN + 1)
        replay(policy, 128, TIMED - 1)
        assert policy.times_of("key", bucket(128)).pays
        replay(policy, 128)
        assert not policy.times_of("key", bucket(128)).pays
        assert ask(policy, 128) == [NO_GAIN]

    def test_a_graph_that_gains(self, times):
        policy = Policy()
        ask(policy, 128, OFTEN + 1)
        times.device_ms = 0.9 * graph_policy.GAIN * 10.0
        replay(policy, 128, TIMED)
        assert policy.times_of("key", bucket(128)).pays

    def test_captures_are_paid_for_by_replays(self, times):
        policy = Policy()
        ask(policy, 4096, OFTEN + 1)
        policy.captures = CAPTURES
        assert ask(policy, 4096) == [TOO_MANY]
        times.device_ms = 1.0
        replay(policy, 4096, REPLAYS)
        assert ask(policy, 4096) == [None]

    def test_a_module_that_was_changed(self, times):
        policy = Policy()
        ask(policy, 128, OFTEN + 1)
        policy.forget()
        assert ask(policy, 128) == [SELDOM]


class TestHostWaits:
    """In how many calls of a model the device waits."""

    @pytest.mark.parametrize(("device_ms", "share"), [(10.0, "100%"), (12.0, None)])
    def test_advice(self, times, device_ms, share):
        waits, times.device_ms = HostWaits(), device_ms
        cuda = torch.device("cuda")
        begun = [waits.begin(cuda) for _ in range(WARM_UP + HostWaits.MEASURED + 5)]
        assert [x is not None for x in begun] == [False] * WARM_UP + [True] * HostWaits.MEASURED + [False] * 5
        assert waits.calls == HostWaits.MEASURED
        told = waits.news()
        assert told is None if share is None else f"waits for the host in {share} of the calls" in told
        assert waits.news() is None

    def test_a_cpu_is_not_measured(self, times):
        waits = HostWaits()
        assert not any(waits.begin(CPU) for _ in range(50))

    def test_copies_begin_anew(self, times):
        waits = HostWaits()
        for _ in range(9):
            waits.begin(torch.device("cuda"))
        for copied in (copy.deepcopy(waits), pickle.loads(pickle.dumps(waits))):
            assert copied.calls == copied.waits == 0

    @pytest.mark.usefixtures("uncompared")
    def test_calls_of_a_model_are_measured(self, monkeypatch):
        model, ended = tiny.make("bert", "BertModel", implementation="sdpa").to(DEVICE), []
        nta.patch(model, packing="always")
        monkeypatch.setattr(HostWaits, "begin", lambda self, device: SimpleNamespace(end=lambda: ended.append(device)))
        monkeypatch.setattr(HostWaits, "news", lambda self: "some advice")
        with pytest.warns(UserWarning, match="some advice"):
            model(**batch_of([5, 2, 9]))
        assert [x.type for x in ended] == [DEVICE.type]

    @pytest.mark.parametrize("on_fallback", ["warn", "silent"])
    def test_the_handle_says_it_once(self, on_fallback, monkeypatch):
        handle = nta.patch(tiny.make("bert", "BertModel", implementation="sdpa"), on_fallback=on_fallback)
        handle.counts.waits.calls = handle.counts.waits.waits = HostWaits.MEASURED
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.advise()
            handle.advise()
        told = [str(x.message) for x in caught]
        assert told == ([handle.counts.waits.advice] if on_fallback == "warn" else [])
        assert 'cuda_graphs="auto" may make a step faster' in str(handle).replace("\n      ", " ")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle.counts.waits = HostWaits()
            handle.counts.waits.calls = handle.counts.waits.waits = HostWaits.MEASURED
            handle.advise()  # advice stops no program


def batch_of(lengths):
    lengths = torch.tensor(lengths)[:, None]
    mask = torch.arange(int(lengths.max()) + 2) < lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


@pytest.fixture
def any_gain(monkeypatch):
    """A fake graph takes as long as what it recorded."""
    monkeypatch.setattr(graph_policy, "GAIN", float("inf"))


@pytest.mark.usefixtures("cuda_graphs", "any_gain", "uncompared")
class TestCalls:
    """Calls of models and modules."""

    def make(self):
        model = tiny.make("bert", "BertModel", implementation="sdpa").to(DEVICE).train()
        other = copy.deepcopy(model)
        nta.patch(other, packing="always")
        return model, nta.patch(model, packing="always", cuda_graphs="auto"), other

    def check(self, model, other, batch):
        found = []
        for each in (model, other):
            each.zero_grad()
            out = each(**batch).last_hidden_state
            (out * torch.linspace(0.5, 1.5, out.shape[-1], device=DEVICE)).square().sum().backward()
            found.append((out, {name: x.grad for name, x in each.named_parameters()}))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)

    def test_training_and_inference(self):
        model, handle, other = self.make()
        for _ in range(OFTEN + 3):
            self.check(model, other, batch_of([5, 2, 9]))
        assert handle.graphs.calls == {SELDOM: OFTEN, None: 3}
        with torch.no_grad():
            for each in (model, other):
                each.eval()
            for _ in range(OFTEN + 2):
                batch = batch_of([5, 2, 9])
                got, want = (each(**batch).last_hidden_state for each in (model, other))
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert handle.graphs.calls == {SELDOM: 2 * OFTEN, None: 5}
        assert handle.graphs.captured == 2

    def test_a_device_that_takes_the_time(self, monkeypatch):
        monkeypatch.setattr(graph_policy, "new_event", FakeEvent)
        monkeypatch.setattr(FakeEvent, "slower", 2.0)
        model, handle, other = self.make()
        for _ in range(OFTEN + 3):
            self.check(model, other, batch_of([5, 2, 9]))
        assert handle.graphs.calls == {SELDOM: WARM_UP + 1, DEVICE_BOUND: OFTEN + 2 - WARM_UP}
        assert handle.graphs.captured == 0

    def test_sizes_that_come_seldom_use_a_larger_graph(self):
        model, handle, other = self.make()
        for _ in range(OFTEN + 1):
            self.check(model, other, batch_of([300] * 4))
        for length in (295, 240, 220, 100):
            self.check(model, other, batch_of([length] * 4))
        # 880 tokens are two steps below 1,200; 400 are too few
        assert handle.graphs.calls == {SELDOM: OFTEN + 1, None: 4}
        assert handle.graphs.captured == 1

    def test_captures_are_counted(self, monkeypatch):
        monkeypatch.setattr(graph_policy, "CAPTURES", 1)
        model, handle, other = self.make()
        for lengths in ([300] * 4, [20] * 4):
            for _ in range(OFTEN + 2):
                self.check(model, other, batch_of(lengths))
        assert handle.graphs.calls == {SELDOM: 2 * OFTEN, None: 2, TOO_MANY: 2}

    def test_graphs_that_gain_nothing_are_freed(self, monkeypatch):
        monkeypatch.setattr(graph_policy, "GAIN", 0.0)
        model, handle, other = self.make()
        for _ in range(OFTEN + TIMED + 3):
            self.check(model, other, batch_of([5, 2, 9]))
        self.check(model, other, batch_of([50] * 9))  # asks for another graph
        assert len(handle.graphs) == 0
        assert handle.graphs.calls[NO_GAIN] >= 1

    def test_graphs_that_are_not_used_are_freed(self, monkeypatch):
        from nt_attention.graphs import cache

        model, handle, other = self.make()
        monkeypatch.setattr(cache, "UNUSED", 5)
        for lengths in ([5, 2, 9], [300] * 4):
            for _ in range(OFTEN + 6):
                self.check(model, other, batch_of(lengths))
        self.check(model, other, batch_of([400]))
        assert len(handle.graphs) == 1
        assert UNUSED > 100

    def test_small_batches(self, monkeypatch):
        """They are packed while their time is measured, and run padded when there is no graph."""
        from nt_attention.hf.pack import packed_forward, small_batches

        monkeypatch.setattr(packed_forward, "is_measured", lambda device: True)
        monkeypatch.setattr(small_batches, "HOST_MS", float("inf"))
        model = tiny.make("bert", "BertModel", implementation="sdpa").to(DEVICE).eval()
        handle = nta.patch(model, cuda_graphs="auto")
        with torch.no_grad():
            for _ in range(OFTEN + 2):
                model(**batch_of([5, 2, 9]))
        assert handle.calls == {None: OFTEN + 2}
        assert handle.graphs.calls == {SELDOM: OFTEN, None: 2}

    def test_copies_decide_for_themselves(self):
        module = nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, cuda_graphs="auto")
        assert copy.deepcopy(module).graphs.is_automatic

    def test_multihead_attention(self):
        module = nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, cuda_graphs="auto")
        other = copy.deepcopy(module)
        other.graphs = None
        layout = nta.SequenceLayout.from_lengths([5, 2, 9], device=DEVICE)
        for _ in range(OFTEN + 3):
            x = torch.randn(layout.total, 32, device=DEVICE)
            found = []
            for each in (module, other):
                given = x.clone().requires_grad_()
                each.zero_grad()
                out = each(given, given, given, layout=layout)[0]
                out.square().sum().backward()
                found.append((out, given.grad, each.in_proj_weight.grad))
            torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
        assert module.graphs.calls == {SELDOM: OFTEN, None: 3}

    def test_encoder(self):
        layer = torch.nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(DEVICE)
        handle = nta.patch(model, cuda_graphs="auto")
        padding = (torch.arange(11) >= torch.tensor([5, 2, 9])[:, None]).to(DEVICE)
        x, outs = torch.randn(3, 11, 32, device=DEVICE), []
        with torch.no_grad():
            for _ in range(OFTEN + 2):
                outs.append(model(x, src_key_padding_mask=padding))
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=1e-3, atol=1e-3)
        assert handle.graphs.calls == {SELDOM: OFTEN, None: 2}


def test_another_value():
    with pytest.raises(ValueError, match='True, False, "training" or "auto", got \'never\''):
        nta.patch(tiny.make("bert", "BertModel", implementation="sdpa"), cuda_graphs="never")

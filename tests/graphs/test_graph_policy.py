"""What `cuda_graphs="auto"` captures when, what a handle says of a GPU that waits for the host, and sizes of buckets.

Without a GPU, graphs, events and times are fake; see `helpers/cuda_graphs.py`.
"""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from cuda_graphs import DEVICE, FakeEvent
from graph_entries import Pair, model_of, tokens
from token_tiled_cases import IGNORED_WARNINGS

import nt_attention as nta
from nt_attention.graphs import cache, policy
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
    WARM_UP,
    HostWaits,
    Policy,
)
from nt_attention.hf.pack import packed_forward, small_batches

pytestmark = IGNORED_WARNINGS
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_buckets():
    """Steps of tokens are at most 1/8, or 64."""
    for count in [*range(1, 3000), 16385, 100000]:
        bucket = Sizes(3, 5, count).bucket
        assert count <= bucket.tokens <= max(count + 63, count * 9 / 8)
        assert bucket.bucket == bucket
        assert (bucket.sequences, bucket.longest) == (4, 16)


FITS = {
    (4, 32, 640): True, (16, 128, 704): True,
    (4, 32, 576): False, (4, 16, 640): False, (2, 32, 640): False,  # too small
    (4, 32, 768): False, (64, 32, 640): False, (4, 256, 640): False,  # take longer
}  # fmt: skip


@pytest.mark.parametrize("graph", FITS, ids=str)
def test_graphs_of_other_buckets(graph):
    """A graph that is a little larger is used, so few are captured."""
    assert Sizes(3, 30, 600).fit(Sizes(*graph)) == FITS[graph]


class Times:
    """In place of spans: those that a policy begins take these times, in ms."""

    def __init__(self):
        self.host_ms = self.device_ms = 10.0
        self.is_known = True

    def __call__(self, device):
        waits = self.device_ms <= policy.LATE * self.host_ms
        return SimpleNamespace(**vars(self), waits=waits, end=lambda: None)


@pytest.fixture
def times(monkeypatch):
    made = Times()
    monkeypatch.setattr(policy, "Span", made)
    return made


class Asked(Policy):
    """A policy for buckets of some tokens."""

    def ask(self, tokens, calls=1, key="key"):
        """The reasons of some calls. Those that come too seldom are timed."""
        reasons = []
        for _ in range(calls):
            reasons.append(self.why_not(key, self.bucket(tokens)))
            if reasons[-1] == SELDOM:
                self.time(tokens, key)
        return reasons

    def time(self, tokens=128, key="key"):
        return self.time_call(key, self.bucket(tokens), CPU)

    def replay(self, tokens, calls=1):
        times = self.times_of("key", self.bucket(tokens))
        for _ in range(calls):
            self.time_replay(times, CPU)
        return times

    @staticmethod
    def bucket(tokens):
        return (Sizes(4, 32, tokens),)


class TestPolicy:
    """What is captured, by the times of calls."""

    def test_a_bucket_that_comes_often(self, times):
        assert Asked().ask(128, OFTEN + 2) == [SELDOM] * OFTEN + [None, None]

    def test_a_device_that_takes_the_time(self, times):
        times.device_ms = 12.0
        assert Asked().ask(128, 8) == [SELDOM] * (WARM_UP + 1) + [DEVICE_BOUND] * (7 - WARM_UP)

    def test_the_first_calls_compile_kernels(self, times):
        """The host takes long in them, whatever the device does."""
        asked = Asked()
        times.host_ms = 1000.0
        asked.ask(128, WARM_UP)
        times.host_ms, times.device_ms = 10.0, 12.0
        assert asked.ask(128, 2) == [SELDOM, DEVICE_BOUND]

    def test_a_single_slow_call_of_the_host_decides_nothing(self, times):
        asked = Asked()
        asked.ask(128, WARM_UP)
        times.host_ms = times.device_ms = 50.0
        asked.ask(128)
        times.host_ms, times.device_ms = 10.0, 12.0
        asked.time()
        assert asked.ask(128) == [DEVICE_BOUND]

    def test_times_that_are_not_known_yet(self, times):
        times.is_known = False
        assert Asked().ask(128, 20) == [SELDOM] * 20

    def test_few_calls_are_timed(self, times):
        asked = Asked()
        asked.ask(128)
        assert asked.time() is None
        asked.ask(128, WARM_UP)  # times one
        assert len([span for span in (asked.time() for _ in range(2 * TIMED)) if span is not None]) == TIMED - 1

    def test_smaller_batches_wait_if_a_larger_one_does(self, times):
        asked = Asked()
        asked.ask(1024, OFTEN + 1)
        times.is_known = False
        assert asked.ask(512, OFTEN + 1) == [SELDOM] * OFTEN + [None]
        assert asked.ask(2048, OFTEN + 1) == [SELDOM] * (OFTEN + 1)

    def test_larger_batches_do_not_wait_if_a_smaller_one_does_not(self, times):
        asked = Asked()
        times.device_ms = 12.0
        asked.ask(512, OFTEN + 1)
        times.is_known = False
        assert [asked.ask(tokens)[0] for tokens in (1024, 256)] == [DEVICE_BOUND, SELDOM]
        assert asked.ask(1024, key="other") == [SELDOM]

    @pytest.mark.parametrize(("share", "pays"), [(0.9, True), (1.1, False)])
    def test_a_graph_pays_if_it_takes_less_time(self, times, share, pays):
        asked = Asked()
        asked.ask(128, OFTEN + 1)
        times.device_ms = share * policy.GAIN * 10.0
        assert asked.replay(128, TIMED - 1).pays
        assert asked.replay(128).pays == pays
        assert asked.ask(128) == [None if pays else NO_GAIN]

    def test_captures_are_paid_for_by_replays(self, times):
        asked = Asked()
        asked.ask(4096, OFTEN + 1)
        asked.captures = CAPTURES
        assert asked.ask(4096) == [TOO_MANY]
        times.device_ms = 1.0
        asked.replay(4096, REPLAYS)
        assert asked.ask(4096) == [None]

    def test_a_module_that_was_changed(self, times):
        asked = Asked()
        asked.ask(128, OFTEN + 1)
        asked.forget()
        assert asked.ask(128) == [SELDOM]


@pytest.fixture
def bert(cuda_graphs, fake_times, uncompared):
    return Pair("bert", "auto")


class TestCalls:
    """What a model counts. `OFTEN` calls come before the one that `check` compares."""

    def test_a_device_that_takes_the_time(self, bert, monkeypatch):
        monkeypatch.setattr(FakeEvent, "slower", 2.0)
        for _ in range(OFTEN + 3):
            bert.check(is_graph=False)
        assert bert.graphs.calls == {SELDOM: WARM_UP + 1, DEVICE_BOUND: OFTEN + 2 - WARM_UP}
        assert bert.graphs.captured == 0

    def test_sizes_that_come_seldom_use_a_larger_graph(self, bert):
        bert.check([300] * 4)
        for length in (295, 240, 220, 100):
            bert.check([length] * 4, is_graph=False)
        # 880 tokens are two steps below 1,200; 400 are too few
        assert bert.graphs.calls == {SELDOM: OFTEN + 1, None: 4}
        assert bert.graphs.captured == 1

    def test_captures_are_counted(self, bert, monkeypatch):
        monkeypatch.setattr(policy, "CAPTURES", 1)
        bert.check([300] * 4)
        for _ in range(OFTEN + 2):
            bert.check([20] * 4, is_graph=False)
        assert bert.graphs.calls == {SELDOM: 2 * OFTEN, None: 1, TOO_MANY: 2}

    def test_graphs_that_gain_nothing_are_freed(self, bert, monkeypatch):
        monkeypatch.setattr(policy, "GAIN", 0.0)
        bert.check()
        for _ in range(TIMED + 2):
            bert.check(is_graph=False)
        bert.check([50] * 9, is_graph=False)  # asks for another graph
        assert len(bert.graphs) == 0
        assert bert.graphs.calls[NO_GAIN] >= 1

    def test_graphs_that_are_not_used_are_freed(self, bert, monkeypatch):
        monkeypatch.setattr(cache, "UNUSED", 5)
        bert.check()
        for length in (60, 60, 60, 60, 60, 60, 90):
            bert.check([length] * 4)
        assert len(bert.graphs) == 2

    def test_small_batches(self, bert, monkeypatch):
        """They are packed while their time is measured, and run padded when there is no graph."""
        monkeypatch.setattr(packed_forward, "is_measured", lambda device: True)
        monkeypatch.setattr(small_batches, "HOST_MS", float("inf"))
        model = model_of().eval()
        handle = nta.patch(model, cuda_graphs="auto")
        with torch.no_grad():
            for _ in range(OFTEN + 2):
                model(**tokens([5, 2, 9]))
        assert handle.calls == {None: OFTEN + 2}
        assert handle.graphs.calls == {SELDOM: OFTEN, None: 2}


class TestHostWaits:
    """In how many calls of a model the device waits."""

    @pytest.mark.parametrize(("device_ms", "share"), [(10.0, "100%"), (12.0, None)])
    def test_advice(self, times, device_ms, share):
        waits, times.device_ms = HostWaits(), device_ms
        begun = [waits.begin(CUDA) for _ in range(WARM_UP + HostWaits.MEASURED + 5)]
        assert [x is not None for x in begun] == [False] * WARM_UP + [True] * HostWaits.MEASURED + [False] * 5
        assert waits.calls == HostWaits.MEASURED
        told = waits.news()
        assert told is None if share is None else f"waits for the host in {share} of the calls" in told
        assert waits.news() is None

    def test_a_cpu_is_not_measured_and_copies_begin_anew(self, times):
        waits = HostWaits()
        assert not any(waits.begin(CPU) for _ in range(50))
        waits = HostWaits()
        for _ in range(9):
            waits.begin(CUDA)
        for copied in (copy.deepcopy(waits), pickle.loads(pickle.dumps(waits))):
            assert copied.calls == copied.waits == 0

    @pytest.mark.usefixtures("uncompared")
    def test_calls_of_a_model_are_measured(self, monkeypatch):
        model, ended = model_of(), []
        nta.patch(model, packing="always")
        monkeypatch.setattr(HostWaits, "begin", lambda self, device: SimpleNamespace(end=lambda: ended.append(device)))
        monkeypatch.setattr(HostWaits, "news", lambda self: "some advice")
        with pytest.warns(UserWarning, match="some advice"):
            model(**tokens([5, 2, 9]))
        assert [x.type for x in ended] == [DEVICE.type]

    @pytest.mark.parametrize("on_fallback", ["warn", "silent"])
    def test_the_handle_says_it_once(self, on_fallback):
        handle = nta.patch(model_of(), on_fallback=on_fallback)
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

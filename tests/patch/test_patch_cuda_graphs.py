"""`patch(cuda_graphs=True)` for Hugging Face models: results are those of packed calls, for any lengths.

Without a GPU, graphs are fake; see `helpers/cuda_graphs.py`.

Dimensions: B rows of a padded batch, L positions in a row.
"""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import OrderedDict

import peft
import pytest
import tiny
import torch
import transformers
from cuda_graphs import DEVICE, GPU, assert_same, cuda_graphs, leaves  # noqa: F401
from graphs import with_layers
from sweeps import sweep, sweep_except
from token_tiled_cases import IGNORED_WARNINGS
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx

import nt_attention as nta
from nt_attention.graphs import cache as graph_cache
from nt_attention.graphs import capture as graph_capture
from nt_attention.graphs.cache import CapturedCalls
from nt_attention.graphs.capture import Sizes
from nt_attention.hf.check.first_batches import FirstBatches
from nt_attention.hf.families import CACHE
from nt_attention.patching.handle import NotPackedWarning

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs", "uncompared")]

TOLERANCE = 2e-3 if GPU else 1e-5  # matrix products of other sizes run other kernels


def make(model_type="bert", name="BertModel", **more):
    implementation = "eager" if model_type == "gemma2" else "sdpa"
    return tiny.make(model_type, name, implementation=implementation, **more).to(DEVICE)


def batch_of(lengths, length=None, side="right"):
    lengths = torch.tensor(lengths)[:, None]
    length = length or int(lengths.max()) + 2
    position = torch.arange(length)
    mask = position < lengths if side == "right" else position >= length - lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def pair(model):
    """The model with graphs, and a copy that packs without them."""
    other = copy.deepcopy(model)
    nta.patch(other, packing="always")
    return model, nta.patch(model, packing="always", cuda_graphs=True), other


def run(model, batch, **more):
    with torch.inference_mode():
        return model(**batch, **more)


BATCHES = ([5, 2, 9], [1], [3, 3, 3, 3, 3], [9, 0, 4], [16, 17], [5, 2, 9])


class TestResults:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_batches_of_other_lengths(self, side):
        model, handle, other = pair(make())
        for lengths in BATCHES:
            batch = batch_of(lengths, side=side)
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: len(BATCHES)}
        assert handle.calls == {None: len(BATCHES)}
        assert 1 <= handle.graphs.captured < len(BATCHES)
        assert handle.graphs.captured == len(handle.graphs)
        assert handle.graphs.memory > 0
        assert "CUDA graphs: " in str(handle)

    TYPES = ("gpt2", "llama", "modernbert", "roberta", "esm", "gemma2", "albert", "mistral", "opt", "qwen3")

    @sweep(
        ("model_type", "name"),
        [(model_type, name) for model_type in TYPES for name in tiny.classes(model_type)],
    )
    def test_every_head(self, model_type, name):
        model, handle, other = pair(make(model_type, name))
        for lengths in ([5, 2, 9], [8, 16, 1, 4]):
            batch = batch_of(lengths)
            got, want = (run(x, batch, output_hidden_states=True) for x in (model, other))
            assert type(got) is type(want)
            assert got.keys() == want.keys()
            assert_same(got, want, TOLERANCE)
        assert handle.graphs.calls[None] == 2, handle

    @pytest.mark.parametrize(
        ("kind", "more"),
        [
            ("MPNet", {}),
            ("DebertaV2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}),
            ("Bloom", {"hidden_size": 48, "n_head": 6, "n_layer": 2}),
        ],
    )
    def test_attention_of_their_own(self, kind, more, monkeypatch):
        if not GPU:  # the scalars of a `PackedMask` are on the CPU, and it reads them
            monkeypatch.setattr(graph_capture, "READ_TAGS", ())

        config = getattr(transformers, f"{kind}Config")(**(tiny.TEXT | more))
        model, handle, other = pair(getattr(transformers, f"{kind}Model")(config).eval().to(DEVICE))
        for lengths in ([5, 2, 9], [7, 16, 1, 4]):
            batch = batch_of(lengths)
            assert_same(run(model, batch, use_cache=False), run(other, batch, use_cache=False), TOLERANCE)
        assert handle.graphs.calls[None] == 2, handle

    def test_masked_tokens_are_counted_in_their_sequence(self):
        """ESM scales embeddings by the share of masked tokens in a sequence. Rows of the bucket are in none."""
        model, handle, other = pair(make("esm", "EsmModel"))
        batch = batch_of([5, 2, 9, 3])  # as many rows as the bucket has
        batch["input_ids"][:, ::2] = model.config.mask_token_id
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_without_a_mask(self):
        model, handle, other = pair(make())
        batch = {"input_ids": batch_of([7, 7])["input_ids"][:, :7]}
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_embeddings_and_token_types(self):
        model, handle, other = pair(make())
        for lengths in ([5, 2, 9], [4, 1, 8]):
            batch = batch_of(lengths)
            ids = batch.pop("input_ids")
            batch |= {"inputs_embeds": torch.randn(*ids.shape, 48, device=DEVICE), "token_type_ids": ids % 2}
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 2}
        assert handle.graphs.captured == 1

    def test_tuples_and_numbers(self):
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        for more in ({"return_dict": False}, {"output_hidden_states": True}, {"use_cache": False}):
            got, want = run(model, batch, **more), run(other, batch, **more)
            assert type(got) is type(want)
            assert_same(got, want, TOLERANCE)
        assert handle.graphs.captured == 3

    def test_results_stay_valid_in_any_order_of_arguments(self):
        model, handle, other = pair(make())
        batches = [batch_of([5, 2, 9]), dict(reversed(batch_of([4, 3, 8]).items())), batch_of([1, 2, 10])]
        results = [run(model, batch) for batch in batches]
        for batch, got in zip(batches, results, strict=True):
            assert_same(got, run(other, batch), TOLERANCE)
            got.last_hidden_state.zero_()  # it is the caller's
        assert_same(run(model, batches[0]), run(other, batches[0]), TOLERANCE)
        assert handle.graphs.captured == 1

    @pytest.mark.parametrize("value", [1, [0, 2]], ids=str)
    def test_hidden_states_of_some_layers(self, value):
        """1 is not True: it asks for layer 1, in some versions of transformers."""
        model, _, other = pair(make())
        batch = batch_of([5, 2, 9])
        for more in ({"output_hidden_states": True}, {"output_hidden_states": value}):
            assert_same(run(model, batch, **more), run(other, batch, **more), TOLERANCE)
        for each in (model, other):
            vars(each.config)["output_hidden_states"] = value  # some versions of transformers check assignments
        assert_same(run(model, batch), run(other, batch), TOLERANCE)

    def test_padding_may_hold_anything(self):
        model, _, other = pair(make())
        batch = batch_of([5, 2, 9])
        want = run(other, batch)
        run(model, batch_of([16, 16, 16], length=16))  # leaves values in the tensors of the graph
        batch["input_ids"][batch["attention_mask"] == 0] = 7
        got = run(model, batch)
        assert_same(got, want, TOLERANCE)
        assert (got.last_hidden_state[batch["attention_mask"] == 0] == 0).all()

    @pytest.mark.parametrize("lengths", [[5, 2, 9], [0, 5, 9]], ids=str)
    def test_invalid_ids_at_padding(self, lengths):
        """The further rows of a bucket must not read them: on a GPU such an id ends the process."""
        model, handle, other = pair(make())
        batch = batch_of(lengths, side="left")
        batch["input_ids"][batch["attention_mask"] == 0] = -100
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_cache_of_a_batch_without_padding(self):
        """Callers get the cache, as without graphs; without a cache such a batch runs as a graph."""
        model, handle, other = pair(make("llama", "LlamaForCausalLM"))
        batch = {"input_ids": batch_of([7, 7])["input_ids"][:, :7]}
        for _ in range(2):
            got, want = run(model, batch), run(other, batch)
            assert list(got) == list(want)
            assert got.keys() - CACHE == {"logits"} < got.keys()
            assert_same(got["logits"], want["logits"], TOLERANCE)
        assert_same(run(model, batch, use_cache=False), run(other, batch, use_cache=False), TOLERANCE)
        assert handle.graphs.calls[None] == 1
        assert handle.graphs.calls.total() == 3

    def test_model_calls_a_base_model(self):
        """Callers such as TRL call the base model of a head."""
        model, handle, other = pair(make("llama", "LlamaForCausalLM"))
        batch = batch_of([5, 2, 9])
        assert_same(run(model.model, batch), run(other.model, batch), TOLERANCE)
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 2}


class TestReasons:
    """Calls that can't run as graphs run as without them, and are counted."""

    def check(self, reason, batch=None, model=None, grad=False, **more):
        model, handle, other = pair(make() if model is None else model)
        batch = batch_of([5, 2, 9]) if batch is None else batch
        with torch.set_grad_enabled(grad):
            got, want = model(**batch, **more), other(**batch, **more)
        assert_same(got, want, TOLERANCE)
        assert len(handle.graphs) == 0
        assert [x for x in handle.graphs.calls if x is not None and reason in x], handle
        assert None not in handle.graphs.calls

    def test_calls(self):
        batch = batch_of([5, 2, 9])
        self.check("gradients are enabled", grad=True)
        self.check("a graph can't take position_ids", batch | {"position_ids": torch.arange(11, device=DEVICE)[None]})
        self.check("training mode", model=make().train())
        model = make()
        model.encoder.layer[1].register_forward_hook(lambda module, args, out: None)
        self.check("forward hooks", model=model)
        model, handle, other = pair(make())
        assert_same(run(model._replicate_for_data_parallel(), batch), run(other, batch), TOLERANCE)
        assert list(handle.graphs.calls) == ["the module is a replica of DataParallel"]

    def test_encoder_decoders(self):
        size = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**size, pad_token_id=1, decoder_start_token_id=1)
        batch = batch_of([5, 2, 9])
        model = transformers.T5Model(config).eval().to(DEVICE)
        self.check("encoder-decoder", batch | {"decoder_input_ids": batch["input_ids"]}, model)

    def test_holes(self):
        batch = batch_of([5, 2, 9])
        batch["attention_mask"][0, 1] = 0
        model = make("mistral", "MistralModel")  # windows count positions
        model, handle, _ = pair(model)
        with pytest.warns(NotPackedWarning), torch.no_grad():
            model(**batch)
        assert "its rows have padding between tokens" in handle.graphs.calls

    def test_rope_by_length(self):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model = make("llama", "LlamaModel", max_position_embeddings=8, rope_parameters=rope)
        self.check("needs the lengths on the host", batch_of([12, 3, 5]), model)

    def test_refused_work_is_not_tried_again(self, monkeypatch):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model, handle, _ = pair(make("llama", "LlamaModel", max_position_embeddings=8, rope_parameters=rope))
        run(model, batch_of([12, 3, 5]))
        monkeypatch.setattr(graph_cache, "capture", None)  # calling it is an error
        run(model, batch_of([11, 4, 5]))
        assert handle.graphs.calls.total() == 2

    def test_forward_that_replaces_an_attribute_is_not_tried_again(self):
        """Although the state of the module is another one in each call."""
        model, handle, other = pair(make())
        calls = []

        def forward(x, *, layer, original):
            calls.append(x)
            layer.last = x
            return original(x)

        for each in (model, other):
            layer = each.encoder.layer[0].intermediate
            layer.forward = functools.partial(forward, layer=layer, original=layer.forward)
        batch = batch_of([5, 2, 9])
        run(model, batch)
        calls.clear()
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert len(calls) == 2
        handle.graphs.clear()
        run(model, batch)
        assert len(calls) > 3

    def test_forward_that_changes_an_attribute_or_a_buffer(self):
        class Counts(nn.Module):
            def __init__(self, inner, how):
                super().__init__()
                self.inner, self.how = inner, how
                self.register_buffer("calls", torch.zeros(1, device=DEVICE))

            def forward(self, x):
                if self.how == "attribute":
                    self.last = x
                elif self.how == "buffer":
                    self.calls = self.calls + 1
                else:
                    self.calls.add_(1)
                return self.inner(x)

        for how in ("attribute", "buffer", "in place"):
            model, handle, other = pair(make())
            for each in (model, other):
                part = each.encoder.layer[0].intermediate
                part.dense = Counts(part.dense, how)
            batch = batch_of([5, 2, 9])
            for _ in range(3):
                assert_same(run(model, batch), run(other, batch), TOLERANCE)
            assert list(handle.graphs.calls) == ["its forward changes attributes or buffers of a module"]

    def test_a_graph_with_large_outputs(self, monkeypatch):
        model, handle, other = pair(make())
        monkeypatch.setattr(graph_capture, "LARGEST", 10_000)
        small, large = batch_of([5, 2]), batch_of([30, 30])
        for batch in (large, small, large):
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 1, f"its inputs and outputs take more than {1e4 / 2**30:g} GiB": 2}

    def test_no_memory(self, monkeypatch):
        """Smaller batches are captured all the same."""
        model, handle, other = pair(make())

        def out_of_memory(*args):
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patched:
            patched.setattr(graph_cache.Slot, "capture", out_of_memory)
            assert_same(run(model, batch_of([100, 100])), run(other, batch_of([100, 100])), 1e9)
        for lengths in ([100, 100], [5, 2, 9]):
            batch = batch_of(lengths)
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 1, "there was no memory to capture it": 2}

    @pytest.mark.skipif(GPU, reason="it is about machines without a GPU")
    def test_a_cpu(self, monkeypatch):
        monkeypatch.undo()
        monkeypatch.setattr(FirstBatches, "_is_due", lambda *args: False)
        self.check("not on a CUDA device")

    @pytest.mark.parametrize("value", [1, None, "yes"])
    def test_unknown_option(self, value):
        with pytest.raises(ValueError, match='cuda_graphs must be True, False, "training" or "auto"'):
            nta.patch(make(), cuda_graphs=value)


def dense_of(model):
    return model.encoder.layer[0].intermediate.dense


@torch.no_grad()
def change_in_place(model):
    for x in model.parameters():
        x.mul_(1.01)


def set_weight(model):
    dense_of(model).weight = nn.Parameter(torch.randn_like(dense_of(model).weight))


def set_data(model):
    dense_of(model).weight.data = torch.randn_like(dense_of(model).weight)


def set_shape(model):
    """The same memory. In a graph, the rows would be read past the end."""
    dense_of(model).weight = nn.Parameter(dense_of(model).weight[:50])
    dense_of(model).bias, dense_of(model).shift = nn.Parameter(dense_of(model).bias[:50]), dense_of(model).shift[:50]
    model.encoder.layer[0].output.dense = nn.Linear(50, 48, device=DEVICE)


def set_epsilon(model):
    """A number that only Python reads."""
    model.encoder.layer[0].output.LayerNorm.eps = 0.5


def set_module(model):
    model.encoder.layer[0].intermediate.dense = nn.Linear(48, 53, device=DEVICE)


def set_class(model):
    dense_of(model).__class__ = Twice


def load(model):
    state = {name: torch.randn_like(x) / 8 for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def set_config(model):
    model.config.output_hidden_states = True


def set_item(model):
    dense_of(model).options["scale"] *= 3.0


def set_tensor(model):
    """One that is no parameter."""
    dense_of(model).shift = torch.full((53,), 2.0, device=DEVICE)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.options["scale"] + self.shift


class TestState:
    """What a graph depends on is noticed, and it is captured again."""

    @pytest.mark.parametrize(
        "change",
        [set_weight, set_data, set_shape, set_epsilon, set_module, set_class, load, set_config, set_item, set_tensor],
    )
    def test_change(self, change):
        model, handle, other = pair(make())
        for dense in (dense_of(model), dense_of(other)):
            dense.__class__, dense.options, dense.shift = Shifted, {"scale": 1.0}, torch.ones(53, device=DEVICE)
        batch = batch_of([5, 2, 9])
        run(model, batch)
        for each in (model, other):
            change_in_place(each)
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == 1
        for each in (model, other):
            torch.manual_seed(5)
            change(each)
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == 2

    @pytest.mark.parametrize("is_linear", [False, True])
    def test_graph_with_an_embedding_of_fewer_rows_is_not_replayed(self, monkeypatch, is_linear):
        """On a GPU, ids that are too large for it end the process. The old parameter is still in use elsewhere."""

        class Rows(nn.Module):
            def __init__(self, rows):
                super().__init__()
                self.linear = nn.Linear(48, rows, bias=False)

            def forward(self, ids):
                return nn.functional.embedding(ids, self.linear.weight)

        model, handle, _ = pair(make())
        old = model.get_input_embeddings()
        rows = len(old.weight)
        if is_linear:
            model.set_input_embeddings(Rows(rows).to(DEVICE))
        run(model, batch_of([5, 2, 9]))
        if is_linear:
            table = model.get_input_embeddings()
            old, table.linear = table.linear, nn.Linear(48, 2 * rows, bias=False).to(DEVICE)
        else:
            model.set_input_embeddings(nn.Embedding(2 * rows, 48, old.padding_idx).to(DEVICE))
        replayed, once = [], graph_capture.Captured.replay
        monkeypatch.setattr(
            graph_capture.Captured, "replay", lambda self, work: (replayed.append(self), once(self, work))[1]
        )
        run(model, batch_of([5, 2, 9]))
        assert len(replayed) == 1
        assert handle.graphs.captured == 2

    def test_hooks_in_a_new_table(self):
        model, handle, _ = pair(make())
        batch, seen = batch_of([5, 2, 9]), []
        run(model, batch)
        layer = model.encoder.layer[0]
        layer._forward_hooks = OrderedDict()
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
        run(model, batch)
        assert len(seen) == 1
        assert handle.graphs.calls == {None: 1, "a module has forward hooks": 1}

    @pytest.mark.skipif(not GPU, reason="interpreted kernels do not support bfloat16")
    def test_dtype(self):
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        run(model, batch)
        for each in (model, other):
            each.bfloat16()
        assert_same(run(model, batch), run(other, batch), 5e-2)
        assert handle.graphs.captured == 2

    def test_lora(self):
        def lora(model):
            config = peft.LoraConfig(target_modules=["query", "dense"], init_lora_weights=False, r=2)
            return peft.get_peft_model(model, config)

        torch.manual_seed(1)
        base = make()
        model = lora(base).eval()
        handle = nta.patch(base, packing="always", cuda_graphs=True)
        batch, found = batch_of([5, 2, 9]), []

        def compare(expected):
            with torch.no_grad():
                found.append(base(**batch).last_hidden_state)
                with nta_off(handle):
                    want = base(**batch).last_hidden_state
            torch.testing.assert_close(found[-1], want * batch["attention_mask"][..., None], rtol=TOLERANCE, atol=1e-3)
            assert handle.graphs.captured == expected

        compare(1)
        model.merge_adapter()
        compare(2)
        model.unmerge_adapter()
        compare(3)
        with model.disable_adapter():
            compare(4)
        compare(5)
        for module in model.modules():
            if hasattr(module, "merged_adapters"):
                module.scaling["default"] *= 3
        compare(6)
        assert (found[0] - found[3]).abs().max() > 1e-2
        assert (found[4] - found[5]).abs().max() > 1e-2

    def test_settings_of_the_process(self):
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        run(model, batch)
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            assert_same(run(model, batch), run(other, batch), 2e-2)
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == 2

    def test_forward_replaced(self):
        model, _, other = pair(make("llama", "LlamaForCausalLM"))
        batch = batch_of([5, 2, 9])
        run(model, batch)

        def scaled(original, *args, **kwargs):
            out = original(*args, **kwargs)
            out.last_hidden_state = 3 * out.last_hidden_state
            return out

        for each in (model, other):
            each.model.forward = functools.partial(scaled, each.model.forward)
        assert_same(run(model, batch), run(other, batch), TOLERANCE)


class nta_off:
    """A context in which a patched model runs as before the patch."""

    def __init__(self, handle):
        self.handle = handle

    def __enter__(self):
        self.handle.active = False

    def __exit__(self, *error):
        self.handle.active = True


class TestBounds:
    def test_least_recently_used_is_freed(self, monkeypatch):
        model, handle, other = pair(make())
        monkeypatch.setattr(graph_cache, "GRAPHS", 2)
        for length in (5, 100, 5, 300, 5):
            batch = batch_of([length, length])
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == 3  # that of 5 was used last when that of 300 was captured

    def test_memory(self, monkeypatch):
        monkeypatch.setattr(graph_cache, "MEMORY", 1)
        monkeypatch.setattr(Sizes, "fit", lambda self, graph, more=0.0: False)
        model, handle, other = pair(make())
        for rows in (1, 2, 4):
            batch = batch_of([14] * rows)
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert len(handle.graphs) == 1  # the one that is used stays

    def test_remove_and_clear(self):
        model, handle, _ = pair(make())
        batch = batch_of([5, 2, 9])
        run(model, batch)
        handle.graphs.clear()
        assert len(handle.graphs) == 0
        run(model, batch)
        assert handle.graphs.captured == 2
        handle.remove()
        assert len(handle.graphs) == 0
        run(model, batch)
        assert handle.graphs.calls == {None: 2}

    @pytest.mark.parametrize("removed", [False, True])
    def test_models_are_freed(self, removed):
        model, handle, _ = pair(make())
        run(model, batch_of([5, 2, 9]))
        if removed:
            handle.remove()
        freed = weakref.ref(model)
        del model, handle
        gc.collect()
        assert freed() is None

    @pytest.mark.parametrize("refused", [False, True])
    def test_copies_are_freed(self, refused):
        """They share the handle of the model."""
        model, _, _ = pair(make())
        run(model, batch_of([5, 2, 9]))
        freed = []
        for _ in range(3):
            copied = copy.deepcopy(model)
            if refused:
                copied.encoder.register_forward_hook(lambda *args: None)
            run(copied, batch_of([5, 2, 9]))
            freed += [weakref.ref(copied), weakref.ref(copied.encoder.layer[0].output.dense.weight)]
            del copied
        gc.collect()
        run(model, batch_of([5, 2, 9]))
        gc.collect()
        assert not any(reference() is not None for reference in freed)
        assert len(model.forward.handle.graphs) == 1

    def test_a_module_that_changes_often_is_not_captured_each_time(self):
        model, handle, other = pair(make())
        batch, often = batch_of([5, 2, 9]), "the module, its parameters or its attributes change too often"
        for step in range(20):
            model.step = step
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == graph_cache.CHANGES
        assert handle.graphs.calls[often] == 20 - graph_cache.CHANGES
        for _ in range(20):  # it stays the same
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.captured == graph_cache.CHANGES + 1

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "pickle"])
    def test_copies_have_graphs_of_their_own(self, copier):
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        run(model, batch)
        copied = copier(model)
        with torch.no_grad():
            for each in (copied, other):
                each.embeddings.word_embeddings.weight.mul_(2)
        assert_same(run(copied, batch), run(other, batch), TOLERANCE)
        assert isinstance(handle.graphs, CapturedCalls)

    def test_buckets(self):
        """Steps of tokens are at most 1/8, or 64."""
        for tokens in [*range(1, 3000), 16385, 100000]:
            bucket = Sizes(3, 5, tokens).bucket
            assert tokens <= bucket.tokens <= max(tokens + 63, tokens * 9 / 8)
            assert bucket.bucket == bucket
            assert (bucket.sequences, bucket.longest) == (4, 16)

    def test_graphs_of_other_buckets(self):
        """A graph that is a little larger is used, so few are captured."""
        assert Sizes(3, 30, 600).fit(Sizes(4, 32, 640))
        assert Sizes(3, 30, 600).fit(Sizes(16, 128, 704))
        assert not Sizes(3, 30, 600).fit(Sizes(4, 32, 576))  # too small
        assert not Sizes(3, 33, 600).fit(Sizes(4, 32, 640))
        assert not Sizes(5, 30, 600).fit(Sizes(4, 32, 640))
        assert not Sizes(3, 30, 600).fit(Sizes(4, 32, 768))  # takes longer
        assert not Sizes(3, 30, 600).fit(Sizes(64, 32, 640))


@pytest.mark.gpu
class TestOnAGpu:
    def test_many_batches(self):
        model, handle, other = pair(make())
        for _ in range(200):
            lengths = torch.randint(1, 60, (int(torch.randint(1, 33, ())),)).tolist()
            batch = batch_of(lengths)
            assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert handle.graphs.calls == {None: 200}
        assert handle.graphs.captured < 50

    def test_host_reads(self):
        """A mixture of experts that loops over experts reads which of them are used."""

        class Reads(nn.Linear):
            def forward(self, x):
                return super().forward(x) * float(x.isfinite().all())

        model, handle, other = pair(make())
        old = model.encoder.layer[0].intermediate.dense
        new = model.encoder.layer[0].intermediate.dense = Reads(48, 53, device=DEVICE)
        new.load_state_dict(old.state_dict())
        batch = batch_of([5, 2, 9])
        assert_same(run(model, batch), run(other, batch), TOLERANCE)
        assert "reads values on the host" in next(iter(handle.graphs.calls))

    def test_after_a_failed_capture(self):
        """Random numbers can be drawn, and graphs that were captured before follow the seed."""

        class Waits(nn.Linear):
            def forward(self, x):
                torch.cuda.synchronize()
                return super().forward(x)

        model = make(hidden_dropout_prob=0.5).train()
        captures = nta.patch(model, packing="always", cuda_graphs="training").graphs
        batch = batch_of([5, 2, 9])

        def drawn(seed):
            torch.cuda.manual_seed(seed)
            return model(**batch).last_hidden_state.detach()

        drawn(1)  # captures, which draws random numbers too
        first = drawn(1)
        broken, handle, other = pair(make())
        for each in (broken, other):
            dense = each.encoder.layer[0].intermediate.dense
            new = each.encoder.layer[0].intermediate.dense = Waits(48, 53, device=DEVICE)
            new.load_state_dict(dense.state_dict())
        assert_same(run(broken, batch), run(other, batch), TOLERANCE)
        assert "a CUDA graph can't be captured" in next(iter(handle.graphs.calls))
        torch.randn(3, device=DEVICE)
        torch.testing.assert_close(drawn(1), first)
        assert (drawn(2) - first).abs().max() > 1e-3
        assert set(captures.calls) == {None}

    def test_threads(self):
        model, handle, other = pair(make())
        batches = [batch_of(torch.randint(1, 60, (rows,)).tolist()) for rows in range(1, 17)]
        want = [run(other, batch) for batch in batches]
        torch.cuda.synchronize()
        failed = []

        def serve(start):
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    at = (start + i) % len(batches)
                    got = run(model, batches[at])
                    torch.cuda.current_stream().synchronize()
                    try:
                        assert_same(got, want[at], TOLERANCE)
                    except AssertionError as error:
                        failed.append(error)

        threads = [threading.Thread(target=serve, args=(4 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert handle.graphs.calls == {None: 240}

    def test_memory_of_many_replays(self):
        model, _, _ = pair(make())
        batches = [batch_of(torch.randint(1, 60, (rows,)).tolist()) for rows in range(1, 17)]
        for batch in batches:
            run(model, batch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for i in range(500):
            run(model, batches[i % len(batches)])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before * 1.01


class Compiles:
    """A backend of torch.compile.

    Attributes:
        graphs: the number of graphs with attention.
        captured: how often one of them ran while a CUDA graph was captured, or before that.
    """

    def __init__(self):
        self.graphs = self.captured = 0

    def __call__(self, graph, inputs):
        compiled = (compile_fx if GPU else aot_eager)(graph, inputs)
        if not any(str(node.target).startswith("nt_attention.attention_forward") for node in graph.graph.nodes):
            return compiled
        self.graphs += 1

        def run(*arguments):
            self.captured += graph_capture.is_capturing()
            return compiled(*arguments)

        return run


@pytest.mark.filterwarnings("ignore:.*logging.getLogger")
class TestCompiled:
    @pytest.fixture(autouse=True)
    def reset(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    CASES = (("bert", "model"), ("llama", "in place"), ("modernbert", "layers"))

    @pytest.mark.fresh_process
    @pytest.mark.parametrize(("model_type", "kind"), sweep_except(CASES, ("llama", "in place")))
    def test_batches_of_other_lengths(self, model_type, kind):
        model, handle, other = pair(with_layers(make(model_type, tiny.classes(model_type)[0])).to(DEVICE))
        backend = Compiles()
        called = model
        if kind == "layers":
            base = getattr(model, model.base_model_prefix, model)
            for layer in base.layers:
                layer.compile(backend=backend, dynamic=True)
        elif kind == "model":
            called = torch.compile(model, backend=backend, dynamic=True)
        else:
            model.compile(backend=backend, dynamic=True)
        for lengths in BATCHES:
            batch = batch_of(lengths)
            assert_same(run(called, batch, use_cache=False), run(other, batch, use_cache=False), TOLERANCE)
        assert handle.graphs.calls == {None: len(BATCHES)}
        assert 1 <= backend.graphs <= 6  # ModernBERT has three kinds of layers
        assert backend.captured >= 3 * handle.graphs.captured

    def test_a_graph_is_captured_once(self):
        """Whatever compiles the model may be another object in each call."""
        model, handle, other = pair(with_layers(make()).to(DEVICE))
        batch = batch_of([5, 2, 9])
        want = run(other, batch)

        def compiled():
            # as torch.compile; Lightning replaces that, and sets an attribute of the model, which makes graphs stale
            return torch._dynamo.optimize("inductor" if GPU else "aot_eager", dynamic=True)(model)

        first = compiled()
        assert_same(run(first, batch), want, TOLERANCE)
        for stance in ("fail_on_recompile", "eager_then_compile", "eager_on_recompile"):
            with torch.compiler.set_stance(stance):
                for _ in range(2):
                    assert_same(run(first, batch), want, TOLERANCE)
        assert_same(run(compiled(), batch), want, TOLERANCE)
        assert handle.graphs.captured == 1
        with torch.compiler.set_stance("force_eager"):
            assert_same(run(first, batch), want, TOLERANCE)
        assert handle.graphs.captured == 2
        torch._dynamo.reset()
        gc.collect()  # the compiled program is freed
        assert_same(run(first, batch), want, TOLERANCE)
        assert handle.graphs.calls == {None: 10}
        assert handle.graphs.captured == 2

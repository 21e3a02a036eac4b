"""Batches that are too small to gain run padded, and callers get what a packed call returns."""

import copy
import pickle
import warnings

import pytest
import tiny
import torch
import transformers
from sweeps import sweep_except
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as stock
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

import nt_attention as nta
from nt_attention.hf.pack import packed_forward, small_batches
from nt_attention.hf.pack.change_model import attention_modules
from nt_attention.hf.pack.small_batches import Costs, PaddedRows, Size
from nt_attention.hf.route import masks, packed_row, positions
from nt_attention.patch import NotPackedWarning

SMALL = "the batch is too small to gain from packing"
TYPES = ("albert", "bert", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "modernbert", "opt")
ENTRIES = [(model_type, name) for model_type in TYPES for name in tiny.classes(model_type)]


@pytest.fixture
def everything_is_small(monkeypatch):
    """As on a GPU whose host needs a second for each kernel."""
    for module in (small_batches, packed_forward):
        monkeypatch.setattr(module, "costs_of", lambda device: Costs(1e6, 1e6, 1.0, 1.0, 1.0))


class _Launches(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        no_kernel = func.is_view or str(func).startswith(("aten.empty", "aten._unsafe_view", "aten.detach"))
        self.count += not no_kernel
        return func(*args, **(kwargs or {}))


def batch_of(model, side, *, empty_row=False):
    lengths = torch.tensor([7, 1, 13, 0 if empty_row else 11])[:, None]
    position = torch.arange(15)
    mask = position < lengths if side == "right" else position >= 15 - lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    name = type(model).__name__
    if "SequenceClassification" in name:
        batch["labels"] = torch.tensor([0, 2, 1, 1])
    elif "MultipleChoice" in name:
        batch = {key: x.unflatten(0, (2, 2)) for key, x in batch.items()} | {"labels": torch.tensor([0, 1])}
    elif "TokenClassification" in name:
        batch["labels"] = ids % 3  # also at padding
    elif name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
        batch["labels"] = ids
    return batch


def solve(model, batch, *, hidden_states=True):
    """All outputs, and the gradients of the parameters."""
    out = model(**batch, output_hidden_states=hidden_states)
    values = {name: out[name] for name in out if name != "past_key_values"}
    loss = values.get("loss")
    if loss is None:
        loss = sum(x.square().sum() for x in values.values() if isinstance(x, torch.Tensor))
    model.zero_grad()
    loss.backward()
    return values, {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("model_type", "name"),
    sweep_except(ENTRIES, ("bert", "BertModel"), ("bert", "BertForMaskedLM"), ("llama", "LlamaForCausalLM")),
)
def test_callers_get_what_a_packed_call_returns(everything_is_small, model_type, name, side):
    model = tiny.make(model_type, name, "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa").train()
    batch = batch_of(model, side)
    other = copy.deepcopy(model)
    with nta.patch(model, packing="always"), nta.patch(other) as handle:
        for train in (True, False):
            want, got = (solve(x.train(train), batch) for x in (model, other))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert handle.calls == {SMALL: 2}


def test_logits_have_one_form(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    batch = batch_of(model, "right")
    with nta.patch(model):
        assert model(**batch).logits.shape == (1, 7 + 1 + 13 + 11, tiny.VOCABULARY)
        assert model.eval()(**batch).logits.shape == (4, 15, tiny.VOCABULARY)
    with nta.patch(model.train(), logits="padded"):
        assert model(**batch).logits.shape == (4, 15, tiny.VOCABULARY)


def test_rows_without_tokens(everything_is_small):
    model = tiny.make("bert", "BertModel", "sdpa").eval()
    batch, other = batch_of(model, "right", empty_row=True), copy.deepcopy(model)
    with nta.patch(model, packing="always"), nta.patch(other) as handle:
        want, got = model(**batch), other(**batch)
    torch.testing.assert_close(dict(got), dict(want), rtol=1e-4, atol=2e-5)
    assert handle.calls == {SMALL: 1}


@pytest.mark.parametrize("training", [False, True])
def test_neither_the_mask_nor_positions_are_read(everything_is_small, monkeypatch, training):
    model = tiny.make("llama", "LlamaModel", "sdpa").train(training)
    batch = batch_of(model, "right")

    def refuse(*args, **kwargs):
        raise AssertionError("it was read")

    with nta.patch(model) as handle:
        monkeypatch.setattr(positions.SequenceLayout, "from_attention_mask", refuse)
        monkeypatch.setattr(positions, "read_layout", refuse)
        monkeypatch.setattr(masks, "is_all_true", refuse)
        with torch.set_grad_enabled(training):
            model(**batch)
    assert handle.calls == {SMALL: 1}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("model_type", ["bert", "llama", "modernbert"])
def test_no_more_operations_than_without_the_patch(everything_is_small, model_type, rows, training):
    """But for the pooled output, which is computed again, and the mask of a single row, which is read again."""
    options = {"add_pooling_layer": False} if model_type == "bert" else {}
    kind, config = type(tiny.make(model_type, tiny.classes(model_type)[0])), tiny.config_of(model_type)
    model = kind._from_config(config, attn_implementation="sdpa", **options).train(training)
    batch = {name: x[-rows:] for name, x in batch_of(model, "right").items()}
    if rows == 1:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    counts = []
    for patched in (False, True):
        handle = nta.patch(model) if patched else None
        model.zero_grad()
        with torch.set_grad_enabled(training), _Launches() as launches:
            out = model(**batch).last_hidden_state
            if training:
                out.mean().backward()
        counts.append(launches.count)
    assert handle.calls == {SMALL: 1}
    assert counts[1] <= counts[0] + (2 if rows == 1 and model_type == "llama" else 0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["causal_mask_function", "bidirectional_mask_function", "sliding window"])
def test_masks_are_those_of_transformers(name, side):
    window = name == "sliding window"
    function = stock.sliding_window_causal_mask_function(3) if window else getattr(stock, name)
    model = tiny.make("llama", "LlamaModel", "sdpa")
    token_mask = batch_of(model, side, empty_row=True)["attention_mask"].bool()
    given = {"batch_size": 4, "q_length": 15, "kv_length": 15, "mask_function": function, "attention_mask": token_mask}
    want = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given, allow_is_causal_skip=False)
    with packed_row.running_padded(model):
        mask = masks.mask(over="sdpa", **given, config=model.config)
        torch.testing.assert_close(mask, want)
        assert masks.mask(over="sdpa", **given, config=tiny.config_of("llama")) is not mask  # of another model


def test_layers_share_a_mask(everything_is_small):
    """With checkpoints, each layer gets a mask of its own, with the same memory."""
    model = tiny.make("bert", "BertModel", "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    inverted = []

    class Inversions(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            inverted.extend([args] if func is torch.ops.aten.logical_not.default else [])
            return func(*args, **(kwargs or {}))

    with nta.patch(model), Inversions():
        model(**batch_of(model, "right"))
    assert len(inverted) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_mask_that_changes_between_layers(everything_is_small, mode):
    model = tiny.make("bert", "BertModel", "sdpa")
    batch, found = batch_of(model, "right"), []

    def hide_first(module, args, kwargs):
        mask = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() == 4)
        mask[..., 0] = False

    model.encoder.layer[1].register_forward_pre_hook(hide_first, with_kwargs=True)
    for patched in (False, True):
        handle = nta.patch(model) if patched else None
        with mode():
            found.append(model(**batch).last_hidden_state)
    assert handle.calls == {SMALL: 1}
    tokens = batch["attention_mask"].bool()
    torch.testing.assert_close(found[1][tokens], found[0][tokens], rtol=1e-4, atol=2e-5)


def full_batch(rows):
    ids = torch.randint(5, 90, (rows, 15))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_full_batch(model, rows):
    """A batch without padding gives what it gives without the patch."""
    batch = full_batch(rows)
    with torch.no_grad():
        want = model(**batch)[0]
        with nta.patch(model) as handle:
            got = model(**batch)[0]
    assert handle.calls == {SMALL: 1}
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_a_part_with_a_config_of_its_own(everything_is_small, implementation):
    """The mask function gets the text config, which is not that of the model. Some layers have a window."""
    text = tiny.TEXT | {
        "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    special = {"mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 94, "eoi_token_index": 95}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **special)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()
    for rows in (1, 2):
        check_full_batch(model, rows)


@pytest.mark.parametrize(("model_type", "implementation"), [("mistral", "sdpa"), ("llama", "eager")])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_config_that_is_replaced_after_the_patch(everything_is_small, model_type, implementation, rows):
    model, batch = tiny.make(model_type, tiny.classes(model_type)[0], implementation), full_batch(rows)
    with torch.no_grad():
        want = model(**batch)[0]
        with nta.patch(model):
            model(**batch)
            model.config = copy.deepcopy(model.config)
            torch.testing.assert_close(model(**batch)[0], want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 2])
def test_softcap_and_sinks_under_our_own_name(everything_is_small, model_type, rows):
    check_full_batch(tiny.make(model_type, tiny.classes(model_type)[0], nta.hf.register()), rows)


@pytest.mark.parametrize("outer", [(9,), (9, 5)], ids=["one row", "two rows"])
@pytest.mark.parametrize("inner", ["same model, padded", "same model, packed", "padded", "packed"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_calls_in_the_forward_of_a_small_batch(everything_is_small, implementation, inner, outer):
    """A hook makes them. The other model shares the config."""
    model = tiny.make("llama", "LlamaModel", implementation)
    called = model if "same" in inner else type(model)(model.config).eval()
    more = {"use_cache": True} if "same" in inner else {}
    batch = {name: x[:2] for name, x in batch_of(model, "left").items()}
    ids = torch.arange(5, 14).expand(2, -1)
    positions_of_two = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)

    def call():
        if "packed" in inner:
            return called(ids, attention_mask=torch.ones_like(ids), position_ids=positions_of_two, **more)[0]
        return called(**batch, **more)[0][batch["attention_mask"].bool()]

    found, inside = [], []
    with torch.no_grad(), warnings.catch_warnings(), nta.patch(model):
        warnings.simplefilter("ignore", NotPackedWarning)
        alone = call()

        def hook(*_):
            if not inside:
                inside.append(True)
                found.append(call())

        model.layers[1].register_forward_pre_hook(hook)
        mask = torch.arange(9) < torch.tensor(outer)[:, None]
        model(torch.full(mask.shape, 7), attention_mask=mask.long())
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM"])
def test_function_transforms_pack(everything_is_small, name):
    model = tiny.make("bert" if "Bert" in name else "llama", name, "sdpa")
    batch, found = batch_of(model, "right"), []
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), batch)[0].square().sum()

    for packing in ("always", "auto"):
        with nta.patch(model, packing=packing):
            found.append(torch.func.grad(loss)(parameters))
    torch.testing.assert_close(found[1], found[0])


def test_calls_of_the_base_model_in_the_forward_of_its_head(everything_is_small):
    """By a hook: they are packed, or small, as others are."""
    found = []
    ids, positions = torch.arange(5, 14)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    mask = torch.arange(9) >= torch.tensor([[5], [0]])
    for packing in ("always", "auto"):
        model, nested = tiny.make("llama", "LlamaForCausalLM", "sdpa"), []

        def hook(*_, model=model, nested=nested):
            if not nested:
                nested.append(None)
                nested.append(model.model(ids, position_ids=positions)[0])
                nested.append(model.model(ids.expand(2, -1), attention_mask=mask.long())[0])

        model.model.layers[1].register_forward_pre_hook(hook)
        with nta.patch(model, packing=packing), torch.no_grad():
            model(torch.full((2, 9), 7), attention_mask=mask.long())
        found.append(nested[1:])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


def test_a_mask_that_is_not_the_padding_of_the_ids(everything_is_small):
    """XLM makes its own mask of ids if it gets none."""
    config = transformers.XLMConfig(vocab_size=97, emb_dim=48, n_layers=2, n_heads=6, pad_index=1, pad_token_id=1)
    model = transformers.XLMModel(config).eval()
    ids = torch.tensor([[5, 6, 1, 7, 8, 1, 9, 10, 1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        want = model(**batch)[0]
        with nta.patch(model):
            torch.testing.assert_close(model(**batch)[0], want)


def test_gradients_of_esm_with_an_empty_row(everything_is_small):
    model = tiny.make("esm", "EsmForMaskedLM", "sdpa").train()
    batch = batch_of(model, "right", empty_row=True)
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    with nta.patch(model):
        model(**batch).loss.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def test_masks_of_bfloat16_count_positions(everything_is_small):
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    model = transformers.OPTModel(config).eval()
    mask = torch.arange(600) < torch.tensor([[600], [300]])
    ids = torch.randint(5, 97, mask.shape)
    found = []
    for packing in ("always", "auto"):
        with nta.patch(model, packing=packing), torch.no_grad():
            found.append(model(ids, attention_mask=mask.bfloat16())[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


def test_hidden_states_with_further_dimensions_fall_back(everything_is_small):
    """In Gemma3n they are (4, B, L, D), here with B = L = 4."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3nTextConfig(
        **tiny.TEXT | layers, vocab_size_per_layer_input=tiny.VOCABULARY, hidden_size_per_layer_input=8,
        num_key_value_heads=2, head_dim=8, laurel_rank=4, num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    model = transformers.Gemma3nTextModel._from_config(config, attn_implementation="sdpa").eval()
    mask = (torch.arange(4) < torch.tensor([[4], [2], [3], [1]])).long()
    call = {"input_ids": torch.full((4, 4), 7), "attention_mask": mask, "output_hidden_states": True}
    with torch.no_grad():
        want = model(**call).hidden_states
        with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="hidden_states"):
            torch.testing.assert_close(model(**call).hidden_states, want)
    assert handle.calls[SMALL] == 1


def test_compiled_layers_are_one_graph_after_small_batches(everything_is_small):
    """A cache makes layers differ, and PyTorch keeps 8 graphs of a function."""
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa", num_hidden_layers=3, use_cache=True).train()
    counter = CompileCounterWithBackend("eager")
    with nta.patch(model):
        for layer in model.model.layers:
            layer.compile(backend=counter, dynamic=True)
        model(**batch_of(model, "right")).loss.backward()
    assert counter.frame_count == 1


def test_decisions_are_not_pickled(everything_is_small):
    """A pickle may be loaded on another device."""
    model = tiny.make("bert", "BertModel", "sdpa")
    with nta.patch(model), torch.no_grad():
        model(**batch_of(model, "right"))
        copied = pickle.loads(pickle.dumps(model))
        assert [len(x.forward.forward._is_small_shape) for x in (model, copied)] == [1, 0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_is_refused_as_for_large_batches(everything_is_small, mode):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa")
    batch = batch_of(model, "right")

    def logits(ids, mask):
        return model(input_ids=ids, attention_mask=mask).logits

    with nta.patch(model), pytest.raises(ValueError, match=r"while make_fx is tracing|has no values to read"):
        make_fx(logits, tracing_mode=mode, _allow_non_fake_inputs=True)(batch["input_ids"], batch["attention_mask"])


def test_forwards_with_and_without_gradients_decide_alike(monkeypatch):
    """In training mode a checkpoint runs both, and they must draw the same random numbers."""
    for module in (small_batches, packed_forward):
        monkeypatch.setattr(module, "costs_of", lambda device: Costs(40, 80, 1e-2, 1e-2, 1e-2))
    model, found = tiny.make("bert", "BertModel", "sdpa").train(), set()
    with nta.patch(model) as handle:
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16):
            ids, decisions = torch.full((rows, 9), 7), []
            mask = (torch.arange(9) < torch.arange(rows)[:, None] % 9 + 1).long()
            for mode in (torch.no_grad, torch.enable_grad):
                before = handle.calls[SMALL]
                with mode():
                    model(ids, attention_mask=mask)
                decisions.append(handle.calls[SMALL] > before)
            assert decisions[0] == decisions[1]
            found.add(decisions[0])
    assert found == {True, False}


def test_the_decision_depends_on_the_dtype_of_the_model_now(monkeypatch):
    for module in (small_batches, packed_forward):
        monkeypatch.setattr(module, "costs_of", lambda device: Costs(1, 1, 1e9, 1e-9, 1e9))
    model, handles = tiny.make("bert", "BertModel", "sdpa"), []
    batch = batch_of(model, "right")
    with torch.no_grad(), nta.patch(model) as handle:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            model.to(dtype)(**batch)
            handles.append(dict(handle.calls))
    assert handles == [{None: 1}, {None: 1, SMALL: 1}, {None: 2, SMALL: 1}]


def test_mpt_has_no_positions_past_max_seq_len(everything_is_small):
    config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, max_seq_len=32)
    model = transformers.MptModel(config).eval()
    mask = (torch.arange(40) < torch.tensor([[7], [5]])).long()
    with torch.no_grad(), nta.patch(model) as handle:
        model(torch.full(mask.shape, 7), attention_mask=mask)
    assert handle.calls == {None: 1}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel"])
@pytest.mark.parametrize("padding", [0, 3])
def test_one_row(everything_is_small, name, padding):
    """Without padding it runs as without the patch; the mask is read once, as transformers does."""
    model = tiny.make(name[: -len("ForCausalLM") if "For" in name else -len("Model")].lower(), name, "sdpa")
    ids = torch.randint(5, tiny.VOCABULARY, (1, 9))
    mask = torch.ones_like(ids)
    mask[:, 9 - padding :] = 0
    other = copy.deepcopy(model)
    with nta.patch(model, packing="always"), nta.patch(other) as handle, torch.no_grad():
        want, got = (dict(x(ids, attention_mask=mask)) for x in (model, other))
    want.pop("past_key_values", None), got.pop("past_key_values", None)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    assert handle.calls == {SMALL: 1}


@pytest.mark.parametrize("form", ["padding", "no padding", "one row"])
@pytest.mark.parametrize("model_type", ["llama", "bert", "modernbert"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_the_same_again(everything_is_small, model_type, reentrant, form):
    """Layers run again in the backward, where nothing says that the batch is small."""
    model = tiny.make(model_type, tiny.classes(model_type)[0], "sdpa").train()
    batch, other = batch_of(model, "right"), copy.deepcopy(model)
    if form != "padding":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    if form == "one row":
        batch = {name: x[:1] for name, x in batch.items()}
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other.enable_input_require_grads()
    with nta.patch(model), nta.patch(other) as handle:
        torch.testing.assert_close(solve(other, batch), solve(model, batch))
    assert handle.calls == {SMALL: 1}


@pytest.mark.parametrize("change", ["position_ids", "logits_to_keep", "ignore_index", "compiled", "no mask"])
def test_these_calls_do_not_run_as_small_batches(everything_is_small, fresh_compiler, change):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    batch = batch_of(model, "right")
    if change == "position_ids":
        batch[change] = torch.arange(15).expand(4, -1)
    elif change == "logits_to_keep":
        batch = {**batch, change: 1}
        del batch["labels"]
    elif change == "ignore_index":
        batch[change] = -100
    elif change == "no mask":
        del batch["attention_mask"]
    want = model(**batch).logits.detach()
    with nta.patch(model, logits="padded") as handle, warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        function = torch.compile(model, backend="eager", dynamic=True) if change == "compiled" else model
        got = function(**batch).logits
    assert SMALL not in handle.calls
    kept = slice(None) if change == "no mask" else batch["attention_mask"].bool()[:, -want.shape[1] :]
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model_type", sweep_except(["albert", "bert", "electra", "llama", "roberta"], "bert", "llama"))
def test_layers_that_are_compiled_on_their_own(everything_is_small, fresh_compiler, model_type):
    model = tiny.make(model_type, tiny.classes(model_type)[0], "sdpa").train()
    batch, other = batch_of(model, "right"), copy.deepcopy(model)
    with nta.patch(model, packing="always"), nta.patch(other) as handle:
        want = solve(model, batch, hidden_states=False)
        for module in other.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(backend="aot_eager")
        torch.testing.assert_close(solve(other, batch, hidden_states=False), want, rtol=1e-3, atol=1e-4)
    assert handle.calls == {SMALL: 1}


@pytest.mark.parametrize("shares_config", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_other_models_in_the_forward_of_a_small_batch(everything_is_small, model_type, shares_config):
    """A hook calls a model that gets a packed row."""
    name = tiny.classes(model_type)[0]
    model, other = (tiny.make(model_type, name, x) for x in ("sdpa", nta.hf.register()))
    if shares_config:
        other = type(model)(model.config).eval()
        other.set_attn_implementation(nta.hf.register())
    ids, found = torch.randint(5, tiny.VOCABULARY, (1, 9)), []
    positions_of_two = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    layers = model.layers if model_type == "llama" else model.encoder.layer
    more = {"attention_mask": torch.ones_like(ids)}
    layers[1].register_forward_pre_hook(lambda *_: found.append(other(ids, position_ids=positions_of_two, **more)[0]))
    with nta.patch(model) as handle, torch.no_grad():
        model(**batch_of(model, "right"))
        alone = other(ids[:, 4:], attention_mask=more["attention_mask"][:, 4:])[0]
        torch.testing.assert_close(found[0][:, 4:], alone, rtol=1e-4, atol=2e-5)
    assert handle.calls[SMALL] >= 1


def test_a_prompt_keeps_its_cache(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa")
    ids = torch.randint(5, tiny.VOCABULARY, (1, 9))
    with nta.patch(model) as handle, torch.no_grad():
        first = model(ids[:, :8], attention_mask=torch.ones(1, 8, dtype=torch.long))
        second = model(ids[:, 8:], past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(second.logits[0, -1], model(ids).logits[0, -1], rtol=1e-4, atol=2e-5)
    assert handle.calls[SMALL] == 1


def test_logits_of_a_batch_without_padding_are_not_packed(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    ids = torch.randint(5, tiny.VOCABULARY, (2, 9))
    for packing in ("auto", "always"):
        with nta.patch(model, packing=packing):
            out = model(ids, attention_mask=torch.ones_like(ids), labels=ids)
            assert out.logits.shape == (2, 9, tiny.VOCABULARY)


def test_base_models_ignore_labels(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    batch = batch_of(model, "right")
    with nta.patch(model):
        assert model.model(**batch).last_hidden_state.shape == (4, 15, 48)


def test_logits_of_tokens_with_labels_only(everything_is_small):
    model = tiny.make("modernbert", "ModernBertForMaskedLM", "sdpa", sparse_prediction=True).train()
    batch, other = batch_of(model, "right"), copy.deepcopy(model)
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    with nta.patch(model, packing="always"), nta.patch(other):
        torch.testing.assert_close(other(**batch).logits, model(**batch).logits, rtol=1e-4, atol=2e-5)


def test_rows_that_are_longer_than_the_positions_of_the_model(everything_is_small):
    """The padding has no positions."""
    for model_type in ("bert", "roberta"):
        model = tiny.make(model_type, tiny.classes(model_type)[0], "sdpa")
        padding = model.config.pad_token_id + 1 if model_type == "roberta" else 0
        longest = model.config.max_position_embeddings - padding
        for length, small in ((longest, 1), (longest + 1, 0)):
            ids = torch.full((2, length), tiny.PAD)
            mask = torch.arange(length) < torch.tensor([[7], [11]])
            ids[mask] = 7
            with nta.patch(model) as handle, torch.no_grad():
                model(input_ids=ids, attention_mask=mask.long())
            assert handle.calls[SMALL] == small


@pytest.mark.parametrize("value", [True, 2, 1.0])
def test_any_value_but_0_is_a_token(everything_is_small, value):
    model = tiny.make("opt", "OPTModel", "sdpa")
    batch, other = batch_of(model, "right"), copy.deepcopy(model)
    batch["attention_mask"] = batch["attention_mask"] * value
    with nta.patch(model, packing="always"), nta.patch(other), torch.no_grad():
        torch.testing.assert_close(other(**batch)[0], model(**batch)[0], rtol=1e-4, atol=2e-5)


def test_models_whose_positions_depend_on_the_length_of_a_row_are_packed(everything_is_small):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    model = tiny.make("llama", "LlamaModel", "sdpa", max_position_embeddings=5, rope_parameters=rope)
    with nta.patch(model) as handle, torch.no_grad():
        model(**batch_of(model, "right"))
    assert handle.calls == {None: 1}


def test_an_error_in_a_small_batch_does_not_stay(everything_is_small):
    model = tiny.make("llama", "LlamaModel", nta.hf.register())
    ids = torch.randint(5, tiny.VOCABULARY, (1, 9))
    with nta.patch(model):
        hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch_of(model, "right"))
        hook.remove()
    with torch.no_grad():
        got = model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))[0]
        torch.testing.assert_close(got[:, 4:], model(ids[:, 4:])[0], rtol=1e-4, atol=2e-5)


def test_which_batches_are_small():
    """On a device with 100 teraflops, whose host needs 10 µs for each kernel."""
    costs = Costs(host_us=10, host_us_training=30, tflops=100, tflops_float32=10, terabytes=1)
    bf16, size = torch.bfloat16, Size(weights=10**8, attention=0, launches=100, width=0)  # 2e8 operations a token, 1 ms
    for training in (False, True):
        assert size.is_too_small(1, 499, bf16, costs, training)
        assert not size.is_too_small(1, 501, bf16, costs, training)
    assert not size.is_too_small(1, 51, torch.float32, costs, training=False)
    moved = Size(weights=0, attention=0, launches=100, width=10**4)  # 6e6 bytes a token
    assert moved.is_too_small(1, 166, bf16, costs, training=False)
    assert not moved.is_too_small(1, 167, bf16, costs, training=False)
    scores = Size(weights=0, attention=10**5, launches=100, width=0)  # 4e5 · L² operations a row
    assert scores.is_too_small(1, 499, bf16, costs, training=False)
    assert not scores.is_too_small(1, 501, bf16, costs, training=False)


@pytest.mark.parametrize("model_type", ["albert", "bert", "llama", "modernbert", "opt", "qwen3"])
def test_size_of_a_model(model_type):
    model = tiny.make(model_type, tiny.classes(model_type)[0], "sdpa")
    config = model.config
    size = Size.of(model, len(attention_modules(model)))
    times = config.num_hidden_layers if model_type == "albert" else 1  # its layers share their weights
    linear = sum(x.weight.numel() for x in model.modules() if isinstance(x, torch.nn.Linear))
    assert size.weights == times * linear
    assert size.attention == config.num_hidden_layers * config.hidden_size
    with nta.patch(model, packing="always"), torch.no_grad():
        model(**batch_of(model, "right"))
        with _Launches() as launches:
            model(**batch_of(model, "right"))
    assert 0.5 < size.launches / launches.count < 1.5


def test_cpus_pack_every_batch():
    assert small_batches.costs_of(torch.device("cpu")) is None


def test_nearest_tokens():
    is_token = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    rows, values = PaddedRows.of(is_token), torch.arange(12.0).view(3, 4, 1)
    assert rows.pad_with_nearest(values).squeeze(2).tolist() == [[1, 1, 1, 3], [4, 5, 5, 5], [0, 0, 0, 0]]
    assert rows.first_tokens(rows.pad(values)).squeeze(1).tolist() == [1, 4, 0]
    assert rows.pad(values, -1).squeeze(2).tolist() == [[-1, 1, -1, 3], [4, 5, -1, -1], [-1] * 4]


def test_packing_must_be_known():
    with pytest.raises(ValueError, match='packing must be "auto" or "always", got True'):
        nta.patch(tiny.make("bert", "BertModel"), packing=True)

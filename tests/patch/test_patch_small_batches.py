"""Batches that are too small to gain run the original forward. Their outputs are 0 at padding."""

import copy
import warnings

import pytest
import tiny
import torch
import transformers
from sweeps import covering, sweep_except
from torch.utils._python_dispatch import TorchDispatchMode

import nt_attention as nta
from nt_attention import NotPackedWarning
from nt_attention.hf.families import CACHE
from nt_attention.hf.pack import packed_forward, small_batches
from nt_attention.hf.pack.small_batches import Size
from nt_attention.hf.route.packed_row import SmallCall

pytestmark = pytest.mark.usefixtures("uncompared")

SMALL = "the batch is too small to gain from packing"
TYPES = ("albert", "bert", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "modernbert", "opt")
ENTRIES = [(model_type, name) for model_type in TYPES for name in tiny.classes(model_type)]


@pytest.fixture
def everything_is_small(monkeypatch):
    """As on a GPU whose host never ends."""
    monkeypatch.setattr(packed_forward, "is_measured", lambda device: True)
    monkeypatch.setattr(small_batches, "HOST_MS", float("inf"))


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
    values = {name: out[name] for name in out if name not in CACHE}
    loss = values.get("loss")
    if loss is None:
        loss = sum(x.square().sum() for x in values.values() if isinstance(x, torch.Tensor))
    model.zero_grad()
    loss.backward()
    return values, {name: x.grad for name, x in model.named_parameters()}


def at_padding(x, mask, value):
    """Some outputs with this value at padding, in tensors and in tuples of them."""
    if isinstance(x, tuple):
        return tuple(at_padding(part, mask, value) for part in x)
    if x.shape[:2] != mask.shape:
        return x
    return x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), value)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("model_type", "name"),
    sweep_except(ENTRIES, ("bert", "BertModel"), ("bert", "BertForMaskedLM"), ("llama", "LlamaForCausalLM")),
)
def test_the_original_forward_but_for_padding(everything_is_small, model_type, name, side):
    """Also the loss, which counts labels at padding, the pooled output and the gradients."""
    model = tiny.make(model_type, name, "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa").train()
    batch = batch_of(model, side)
    mask = batch["attention_mask"].bool().flatten(0, -2)
    for train in (True, False):
        want, want_gradients = solve(model.train(train), batch)
        with nta.patch(model) as handle:
            got, gradients = solve(model, batch)
        assert handle.calls == {SMALL: 1}
        assert got.keys() == want.keys()
        for key, x in want.items():
            lowest = key in ("start_logits", "end_logits")
            by_head = key == "last_hidden_state" or key in ("loss", "pooler_output")
            x = x if by_head and "For" in name else at_padding(x, mask, torch.finfo(torch.float32).min if lowest else 0)
            torch.testing.assert_close(got[key], x, rtol=1e-3, atol=1e-4)
        if "loss" in want:  # else the gradients are of padded outputs
            torch.testing.assert_close(gradients, want_gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("return_dict", [True, False])
def test_outputs_are_0_at_padding(everything_is_small, return_dict):
    model = tiny.make("bert", "BertModel", "sdpa").eval()
    batch = batch_of(model, "right", empty_row=True)
    with nta.patch(model) as handle:
        out = model(**batch, return_dict=return_dict)
    assert isinstance(out, tuple) != return_dict
    assert not out[0][batch["attention_mask"] == 0].any()
    assert handle.calls == {SMALL: 1}


def test_few_more_operations_than_without_the_patch(everything_is_small):
    """The padding mask is made, and the output filled."""
    for model_type in ("bert", "llama"):
        model = tiny.make(model_type, tiny.classes(model_type)[0], "sdpa")
        batch, counts = batch_of(model, "right"), []
        for patched in (False, True):
            handle = nta.patch(model) if patched else None
            with torch.no_grad(), _Launches() as launches:
                model(**batch)
            counts.append(launches.count)
        assert handle.calls == {SMALL: 1}
        assert counts[1] <= counts[0] + 2, counts


def test_layers_of_two_dtypes_share_a_mask():
    small, mask = SmallCall(torch.nn.Linear(2, 2)), torch.tensor([[True, False]])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        assert torch.equal(small.additive(mask, dtype), torch.tensor([[0.0, -torch.inf]], dtype=dtype))
        assert small.additive(mask, dtype) is small.additive(mask, dtype)


@covering(
    {
        "implementation": ["sdpa", "eager"],
        "inner": ["same model, padded", "same model, packed", "padded", "packed"],
        "outer": [(9,), (9, 5), (9, 5), (9,)],
    }
)
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


def test_the_decision_depends_on_the_dtype_of_the_model_now(monkeypatch):
    monkeypatch.setattr(packed_forward, "is_measured", lambda device: True)
    monkeypatch.setattr(small_batches, "HOST_MS", 1e-4)  # bfloat16 takes 7e-5, and float32 2e-4
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


@covering(
    {
        "reentrant": [True, False],
        "model_type": ["llama", "bert", "modernbert"],
        "form": ["padding", "no padding", "one row", "padding"],
    }
)
def test_checkpoints_compute_the_same_again(everything_is_small, model_type, reentrant, form):
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


@pytest.mark.parametrize("change", ["position_ids", "logits_to_keep", "compiled", "no mask"])
def test_these_calls_do_not_run_as_small_batches(everything_is_small, fresh_compiler, change):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    batch = batch_of(model, "right")
    if change == "position_ids":
        batch[change] = torch.arange(15).expand(4, -1)
    elif change == "logits_to_keep":
        batch = {**batch, change: 1}
        del batch["labels"]
    elif change == "no mask":
        del batch["attention_mask"]
    want = model(**batch).logits.detach()
    with nta.patch(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        warnings.filterwarnings("ignore", "the result differs", NotPackedWarning)  # labels at padding
        function = torch.compile(model, backend="eager", dynamic=True) if change == "compiled" else model
        got = function(**batch).logits
    assert SMALL not in handle.calls
    kept = slice(None) if change == "no mask" else batch["attention_mask"].bool()[:, -want.shape[1] :]
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=2e-5)


def test_a_prompt_keeps_its_cache(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa")
    ids = torch.randint(5, tiny.VOCABULARY, (1, 9))
    with nta.patch(model) as handle, torch.no_grad():
        first = model(ids[:, :8], attention_mask=torch.ones(1, 8, dtype=torch.long))
        second = model(ids[:, 8:], past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(second.logits[0, -1], model(ids).logits[0, -1], rtol=1e-4, atol=2e-5)
    assert handle.calls[SMALL] == 1


def test_base_models_ignore_labels(everything_is_small):
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").train()
    batch = batch_of(model, "right")
    with nta.patch(model):
        assert model.model(**batch).last_hidden_state.shape == (4, 15, 48)


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


def test_models_whose_positions_depend_on_the_length_of_a_row_are_packed(everything_is_small):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    model = tiny.make("llama", "LlamaModel", "sdpa", max_position_embeddings=5, rope_parameters=rope)
    with nta.patch(model) as handle, torch.no_grad():
        model(**batch_of(model, "right"))
    assert handle.calls == {None: 1}


# Padded rows of 512 tokens, in bfloat16 and in float32, that took less time than packed ones on an H200.
@pytest.mark.parametrize(
    ("width", "small", "large"), [(384, (64, 16), (160, 22)), (768, (32, 5), (64, 7)), (1024, (32, 3), (64, 5))]
)
def test_which_batches_are_small(width, small, large):
    for rows, want in ((small, True), (large, False)):
        assert [Size(width).is_too_small(n, 512, itemsize) for n, itemsize in zip(rows, (2, 4), strict=True)] == [
            want
        ] * 2
    assert not Size(width, longest=511).is_too_small(1, 512, 2)
    assert not small_batches.is_measured(torch.device("cpu"))


def test_packing_must_be_known():
    with pytest.raises(ValueError, match='packing must be "auto" or "always", got True'):
        nta.patch(tiny.make("bert", "BertModel"), packing=True)

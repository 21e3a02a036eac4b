"""What PyTorch's own tests ask of nn.MultiheadAttention and the Transformer modules, with our module in its place.

Each test asks in its own way what a test of the pytorch repository asks: test/nn/test_multihead_attention.py,
test_transformers.py, test_nn.py, test_native_mha.py, test_modules.py with its inputs from common_modules.py,
test_nestedtensor.py, nn/test_parametrization.py, nn/test_pruning.py and nn/test_module_hooks.py. The stock modules are
the reference, or a formula in NumPy is.

These can not hold:

- test_multihead_attn_nested_tensor_outside_fast_path, as released, wants NestedTensors refused wherever the fused
  kernel does not run. To take them there is what our module is for.
- test_script_mha_in_proj_weight_none, test_script_encoder_subclass, test_transformerencoderlayer_subclass,
  test_transformerencoderlayer_subclass_model, and test_transformerencoder_fastpath with use_torchscript=True:
  TorchScript has no word for a SequenceLayout. Nor has torch.fx.symbolic_trace, which takes modules whole only where
  they come from torch.nn.
- test_transformerdecoderlayer and test_transformerdecoder compare padded targets too. Under a boolean key_padding_mask
  alone, self-attention gives 0 there, since padding is not computed. Every real position is compared here.
- test_custom_module_multi_head_attention (quantization) asks ``type(module) is nn.MultiheadAttention``. A quantizable
  class that asks for ours finds every attribute that it reads.
- Tests that match the words of an error: its type holds, and ours say what to pass. Tests that ask whether
  the fused kernel has run: ours takes another way to the same numbers.
- Strided NestedTensors in eval give weights by default there; ours gives none for ragged inputs unless it is asked.
- in_proj_bias in another dtype than the weights, which the fused kernel alone bears.
- test_multihead_attention with static_k and static_v, test_transform_bias_rescale_qkv, its nested form, and
  test_scaled_dot_product_attention go past the module, to functions that are not ours.
"""

import contextlib
import copy
import functools
import io
import itertools
import logging
import pickle
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention import VarlenMultiheadAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

BATCH, LENGTH, KEYS, EMBED, HEADS = 3, 5, 7, 12, 4
BATCH_FIRST = pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
NORM_FIRST = pytest.mark.parametrize("norm_first", [True, False], ids=["norm-first", "norm-last"])
MODES = ["train", "eval", "no-grad"]

close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9, equal_nan=True)
double = functools.partial(torch.randn, dtype=torch.float64)


def scrambled(module):
    """The same module with parameters that are nowhere constant: fresh biases are 0 and would hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def pair(embed=EMBED, heads=HEADS, **options):
    """The stock module and ours, with the same parameters."""
    options = {"dtype": torch.float64, **options}
    stock = scrambled(nn.MultiheadAttention(embed, heads, **options))
    ours = VarlenMultiheadAttention(embed, heads, **options)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def swapped(model):
    """A copy of a model with our module for each attention module in it."""
    return swap(copy.deepcopy(model))


def swap(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, VarlenMultiheadAttention.from_torch(child))
    return model


@contextlib.contextmanager
def put_in(mode, *models):
    """Models in train or eval, and gradients unless it is "no-grad"."""
    for model in models:
        model.train(mode == "train")
    with torch.set_grad_enabled(mode != "no-grad"):
        yield


def encoder_layer(**options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    return scrambled(nn.TransformerEncoderLayer(EMBED, HEADS, **options))


def decoder_layer(**options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    return scrambled(nn.TransformerDecoderLayer(EMBED, HEADS, **options))


def encoder(layers=2, norm=False, enable_nested_tensor=True, mask_check=True, **options):
    final = nn.LayerNorm(EMBED, dtype=torch.float64) if norm else None
    made = nn.TransformerEncoder(encoder_layer(**options), layers, final, enable_nested_tensor, mask_check)
    return scrambled(made)  # the layers are copies of one, and must not be


def padding(lengths, longest):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def outcome(model, *inputs, rows=..., length_first=False, **options):
    """The output at ``rows`` of (batch, length), and the gradients of inputs and parameters where there are any."""
    leaves = {id(x): x.clone().requires_grad_(torch.is_grad_enabled()) for x in inputs}
    out = model(*[leaves[id(x)] for x in inputs], **options)
    out = out[0] if isinstance(out, tuple) else out
    out = (out.transpose(0, 1) if length_first else out)[rows]
    if not torch.is_grad_enabled():
        return [out]
    return [out, *torch.autograd.grad(out.square().sum(), [*leaves.values(), *model.parameters()])]


# The module itself.

KEYS_PADDED = padding([7, 3, 5], KEYS)


def mask_forms():
    """Keyword arguments, and what they add to the scores (N, H, L, S)."""
    blocked = torch.rand(LENGTH, KEYS) > 0.6
    per_head = torch.rand(BATCH * HEADS, LENGTH, KEYS) > 0.6
    blocked[:, 0] = per_head[..., 0] = False
    bias, head_bias, key_bias = double(LENGTH, KEYS), double(BATCH * HEADS, LENGTH, KEYS), double(BATCH, KEYS)
    spread = KEYS_PADDED[:, None, None]
    return {
        "none": ({}, torch.zeros(1)),
        "bool": ({"attn_mask": blocked}, additive(blocked)),
        "float": ({"attn_mask": bias}, bias),
        "bool-per-head": ({"attn_mask": per_head}, additive(per_head).view(BATCH, HEADS, LENGTH, KEYS)),
        "float-per-head": ({"attn_mask": head_bias}, head_bias.view(BATCH, HEADS, LENGTH, KEYS)),
        "padding": ({"key_padding_mask": KEYS_PADDED}, additive(spread)),
        "float-padding": ({"key_padding_mask": key_bias}, key_bias[:, None, None]),
        "both": ({"attn_mask": blocked, "key_padding_mask": KEYS_PADDED}, additive(blocked | spread)),
        "both-float": ({"attn_mask": bias, "key_padding_mask": key_bias}, bias + key_bias[:, None, None]),
        "mixed": ({"attn_mask": bias, "key_padding_mask": KEYS_PADDED}, bias + additive(spread)),
        "per-head-and-padding": (
            {"attn_mask": head_bias, "key_padding_mask": key_bias},
            head_bias.view(BATCH, HEADS, LENGTH, KEYS) + key_bias[:, None, None],
        ),
    }


def by_formula(module, query, key, value, bias):
    """(N, L, E) and (N, H, L, S + added) from the parameters alone, in NumPy."""
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    if "in_proj_weight" in state:
        weights = np.split(state["in_proj_weight"], 3)
    else:
        weights = [state[f"{letter}_proj_weight"] for letter in "qkv"]
    biases = np.split(state["in_proj_bias"], 3) if "in_proj_bias" in state else [0.0] * 3
    q, k, v = (x.numpy() @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True))
    count = len(q)
    if "bias_k" in state:
        k, v = (np.concatenate([x, np.repeat(state[b], count, 0)], 1) for x, b in ((k, "bias_k"), (v, "bias_v")))
    if module.add_zero_attn:
        k, v = (np.concatenate([x, np.zeros((count, 1, x.shape[2]))], 1) for x in (k, v))
    q, k, v = (x.reshape(count, x.shape[1], HEADS, -1).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    bias = np.broadcast_to(bias.numpy(), (count, HEADS, query.shape[1], key.shape[1]))
    scores[..., : key.shape[1]] += bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    merged = (weights @ v).transpose(0, 2, 1, 3).reshape(count, query.shape[1], -1)
    out = merged @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0)
    return torch.from_numpy(out), torch.from_numpy(weights)


@pytest.mark.parametrize("masks", mask_forms())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 6, "vdim": 9},
        {"kdim": 6, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True},
    ],
    ids=lambda o: "+".join(o) or "default",
)
def test_matches_the_formula_under_every_form_of_mask(options, masks):
    stock, ours = pair(batch_first=True, **options)
    query, key, value = (double(BATCH, n, w) for n, w in ((LENGTH, EMBED), (KEYS, stock.kdim), (KEYS, stock.vdim)))
    value = key if options.get("kdim") == options.get("vdim") else value
    arguments, bias = mask_forms()[masks]
    out, weights = by_formula(ours, query, key, value, bias)
    got = ours(query, key, value, **arguments)
    close(got, (out, weights.mean(1)))
    close(ours(query, key, value, average_attn_weights=False, **arguments), (out, weights))
    wanted = outcome(stock, query, key, value, need_weights=False, **arguments)
    close(wanted[0], out)
    close(outcome(ours, query, key, value, need_weights=False, **arguments), wanted)
    ours.batch_first = False
    got = ours(*(x.transpose(0, 1) for x in (query, key, value)), need_weights=False, **arguments)[0]
    close(got.transpose(0, 1), out)


def test_a_mask_for_each_batch_element_is_that_of_the_element_alone():
    _, ours = pair()
    query, key = double(LENGTH, BATCH, EMBED), double(KEYS, BATCH, EMBED)
    mask = additive(torch.rand(BATCH, LENGTH, KEYS) > 0.5)
    mask[..., 0] = 0
    together = ours(query, key, key, attn_mask=mask.repeat_interleave(HEADS, 0))[0]
    for i in range(BATCH):
        alone = ours(query[:, i : i + 1], key[:, i : i + 1], key[:, i : i + 1], attn_mask=mask[i])[0]
        close(together[:, i : i + 1], alone)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("added", list(itertools.product([True, False], repeat=2)), ids=str)
@BATCH_FIRST
def test_unbatched_inputs_are_a_batch_of_one(batch_first, added, bias):
    stock, ours = pair(3, 3, bias=bias, add_bias_kv=added[0], add_zero_attn=added[1], batch_first=batch_first)
    last = torch.tensor([False, False, True])
    dim = 0 if batch_first else 1
    for same, padded, mask, need in itertools.product(
        [True, False], [None, last], [None, last.expand(3, 3, 3)], [True, False]
    ):
        q = double(3, 3)
        inputs = [q, q, q] if same else [q, double(3, 3), double(3, 3)]
        one = {id(x): x.unsqueeze(dim) for x in inputs}
        arguments = {"attn_mask": mask, "need_weights": need}
        out, weights = ours(*inputs, key_padding_mask=padded, **arguments)
        batched = None if padded is None else padded[None]
        want, want_weights = ours(*[one[id(x)] for x in inputs], key_padding_mask=batched, **arguments)
        close((out, weights), (want.squeeze(dim), want_weights.squeeze(0) if need else None))
        if padded is None or mask is not None or need or not same:
            close((out, weights), stock(*inputs, key_padding_mask=padded, **arguments))


def misfits():
    x, y, z, flat, level = double(4, 4, 4), double(4, 4, 4), double(4, 4, 4), double(4, 4), double(4, 4)
    row = torch.tensor([False, False, True, True])
    return {
        "key-2d": ((x, flat, z), {}),
        "value-2d": ((x, y, flat), {}),
        "padding-1d": ((x, y, z), {"key_padding_mask": row}),
        "mask-1d": ((x, y, z), {"attn_mask": row}),
        "unbatched-key-3d": ((flat, x, level), {}),
        "unbatched-value-3d": ((flat, level, x), {}),
        "unbatched-padding-2d": ((flat, level, level), {"key_padding_mask": row.expand(1, 4)}),
        "unbatched-mask-1d": ((flat, level, level), {"attn_mask": row}),
        "unbatched-mask-heads": ((flat, level, level), {"attn_mask": row.expand(5, 4, 4)}),
        "query-4d": ((x[None], y[None], z[None]), {}),
        "padding-int": ((x, x, x), {"key_padding_mask": row.expand(4, 4).long()}),
        "padding-uint8": ((x, x, x), {"key_padding_mask": row.expand(4, 4).to(torch.uint8)}),
        "mask-int": ((x, x, x), {"attn_mask": row.expand(4, 4).int()}),
    }


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("case", misfits())
def test_refuses_what_stock_refuses_and_says_what_does_not_fit(case, fast, need_weights):
    stock, ours = (module.train(not fast) for module in pair(4, 4, batch_first=fast))
    inputs, arguments = misfits()[case]
    with torch.set_grad_enabled(not fast):
        with pytest.raises(AssertionError) as wanted:
            stock(*inputs, need_weights=need_weights, **arguments)
        with pytest.raises(wanted.type, match=next(iter(arguments), "query, key and value")):
            ours(*inputs, need_weights=need_weights, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@BATCH_FIRST
def test_keeps_sizes_and_dtypes_and_agrees_with_stock_in_them(batch_first, mode, dtype):
    stock, ours = (module.to(dtype) for module in pair(batch_first=batch_first, dtype=None))
    x, key = torch.randn(4, 4, EMBED, dtype=dtype), torch.randn(4, 4, EMBED, dtype=dtype)
    padded = padding([4, 1, 3, 2], 4)
    for inputs in ((x, x, x), (x, key, key)):
        results = []
        for module in (stock, ours):
            with put_in(mode, module):
                out, weights = module(*inputs, need_weights=False)
                hidden = module(*inputs, need_weights=False, key_padding_mask=padded)[0]
            assert weights is None
            assert (out.dtype, out.shape) == (hidden.dtype, hidden.shape) == (dtype, x.shape)
            shown = slice(None) if inputs[0] is key else ~padded if batch_first else ~padded.T
            results.append((out, hidden[shown]))
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 5e-3}[dtype]
        torch.testing.assert_close(*results[::-1], rtol=tolerance, atol=tolerance)


def test_device_and_dtype_are_those_asked_for():
    for made in (
        VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True, kdim=3, device="meta", dtype=torch.float16),
        nn.utils.skip_init(VarlenMultiheadAttention, EMBED, HEADS, dtype=torch.float16).to_empty(device="meta"),
    ):
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.float16)}
    with torch.device("meta"):
        module = VarlenMultiheadAttention(EMBED, HEADS)
    assert {p.device.type for p in module.to_empty(device="cpu").parameters()} == {"cpu"}
    x = torch.randn(2, 3, EMBED)
    assert scrambled(module)(x, x, x)[0].isfinite().all()


@pytest.mark.parametrize("mask_dim", [2, 3, None])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_eval_agrees_with_train_under_masks(dtype, padded, mask_dim):
    """Masks are drawn blindly: who sees no key is NaN on stock's fast path, and 0 before out_proj elsewhere."""
    stock, ours = pair(batch_first=True)
    x = double(BATCH, LENGTH, EMBED)

    def drawn(*shape):
        return torch.rand(shape) > 0.5 if dtype == torch.bool else double(shape)

    mask = None if mask_dim is None else drawn(*[(LENGTH, LENGTH), (BATCH * HEADS, LENGTH, LENGTH)][mask_dim - 2])
    arguments = {"attn_mask": mask, "key_padding_mask": drawn(BATCH, LENGTH) if padded else None}
    hidden = arguments["key_padding_mask"]
    rows = ~hidden if padded and mask is None and dtype == torch.bool else ...
    results = []
    for training in (True, False):
        with torch.no_grad():
            got, want = (
                module.train(training)(x, x, x, need_weights=False, **arguments)[0][rows] for module in (ours, stock)
            )
        close(got.where(~want.isnan(), torch.nan), want)
        results.append(got)
    close(*results)


@pytest.mark.parametrize("inputs", ["self", "encoder-decoder", "generic"])
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per-head"])
@pytest.mark.parametrize("masks", ["none", "padding", "mask", "both"])
def test_what_decides_over_stock_s_fused_kernel_changes_nothing(masks, average, inputs):
    _, ours = pair(batch_first=True)
    ours.eval()
    query, key, value = (double(BATCH, LENGTH, EMBED) for _ in range(3))
    key, value = {"self": (query, query), "encoder-decoder": (key, key), "generic": (key, value)}[inputs]
    hidden = padding([5, 2, 4], LENGTH)
    arguments = {"average_attn_weights": average}
    if masks in ("padding", "both"):
        arguments["key_padding_mask"] = hidden
    if masks in ("mask", "both"):
        arguments["attn_mask"] = causal(LENGTH)
    slow = ours(query, key, value, **arguments)
    with torch.no_grad():
        fast = ours(query, key, value, **arguments)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            off = ours(query, key, value, **arguments)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    close(off, slow)
    close(fast, slow)


def test_length_first_is_batch_first_turned_around():
    _, ours = pair(10, 2, batch_first=True)
    ours.eval()
    x = double(5, 2, 10)
    out, weights = ours.forward(x, x, x)
    ours.batch_first = False
    y = x.transpose(0, 1)
    got, got_weights = ours.forward(y, y, y)
    close((got.transpose(0, 1), got_weights), (out, weights))


@BATCH_FIRST
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_outputs_lie_in_memory_where_views_of_stock_s_would_work(masked, batch_first):
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    hidden = padding([5, 2, 4], LENGTH) if masked else None
    stock, ours = (
        module(x, x, x, need_weights=False, key_padding_mask=hidden)[0] for module in pair(batch_first=batch_first)
    )
    assert ours.is_contiguous() or not stock.is_contiguous()


@torch.no_grad()
def test_odd_parameters_run():
    """As few features as heads, no weights in one piece, no bias."""
    x = double(4, 4, 4)
    stock, ours = (module.eval() for module in pair(4, 4, batch_first=True))
    close(ours(x, x, x), stock(x, x, x))
    for options, key in (({"kdim": 2, "vdim": 2}, double(4, 4, 2)), ({"bias": False}, x)):
        stock, ours = pair(4, 4, **options)
        close(ours(x, key, key), stock(x, key, key))
    assert ours.in_proj_bias is ours.out_proj.bias is None


def test_is_causal_is_a_hint_that_needs_its_mask():
    stock, ours = pair(batch_first=True)
    x = double(BATCH, LENGTH, EMBED)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    for need, form in itertools.product([True, False], [mask, mask == -torch.inf]):
        want = stock(x, x, x, attn_mask=form, need_weights=need)
        close(ours(x, x, x, attn_mask=form, need_weights=need, is_causal=True), want)
    with pytest.raises(RuntimeError, match="pass attn_mask"):
        ours(x, x, x, is_causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(ours(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0], want[0])


def test_gradients_are_those_of_the_function():
    _, ours = pair(4, 2, batch_first=True, add_bias_kv=True)
    x, key = (double(2, 3, 4, requires_grad=True) for _ in range(2))
    hidden = padding([3, 1], 3)
    check = functools.partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda a: ours(a, a, a), (x,))
    assert check(lambda a: ours(a, a, a, key_padding_mask=hidden, need_weights=False)[0], (x,))
    assert check(lambda a, b: ours(a, b, b, key_padding_mask=hidden, need_weights=False)[0], (x, key))
    assert torch.autograd.gradgradcheck(lambda a: ours(a, a, a)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_inputs_that_are_not_contiguous_give_the_same(masked):
    _, ours = pair(batch_first=True)
    x, key = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    arguments = {"need_weights": False, "key_padding_mask": KEYS_PADDED if masked else None}

    def strided(tensor):
        return tensor.repeat_interleave(2, -1)[..., ::2]

    odd = strided(key)
    close(outcome(ours, strided(x), odd, odd, **arguments), outcome(ours, x, key, key, **arguments))


# Strided NestedTensors where stock takes them, and where it does not.


@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_strided_nested_tensors_in_eval_give_what_stock_gives(need_weights):
    stock, ours = (module.eval() for module in pair(batch_first=True))
    x = torch.nested.nested_tensor([double(n, EMBED) for n in (5, 2, 4)])
    want, want_weights = stock(x, x, x, need_weights=need_weights)
    got, weights = ours(x, x, x, need_weights=need_weights)
    close(got.to_padded_tensor(0), want.to_padded_tensor(0))
    close(weights, want_weights)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("added", list(itertools.product([True, False], repeat=2)), ids=str)
@pytest.mark.parametrize("mode", [*MODES, "inference", "frozen"])
def test_nested_tensors_give_each_sequence_what_it_gets_alone(mode, added, layout):
    stock, ours = pair(10, 5, add_bias_kv=added[0], add_zero_attn=added[1])
    queries, keys, values = ([double(n, 10) for n in lengths] for lengths in ((4, 6), (7, 16), (7, 16)))
    nest = functools.partial(torch.nested.nested_tensor, layout=layout)
    if mode == "frozen":
        ours.requires_grad_(False)
    with put_in(mode, ours), torch.inference_mode(mode == "inference"):
        q, k, v = nest(queries), nest(keys), nest(values)
        for inputs, parts in (((q, q, q), [queries] * 3), ((q, k, k), [queries, keys, keys])):
            got, weights = ours(*inputs)
            assert weights is None
            close(list(got.unbind()), [stock(*one)[0] for one in zip(*parts, strict=True)])
        got = ours(q, k, v)[0]  # keys and values of the same lengths by chance, each with their own offsets
        close(list(got.unbind()), [stock(*one)[0] for one in zip(queries, keys, values, strict=True)])


# Encoder layers and encoders.

SOME_PADDED = padding([5, 2, 4], LENGTH)
ENCODER_MASKS = {
    "none": {},
    "all-seen": {"src_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.bool)},
    "causal": {"src_mask": causal(LENGTH)},
    "causal-hint": {"src_mask": causal(LENGTH), "is_causal": True},
    "per-head": {"src_mask": causal(LENGTH).expand(BATCH * HEADS, LENGTH, LENGTH)},
    "nothing-padded": {"src_key_padding_mask": torch.zeros(BATCH, LENGTH, dtype=torch.bool)},
    "padding": {"src_key_padding_mask": SOME_PADDED},
    "holes": {"src_key_padding_mask": torch.tensor([[False, True, False, False, True]]).expand(BATCH, LENGTH)},
    "float-padding": {"src_key_padding_mask": additive(SOME_PADDED)},
    "both": {"src_mask": causal(LENGTH), "src_key_padding_mask": SOME_PADDED},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", ENCODER_MASKS)
@BATCH_FIRST
@NORM_FIRST
def test_encoder_layers_give_what_stock_ones_give(norm_first, batch_first, masks, mode):
    stock = encoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = swapped(stock)
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    with put_in(mode, stock, ours):
        close(outcome(ours, x, **ENCODER_MASKS[masks]), outcome(stock, x, **ENCODER_MASKS[masks]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"activation": a} for a in ("gelu", F.gelu, nn.GELU(), nn.ReLU(), F.silu)] + [{"bias": False}],
    ids=["gelu-name", "gelu", "GELU", "ReLU", "silu", "no-bias"],
)
def test_activations_and_bias_of_encoder_and_decoder_layers(options, mode):
    x, memory = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    for layer, inputs in ((encoder_layer(**options), (x,)), (decoder_layer(**options), (x, memory))):
        with put_in(mode, layer):  # no copies: a copied decoder layer forgets an activation that is a module
            want = outcome(layer, *inputs)
            close(outcome(swap(layer).train(layer.training), *inputs), want)


@BATCH_FIRST
@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_of_padding_alone_is_nan_where_stock_s_is(mode, batch_first):
    stock = encoder_layer(batch_first=batch_first)
    ours = swapped(stock)
    x, hidden = double(1, 1, EMBED), torch.tensor([[True]])
    with put_in(mode, stock, ours):
        got = ours(x, src_key_padding_mask=hidden)
        assert got.isnan().all() == (batch_first and mode == "no-grad")
        close(got, stock(x, src_key_padding_mask=hidden))


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_encoder_and_decoder_inputs_are_a_batch_of_one(batch_first, heads):
    dim = 0 if batch_first else 1
    last = torch.tensor([False, False, True])
    for norm_first, bias, padded, mask in itertools.product(
        [True, False], [True, False], [None, last], [None, last.expand(3, 3)]
    ):
        made = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias}
        options = {"dim_feedforward": 8, "dropout": 0.0, "dtype": torch.float64, **made}
        x, memory = double(3, EMBED), double(3, EMBED)
        one = None if padded is None else padded[None]
        layer = swapped(scrambled(nn.TransformerEncoderLayer(EMBED, heads, **options)))
        want = layer(x.unsqueeze(dim), src_mask=mask, src_key_padding_mask=one).squeeze(dim)
        close(layer(x, src_mask=mask, src_key_padding_mask=padded), want)
        layer = swapped(scrambled(nn.TransformerDecoderLayer(EMBED, heads, **options)))
        names = ("tgt_key_padding_mask", "memory_key_padding_mask")
        masks = {"tgt_mask": mask, "memory_mask": mask}
        want = layer(x.unsqueeze(dim), memory.unsqueeze(dim), **masks, **dict.fromkeys(names, one)).squeeze(dim)
        close(layer(x, memory, **masks, **dict.fromkeys(names, padded)), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", ["none", "causal", "nothing-padded", "padding", "holes", "both"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "dense"])
@pytest.mark.parametrize(("layers", "norm"), [(1, False), (2, True), (6, False)])
def test_encoders_give_what_stock_ones_give(layers, norm, nested, masks, mode):
    stock = encoder(layers, norm, nested)
    ours = swapped(stock)
    arguments = {name.replace("src_mask", "mask"): mask for name, mask in ENCODER_MASKS[masks].items()}
    x = double(BATCH, LENGTH, EMBED)
    with put_in(mode, stock, ours):
        close(outcome(ours, x, **arguments), outcome(stock, x, **arguments))


@pytest.mark.parametrize(
    ("lengths", "nested", "autocast"),
    [
        *itertools.product([(1, 1, 0), (98, 90)], [True, False], [False]),
        ((98, 90), False, True),
        ((1025, 1031), True, False),
    ],
)
def test_the_fast_path_of_an_encoder_agrees_with_its_slow_path(lengths, nested, autocast):
    longest = max(lengths) + 9 if min(lengths) else 2
    model = swapped(encoder(2, enable_nested_tensor=nested, dtype=None)).eval()
    x, hidden = torch.rand(len(lengths), longest, EMBED), padding(lengths, longest)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            fast = model(x, src_key_padding_mask=hidden)
        slow = model(x, src_key_padding_mask=hidden)
    seen = ~hidden[:, : fast.shape[1]]
    tolerance = {"rtol": 0.05, "atol": 0.1} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(fast[seen].float(), slow[:, : fast.shape[1]][seen].float(), **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_as_many_sequences_as_tokens_are_told_apart(mode):
    stock = encoder(2, enable_nested_tensor=False)
    ours = swapped(stock)
    x, mask = double(4, 4, EMBED), torch.rand(4, 4) > 0.5
    mask.fill_diagonal_(False)
    with put_in(mode, stock, ours):
        close(ours(x, mask=mask), stock(x, mask=mask))


@pytest.mark.parametrize(
    ("enabled", "checked", "padded", "mask", "nested"),
    [
        (True, True, [[0, 0, 1]], None, True),
        (True, True, [[1, 0, 1]], None, False),
        (False, True, [[0, 0, 1]], None, False),
        (False, True, [[1, 0, 1]], None, False),
        (False, True, [[0, 0, 1]], [[0, 1, 0], [0, 0, 0], [1, 0, 0]], False),
        (True, False, [[0, 0, 1]], None, True),
        (True, False, [[1, 0, 1]], None, True),
    ],
)
@torch.no_grad()
def test_encoders_take_the_fused_layer_with_nested_tensors_where_stock_does(enabled, checked, padded, mask, nested):
    model = swapped(encoder(2, enable_nested_tensor=enabled, mask_check=checked)).eval()
    arguments = {"src_key_padding_mask": torch.tensor(padded).bool()}
    arguments["mask"] = None if mask is None else torch.tensor(mask).bool()
    with mock.patch("torch._transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd) as fused:
        model(double(1, 3, EMBED), **arguments)
    assert [call.args[0].is_nested for call in fused.call_args_list] == [nested] * 2


@pytest.mark.parametrize("enabled", [True, False])
@torch.no_grad()
def test_the_fast_path_s_switch_reaches_every_model(enabled):
    layers = swapped(encoder(2)).eval()
    whole = swapped(nn.Transformer(EMBED, HEADS, 1, 1, 8, batch_first=True)).double().eval()
    x, y = double(1, 3, EMBED), double(1, 4, EMBED)
    fused = mock.Mock(wraps=torch._transformer_encoder_layer_fwd)
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with mock.patch("torch._transformer_encoder_layer_fwd", fused):
            for run in (
                lambda: layers(x, src_key_padding_mask=torch.tensor([[True, False, True]])),
                lambda: whole(x, y),
            ):
                fused.reset_mock()
                run()
                assert fused.called == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("hidden", [None, SOME_PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("heads", [3, 4])
@torch.no_grad()
def test_a_hook_on_the_attention_keeps_it_from_being_bypassed(heads, hidden):
    """Under padding the encoder has turned its input into a strided NestedTensor by then."""
    layer = nn.TransformerEncoderLayer(EMBED, heads, 16, 0.0, batch_first=True, dtype=torch.float64)
    stock = scrambled(nn.TransformerEncoder(layer, 2)).eval()
    x, results = double(BATCH, LENGTH, EMBED), []
    for model in (stock, swapped(stock)):
        seen = []
        for made in model.layers:
            made.self_attn.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[0]))
        out = model(x, src_key_padding_mask=hidden)
        results.append([out, *[x.to_padded_tensor(0) if x.is_nested else x for x in seen]])
    assert len(results[1]) == 3
    close(results[1], results[0])


def test_causality_is_found_in_a_mask_and_handed_on():
    x = double(1, LENGTH, EMBED)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    assert mask.dtype == torch.float64
    assert torch.equal(mask == -torch.inf, causal(LENGTH))
    assert _detect_is_causal_mask(mask, None, LENGTH)
    assert not any(_detect_is_causal_mask(m, None, LENGTH) for m in (torch.zeros_like(mask), None))
    layer = swapped(encoder_layer()).eval()
    close(layer(x, src_mask=mask, is_causal=True), layer(x, src_mask=mask))
    model = swapped(encoder(2, enable_nested_tensor=False)).train()
    out = model(x, mask=mask, is_causal=True)
    close(out, model(x, mask=mask == -torch.inf))
    out.square().mean().backward()
    hints = []
    for made in model.layers:
        made.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: hints.append(kwargs["is_causal"]), with_kwargs=True
        )
    for given in (mask, mask == -torch.inf, torch.rand(LENGTH, LENGTH) > 2, None):
        model(x, mask=given)
    assert hints == [True, True, True, True, False, False, False, False]


@BATCH_FIRST
def test_training_with_padding_and_the_masks_that_are_refused(batch_first):
    model = swapped(encoder(2, activation="gelu", dtype=None, batch_first=batch_first)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x = torch.randn(2, 4, EMBED) if batch_first else torch.randn(4, 2, EMBED)
    hidden = padding([2, 3], 4)
    losses = []
    for _ in range(8):
        out = model(x, src_key_padding_mask=hidden)
        loss = F.mse_loss(*((y if batch_first else y.transpose(0, 1))[~hidden] for y in (out, x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for mode in MODES:
        with put_in(mode, model):
            for wrong in (torch.uint8, torch.int64):
                with pytest.raises(AssertionError, match="only bool and floating types"):
                    model(x, src_key_padding_mask=hidden.to(wrong))
    outs = []
    for mode in MODES:
        with put_in(mode, model):
            out = model(x, src_key_padding_mask=hidden)
            outs.append((out if batch_first else out.transpose(0, 1))[~hidden])
    torch.testing.assert_close(outs[1:], outs[:1] * 2, rtol=1e-4, atol=1e-4)


def test_columns_of_padding_alone_stay():
    for batch_first, mode in itertools.product([True, False], MODES):
        model = swapped(encoder(3, activation="gelu", batch_first=batch_first))
        hidden = padding([5, 5, 5, 2, 5, 1], 10)
        x = double(6, 10, EMBED) if batch_first else double(10, 6, EMBED)
        with put_in(mode, model):
            assert model(x, src_key_padding_mask=hidden).shape == x.shape


def test_the_reason_for_no_nested_tensors_is_stock_s():
    layer = swapped(encoder_layer(bias=False)).eval()
    x = double(2, 3, EMBED)
    layer(x)
    with pytest.warns(UserWarning, match=r"encoder_layer\.self_attn was passed bias=False"):
        nn.TransformerEncoder(layer, 1).eval()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nn.TransformerEncoder(swapped(encoder_layer()), 1).use_nested_tensor


@pytest.mark.parametrize("model", ["encoder layer", "encoder", "decoder layer"])
def test_dropout_draws_what_stock_draws_from_a_seed(model):
    """Length first: stock's output lies so in memory either way, and the next dropout draws in that order."""
    stock = {
        "encoder layer": lambda: encoder_layer(dropout=0.3, batch_first=False),
        "encoder": lambda: encoder(2, dropout=0.3, batch_first=False),
        "decoder layer": lambda: decoder_layer(dropout=0.3, batch_first=False),
    }[model]()
    x = double(LENGTH, BATCH, EMBED)
    inputs = (x, double(KEYS, BATCH, EMBED)) if model == "decoder layer" else (x,)
    masks = {} if model == "decoder layer" else {"src_key_padding_mask": SOME_PADDED}
    results = []
    for made in (stock, swapped(stock)):
        torch.manual_seed(5)
        results.append(outcome(made.train(), *inputs, **masks))
    close(*results)


# Decoder layers, decoders, and both together.

MEMORY_PADDED = padding([2, 7, 4], KEYS)
DECODER_MASKS = {
    "none": {},
    "causal": {"tgt_mask": causal(LENGTH)},
    "causal-hint": {"tgt_mask": causal(LENGTH), "tgt_is_causal": True},
    "memory-mask": {"memory_mask": torch.linspace(-2, 2, LENGTH * KEYS, dtype=torch.float64).view(LENGTH, KEYS)},
    "target-padding": {"tgt_key_padding_mask": SOME_PADDED},
    "memory-padding": {"memory_key_padding_mask": MEMORY_PADDED},
    "nothing-padded": {"memory_key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.bool)},
    "float-padding": {
        "tgt_key_padding_mask": additive(SOME_PADDED),
        "memory_key_padding_mask": additive(MEMORY_PADDED),
    },
    "all": {
        "tgt_mask": causal(LENGTH),
        "memory_mask": torch.arange(LENGTH)[:, None] + 2 < torch.arange(KEYS),
        "tgt_key_padding_mask": SOME_PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    },
}


def compared_rows(masks):
    """All, but for padded targets where nothing else is asked of the self-attention: ours gives 0 there."""
    padded = masks.get("tgt_key_padding_mask")
    skipped = padded is not None and padded.dtype == torch.bool and "tgt_mask" not in masks
    return ~padded if skipped else ...


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", DECODER_MASKS)
@BATCH_FIRST
@NORM_FIRST
def test_decoder_layers_give_what_stock_ones_give(norm_first, batch_first, masks, mode):
    stock = decoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = swapped(stock)
    inputs = [double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)]
    inputs = inputs if batch_first else [x.transpose(0, 1).contiguous() for x in inputs]
    masks = DECODER_MASKS[masks]
    with put_in(mode, stock, ours):
        got, want = (
            outcome(model, *inputs, rows=compared_rows(masks), length_first=not batch_first, **masks)
            for model in (ours, stock)
        )
    close(got, want)


@pytest.mark.parametrize("masks", ["none", "target-padding", "memory-padding", "all"])
@pytest.mark.parametrize(("layers", "norm", "activation"), [(1, False, "gelu"), (2, True, "relu"), (6, True, "gelu")])
@BATCH_FIRST
def test_decoders_give_what_stock_ones_give(batch_first, layers, norm, activation, masks):
    layer = decoder_layer(batch_first=batch_first, activation=activation)
    stock = nn.TransformerDecoder(layer, layers, nn.LayerNorm(EMBED, dtype=torch.float64) if norm else None)
    ours = swapped(scrambled(stock))
    inputs = [double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)]
    inputs = inputs if batch_first else [x.transpose(0, 1).contiguous() for x in inputs]
    masks = DECODER_MASKS[masks]
    got, want = (
        outcome(model, *inputs, rows=compared_rows(masks), length_first=not batch_first, **masks)
        for model in (ours, stock)
    )
    close(got, want)


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_training_under_masks_and_padding_says_nothing(model, caplog):
    """With dropout, as upstream has it: what stock trains in silence, a model with our module does too."""
    masks = {"mask": causal(3), "src_key_padding_mask": padding([3, 2], 3)}
    x = torch.randn(2, 3, EMBED)
    if model == "encoder":
        made = swapped(encoder(2, True, dropout=0.1, dtype=None)).float()
    else:
        layer = decoder_layer(dropout=0.1, dtype=None)
        made = swapped(nn.TransformerDecoder(layer, 2, nn.LayerNorm(EMBED)))
        names = ("tgt_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
        masks = dict(zip(names, (causal(3), padding([3, 2], 3), padding([3, 2], 3)), strict=True))
        made = functools.partial(made, memory=torch.randn(2, 3, EMBED))
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x, **masks)
    assert not caplog.records


@pytest.mark.parametrize("mode", MODES)
@BATCH_FIRST
@NORM_FIRST
def test_a_whole_transformer_gives_what_the_stock_one_gives(norm_first, batch_first, mode):
    options = {"batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64}
    stock = scrambled(nn.Transformer(EMBED, HEADS, 2, 2, 16, 0.0, **options))
    ours = swapped(stock)
    source, target = double(BATCH, KEYS, EMBED), double(BATCH, LENGTH, EMBED)
    if not batch_first:
        source, target = (x.transpose(0, 1).contiguous() for x in (source, target))
    square = nn.Transformer.generate_square_subsequent_mask
    dense = {
        "src_mask": square(KEYS, dtype=torch.float64),
        "tgt_mask": square(LENGTH, dtype=torch.float64),
        "memory_mask": double(LENGTH, KEYS),
    }
    padded = {
        "src_key_padding_mask": MEMORY_PADDED,
        "tgt_key_padding_mask": SOME_PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    }
    hinted = {
        "src_mask": dense["src_mask"],
        "tgt_mask": dense["tgt_mask"],
        "src_is_causal": True,
        "tgt_is_causal": True,
    }
    with put_in(mode, stock, ours):
        for masks in ({}, dense, padded, dense | padded, hinted):
            got, want = (
                outcome(model, source, target, rows=compared_rows(masks), length_first=not batch_first, **masks)
                for model in (ours, stock)
            )
            close(got, want)


def test_a_transformer_refuses_what_does_not_fit_as_stock_does():
    stock = nn.Transformer(EMBED, HEADS, 1, 1, 8, 0.0)
    ours = swapped(stock)
    right = {
        "src": (KEYS, BATCH, EMBED),
        "tgt": (LENGTH, BATCH, EMBED),
        "src_mask": (KEYS, KEYS),
        "tgt_mask": (LENGTH, LENGTH),
        "memory_mask": (LENGTH, KEYS),
        "src_key_padding_mask": (BATCH, KEYS),
        "tgt_key_padding_mask": (BATCH, LENGTH),
        "memory_key_padding_mask": (BATCH, KEYS),
    }
    for name, (*rest, last) in right.items():
        inputs = {key: torch.zeros(shape) for key, shape in right.items()} | {name: torch.zeros(*rest, last + 2)}
        errors = []
        for model in (stock, ours):
            with pytest.raises((RuntimeError, AssertionError)) as raised:
                model(**inputs)
            errors.append(raised.type)
        assert issubclass(errors[1], errors[0])
    with pytest.raises(RuntimeError, match="batch number"):
        ours(torch.zeros(KEYS, BATCH, EMBED), torch.zeros(LENGTH, BATCH + 1, EMBED))


# NestedTensors through layers, encoders, decoders: stock runs one sequence at a time.

LENGTHS, MEMORY_LENGTHS = [4, 1, 9, 6], [3, 7, 2, 5]


def parts(lengths):
    return [double(n, EMBED, requires_grad=True) for n in lengths]


def nest(tensors, how):
    if how == "jagged":
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    if how == "strided":
        return torch.nested.as_nested_tensor(tensors, layout=torch.strided)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, tensors))])
    return torch.nested.nested_tensor_from_jagged(torch.cat(tensors), offsets)


def no_masks(*lengths):
    return {}


def same_as_alone(ours, stock, *inputs, how, mode, masks=no_masks, **options):
    """``masks`` makes the stock module's arguments from the lengths of one sequence's inputs."""
    stock.train(mode == "train")
    with put_in(mode, ours), torch.inference_mode(mode == "inference"):
        nested = [nest(x, how) for x in inputs]
        got = torch.cat(ours(*nested, **options).unbind())
        each = [stock(*one, **masks(*map(len, one))) for one in zip(*inputs, strict=True)]
        want = torch.cat(each)
        close(got, want)
        if mode in ("train", "eval"):
            leaves = [*itertools.chain(*inputs)]
            incoming = torch.randn_like(want)
            got = torch.autograd.grad(got, [*leaves, *ours.parameters()], incoming)
            close(got, torch.autograd.grad(want, [*leaves, *stock.parameters()], incoming))


HOW = pytest.mark.parametrize("how", ["jagged", "from-jagged", "strided"])


@pytest.mark.parametrize("mode", [*MODES, "inference"])
@HOW
@NORM_FIRST
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu], ids=["relu", "gelu", "silu"])
def test_encoder_layers_take_nested_tensors(activation, norm_first, how, mode):
    stock = encoder_layer(norm_first=norm_first, activation=activation)
    same_as_alone(swapped(stock), stock, parts(LENGTHS), how=how, mode=mode)


@pytest.mark.parametrize("mode", [*MODES, "inference"])
@HOW
@pytest.mark.parametrize("seen", ["full", "causal"])
def test_encoders_take_nested_tensors(seen, how, mode):
    if how == "strided" and seen == "causal" and mode in ("no-grad", "inference"):
        pytest.skip("the fused layer of stock takes strided NestedTensors, and no masks with them")
    stock = encoder(3, norm=True)
    masks = no_masks if seen == "full" else lambda n: {"mask": causal(n)}
    options = {} if seen == "full" else {"is_causal": True}
    same_as_alone(swapped(stock), stock, parts(LENGTHS), how=how, mode=mode, masks=masks, **options)


@pytest.mark.parametrize("mode", [*MODES, "inference"])
@pytest.mark.parametrize("how", ["jagged", "strided"])
@pytest.mark.parametrize("seen", ["full", "causal"])
@NORM_FIRST
def test_decoders_take_nested_tensors(norm_first, seen, how, mode):
    layer = decoder_layer(norm_first=norm_first)
    stack = scrambled(nn.TransformerDecoder(layer, 2, nn.LayerNorm(EMBED, dtype=torch.float64)))
    masks = no_masks if seen == "full" else lambda n, _: {"tgt_mask": causal(n)}
    options = {} if seen == "full" else {"tgt_is_causal": True}
    for stock in (layer, stack):
        inputs = parts(LENGTHS), parts(MEMORY_LENGTHS)
        same_as_alone(swapped(stock), stock, *inputs, how=how, mode=mode, masks=masks, **options)


@pytest.mark.parametrize("mode", [*MODES, "inference"])
@pytest.mark.parametrize("seen", ["full", "causal"])
def test_a_whole_transformer_takes_jagged_nested_tensors(seen, mode):
    stock = scrambled(nn.Transformer(EMBED, HEADS, 2, 2, 16, 0.0, batch_first=True, dtype=torch.float64))
    masks, options = no_masks, {}
    if seen == "causal":
        options = {"src_is_causal": True, "tgt_is_causal": True}

        def masks(n, m):
            return {"src_mask": causal(n), "tgt_mask": causal(m)}

    inputs = parts(MEMORY_LENGTHS), parts(LENGTHS)
    same_as_alone(swapped(stock), stock, *inputs, how="jagged", mode=mode, masks=masks, **options)


def test_a_strided_batch_runs_through_an_encoder_in_eval_as_through_a_stock_one():
    stock = encoder(3, activation="gelu").eval()
    ours = swapped(stock)
    hidden = padding([0, 10, 2, 10, 4, 8], 10)[1:]
    with torch.no_grad():
        x = torch._nested_tensor_from_mask(double(5, 10, EMBED), ~hidden, mask_check=False)
        out = ours(x)
        assert out.is_nested
        close(out.to_padded_tensor(0), stock(x).to_padded_tensor(0))


# What is done to modules from outside.


def test_state_dicts_travel_both_ways():
    for options in ({}, {"bias": False}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}):
        stock, ours = pair(**options)
        assert list(stock.state_dict()) == list(ours.state_dict())
        for assign in (False, True):
            for to, of in ((stock, ours), (ours, stock)):
                scrambled(of)
                to.load_state_dict(of.state_dict(), assign=assign)
                close(dict(to.state_dict()), dict(of.state_dict()))
    stock = nn.Transformer(EMBED, HEADS, 1, 1, 8)
    ours, buffer = swapped(stock), io.BytesIO()
    assert list(ours.state_dict()) == list(stock.state_dict())
    torch.save(scrambled(ours).state_dict(), buffer)
    buffer.seek(0)
    stock.load_state_dict(torch.load(buffer, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict({k: v for k, v in stock.state_dict().items() if "in_proj_weight" not in k})


def reloaded(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reloaded], ids=["deepcopy", "pickle", "save"]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_copies_are_whole_and_their_own(mode, again):
    _, module = pair(add_bias_kv=True, kdim=3)
    model = swapped(encoder(2, norm=True))
    x = double(BATCH, LENGTH, EMBED)
    jagged = nest(parts(LENGTHS), "jagged")
    for made, inputs in ((module, (x, double(BATCH, LENGTH, 3), x)), (model, (x,)), (model, (jagged,))):
        with put_in(mode, made):
            copied = again(made)
            assert copied.training == made.training
            want = made(*inputs)
            got = copied(*inputs)
            want, got = ((r[0] if isinstance(r, tuple) else r) for r in (want, got))
            close(*(list(r.unbind()) for r in (got, want)))
            assert not {id(p) for p in made.parameters()} & {id(p) for p in copied.parameters()}
            assert repr(copied) == repr(made)


def test_hooks_see_the_arguments_and_results_of_stock():
    x, memory = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    masks = {"tgt_mask": causal(LENGTH), "memory_key_padding_mask": MEMORY_PADDED}
    for stock, inputs, names, options in (
        (encoder_layer(), (x,), ["self_attn"], {"src_key_padding_mask": SOME_PADDED}),
        (encoder_layer(), (x,), ["self_attn"], {"src_mask": causal(LENGTH), "is_causal": True}),
        (decoder_layer(), (x, memory), ["self_attn", "multihead_attn"], masks),
    ):
        told = []
        for model in (stock, swapped(stock)):
            seen = []
            for name in names:
                attention = model.get_submodule(name)
                attention.register_forward_pre_hook(
                    lambda module, args, kwargs, seen=seen: seen.append((args, kwargs)), with_kwargs=True
                )
                attention.register_forward_hook(
                    lambda module, args, kwargs, out, seen=seen: seen.append((args, kwargs, out)), with_kwargs=True
                )
            model.train()(*inputs, **options)
            assert len(seen) == 2 * len(names)
            assert all(isinstance(call[-1], tuple) and len(call[-1]) == 2 for call in seen[1::2])
            told.append(seen)
        close(*told)


def test_hooks_change_what_goes_in_and_what_comes_out():
    stock = encoder_layer()
    x, kept = double(BATCH, LENGTH, EMBED), []

    def ask_for_weights(module, args, kwargs):
        return tuple(a * 2 for a in args), kwargs | {"need_weights": True, "average_attn_weights": False}

    def keep_and_double(module, args, out):
        kept.append(out[1])
        return 2 * out[0], None

    for model in (stock, swapped(stock)):
        model.self_attn.register_forward_pre_hook(ask_for_weights, with_kwargs=True)
        model.self_attn.register_forward_hook(keep_and_double)
        kept.append(model(x, src_key_padding_mask=SOME_PADDED))
    close(kept[2:], kept[:2])
    assert kept[2].shape == (BATCH, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_backward_hooks_change_no_result(masked):
    _, module = pair(batch_first=True)
    x, grads = double(BATCH, LENGTH, EMBED), []

    def run():
        leaf = x.clone().requires_grad_()
        out = module(leaf, leaf, leaf, need_weights=False, key_padding_mask=SOME_PADDED if masked else None)[0]
        return out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])

    before = run()
    module.register_full_backward_hook(lambda module, grad_in, grad_out: grads.append((grad_in, grad_out)))
    close(run(), before)
    assert len(grads) == 1


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class LowRank(nn.Module):
    """A weight beside a product of two thin matrices, which alone are trained."""

    def __init__(self, weight):
        super().__init__()
        rows, columns = weight.shape
        self.up, self.down = (nn.Parameter(torch.randn(n, 2).to(weight)) for n in (rows, columns))

    def forward(self, weight):
        return weight.detach() + self.up @ self.down.T


def low_rank(module):
    torch.manual_seed(11)
    parametrize.register_parametrization(module, "in_proj_weight", LowRank(module.in_proj_weight))
    parametrize.register_parametrization(module.out_proj, "weight", LowRank(module.out_proj.weight))


CHANGES = {
    "twice": lambda m: parametrize.register_parametrization(m, "in_proj_weight", Twice()),
    "twice-out": lambda m: parametrize.register_parametrization(m.out_proj, "weight", Twice()),
    "low-rank": low_rank,
    "weight-norm": lambda m: parametrizations.weight_norm(m, "in_proj_weight"),
    "spectral-norm": lambda m: (torch.manual_seed(7), parametrizations.spectral_norm(m, "in_proj_weight"), m.eval()),
    "orthogonal": lambda m: parametrizations.orthogonal(m.out_proj, "weight"),
    "prune": lambda m: prune.l1_unstructured(m, "in_proj_weight", 0.5),
    "prune-rows-out": lambda m: prune.ln_structured(m.out_proj, "weight", 0.5, 2, 0),
    "prune-bias": lambda m: prune.l1_unstructured(m, "in_proj_bias", 4),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changed_weights_count_as_they_do_in_stock(how):
    stock, ours = pair(batch_first=True)
    x, key = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    for module in (stock, ours):
        before = module(x, x, x)[0].detach()
        CHANGES[how](module)
        assert not torch.equal(module(x, x, x)[0], before) or how == "weight-norm"
    assert list(stock.state_dict()) == list(ours.state_dict())
    for arguments in ({}, {"need_weights": False}, {"need_weights": False, "key_padding_mask": KEYS_PADDED}):
        results = []
        for module in (stock, ours):
            out = module(x, key, key, **arguments)[0]
            # the graph is kept: stock never runs out_proj, nor the hook on it that masks its weight anew
            grads = torch.autograd.grad(
                out.square().sum(), [*module.parameters()], allow_unused=True, retain_graph=True
            )
            results.append([out, *[g for g in grads if g is not None]])
        close(*results)
    queries = parts(LENGTHS)
    nested = nest(queries, "jagged")
    with torch.no_grad():
        close(ours(nested, nested, nested)[0].values(), torch.cat([stock(q, q, q)[0] for q in queries]))


@pytest.mark.parametrize("how", ["twice", "low-rank", "weight-norm"])
def test_parametrizations_inside_layers_and_their_removal(how):
    stock = encoder_layer()
    ours = swapped(stock)
    x = double(BATCH, LENGTH, EMBED)
    for model in (stock, ours):
        CHANGES[how](model.self_attn)
    assert isinstance(ours.self_attn, VarlenMultiheadAttention)
    for mode in MODES:
        with put_in(mode, stock, ours):
            close(ours(x, src_key_padding_mask=SOME_PADDED), stock(x, src_key_padding_mask=SOME_PADDED))
            close(copy.deepcopy(ours)(x), stock(x))
    want = ours(x)
    parametrize.remove_parametrizations(ours.self_attn, "in_proj_weight")
    assert type(ours.self_attn) is VarlenMultiheadAttention
    close(ours(x), want)


@pytest.mark.parametrize("how", ["twice", "twice-out", "low-rank", "weight-norm", "prune", "prune-bias"])
def test_a_changed_stock_module_is_stood_in_for_or_refused(how):
    """Never with weights of its own that hold nothing."""
    stock, _ = pair(batch_first=True)
    CHANGES[how](stock)
    try:
        ours = VarlenMultiheadAttention.from_torch(stock)
    except (ValueError, TypeError, NotImplementedError):
        return
    assert not any(p.is_meta for p in ours.parameters())
    x = double(BATCH, LENGTH, EMBED)
    close(ours(x, x, x), stock(x, x, x))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_functional_call_and_transforms_of_it():
    stock = encoder_layer()
    ours = swapped(stock)
    x = double(BATCH, LENGTH, EMBED)
    params = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    call = torch.func.functional_call
    jagged = nest(parts(LENGTHS), "jagged")
    close(call(ours, params, (x,)), call(stock, params, (x,)))
    scrambled(stock).load_state_dict(params)
    close(torch.cat(call(ours, params, (jagged,)).unbind()), torch.cat([stock(one) for one in jagged.unbind()]))

    def loss(params, model, x, hidden):
        return call(model, params, (x,), {"src_key_padding_mask": hidden}).square().sum()

    got, want = (torch.func.grad(loss)(params, model, x, SOME_PADDED) for model in (ours, stock))
    close(got, want)
    each = torch.func.vmap(torch.func.grad(loss), (None, None, 0, 0))  # gradients of each example
    close(each(params, ours, x, SOME_PADDED), each(params, stock, x, SOME_PADDED))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    ensemble = torch.func.vmap(lambda p: call(ours, p, (x,)))(stacked)
    close(ensemble, torch.stack([call(stock, {k: v[i] for k, v in stacked.items()}, (x,)) for i in (0, 1)]))


def on_meta(layer, x, hidden):
    with torch.no_grad():
        return layer.to("meta")(*[t.to("meta") for t in (x, x, hidden)]).shape


def compiled(layer, x, hidden):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="eager")(x, x, hidden)


def exported(layer, x, hidden):
    return torch.export.export(layer, (x, x, hidden)).module()(x, x, hidden)


def traced(layer, x, hidden):
    return torch.jit.trace(layer, (x, x, hidden.flip(0)), check_trace=False)(x, x, hidden)


def mapped(layer, x, hidden):
    return torch.func.vmap(layer)(x, x, hidden)


class PaddedDecoderLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, memory, hidden):
        return self.layer(x, memory, memory_key_padding_mask=hidden)


@pytest.mark.parametrize("where", [on_meta, compiled, exported, traced, mapped], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_padded_decoders_run_where_no_value_can_be_read(where):
    stock = PaddedDecoderLayer(decoder_layer())
    x = double(BATCH, LENGTH, EMBED)
    want = where(copy.deepcopy(stock), x, SOME_PADDED)
    if where is on_meta:
        assert where(swapped(stock), x, SOME_PADDED) == want == x.shape
    else:
        close(want, stock(x, x, SOME_PADDED))
        close(where(swapped(stock), x, SOME_PADDED), want)


def test_a_padded_encoder_compiles_as_one_graph():
    model = swapped(encoder(2, dropout=0.1)).eval()
    x, hidden = double(1, 41, EMBED), torch.rand(1, 41) > 0.5
    hidden[:, 0] = True
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="eager")
    for mode in ("eval", "no-grad"):
        with put_in(mode, model):
            close(run(x, src_key_padding_mask=hidden), model(x, src_key_padding_mask=hidden))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_layer_gives_what_it_gave():
    layer = swapped(encoder_layer())
    x = double(BATCH, LENGTH, EMBED)
    close(torch.jit.trace(layer, x)(x), layer(x))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "dense"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointed_layers_train_the_same(reentrant, nested):
    if nested and reentrant:
        pytest.skip("reentrant checkpoints lose the offsets of NestedTensors upstream")
    layer = swapped(encoder_layer())
    leaves = parts(LENGTHS) if nested else [double(BATCH, LENGTH, EMBED, requires_grad=True)]
    results = []
    for again in (False, True):
        x = nest(leaves, "jagged") if nested else leaves[0]
        out = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        (out.values() if nested else out).square().sum().backward()
        results.append([t.grad for t in (*leaves, *layer.parameters())])
        for t in (*leaves, *layer.parameters()):
            t.grad = None
    close(*results)


def test_quantizable_modules_find_what_they_read():
    quantizable = pytest.importorskip("torch.ao.nn.quantizable")

    class FromOurs(quantizable.MultiheadAttention):
        _FLOAT_MODULE = VarlenMultiheadAttention

    for options in ({}, {"add_bias_kv": True}, {"bias": False}, {"kdim": 6, "vdim": 9}, {"batch_first": True}):
        stock, ours = pair(dtype=torch.float32, **options)
        assert type(ours.out_proj) is type(stock.out_proj)  # which dynamic quantization knows to leave alone
        x = torch.randn(4, 4, EMBED)
        key, value = torch.randn(4, 4, stock.kdim), torch.randn(4, 4, stock.vdim)
        outs = []
        for module, kind in ((stock, quantizable.MultiheadAttention), (ours, FromOurs)):
            module.qconfig = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nothing is to be quantized
                outs.append(kind.from_float(module)(x, key, value))
        close(*outs)


def test_stock_code_takes_ours_for_its_own():
    _, ours = pair(kdim=3, add_bias_kv=True)
    stock = nn.MultiheadAttention(EMBED, HEADS, kdim=3, add_bias_kv=True, dtype=torch.float64)
    assert isinstance(ours, nn.MultiheadAttention)
    for name, value in vars(stock).items():
        if not name.startswith("_") or name == "_qkv_same_embed_dim":
            assert getattr(ours, name) == value or isinstance(value, torch.Tensor), name
    assert {n: p.shape for n, p in stock._parameters.items() if p is not None} == {
        n: p.shape for n, p in ours._parameters.items() if p is not None
    }
    state = torch.get_rng_state()
    nta.VarlenMultiheadAttention.from_torch(stock)
    assert torch.equal(torch.get_rng_state(), state)

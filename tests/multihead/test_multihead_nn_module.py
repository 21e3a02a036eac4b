"""Dense inputs against nn.MultiheadAttention and a formula in NumPy: masks, batches, dtypes, memory layout."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from transformer_layers import (
    BATCH,
    BATCH_FIRST,
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    KEYS,
    KEYS_PADDED,
    LENGTH,
    MODES,
    additive,
    causal,
    close,
    double,
    in_mode,
    output_and_gradients,
    padding,
    pair,
)

import nt_attention as nta
from nt_attention import VarlenMultiheadAttention

pytestmark = IGNORED_WARNINGS


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


def numpy_attention(module, query, key, value, bias):
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
def test_mask_forms_give_what_the_formula_gives(options, masks):
    stock, ours = pair(batch_first=True, **options)
    query, key, value = (double(BATCH, n, w) for n, w in ((LENGTH, EMBED), (KEYS, stock.kdim), (KEYS, stock.vdim)))
    value = key if options.get("kdim") == options.get("vdim") else value
    arguments, bias = mask_forms()[masks]
    out, weights = numpy_attention(ours, query, key, value, bias)
    got = ours(query, key, value, **arguments)
    close(got, (out, weights.mean(1)))
    close(ours(query, key, value, average_attn_weights=False, **arguments), (out, weights))
    wanted = output_and_gradients(stock, query, key, value, need_weights=False, **arguments)
    close(wanted[0], out)
    close(output_and_gradients(ours, query, key, value, need_weights=False, **arguments), wanted)
    ours.batch_first = False
    got = ours(*(x.transpose(0, 1) for x in (query, key, value)), need_weights=False, **arguments)[0]
    close(got.transpose(0, 1), out)


def test_per_batch_attn_mask_is_applied_to_its_own_element():
    _, ours = pair()
    query, key = double(LENGTH, BATCH, EMBED), double(KEYS, BATCH, EMBED)
    mask = additive(torch.rand(BATCH, LENGTH, KEYS) > 0.5)
    mask[..., 0] = 0
    together = ours(query, key, key, attn_mask=mask.repeat_interleave(HEADS, 0))[0]
    for i in range(BATCH):
        alone = ours(query[:, i : i + 1], key[:, i : i + 1], key[:, i : i + 1], attn_mask=mask[i])[0]
        close(together[:, i : i + 1], alone)


@covering(
    {
        "added": list(itertools.product([True, False], repeat=2)),
        "bias": [True, False],
        "batch_first": [True, False, False],
    }
)
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


@covering(
    {
        "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
        "mode": MODES,
        "batch_first": [True, False],
    }
)
def test_output_shapes_and_dtypes(batch_first, mode, dtype):
    stock, ours = (module.to(dtype) for module in pair(batch_first=batch_first, dtype=None))
    x, key = torch.randn(4, 4, EMBED, dtype=dtype), torch.randn(4, 4, EMBED, dtype=dtype)
    padded = padding([4, 1, 3, 2], 4)
    for inputs in ((x, x, x), (x, key, key)):
        results = []
        for module in (stock, ours):
            with in_mode(mode, module):
                out, weights = module(*inputs, need_weights=False)
                hidden = module(*inputs, need_weights=False, key_padding_mask=padded)[0]
            assert weights is None
            assert (out.dtype, out.shape) == (hidden.dtype, hidden.shape) == (dtype, x.shape)
            shown = slice(None) if inputs[0] is key else ~padded if batch_first else ~padded.T
            results.append((out, hidden[shown]))
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 5e-3}[dtype]
        torch.testing.assert_close(*results[::-1], rtol=tolerance, atol=tolerance)


def test_device_and_dtype_arguments():
    for made in (
        VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True, kdim=3, device="meta", dtype=torch.float16),
        nn.utils.skip_init(VarlenMultiheadAttention, EMBED, HEADS, dtype=torch.float16).to_empty(device="meta"),
    ):
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.float16)}
    with torch.device("meta"):
        module = VarlenMultiheadAttention(EMBED, HEADS)
    assert {p.device.type for p in module.to_empty(device="cpu").parameters()} == {"cpu"}
    x = torch.randn(2, 3, EMBED)
    assert with_random_parameters(module)(x, x, x)[0].isfinite().all()


@pytest.mark.parametrize("mask_dim", [2, 3, None])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_eval_and_train_agree_under_masks(dtype, padded, mask_dim):
    """A random mask may hide all keys: that row is NaN on stock's fast path, and 0 before out_proj elsewhere."""
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
def test_fast_path_switch_changes_nothing(masks, average, inputs):
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


def test_batch_first_false_is_the_transpose():
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
def test_outputs_are_contiguous_where_those_of_nn_multihead_attention_are(masked, batch_first):
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    hidden = padding([5, 2, 4], LENGTH) if masked else None
    stock, ours = (
        module(x, x, x, need_weights=False, key_padding_mask=hidden)[0] for module in pair(batch_first=batch_first)
    )
    assert ours.is_contiguous() or not stock.is_contiguous()


@torch.no_grad()
def test_one_feature_per_head_and_missing_biases():
    """As many heads as features; separate projection weights; no bias."""
    x = double(4, 4, 4)
    stock, ours = (module.eval() for module in pair(4, 4, batch_first=True))
    close(ours(x, x, x), stock(x, x, x))
    for options, key in (({"kdim": 2, "vdim": 2}, double(4, 4, 2)), ({"bias": False}, x)):
        stock, ours = pair(4, 4, **options)
        close(ours(x, key, key), stock(x, key, key))
    assert ours.in_proj_bias is ours.out_proj.bias is None


def test_is_causal_needs_attn_mask_beside_attention_weights():
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


def test_dense_gradcheck():
    _, ours = pair(4, 2, batch_first=True, add_bias_kv=True)
    x, key = (double(2, 3, 4, requires_grad=True) for _ in range(2))
    hidden = padding([3, 1], 3)
    check = functools.partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda a: ours(a, a, a), (x,))
    assert check(lambda a: ours(a, a, a, key_padding_mask=hidden, need_weights=False)[0], (x,))
    assert check(lambda a, b: ours(a, b, b, key_padding_mask=hidden, need_weights=False)[0], (x, key))
    assert torch.autograd.gradgradcheck(lambda a: ours(a, a, a)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_non_contiguous_inputs(masked):
    _, ours = pair(batch_first=True)
    x, key = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    arguments = {"need_weights": False, "key_padding_mask": KEYS_PADDED if masked else None}

    def strided(tensor):
        return tensor.repeat_interleave(2, -1)[..., ::2]

    odd = strided(key)
    close(
        output_and_gradients(ours, strided(x), odd, odd, **arguments),
        output_and_gradients(ours, x, key, key, **arguments),
    )


@pytest.mark.parametrize("arguments", [{}, {"need_weights": True}], ids=["left out", "weights"])
@pytest.mark.parametrize("padding", [None, torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_is_causal_without_attn_mask_raises_where_weights_are_asked_for(training, padding, arguments):
    """Stock raises on its slow path, and its fast path ignores is_causal."""
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = None if padding is None else torch.zeros(2, 5, dtype=padding)
    module = nta.VarlenMultiheadAttention(8, 4, batch_first=True, dtype=torch.float64).train(training)
    with torch.set_grad_enabled(training), pytest.raises(RuntimeError):
        module(x, x, x, key_padding_mask=mask, is_causal=True, **arguments)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("kind", ["plain", "padding", "mask"])
def test_dense_autocast_gives_what_nn_multihead_attention_gives(kind, need_weights):
    torch.manual_seed(3)
    stock = nn.MultiheadAttention(12, 3, batch_first=True)
    ours = nta.VarlenMultiheadAttention.from_torch(stock)
    x = torch.randn(2, 5, 12)
    arguments: dict[str, Any] = {
        "plain": {},
        "padding": {"key_padding_mask": (torch.arange(5) > 2).expand(2, 5)},
        "mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    }[kind]
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (m(x, x.clone(), x, need_weights=need_weights, **arguments) for m in (ours, stock))
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)

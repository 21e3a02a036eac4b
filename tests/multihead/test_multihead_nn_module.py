"""Dense inputs against nn.MultiheadAttention and a formula in NumPy: masks, batches, dtypes, memory layout."""

from __future__ import annotations

import functools
import itertools

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
    LENGTH,
    MODES,
    close,
    double,
    in_mode,
    padding,
    pair,
)

import nt_attention as nta
from nt_attention import VarlenMultiheadAttention

pytestmark = IGNORED_WARNINGS


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


@BATCH_FIRST
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_outputs_are_contiguous_where_those_of_nn_multihead_attention_are(masked, batch_first):
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    hidden = padding([5, 2, 4], LENGTH) if masked else None
    stock, ours = (
        module(x, x, x, need_weights=False, key_padding_mask=hidden)[0] for module in pair(batch_first=batch_first)
    )
    assert ours.is_contiguous() or not stock.is_contiguous()


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

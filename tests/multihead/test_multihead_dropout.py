"""VarlenMultiheadAttention's dropout: mean, spread, gradients, and the weights that are returned after it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from multihead_ragged import (
    EMBED,
    FORMS,
    HEADS,
    KEY_LENGTHS,
    LENGTHS,
    STOCK_OPTIONS,
    TOLERANCE,
    call,
    inputs_of,
    pair,
    projected,
    random_masks,
    random_sequences,
    with_and_without_weights,
)
from sweeps import covering
from torch import Tensor, nn
from torch.nn import functional as F

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

COPIES = 1000

DROPOUT_CALLS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "mask": {"need_weights": False, "attn_mask": torch.ones(5, 4, dtype=torch.bool).triu(1)},
    "float mask": {"need_weights": False, "attn_mask": torch.arange(20.0).view(5, 4).double() / 7},
    "padding": {"need_weights": False, "key_padding_mask": (torch.arange(4) > 2).expand(COPIES, 4)},
    "float padding": {"need_weights": False, "key_padding_mask": torch.arange(4.0).double().expand(COPIES, 4)},
    "causal": {"need_weights": False, "is_causal": True},
}


def dropout_module(p: float) -> tuple[nta.VarlenMultiheadAttention, Tensor, Tensor]:
    """A module in training, and ``COPIES`` copies of the queries and keys of one sequence."""
    torch.manual_seed(3)
    module = nta.VarlenMultiheadAttention(6, 3, dropout=p, batch_first=True, dtype=torch.float64)
    query, key = (torch.randn(1, n, 6, dtype=torch.float64).repeat(COPIES, 1, 1) for n in (5, 4))
    return module, query, key


@pytest.mark.parametrize("case", DROPOUT_CALLS)
def test_dense_dropout_keeps_the_mean(case):
    module, query, key = dropout_module(0.4)
    with torch.no_grad():
        draws = module(query, key, key, **DROPOUT_CALLS[case])[0]
        want = module.eval()(query, key, key, **DROPOUT_CALLS[case])[0][0]
    sigma = draws.std(0) / math.sqrt(COPIES)
    assert (sigma > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * sigma).all()
    assert (want.abs() > 25 * sigma).any(), "a wrong scale would not be seen"


@pytest.mark.parametrize("case", DROPOUT_CALLS)
def test_dense_dropout_gradient_drops_what_the_output_dropped(case):
    module, query, key = dropout_module(0.4)
    value = torch.randn_like(key).requires_grad_()
    above = torch.randn_like(query)
    out, _ = module(query, key, value, **DROPOUT_CALLS[case])
    (grad,) = torch.autograd.grad(out, value, above)
    torch.testing.assert_close((grad * value).sum(), (out * above).sum())  # the biases are 0, so out is linear in value


@pytest.mark.parametrize("case", DROPOUT_CALLS)
def test_dense_dropout_of_1_leaves_the_bias(case):
    module, query, key = dropout_module(1.0)
    nn.init.normal_(module.out_proj.bias)
    arguments = {name: x[:2] if name == "key_padding_mask" else x for name, x in DROPOUT_CALLS[case].items()}
    query, key = query[:2].requires_grad_(), key[:2]
    out, weights = module(query, key, key, **arguments)
    torch.testing.assert_close(out, module.out_proj.bias.expand_as(out))
    assert weights is None or not weights.any()
    for grad in torch.autograd.grad(out.sum(), [query, module.in_proj_weight]):
        assert not grad.any()


@pytest.mark.parametrize("masked", [False, True])
def test_dense_attention_weights_are_returned_after_dropout(masked):
    p = 0.4
    module, query, key = dropout_module(p)
    mask = torch.ones(5, 4, dtype=torch.bool).triu(1) if masked else None
    with torch.no_grad():
        out, weights = module(query, key, key, attn_mask=mask, average_attn_weights=False)
        averaged = module(query, key, key, attn_mask=mask)[1]
        full = module.eval()(query, key, key, attn_mask=mask, average_attn_weights=False)[1]
    kept = weights != 0
    torch.testing.assert_close(weights, torch.where(kept, full / (1 - p), 0.0))
    seen = full[0] != 0
    rate = kept.double().mean(0)
    assert ((rate - (1 - p)).abs() < 5 * math.sqrt(p * (1 - p) / COPIES))[seen].all()
    value = F.linear(key, module.in_proj_weight[12:]).unflatten(-1, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(out, module.out_proj((weights @ value).transpose(1, 2).flatten(2)))
    sigma = averaged.std(0) / math.sqrt(COPIES)
    assert ((averaged.mean(0) - full[0].mean(0)).abs() <= 5 * sigma).all()


@pytest.mark.parametrize("options", STOCK_OPTIONS.values(), ids=STOCK_OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_ragged_attention_weights_are_returned_after_dropout(form, options):
    p = 0.4
    stock, ours = pair(dropout=p, **options)
    parts = inputs_of(stock, cross=True)
    with torch.no_grad():
        full = call(form, ours.eval(), parts, need_weights=True, average_attn_weights=False)[1]
        out, weights = call(form, ours.train(), parts, need_weights=True, average_attn_weights=False)
    kept = weights != 0
    assert 0 < kept.sum() < (full != 0).sum()
    torch.testing.assert_close(weights, torch.where(kept, full / (1 - p), 0.0))
    values = []
    for keys, value in zip(parts[1], parts[2], strict=True):
        _, _, v = projected(ours, None, keys, keys, value)
        more = [] if ours.bias_v is None else [ours.bias_v.view(1, *v.shape[1:])]
        more += [v.new_zeros(1, *v.shape[1:])] if ours.add_zero_attn else []
        values.append(torch.cat([F.pad(v, (0, 0, 0, 0, 0, max(KEY_LENGTHS) - len(v))), *more]))
    products = torch.einsum("bhls,bshd->blhd", weights, torch.stack(values)).flatten(2)
    want = torch.cat([x[:length] for x, length in zip(ours.out_proj(products), LENGTHS, strict=True)])
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("form", FORMS)
@with_and_without_weights
def test_ragged_dropout_of_1_leaves_the_bias(form, need_weights):
    _, ours = pair(dropout=1.0, add_zero_attn=True)
    parts = inputs_of(ours, cross=True)
    out, weights = call(form, ours, parts, need_weights=need_weights, is_causal=True)
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))
    assert weights is None if not need_weights else not weights.any()
    for grad in torch.autograd.grad(out.sum(), [*parts[0], ours.in_proj_weight]):
        assert not grad.any()


@covering({"form": FORMS, "dtype": [torch.bool, torch.float64]})
def test_ragged_dropout_under_attn_mask_keeps_the_mean(form, dtype):
    copies = 500
    _, ours = pair(dropout=0.4)
    parts = [random_sequences([3]) * copies] * 3
    (mask,) = random_masks([x[:1] for x in parts], None, dtype)
    with torch.no_grad():
        draws = call(form, ours, parts, attn_mask=mask)[0].unflatten(0, (copies, 3))
        want = call(form, ours.eval(), [x[:1] for x in parts], attn_mask=mask)[0]
    sigma = draws.std(0) / copies**0.5
    assert (sigma[2] > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * sigma + TOLERANCE).all()


def test_eval_has_no_dropout():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, dropout=0.5, backend="reference")
    x, layout = torch.randn(20, EMBED), nta.SequenceLayout.from_lengths([9, 11])
    assert not torch.equal(module(x, x, x, layout=layout)[0], module(x, x, x, layout=layout)[0])
    module.eval()
    assert torch.equal(module(x, x, x, layout=layout)[0], module(x, x, x, layout=layout)[0])

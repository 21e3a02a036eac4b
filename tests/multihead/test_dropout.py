"""VarlenMultiheadAttention's dropout: mean, gradients, and the weights that are returned after it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from multihead_cases import (
    EMBED,
    FORMS,
    KEY_LENGTHS,
    LENGTHS,
    STOCK,
    TOLERANCE,
    call,
    inputs_of,
    make,
    projected,
    random_masks,
    random_sequences,
)
from sweeps import covering
from torch import Tensor, nn
from torch.nn import functional as F

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

COPIES = 1000
RAGGED = "ragged, "

CALLS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "mask": {"need_weights": False, "attn_mask": torch.ones(5, 4, dtype=torch.bool).triu(1)},
    "float mask": {"need_weights": False, "attn_mask": torch.arange(20.0).view(5, 4).double() / 7},
    "padding": {"need_weights": False, "key_padding_mask": (torch.arange(4) > 2).expand(COPIES, 4)},
    "float padding": {"need_weights": False, "key_padding_mask": torch.arange(4.0).double().expand(COPIES, 4)},
    "causal": {"need_weights": False, "is_causal": True},
}


def dropout_module(p: float) -> tuple[nta.VarlenMultiheadAttention, Tensor, Tensor]:
    """A module in training, and `COPIES` copies of the queries and keys of one sequence."""
    torch.manual_seed(3)
    module = nta.VarlenMultiheadAttention(6, 3, dropout=p, batch_first=True, dtype=torch.float64)
    query, key = (torch.randn(1, n, 6, dtype=torch.float64).repeat(COPIES, 1, 1) for n in (5, 4))
    return module, query, key


@pytest.mark.parametrize("case", CALLS)
def test_dense_dropout_keeps_the_mean_and_its_gradient_drops_what_the_output_dropped(case):
    module, query, key = dropout_module(0.4)
    value = torch.randn_like(key).requires_grad_()
    above = torch.randn_like(query)
    out, _ = module(query, key, value, **CALLS[case])
    (grad,) = torch.autograd.grad(out, value, above)
    torch.testing.assert_close((grad * value).sum(), (out * above).sum())  # the biases are 0, so out is linear in value
    with torch.no_grad():
        draws = module(query, key, key, **CALLS[case])[0]
        want = module.eval()(query, key, key, **CALLS[case])[0][0]
    sigma = draws.std(0) / math.sqrt(COPIES)
    assert (sigma > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * sigma).all()
    assert (want.abs() > 25 * sigma).any(), "a wrong scale would not be seen"


@covering({"form": FORMS, "dtype": [torch.bool, torch.float64]})
def test_ragged_dropout_under_attn_mask_keeps_the_mean(form, dtype):
    copies, module = 500, make("plain", dropout=0.4)
    parts = [random_sequences([3]) * copies] * 3
    (mask,) = random_masks([x[:1] for x in parts], None, dtype)
    with torch.no_grad():
        draws = call(form, module, parts, attn_mask=mask)[0].unflatten(0, (copies, 3))
        want = call(form, module.eval(), [x[:1] for x in parts], attn_mask=mask)[0]
    sigma = draws.std(0) / copies**0.5
    assert (sigma[2] > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * sigma + TOLERANCE).all()


@pytest.mark.parametrize("case", [*CALLS, *(RAGGED + form for form in FORMS)])
def test_dropout_of_1_leaves_the_bias(case):
    if case.startswith(RAGGED):
        module = make("both added, no bias", dropout=1.0, bias=True)
        parts = inputs_of(module, cross=True)
        found = [call(case.removeprefix(RAGGED), module, parts, need_weights=x, is_causal=True) for x in (False, True)]
        leaves = [*parts[0], module.in_proj_weight]
    else:
        module, query, key = dropout_module(1.0)
        nn.init.normal_(module.out_proj.bias)
        given = {name: x[:2] if name == "key_padding_mask" else x for name, x in CALLS[case].items()}
        query, key = query[:2].requires_grad_(), key[:2]
        found, leaves = [module(query, key, key, **given)], [query, module.in_proj_weight]
    for out, weights in found:
        torch.testing.assert_close(out, module.out_proj.bias.expand_as(out))
        assert weights is None or not weights.any()
        assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


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
    seen, rate = full[0] != 0, kept.double().mean(0)
    assert ((rate - (1 - p)).abs() < 5 * math.sqrt(p * (1 - p) / COPIES))[seen].all()
    value = F.linear(key, module.in_proj_weight[12:]).unflatten(-1, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(out, module.out_proj((weights @ value).transpose(1, 2).flatten(2)))
    sigma = averaged.std(0) / math.sqrt(COPIES)
    assert ((averaged.mean(0) - full[0].mean(0)).abs() <= 5 * sigma).all()


@covering({"form": FORMS, "name": STOCK})
def test_ragged_attention_weights_are_returned_after_dropout(form, name):
    p, module = 0.4, make(name, dropout=0.4)
    parts = inputs_of(module, cross=True)
    with torch.no_grad():
        full = call(form, module.eval(), parts, need_weights=True, average_attn_weights=False)[1]
        out, weights = call(form, module.train(), parts, need_weights=True, average_attn_weights=False)
    kept = weights != 0
    assert 0 < kept.sum() < (full != 0).sum()
    torch.testing.assert_close(weights, torch.where(kept, full / (1 - p), 0.0))
    values = []
    for keys, value in zip(parts[1], parts[2], strict=True):
        v = projected(module, keys.new_zeros(1, EMBED), keys, value)[2]
        more = [] if module.bias_v is None else [module.bias_v.view(1, *v.shape[1:])]
        more += [v.new_zeros(1, *v.shape[1:])] if module.add_zero_attn else []
        values.append(torch.cat([F.pad(v, (0, 0, 0, 0, 0, max(KEY_LENGTHS) - len(v))), *more]))
    products = torch.einsum("bhls,bshd->blhd", weights, torch.stack(values)).flatten(2)
    want = torch.cat([x[:length] for x, length in zip(module.out_proj(products), LENGTHS, strict=True)])
    torch.testing.assert_close(out, want)

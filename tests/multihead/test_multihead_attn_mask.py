"""attn_mask on ragged inputs: one mask, one for each head, or a list with one for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from multihead_ragged import (
    EXTRA_OPTIONS,
    HEADS,
    KEY_LENGTHS,
    LENGTHS,
    STOCK_OPTIONS,
    assert_same_results,
    call,
    causal_masks,
    crop_mask,
    expected,
    inputs_of,
    leaves_of,
    make_with_options,
    one_at_a_time,
    pair,
    random_masks,
    with_and_without_weights,
)
from sweeps import covering
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
MASKS = ["one", "larger", "larger for each head", "list", "list by head", "mixed list"]


def masks_for(kind: str, parts: Sequence[list[Tensor]], dtype: torch.dtype) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The mask to pass, the mask of each sequence, and the tensors that need gradients."""
    if "list" in kind:
        masks = random_masks(parts, HEADS if kind == "list by head" else None, dtype)
        if kind == "mixed list":
            masks[::2] = random_masks(parts, HEADS, dtype)[::2]
        return masks, masks, masks if dtype != torch.bool else []
    more = 4 if "larger" in kind else 0
    size = [torch.empty(max(map(len, x)) + more, 0) for x in parts]
    (mask,) = random_masks([[x] for x in size], len(parts[0]) * HEADS if "each head" in kind else None, dtype)
    return mask, crop_mask(mask, parts), [mask] if dtype != torch.bool else []


@covering(
    {
        "kind": MASKS,
        "dtype": [torch.bool, torch.float64],
        "form": ["packed", "packed", "strided", "strided"],
        "cross": [True, False, False],
    }
)
def test_attn_mask_forms_give_what_one_sequence_gives(form, kind, dtype, cross):
    options = [{}, {"add_bias_kv": True, "add_zero_attn": True}][MASKS.index(kind) % 2 ^ cross]
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross)
    given, masks, learned = masks_for(kind, parts, dtype)
    want, weights = one_at_a_time(stock, parts, masks)
    leaves = [*leaves_of(stock, parts), *learned]
    assert_same_results(call(form, ours, parts, attn_mask=given), (want, None), leaves)
    got = call(form, ours, parts, attn_mask=given, need_weights=True, average_attn_weights=False)
    assert_same_results(got, (want, weights), leaves)


def test_gradient_of_a_larger_attn_mask_is_zero_past_the_longest_lengths():
    _, ours = pair()
    parts = inputs_of(ours, cross=True)
    mask = torch.randn(17, 19, dtype=torch.float64, requires_grad=True)
    call("packed", ours, parts, attn_mask=mask)[0].sum().backward()
    inside = torch.zeros_like(mask, dtype=torch.bool)
    inside[: max(LENGTHS), : max(KEY_LENGTHS)] = True
    assert not mask.grad[~inside].any()
    assert mask.grad[inside].any()


@covering(
    {
        "form": ["jagged", "list", "jagged", "list"],
        "dtype": [torch.bool, torch.float64],
        "by_head": [False, True, True],
        "cross": [False, False, True, True],
        "need_weights": [True, False, True, True],
    }
)
def test_ragged_rows_without_a_visible_key_give_the_bias(form, dtype, by_head, cross, need_weights):
    _, ours = pair()
    parts = inputs_of(ours, cross)
    masks = [x.detach() for x in random_masks(parts, HEADS if by_head else None, dtype)]
    for x in masks:
        x[..., ::2, :] = True if dtype == torch.bool else -torch.inf
        if by_head:  # rows of which one head sees something
            x[1, ..., ::4, :] = False if dtype == torch.bool else 0.0
    learned = [] if dtype == torch.bool else [x.requires_grad_() for x in masks]
    arguments = {"need_weights": need_weights, "average_attn_weights": False}
    got = call(form, ours, parts, attn_mask=masks, **arguments)
    want, weights = expected(ours, parts, masks)
    assert_same_results(got, (want, weights if need_weights else None), [*leaves_of(ours, parts), *learned])
    hidden = [(x if dtype == torch.bool else x == -torch.inf).all(-1) for x in masks]
    blind = torch.cat([x.all(0) for x in hidden] if by_head else hidden)
    assert blind.any()
    torch.testing.assert_close(got[0][blind], ours.out_proj.bias.expand(int(blind.sum()), -1))
    assert got[0].isfinite().all()


@pytest.mark.parametrize("name", ["sinks", "all", "added keys", "softcap"])
@with_and_without_weights
def test_ragged_rows_without_a_visible_key_under_extra_options(name, need_weights):
    module = make_with_options(name)
    parts = inputs_of(module, cross=False)
    masks = [x.index_fill(-2, torch.arange(0, len(x), 2), True) for x in random_masks(parts, None, torch.bool)]
    got = call("packed", module, parts, attn_mask=masks, need_weights=need_weights, average_attn_weights=False)
    want, weights = expected(module, parts, masks, rotary=EXTRA_OPTIONS[name].get("rotary"))
    assert_same_results(got, (want, weights if need_weights else None), leaves_of(module, parts))


@covering({"kind": ["bool", "float", "by head", "list"], "form": ["jagged", "list"], "options": STOCK_OPTIONS.values()})
def test_is_causal_beside_a_causal_attn_mask(form, kind, options):
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross=True)
    longest = max(LENGTHS), max(KEY_LENGTHS)
    hidden = torch.ones(longest, dtype=torch.bool).triu(1)
    mask = {
        "bool": hidden,
        "float": torch.zeros(longest, dtype=torch.float64).masked_fill(hidden, -torch.inf),
        "by head": hidden.repeat(len(LENGTHS) * HEADS, 1, 1),
        "list": causal_masks(parts),
    }[kind]
    want, weights = one_at_a_time(stock, parts, causal_masks(parts))
    leaves = leaves_of(stock, parts)
    assert_same_results(call(form, ours, parts, attn_mask=mask, is_causal=True), (want, None), leaves)
    arguments = {"need_weights": True, "average_attn_weights": False}
    assert_same_results(call(form, ours, parts, attn_mask=mask, is_causal=True, **arguments), (want, weights), leaves)


@pytest.mark.parametrize("shape", [(9, 9), (1, 7), (2, 11, 11)], ids=str)
def test_mask_that_a_hint_replaces_may_have_any_shape_as_in_nn_multihead_attention(shape):
    stock, ours = pair()
    x, mask = torch.randn(2, 7, stock.embed_dim, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    want, _ = stock(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], want)
    for module in (stock, ours):
        with pytest.raises(RuntimeError):  # with weights, the mask is read
            module(x, x, x, attn_mask=mask, is_causal=True)
        with pytest.raises(AssertionError):
            module(x, x, x, attn_mask=mask.int(), is_causal=True, need_weights=False)

"""score_mod and mask_mod of VarlenMultiheadAttention against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from multihead_ragged import (
    EMBED,
    EXTRA_OPTIONS,
    HEADS,
    LENGTHS,
    assert_same_results,
    call,
    expected,
    inputs_of,
    leaves_of,
    make_with_options,
    pair,
    random_masks,
    with_and_without_weights,
)
from sweeps import covering
from torch import Tensor

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


def table_mods(heads: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    table = torch.randn(len(LENGTHS), heads, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * 0.7 + table[b, h] * (q - 2 * k) / 5

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 2 * k + h + b) % 5 != 0

    return score_mod, mask_mod


@covering(
    {
        "form": ["packed", "strided", "packed", "strided"],
        "mod": ["score_mod", "mask_mod", "mask_mod", "score_mod"],
        "cross": [False, True],
        "causal": [True, False, False],
        "need_weights": [False, True, True, False],
    }
)
def test_score_mod_and_mask_mod_give_what_the_oracle_gives(form, mod, cross, causal, need_weights):
    _, ours = pair()
    parts = inputs_of(ours, cross)
    score_mod, mask_mod = table_mods(HEADS)
    given = {mod: score_mod if mod == "score_mod" else mask_mod}
    want, weights = expected(ours, parts, is_causal=causal, **given)
    got = call(form, ours, parts, is_causal=causal, need_weights=need_weights, average_attn_weights=False, **given)
    assert_same_results(got, (want, weights if need_weights else None), leaves_of(ours, parts))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softcap", "all"])
@with_and_without_weights
def test_mods_are_applied_after_the_attn_mask(name, dtype, need_weights):
    module = make_with_options(name)
    parts = inputs_of(module, cross=False)
    masks = random_masks(parts, None, dtype)
    score_mod, mask_mod = table_mods(module.num_heads)
    given = {"score_mod": lambda s, *at: torch.tanh(score_mod(s, *at)), "mask_mod": mask_mod}
    if dtype != torch.bool:  # tanh would bring back what −inf hides
        masks = [x.detach().clamp(min=-3.0).requires_grad_() for x in masks]
    want, weights = expected(module, parts, masks, rotary=EXTRA_OPTIONS[name].get("rotary"), **given)
    got = call("packed", module, parts, attn_mask=masks, need_weights=need_weights, average_attn_weights=False, **given)
    learned = [] if dtype == torch.bool else masks
    assert_same_results(got, (want, weights if need_weights else None), [*leaves_of(module, parts), *learned])


@covering({"name": EXTRA_OPTIONS, "need_weights": [False, True]})
def test_mods_under_extra_options(name, need_weights):
    module = make_with_options(name, add_bias_kv=False, add_zero_attn=False)
    parts = inputs_of(module, cross=False)
    score_mod, mask_mod = table_mods(module.num_heads)
    given = {"score_mod": score_mod, "mask_mod": mask_mod, "is_causal": True}
    want, weights = expected(module, parts, rotary=EXTRA_OPTIONS[name].get("rotary"), **given)
    got = call("packed", module, parts, need_weights=need_weights, average_attn_weights=False, **given)
    assert_same_results(got, (want, weights if need_weights else None), leaves_of(module, parts))


@with_and_without_weights
def test_mask_mod_may_index_a_table_of_packed_tokens(need_weights):
    _, ours = pair()
    lengths = [2, 7, 3]
    layout = nta.SequenceLayout.from_lengths(lengths)
    kinds = torch.randint(3, (layout.total,))

    def alike(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kinds[layout.offsets[b] + q] == kinds[layout.offsets[b] + k]

    x = torch.randn(layout.total, EMBED, dtype=torch.float64)
    parts = [list(x.split(lengths))] * 3
    masks = [kind[:, None] != kind for kind in kinds.split(lengths)]
    want, weights = expected(ours, parts, masks)
    out, found = ours(x, x, x, layout=layout, mask_mod=alike, need_weights=need_weights, average_attn_weights=False)
    torch.testing.assert_close(out, want)
    assert found is None or torch.equal(found != 0, weights != 0)

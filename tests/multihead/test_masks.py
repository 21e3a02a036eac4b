"""Masks, mods, padding and odd batches of VarlenMultiheadAttention, against the oracle on each sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from multihead_cases import (
    EMBED,
    FORMS,
    HEADS,
    KEY_LENGTHS,
    LENGTHS,
    OPTIONS,
    TOLERANCE,
    assert_same_results,
    call,
    causal_masks,
    expected,
    inputs_of,
    leaves_of,
    make,
    masks_for,
    one_at_a_time,
    random_masks,
    random_sequences,
)
from sweeps import covering
from torch import Tensor, nn

import nt_attention as nta
from nt_attention import SequenceLayout

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
MASKS = ["one", "larger", "larger for each head", "list", "list by head", "mixed list"]
WITH_ADDED_KEYS = {name for name, x in OPTIONS.items() if {"add_bias_kv", "add_zero_attn"} & x.keys()}


@covering(
    {
        "kind": [*MASKS, *MASKS],
        "name": ["plain", "both added, no bias", "sinks", "all", "added keys", "softcap", "kdim, vdim"],
        "dtype": [torch.bool, torch.float64],
        "form": FORMS,
        "cross": [True, False, False],
        "blind": [False, True, True],
    }
)
def test_attn_mask_forms_give_each_sequence_alone(kind, name, dtype, form, cross, blind):
    """With `blind`, some rows see no key, all of them or those of some heads."""
    module = make(name)
    parts = inputs_of(module, cross)
    given, masks = masks_for(kind, parts, module.num_heads, dtype)
    if blind:
        with torch.no_grad():
            for x in given if isinstance(given, list) else [given]:
                x[..., ::2, :] = True if dtype == torch.bool else -torch.inf
                if x.dim() == 3:
                    x[1, ..., ::4, :] = False if dtype == torch.bool else 0.0
    want, weights = expected(module, parts, masks)
    learned = [] if dtype == torch.bool else given if isinstance(given, list) else [given]
    leaves = [*leaves_of(module, parts), *learned]
    assert_same_results(call(form, module, parts, attn_mask=given), (want, None), leaves)
    got = call(form, module, parts, attn_mask=given, need_weights=True, average_attn_weights=False)
    assert_same_results(got, (want, weights), leaves)
    assert got[0].isfinite().all()


def test_gradient_of_a_larger_attn_mask_is_zero_past_the_longest_lengths():
    module = make("plain")
    mask = torch.randn(17, 19, dtype=torch.float64, requires_grad=True)
    call("packed", module, inputs_of(module, cross=True), attn_mask=mask)[0].sum().backward()
    inside = torch.zeros_like(mask, dtype=torch.bool)
    inside[: max(LENGTHS), : max(KEY_LENGTHS)] = True
    assert not mask.grad[~inside].any()
    assert mask.grad[inside].any()


@covering(
    {
        "kind": ["bool", "float", "by head", "list"],
        "form": ["jagged", "list"],
        "name": ["plain", "add_bias_kv", "both added, no bias"],
    }
)
def test_is_causal_beside_a_causal_attn_mask(form, kind, name):
    module = make(name)
    parts = inputs_of(module, cross=True)
    longest = max(LENGTHS), max(KEY_LENGTHS)
    hidden = torch.ones(longest, dtype=torch.bool).triu(1)
    mask = {
        "bool": hidden,
        "float": torch.zeros(longest, dtype=torch.float64).masked_fill(hidden, -torch.inf),
        "by head": hidden.repeat(len(LENGTHS) * HEADS, 1, 1),
        "list": causal_masks(parts),
    }[kind]
    want, weights = one_at_a_time(module, parts, causal_masks(parts))
    leaves = leaves_of(module, parts)
    assert_same_results(call(form, module, parts, attn_mask=mask, is_causal=True), (want, None), leaves)
    asked = {"need_weights": True, "average_attn_weights": False}
    assert_same_results(call(form, module, parts, attn_mask=mask, is_causal=True, **asked), (want, weights), leaves)
    if kind == "bool" and form == "list":
        outs, found = module(*parts, None, True, mask, False, True)  # by position
        assert_same_results((torch.cat(outs), found), (want, weights), leaves)


@pytest.mark.parametrize("shape", [(9, 9), (1, 7), (2, 11, 11)], ids=str)
def test_mask_that_a_hint_replaces_may_have_any_shape_as_in_nn_multihead_attention(shape):
    ours = make("plain")
    x, mask = torch.randn(2, 7, EMBED, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    want, _ = ours.to_torch()(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], want)
    for module in (ours.to_torch(), ours):
        with pytest.raises(RuntimeError):  # with weights, the mask is read
            module(x, x, x, attn_mask=mask, is_causal=True)
        with pytest.raises(AssertionError):
            module(x, x, x, attn_mask=mask.int(), is_causal=True, need_weights=False)


def table_mods(heads: int) -> dict[str, Callable[..., Tensor]]:
    table = torch.randn(len(LENGTHS), heads, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score * 0.7 + table[b, h] * (q - 2 * k) / 5)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 2 * k + h + b) % 5 != 0

    return {"score_mod": score_mod, "mask_mod": mask_mod}


@covering(
    {
        "name": [name for name in OPTIONS if name not in WITH_ADDED_KEYS],
        "mods": [["score_mod"], ["mask_mod"], ["score_mod", "mask_mod"]],
        "form": ["packed", "strided"],
        "mask": [None, torch.bool, None, None, torch.float64],
        "cross": [False, True],
        "need_weights": [False, True, True],
    }
)
def test_mods_are_applied_after_all_other_options(name, mods, form, mask, cross, need_weights):
    module = make(name)
    parts = inputs_of(module, cross)
    masks = None if mask is None else random_masks(parts, None, mask)
    if mask == torch.float64:  # tanh would bring back what −inf hides
        masks = [x.detach().clamp(min=-3.0).requires_grad_() for x in masks]
    given = {mod: x for mod, x in table_mods(module.num_heads).items() if mod in mods}
    want, weights = expected(module, parts, masks, is_causal=mask is None, **given)
    given |= {"is_causal": True} if mask is None else {"attn_mask": masks}
    got = call(form, module, parts, need_weights=need_weights, average_attn_weights=False, **given)
    learned = masks if mask == torch.float64 else []
    assert_same_results(got, (want, weights if need_weights else None), [*leaves_of(module, parts), *learned])


@pytest.mark.parametrize("need_weights", [False, True])
def test_mask_mod_may_index_a_table_of_packed_tokens(need_weights):
    module, lengths = make("plain"), [2, 7, 3]
    layout = SequenceLayout.from_lengths(lengths)
    kinds = torch.randint(3, (layout.total,))

    def alike(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kinds[layout.offsets[b] + q] == kinds[layout.offsets[b] + k]

    x = torch.randn(layout.total, EMBED, dtype=torch.float64)
    want, weights = expected(module, [list(x.split(lengths))] * 3, [k[:, None] != k for k in kinds.split(lengths)])
    out, found = module(x, x, x, layout=layout, mask_mod=alike, need_weights=need_weights, average_attn_weights=False)
    torch.testing.assert_close(out, want)
    assert found is None or torch.equal(found != 0, weights != 0)


@covering(
    {
        "name": ["rotary", "alibi", "window_size", "all", "added keys"],
        "kind": ["bool", "float", "layout"],
        "causal": [False, True, True],
        "need_weights": [False, False, True],
    }
)
def test_padding_inside_a_row_has_no_position(name, kind, causal, need_weights):
    """`SequenceLayout.from_attention_mask` gives weights that begin at the left of each row."""
    module = make(name)
    here = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 1, 0], [0] * 8], dtype=torch.bool)
    x = torch.randn(3, 8, EMBED, dtype=torch.float64, requires_grad=True)
    parts = [list(x[here].split(here.sum(1).tolist()))] * 3
    want, weights = expected(module, parts, is_causal=causal)
    leaves = [x, *module.parameters()]
    if kind == "layout":
        layout = SequenceLayout.from_attention_mask(here)
        packed, asked = layout.pack(x), {"need_weights": need_weights, "average_attn_weights": False}
        got = module(packed, packed, packed, layout=layout, is_causal=causal, **asked)
        assert_same_results(got, (want, weights if need_weights else None), leaves)
        return
    padding = ~here if kind == "bool" else torch.zeros(here.shape, dtype=torch.float64).masked_fill(~here, -torch.inf)
    only = {} if need_weights else {"is_causal": causal}
    if causal and need_weights:
        only["attn_mask"] = torch.ones(8, 8, dtype=torch.bool).triu(1)
    out, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights, **only)
    assert_same_results((out[here], None), (want, None), leaves)


def test_padded_tokens_are_not_projected_and_give_zero_and_finite_gradients():
    module, rows = make("plain"), []
    module.out_proj.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    x = torch.randn(3, 9, EMBED, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(9) >= torch.tensor([2, 4, 0])[:, None]
    out, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    out.sum().backward()
    assert rows == [6]
    assert not out[padding].any()
    assert x.grad.isfinite().all()


PAST_THE_END = [
    *itertools.product(
        ["packed", "nested"], [{}, {"need_weights": True}, {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}]
    ),
    ("in a graph", {}),
]


@covering({"form, arguments": PAST_THE_END, "name": ["all", "added keys", "other widths"]})
def test_rows_past_the_end_of_the_layout_are_not_read(name, form, arguments):
    module = make(name)
    layout = SequenceLayout.from_lengths([3, 0, 2])
    rows = {dim: torch.randn(7, dim, dtype=torch.float64) for dim in (EMBED, module.kdim, module.vdim)}
    results = []
    for past_end in (torch.nan, 0.0):
        leaf_of = {dim: x.index_fill(0, torch.tensor([5, 6]), past_end).requires_grad_() for dim, x in rows.items()}
        leaves = [leaf_of[dim] for dim in (EMBED, module.kdim, module.vdim)]
        if form != "nested":
            function = torch.compile(module, backend="aot_eager") if form == "in a graph" else module
            out, weights = function(*leaves, layout=layout, **arguments)
        else:
            nested, weights = module(*map(layout.to_nested, leaves), **arguments)
            out = nested.values()
        loss = out.square().sum() + (0 if weights is None else weights.square().sum())
        grads = torch.autograd.grad(loss, [*leaves, *module.parameters()], materialize_grads=True)
        results.append((out, weights, *grads))
    for found, want in zip(*results, strict=True):
        assert found is want is None or torch.equal(found, want)


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("rows", [(14, 17), (17, 14), (17, 17)])
def test_key_and_value_rows_past_the_end_of_the_layout(added, rows):
    module = nta.VarlenMultiheadAttention(16, 2, dtype=torch.float64, **added)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    layout = SequenceLayout.from_lengths([5, 9])
    query, key, value = (torch.randn(n, 16, dtype=torch.float64) for n in (14, *rows))
    want, _ = module(query, key[:14], value[:14], layout=layout)
    for x in (key, value):
        x[14:] = torch.nan
    out, _ = module(query, key, value, layout=layout)
    torch.testing.assert_close(out, want)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in module.parameters() if x.grad is not None)
    with pytest.raises(ValueError, match="tokens"):
        module(query, key, value[:13], layout=layout)


@covering({"lengths": [[], [0, 0], [3, 0]], "key_lengths": [None, [0, 0], [0, 2]], "masked": [False, True]})
def test_empty_batches_and_empty_sequences(lengths, key_lengths, masked):
    module = make("plain")
    layout = SequenceLayout.from_lengths(lengths)
    keys = layout if key_lengths is None else SequenceLayout.from_lengths(key_lengths[: len(lengths)])
    q, k = (torch.randn(x.total, EMBED, dtype=torch.float64, requires_grad=True) for x in (layout, keys))
    arguments = {"layout": layout, "key_layout": keys, "attn_mask": torch.zeros(5, 5).bool() if masked else None}
    out, weights = module(q, k, k, need_weights=True, **arguments)
    assert out.shape == q.shape
    assert weights.shape == (len(lengths), layout.max_seqlen, keys.max_seqlen)
    torch.testing.assert_close(module(q, k, k, **arguments)[0], out)
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_attention_weights_have_the_longest_length_not_max_seqlen():
    layout = SequenceLayout.from_offsets(torch.tensor([0, 3, 3, 7]), max_seqlen=11)
    x = torch.randn(7, EMBED, dtype=torch.float64)
    assert make("plain")(x, x, x, layout=layout, need_weights=True)[1].shape == (3, 4, 4)


def test_nested_tensors_with_holes_and_as_leaves():
    module = make("add_bias_kv")
    padded = torch.randn(3, 7, EMBED, dtype=torch.float64, requires_grad=True)
    starts, lengths = torch.tensor([2, 0, 4]), torch.tensor([5, 1, 2])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    masks = [torch.rand(n, n) < 0.4 for n in lengths.tolist()]
    out, weights = module(nested, nested, nested, need_weights=True, attn_mask=masks, average_attn_weights=False)
    parts = [[x[s : s + n] for x, s, n in zip(padded, starts, lengths, strict=True)]] * 3
    want = one_at_a_time(module, parts, masks)
    assert_same_results((torch.cat(list(out.unbind())), weights), want, [padded, *module.parameters()])
    leaf = torch.nested.nested_tensor([x.detach() for x in parts[0]], layout=torch.jagged, requires_grad=True)
    (got,) = torch.autograd.grad(module(leaf, leaf, leaf, None, True, masks)[0].values().square().sum(), leaf)
    grads = torch.autograd.grad(want[0].square().sum(), padded)[0]
    found = [x[s : s + n] for x, s, n in zip(grads, starts, lengths, strict=True)]
    torch.testing.assert_close(got.values(), torch.cat(found), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_keys_and_values_of_the_same_lengths_by_chance_have_their_own_offsets(layout, frozen):
    module = make("both added, no bias").requires_grad_(not frozen)
    parts = [random_sequences(n) for n in ([4, 6], [7, 16], [7, 16])]
    nested = [torch.nested.nested_tensor([y.detach() for y in x], layout=layout) for x in parts]
    got = module(*nested)[0]
    torch.testing.assert_close(torch.cat(list(got.unbind())), one_at_a_time(module, parts)[0], rtol=1e-9, atol=1e-9)

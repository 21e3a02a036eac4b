"""VarlenMultiheadAttention's forms of input: jagged and strided NestedTensors, packed rows, lists, padded batches.

Every form gives what each sequence gives by itself, through nn.MultiheadAttention or the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import oracle
import pytest
import torch
from multihead_ragged import (
    EMBED,
    EXTRA_OPTIONS,
    KEY_LENGTHS,
    LENGTHS,
    TOLERANCE,
    assert_same_results,
    call,
    causal_masks,
    expected,
    inputs_of,
    leaves_of,
    make_with_options,
    one_at_a_time,
    pair,
    random_sequences,
    results_of,
    with_and_without_weights,
)
from sweeps import covering
from torch import Tensor, nn
from torch.nn import functional as F

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


def dense_routes(
    module: Any, parts: Sequence[list[Tensor]], side: str, causal: bool
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Padded on one side: outputs (T, E), and weights (B, H, L, S) if the padding is on the right."""

    def padded(xs: list[Tensor]) -> Tensor:
        longest = max(map(len, xs))
        more = [longest - len(x) for x in xs]
        sides = [(0, 0, n, 0) if side == "left" else (0, 0, 0, n) for n in more]
        return torch.stack([F.pad(x, n) for x, n in zip(xs, sides, strict=True)])

    once = {id(xs): padded(xs) for xs in parts}
    inputs = [once[id(xs)] for xs in parts]
    real, here = (padded([torch.ones(len(x), 1) for x in xs]).squeeze(-1).bool() for xs in parts[:2])
    future = torch.ones(inputs[0].shape[1], inputs[1].shape[1], dtype=torch.bool).triu(1)
    numbers = torch.zeros(here.shape, dtype=torch.float64).masked_fill(~here, -torch.inf)
    for name, padding in (("bool", ~here), ("float", numbers)):
        out, _ = module(*inputs, key_padding_mask=padding, need_weights=False, is_causal=causal)
        yield f"{side}-padded, {name} padding", out[real], None
        mask = future if causal else None
        out, weights = module(*inputs, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
        weights = None if side == "left" else weights.masked_fill(~real[:, None, :, None], 0.0)
        yield f"{side}-padded, {name} padding, weights", out[real], weights


def ragged_routes(
    module: Any, parts: Sequence[list[Tensor]], causal: bool
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    masks = (
        causal_masks(parts)
        if causal
        else [torch.zeros(len(q), len(k), dtype=torch.bool) for q, k in zip(*parts[:2], strict=True)]
    )
    numbers = [torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -torch.inf) for x in masks]
    weighed = {"need_weights": True, "average_attn_weights": False}
    ways: dict[str, dict[str, Any]] = {
        "packed": {"is_causal": causal},
        "weights": {"is_causal": causal, **weighed},
        "mask": {"attn_mask": masks},
        "mask and weights": {"attn_mask": masks, **weighed},
        "mask of numbers": {"attn_mask": numbers},
    }
    for name, arguments in ways.items():
        yield name, *call("packed", module, parts, **arguments)
    yield "jagged", *call("jagged", module, parts, is_causal=causal)


@covering({"name": EXTRA_OPTIONS, "cross": [False, True], "causal": [True, False, False]})
def test_all_input_forms_give_what_the_oracle_gives(name, cross, causal):
    module = make_with_options(name)
    parts = inputs_of(module, cross)
    want, weights = expected(module, parts, is_causal=causal, rotary=EXTRA_OPTIONS[name].get("rotary"))
    found = [*ragged_routes(module, parts, causal), *dense_routes(module, parts, "right", causal)]
    if parts[0] is parts[1]:  # by column, keys at the right of the row are not across from queries at its left
        found += dense_routes(module, parts, "left", causal)
    leaves = leaves_of(module, parts)
    wants = {weighed: results_of((want, weights if weighed else None), leaves) for weighed in (False, True)}
    wrong = []
    for route, out, seen in found:
        try:
            oracle.assert_same(results_of((out, seen), leaves), wants[seen is not None], TOLERANCE)
        except AssertionError as error:
            wrong.append(f"{route}: {' '.join(str(error).split())[:300]}")
    assert not wrong, "\n".join(wrong)


@covering(
    {
        "name": ["rotary", "alibi", "window_size", "all"],
        "kind": ["bool", "float"],
        "causal": [False, True, True],
        "need_weights": [False, False, True],
    }
)
def test_padding_inside_a_row_has_no_position(name, kind, causal, need_weights):
    module = make_with_options(name)
    here = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 1, 0]], dtype=torch.bool)
    x = torch.randn(2, 8, EMBED, dtype=torch.float64, requires_grad=True)
    padding = ~here if kind == "bool" else torch.zeros(2, 8, dtype=torch.float64).masked_fill(~here, -torch.inf)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal and need_weights else None
    only = {"is_causal": causal} if not need_weights else {}
    out, _ = module(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=need_weights, **only)
    parts = [list(x[here].split(here.sum(1).tolist()))] * 3
    want, _ = expected(module, parts, is_causal=causal, rotary=EXTRA_OPTIONS[name].get("rotary"))
    assert_same_results((out[here], None), (want, None), [x, *module.parameters()])


@pytest.mark.parametrize("name", EXTRA_OPTIONS)
def test_unbatched_and_batch_first_false_give_what_the_oracle_gives(name):
    module = make_with_options(name)
    queries, keys, values = (random_sequences([n], w)[0] for n, w in ((7, EMBED), (7, module.kdim), (7, module.vdim)))
    want, weights = expected(module, [[queries], [keys], [values]], rotary=EXTRA_OPTIONS[name].get("rotary"))
    inputs = (queries, keys, values)
    leaves = [*inputs, *module.parameters()]
    assert_same_results(module(*inputs, average_attn_weights=False), (want, weights[0]), leaves)
    assert_same_results(module(*inputs, need_weights=False), (want, None), leaves)
    module.batch_first = False
    out, found = module(*(x.unsqueeze(1) for x in inputs), average_attn_weights=False)
    assert_same_results((out.squeeze(1), found.squeeze(0)), (want, weights[0]), leaves)


@pytest.mark.parametrize("name", ["all", "added keys"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda x: x.__name__)
def test_training_after_a_forward_without_gradients(name, mode):
    module = make_with_options(name)
    parts = inputs_of(module, cross=False)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    rows = torch.cat(parts[0])
    ways = ({}, {"need_weights": True, "average_attn_weights": False})
    with mode():
        early = [module(rows, rows, rows, layout=layout, **arguments)[0] for arguments in ways]
    want, weights = expected(module, parts, rotary=EXTRA_OPTIONS[name]["rotary"])
    for x, arguments in zip(early, ways, strict=True):
        torch.testing.assert_close(x.clone(), want.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        found = module(rows, rows, rows, layout=layout, **arguments)
        assert_same_results(found, (want, None if found[1] is None else weights), leaves_of(module, parts))


@pytest.mark.parametrize("kind", [list, tuple])
@with_and_without_weights
def test_lists_give_lists_with_the_same_lengths(kind, need_weights):
    stock, ours = pair()
    parts = inputs_of(stock, cross=True)
    outs, weights = ours(*map(kind, parts), need_weights=need_weights)
    assert type(outs) is list
    assert [x.shape for x in outs] == [x.shape for x in parts[0]]
    assert (weights is None) == (not need_weights)
    for out, q, k, v in zip(outs, *parts, strict=True):
        torch.testing.assert_close(out, stock(q, k, v)[0])
        asked = [x for x in (q, k, v) if len(x)]
        for grad in torch.autograd.grad(out.sum(), asked, retain_graph=True, materialize_grads=True):
            assert grad.any() == (len(q) > 0 and len(k) > 0)


def test_lists_of_the_same_tensors_need_not_be_one_object():
    _, ours = pair(add_bias_kv=True)
    xs, memory = random_sequences(LENGTHS), random_sequences(KEY_LENGTHS)
    leaves = leaves_of(ours, [xs, memory])
    ways = [((xs, xs, xs), (xs, list(xs), tuple(xs))), ((xs, memory, memory), (tuple(xs), memory, list(memory)))]
    for one, other in ways:
        outs = [torch.cat(ours(*parts)[0]) for parts in (one, other)]
        assert_same_results((outs[0], None), (outs[1], None), leaves)


def test_list_of_one_tensor_is_one_sequence():
    stock, ours = pair()
    (x,) = random_sequences([7])
    (out,), weights = ours([x], [x], [x], need_weights=True)
    torch.testing.assert_close((out, weights.squeeze(0)), stock(x, x, x))


@pytest.mark.parametrize("name", ["all", "rotary", "added keys"])
@with_and_without_weights
def test_layout_from_attention_mask_has_its_weights_on_the_left(name, need_weights):
    module = make_with_options(name)
    here = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    padded = torch.randn(3, 5, EMBED, dtype=torch.float64, requires_grad=True)
    layout = nta.SequenceLayout.from_attention_mask(here)
    rows = layout.pack(padded)
    sizes = layout.lengths.tolist()
    got = module(rows, rows, rows, layout=layout, need_weights=need_weights, average_attn_weights=False)
    parts = [list(rows.split(sizes))] * 3
    want, weights = expected(module, parts, rotary=EXTRA_OPTIONS[name]["rotary"])
    assert_same_results(got, (want, weights if need_weights else None), [padded, *module.parameters()])


PAST_THE_END = [
    *itertools.product(
        ["packed", "nested"], [{}, {"need_weights": True}, {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}]
    ),
    ("in a graph", {}),
]


@pytest.mark.parametrize("name", ["all", "added keys", "other widths"])
@pytest.mark.parametrize(
    ("form", "arguments"), PAST_THE_END, ids=[" ".join([form, *more]) for form, more in PAST_THE_END]
)
def test_rows_past_the_end_of_the_layout_are_not_read(name, form, arguments):
    module = make_with_options(name)
    layout = nta.SequenceLayout.from_lengths([3, 0, 2])
    rows = {dim: torch.randn(7, dim, dtype=torch.float64) for dim in (EMBED, module.kdim, module.vdim)}
    results = []
    for past_end in (torch.nan, 0.0):
        leaf_of = {dim: x.index_fill(0, torch.tensor([5, 6]), past_end).requires_grad_() for dim, x in rows.items()}
        leaves = [leaf_of[dim] for dim in (EMBED, module.kdim, module.vdim)]
        if form != "nested":
            call = torch.compile(module, backend="aot_eager") if form == "in a graph" else module
            out, weights = call(*leaves, layout=layout, **arguments)
        else:
            nested, weights = module(*map(layout.to_nested, leaves), **arguments)
            out = nested.values()
        loss = out.square().sum() + (0 if weights is None else weights.square().sum())
        grads = torch.autograd.grad(loss, [*leaves, *module.parameters()], materialize_grads=True)
        results.append((out, weights, *grads))
    for found, want in zip(*results, strict=True):
        assert found is want is None or torch.equal(found, want)


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0]], ids=str)
@pytest.mark.parametrize("key_lengths", [None, [0, 0], [0, 2]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_empty_batches_and_empty_sequences(lengths, key_lengths, masked):
    _, ours = pair()
    layout = nta.SequenceLayout.from_lengths(lengths)
    keys = layout if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths[: len(lengths)])
    q, k = (torch.randn(x.total, EMBED, dtype=torch.float64, requires_grad=True) for x in (layout, keys))
    mask = torch.zeros(5, 5, dtype=torch.bool) if masked else None
    out, weights = ours(q, k, k, layout=layout, key_layout=keys, attn_mask=mask, need_weights=True)
    assert out.shape == q.shape
    assert weights.shape == (len(lengths), layout.max_seqlen, keys.max_seqlen)
    alone, _ = ours(q, k, k, layout=layout, key_layout=keys, attn_mask=mask)
    torch.testing.assert_close(alone, out)
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_positional_arguments():
    stock, ours = pair()
    parts = inputs_of(stock, cross=True)
    mask = torch.ones(13, 11, dtype=torch.bool).triu(1)
    outs, weights = ours(*parts, None, True, mask, False, True)
    assert_same_results(
        (torch.cat(outs), weights), one_at_a_time(stock, parts, causal_masks(parts)), leaves_of(stock, parts)
    )


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("rows", [(14, 17), (17, 14)])
def test_key_and_value_rows_past_the_end_of_the_layout(added, rows):
    module = nta.VarlenMultiheadAttention(16, 2, dtype=torch.float64, **added)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    layout = nta.SequenceLayout.from_lengths([5, 9])
    query, key, value = (torch.randn(n, 16, dtype=torch.float64) for n in (14, *rows))
    want, _ = module(query, key[:14], value[:14], layout=layout)
    torch.testing.assert_close(module(query, key, value, layout=layout)[0], want)
    with pytest.raises(ValueError, match="tokens"):
        module(query, key, value[:13], layout=layout)

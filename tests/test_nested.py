"""NestedTensors of every make through varlen_attention, against each of their sequences on its own."""

import itertools

import pytest
import torch
from oracle import attention

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

H, D = 3, 5
LENGTHS = {
    "mixed": [5, 0, 3, 1, 7],
    "equal": [5, 5, 5],
    "one": [7],
    "one-token": [1],
    "all-empty": [0, 0],
    "no-sequences": [],
}
jagged = torch.nested.nested_tensor_from_jagged


def offsets_of(parts, first=0):
    return torch.tensor([first, *(len(part) for part in parts)]).cumsum(0)


def packed(parts, gap=0, before=0, after=0):
    """The parts end to end, with rows of garbage before, between and after them."""
    garbage = torch.full((max(gap, before, after), H, D), 99.0, dtype=torch.float64)
    pieces = [garbage[:before], *itertools.chain.from_iterable((part, garbage[:gap]) for part in parts)]
    return torch.cat([*pieces, garbage[:after]])


def from_jagged(parts):
    return jagged(packed(parts), offsets_of(parts))


def int32_offsets(parts):
    return jagged(packed(parts), offsets_of(parts).int())


def heads_first(parts):
    return from_jagged(parts).transpose(1, 2)


def heads_first_contiguous(parts):
    return jagged(packed(parts).transpose(0, 1).contiguous(), offsets_of(parts), jagged_dim=2)


def not_contiguous(parts):
    values = packed(parts).flatten(1)
    return jagged(torch.cat([values, values + 1, values - 1], -1).chunk(3, -1)[1] - 1, offsets_of(parts)).unflatten(
        -1, (H, D)
    )


def strided_values(parts):
    return jagged(packed(parts).repeat_interleave(2, dim=2)[..., ::2], offsets_of(parts))


def with_holes(parts):
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(part) + 2 for part in parts)]).cumsum(0)
    return jagged(packed(parts, gap=2), offsets, lengths=lengths)


def with_holes_heads_first(parts):
    return with_holes(parts).transpose(1, 2)


def begins_later(parts):
    return jagged(packed(parts, before=3), offsets_of(parts, first=3))


def ends_early(parts):
    return jagged(packed(parts, after=2), offsets_of(parts))


def begins_later_and_ends_early(parts):
    return jagged(packed(parts, before=3, after=2), offsets_of(parts, first=3))


def from_layout(parts):
    return SequenceLayout.from_lengths([len(part) for part in parts]).to_nested(packed(parts))


ANY_LENGTHS = [
    from_jagged, int32_offsets, heads_first, heads_first_contiguous, not_contiguous, strided_values, with_holes,
    with_holes_heads_first, begins_later, ends_early, begins_later_and_ends_early, from_layout,
]  # fmt: skip


def as_list(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def narrowed(parts):
    starts = torch.tensor([b % 3 for b in range(len(parts))])
    lengths = torch.tensor([len(part) for part in parts])
    rows = [
        torch.nn.functional.pad(part, (0, 0, 0, 0, b % 3, 11 - b % 3 - len(part)), value=99.0)
        for b, part in enumerate(parts)
    ]
    return torch.nested.narrow(torch.stack(rows), 1, starts, lengths, layout=torch.jagged)


def strided(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.strided)


def strided_heads_first(parts):
    return strided(parts).transpose(1, 2)


MADE = [pytest.param(make, name, id=f"{make.__name__}-{name}") for make in ANY_LENGTHS for name in LENGTHS]
MADE += [pytest.param(narrowed, name, id=f"narrowed-{name}") for name in LENGTHS if name != "no-sequences"]
MADE += [pytest.param(make, "mixed", id=f"{make.__name__}-mixed") for make in (as_list, strided, strided_heads_first)]


def sequences(nested):
    """The sequences of a NestedTensor, each (L, H, …). Its own unbind knows no offsets that begin or end elsewhere."""
    if nested.layout == torch.strided:
        return list(nested.unbind())
    values = nested.values().movedim(nested._ragged_idx - 1, 0)
    begins = nested.offsets()[:-1]
    lengths = nested.offsets().diff() if nested.lengths() is None else nested.lengths()
    return [values[begin : begin + n] for begin, n in zip(begins.tolist(), lengths.tolist(), strict=True)]


def random_parts(lengths):
    return [torch.randn(n, H, D, dtype=torch.float64, requires_grad=True) for n in lengths]


def assert_all_close(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("make", "name"), MADE)
def test_each_sequence_sees_itself_alone(make, name, causal):
    parts = random_parts(LENGTHS[name])
    x = make(parts)
    out, lse = varlen_attention(x, x, x, is_causal=causal, return_lse=True)
    assert (out.is_nested, out.layout, out.dim()) == (True, x.layout, 4)
    outs, lses = sequences(out), sequences(lse)
    if make is strided_heads_first:
        outs = [part.transpose(0, 1) for part in outs]
    alone = [attention(part, part, part, [len(part)], is_causal=causal) for part in parts]
    assert_all_close(outs, [out for out, _ in alone])
    assert lse.dim() == 3
    assert_all_close(lses, [lse for _, lse in alone])

    if not parts:
        return
    weights = [(torch.randn_like(part), torch.randn_like(part[..., 0])) for part in parts]
    found, wanted = (
        torch.autograd.grad(
            sum((o * w).sum() + (s * u).sum() for (o, s), (w, u) in zip(pairs, weights, strict=True)), parts
        )
        for pairs in (list(zip(outs, lses, strict=True)), alone)
    )
    assert_all_close(found, wanted)


@pytest.mark.parametrize(("make", "name"), MADE)
def test_the_output_can_be_added_to_the_input(make, name):
    parts = random_parts(LENGTHS[name])
    x = make(parts)
    out = varlen_attention(x, x, x)
    if x.layout == torch.jagged:
        assert out.offsets() is x.offsets()
        assert out.lengths() is x.lengths()
        assert out.shape == x.shape
    alone = [part + attention(part, part, part, [len(part)])[0] for part in parts]
    summed = sequences(x + out)
    assert_all_close([part.transpose(0, 1) for part in summed] if make is strided_heads_first else summed, alone)


@pytest.mark.parametrize("make", [from_jagged, heads_first, with_holes, begins_later], ids=lambda make: make.__name__)
def test_lse_shares_the_offsets_of_the_query(make):
    x = make(random_parts(LENGTHS["mixed"]))
    _, lse = varlen_attention(x, x, x, return_lse=True)
    assert lse.offsets() is x.offsets()
    assert lse._ragged_idx == 1
    assert (lse.dim(), lse.size(0), lse.size(2)) == (3, 5, H)


def test_gradient_reaches_a_leaf_through_a_projection():
    layout = SequenceLayout.from_lengths([5, 0, 3])
    values = torch.randn(8, 7, requires_grad=True)
    project = torch.nn.Linear(7, 3 * H * D)

    def attend(q, k, v, *rest):
        return varlen_attention(*(part.unflatten(-1, (H, D)) for part in (q, k, v)), *rest)

    want = attend(*project(values).chunk(3, -1), layout).square().sum()
    got = attend(*project(layout.to_nested(values)).chunk(3, -1)).values().square().sum()
    torch.testing.assert_close(got, want)
    leaves = (values, *project.parameters())
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_a_nested_leaf_gets_a_nested_gradient():
    parts = random_parts([5, 0, 3])
    x = torch.nested.nested_tensor([part.detach() for part in parts], layout=torch.jagged, requires_grad=True)
    varlen_attention(x, x, x).values().sum().backward()
    alone = sum(attention(part, part, part, [len(part)])[0].sum() for part in parts)
    assert_all_close(sequences(x.grad), torch.autograd.grad(alone, parts))


@pytest.mark.parametrize("make_key", [from_jagged, heads_first, with_holes, begins_later], ids=lambda m: m.__name__)
@pytest.mark.parametrize("make", [from_jagged, heads_first, with_holes, strided], ids=lambda make: make.__name__)
def test_cross_attention(make, make_key):
    lengths, key_lengths = [5, 0, 3, 1], [2, 3, 0, 7]
    parts, keys, values = random_parts(lengths), random_parts(key_lengths), random_parts(key_lengths)
    x = make(parts)
    out = varlen_attention(x, make_key(keys), make_key(values), is_causal=True)
    alone = [
        attention(q, k, v, [len(q)], [len(k)], is_causal=True)[0] for q, k, v in zip(parts, keys, values, strict=True)
    ]
    assert_all_close(sequences(out), alone)
    if x.layout == torch.jagged:
        assert out.offsets() is x.offsets()


def test_key_and_value_may_be_of_different_make():
    keys, values, queries = (random_parts([5, 0, 3]) for _ in range(3))
    out = varlen_attention(from_jagged(queries), heads_first(keys), with_holes(values))
    alone = [attention(q, k, v, [len(q)])[0] for q, k, v in zip(queries, keys, values, strict=True)]
    assert_all_close(sequences(out), alone)


def test_heads_first_keeps_its_form_under_gqa_and_another_value_dim():
    offsets = torch.tensor([0, 5, 5, 8])
    query, key, value = (jagged(torch.randn(8, heads, dim), offsets) for heads, dim in ((6, 5), (3, 5), (3, 7)))
    want = varlen_attention(query, key, value)
    got = varlen_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    assert (got._ragged_idx, got.size(1), got.size(3)) == (2, 6, 7)
    assert torch.equal(got.transpose(1, 2).values(), want.values())


def test_the_extremes_travel_along():
    x = from_jagged(random_parts([5, 0, 3]))
    out = varlen_attention(x, x, x)
    assert (out._maybe_max_seqlen, out._maybe_min_seqlen) == (5, 0)


@pytest.mark.parametrize("make", [from_jagged, with_holes, strided], ids=lambda make: make.__name__)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_mix_of_nested_and_plain_is_refused(make, place):
    parts = random_parts([5, 0, 3])
    given = [make(parts)] * 3
    given[place] = packed(parts)
    with pytest.raises(TypeError, match=f"{('query', 'key', 'value')[place]} is a plain tensor.*pass three Nested"):
        varlen_attention(*given)


@pytest.mark.parametrize("name", ["layout", "key_layout"])
def test_nested_tensors_with_a_layout_are_refused(name):
    x = from_jagged(random_parts([5, 0, 3]))
    with pytest.raises(ValueError, match="have their own layout"):
        varlen_attention(x, x, x, **{name: SequenceLayout.from_lengths([5, 0, 3])})


def test_key_and_value_of_different_lengths_are_refused():
    x, y = from_jagged(random_parts([5, 0, 3])), from_jagged(random_parts([5, 1, 2]))
    with pytest.raises(ValueError, match=r"key and value must have the same lengths, got \[5, 0, 3\] and \[5, 1, 2\]"):
        varlen_attention(x, x, y)


def test_another_number_of_sequences_is_refused():
    x, y = from_jagged(random_parts([5, 0, 3])), from_jagged(random_parts([5, 3]))
    with pytest.raises(ValueError, match="3 sequences and key_layout 2"):
        varlen_attention(x, y, y)


def test_sequences_that_overlap_are_refused():
    x = jagged(torch.randn(8, H, D), torch.tensor([0, 5, 8]), lengths=torch.tensor([6, 3]))
    with pytest.raises(ValueError, match=r"sequence 0 of query has the rows 0 to 6, but the next .* at row 5"):
        varlen_attention(x, x, x)


@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 3])], ids=["whole", "holes"])
@pytest.mark.parametrize("first", [0, 2])
def test_offsets_past_the_values_are_refused_each_time(first, lengths):
    offsets = torch.tensor([0, 5, 8]) + first
    long, short = (jagged(torch.randn(n, H, D), offsets, lengths=lengths) for n in (8 + first, 7 + first))
    varlen_attention(long, long, long)
    with pytest.raises(ValueError, match=f"query.*({8 + first}|8 tokens)"):
        varlen_attention(short, short, short)


@pytest.mark.parametrize("size", [(5, H * D), (5, 2, H, D)], ids=["embedding", "five-dimensional"])
def test_tensors_that_are_not_split_into_heads_are_refused(size):
    x = torch.nested.as_nested_tensor([torch.randn(size), torch.randn(3, *size[1:])], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query must be \(tokens, heads, head dim\), got \(8, "):
        varlen_attention(x, x, x)


def test_another_ragged_dimension_is_refused():
    x = jagged(torch.randn(H, D, 8), torch.tensor([0, 5, 8]), jagged_dim=3)
    with pytest.raises(ValueError, match=r"query is ragged in dimension 3 of 4: pass \(B, j, …\)"):
        varlen_attention(x, x, x)


@pytest.mark.parametrize(
    "parts",
    [[torch.randn(5, H, D)] * 2, [torch.randn(5, H, D), torch.randn(5, H, D + 1)]],
    ids=["equal", "ragged-head-dim"],
)
def test_strided_tensors_of_doubtful_shape_are_refused(parts):
    x = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    with pytest.raises(ValueError, match=r"strided NestedTensor of shapes such as \(5, 3, 5\).*layout=torch.jagged"):
        varlen_attention(x, x, x)


def module_of(backend):
    return nta.VarlenMultiheadAttention(8, 2, backend=backend, dtype=torch.float64)


def test_a_gradient_s_gradient_comes_through():
    """Where the backend allows it: a penalty on the gradient weighs as it does on packed rows."""
    module, layout = module_of("reference"), SequenceLayout.from_lengths([5, 3])
    values = torch.randn(8, 8, dtype=torch.float64)
    found = []
    for leaf in (torch.nested.nested_tensor_from_jagged(values, layout.offsets), values.clone()):
        leaf.requires_grad_()
        out = module(leaf, leaf, leaf, layout=None if leaf.is_nested else layout)[0]
        loss = (out.values() if leaf.is_nested else out).square().sum()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        penalty = (grad.values() if leaf.is_nested else grad).square().sum()
        found.append(torch.autograd.grad(loss + penalty, list(module.parameters())))
    for nested, packed in zip(*found, strict=True):
        torch.testing.assert_close(nested, packed)


def test_a_kernel_s_gradient_can_t_be_differentiated_in_silence():
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, 8, dtype=torch.float64), torch.tensor([0, 5, 8]))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module_of("cpu")(x, x, x)[0].values().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.values().square().sum().backward()


def test_gradients_in_float64_undefined_ones_too():
    module, offsets = module_of("cpu"), torch.tensor([0, 3, 3, 8])

    def function(values):
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return module(x, x, x)[0].values()

    assert torch.autograd.gradcheck(function, torch.randn(8, 8, dtype=torch.float64, requires_grad=True))

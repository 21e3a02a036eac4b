"""`varlen_attention` of NestedTensors in every form, compared with each sequence alone."""

import pytest
import torch
from nested_forms import (
    ANY_LENGTHS,
    LENGTHS,
    H,
    as_list,
    assert_all_close,
    begins_later,
    from_jagged,
    heads_first,
    jagged,
    narrowed,
    random_parts,
    sequences,
    strided,
    strided_heads_first,
    with_holes,
)
from oracle import attention

from nt_attention import varlen_attention

MADE = [pytest.param(make, name, id=f"{make.__name__}-{name}") for make in ANY_LENGTHS for name in LENGTHS]

MADE += [pytest.param(narrowed, name, id=f"narrowed-{name}") for name in LENGTHS if name != "no-sequences"]

MADE += [pytest.param(make, "mixed", id=f"{make.__name__}-mixed") for make in (as_list, strided, strided_heads_first)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("make", "name"), MADE)
def test_nested_tensor_attention_of_each_sequence_alone(make, name, causal):
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
def test_nested_tensor_output_can_be_added_to_the_input(make, name):
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
def test_nested_tensor_lse_shares_the_offsets_of_the_query(make):
    x = make(random_parts(LENGTHS["mixed"]))
    _, lse = varlen_attention(x, x, x, return_lse=True)
    assert lse.offsets() is x.offsets()
    assert lse._ragged_idx == 1
    assert (lse.dim(), lse.size(0), lse.size(2)) == (3, 5, H)


@pytest.mark.parametrize("make_key", [from_jagged, heads_first, with_holes, begins_later], ids=lambda m: m.__name__)
@pytest.mark.parametrize("make", [from_jagged, heads_first, with_holes, strided], ids=lambda make: make.__name__)
def test_nested_tensor_cross_attention(make, make_key):
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


def test_nested_key_and_value_of_different_forms():
    keys, values, queries = (random_parts([5, 0, 3]) for _ in range(3))
    out = varlen_attention(from_jagged(queries), heads_first(keys), with_holes(values))
    alone = [attention(q, k, v, [len(q)])[0] for q, k, v in zip(queries, keys, values, strict=True)]
    assert_all_close(sequences(out), alone)


def test_heads_first_nested_tensors_with_grouped_heads_and_another_value_dim():
    offsets = torch.tensor([0, 5, 5, 8])
    query, key, value = (jagged(torch.randn(8, heads, dim), offsets) for heads, dim in ((6, 5), (3, 5), (3, 7)))
    want = varlen_attention(query, key, value)
    got = varlen_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    assert (got._ragged_idx, got.size(1), got.size(3)) == (2, 6, 7)
    assert torch.equal(got.transpose(1, 2).values(), want.values())


def test_nested_tensor_output_keeps_min_and_max_seqlen():
    x = from_jagged(random_parts([5, 0, 3]))
    out = varlen_attention(x, x, x)
    assert (out._maybe_max_seqlen, out._maybe_min_seqlen) == (5, 0)

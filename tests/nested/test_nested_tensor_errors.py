"""NestedTensors that `varlen_attention` refuses, and the messages."""

import pytest
import torch
from nested_forms import D, H, from_jagged, jagged, packed, random_parts, strided, with_holes

from nt_attention import SequenceLayout, varlen_attention


@pytest.mark.parametrize("make", [from_jagged, with_holes, strided], ids=lambda make: make.__name__)
@pytest.mark.parametrize("index", [0, 1, 2], ids=["query", "key", "value"])
def test_nested_and_plain_tensors_together_are_refused(make, index):
    parts = random_parts([5, 0, 3])
    given = [make(parts)] * 3
    given[index] = packed(parts)
    with pytest.raises(TypeError, match=f"{('query', 'key', 'value')[index]} is a plain tensor.*pass three Nested"):
        varlen_attention(*given)


@pytest.mark.parametrize("name", ["layout", "key_layout"])
def test_nested_tensors_with_a_layout_are_refused(name):
    x = from_jagged(random_parts([5, 0, 3]))
    with pytest.raises(ValueError, match="have their own layout"):
        varlen_attention(x, x, x, **{name: SequenceLayout.from_lengths([5, 0, 3])})


def test_nested_key_and_value_of_different_lengths_are_refused():
    x, y = from_jagged(random_parts([5, 0, 3])), from_jagged(random_parts([5, 1, 2]))
    with pytest.raises(ValueError, match=r"key and value must have the same lengths, got \[5, 0, 3\] and \[5, 1, 2\]"):
        varlen_attention(x, x, y)


def test_nested_tensors_of_different_batch_sizes_are_refused():
    x, y = from_jagged(random_parts([5, 0, 3])), from_jagged(random_parts([5, 3]))
    with pytest.raises(ValueError, match="3 sequences and key_layout 2"):
        varlen_attention(x, y, y)


def test_nested_tensor_with_overlapping_sequences_is_refused():
    x = jagged(torch.randn(8, H, D), torch.tensor([0, 5, 8]), lengths=torch.tensor([6, 3]))
    with pytest.raises(ValueError, match=r"sequence 0 of query has the rows 0 to 6, but the next .* at row 5"):
        varlen_attention(x, x, x)


@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 3])], ids=["whole", "holes"])
@pytest.mark.parametrize("first", [0, 2])
def test_nested_tensor_with_offsets_past_the_values_is_refused(first, lengths):
    offsets = torch.tensor([0, 5, 8]) + first
    long, short = (jagged(torch.randn(n, H, D), offsets, lengths=lengths) for n in (8 + first, 7 + first))
    varlen_attention(long, long, long)
    with pytest.raises(ValueError, match=f"query.*({8 + first}|8 tokens)"):
        varlen_attention(short, short, short)


@pytest.mark.parametrize("size", [(5, H * D), (5, 2, H, D)], ids=["embedding", "five-dimensional"])
def test_nested_tensors_without_a_head_dimension_are_refused(size):
    x = torch.nested.as_nested_tensor([torch.randn(size), torch.randn(3, *size[1:])], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query must be \(tokens, heads, head dim\), got \(8, "):
        varlen_attention(x, x, x)


def test_nested_tensor_with_another_ragged_dimension_is_refused():
    x = jagged(torch.randn(H, D, 8), torch.tensor([0, 5, 8]), jagged_dim=3)
    with pytest.raises(ValueError, match=r"query is ragged in dimension 3 of 4: pass \(B, j, …\)"):
        varlen_attention(x, x, x)


@pytest.mark.parametrize(
    "parts",
    [[torch.randn(5, H, D)] * 2, [torch.randn(5, H, D), torch.randn(5, H, D + 1)]],
    ids=["equal", "ragged-head-dim"],
)
def test_strided_nested_tensors_of_ambiguous_shape_are_refused(parts):
    x = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    with pytest.raises(ValueError, match=r"strided NestedTensor of shapes such as \(5, 3, 5\).*layout=torch.jagged"):
        varlen_attention(x, x, x)

"""The constructors of `SequenceLayout`, its properties, copies and pickles."""

import gc
import weakref

import pytest
import torch
from layouts import LENGTHS, MAKERS

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts import cache


@pytest.mark.parametrize("make", [MAKERS["list"], MAKERS["mask"]], ids=["list", "mask"])
def test_nested_tensors_are_not_read_after_their_layout_is_freed(monkeypatch, make):
    x = torch.randn(sum(LENGTHS), 2, 8)
    layout = make(LENGTHS)
    nested, want = layout.to_nested(x), varlen_attention(x, x, x, layout)
    del layout
    gc.collect()
    monkeypatch.setattr(cache, "_read", None)
    torch.testing.assert_close(varlen_attention(nested, nested, nested).values(), want)


def test_a_layout_keeps_no_tensor_of_the_user():
    table = torch.zeros(2, 100, dtype=torch.int64)
    layout, freed = SequenceLayout.from_offsets(table[0]), weakref.ref(table)
    nested = layout.to_nested(torch.randn(0, 3))
    assert layout.offsets.untyped_storage().nbytes() < table.untyped_storage().nbytes()
    del table
    gc.collect()
    assert freed() is None
    assert len(nested.offsets()) == 100


def test_from_lengths_on_a_device():
    layout = SequenceLayout.from_lengths(torch.tensor(LENGTHS), device="meta")
    assert layout.device.type == layout.cu_seqlens.device.type == "meta"
    assert layout.total == 13


def test_host_offsets_stay_on_the_host_under_a_default_device():
    """The default device is "meta" instead of "cuda", because meta tensors have no values."""
    with torch.device("meta"):
        layout = SequenceLayout.from_lengths([5, 0, 3], device="cpu")
        packed = SequenceLayout.from_position_ids(torch.tensor([0, 1, 0, 1, 2], device="cpu"))
    assert layout.host_offsets.tolist() == [0, 5, 5, 8]
    assert packed.host_offsets.tolist() == [0, 2, 5]


def test_from_nested_of_a_strided_nested_tensor():
    parts = [torch.randn(n, 3) for n in LENGTHS]
    made = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    assert SequenceLayout.from_nested(made).lengths.tolist() == LENGTHS

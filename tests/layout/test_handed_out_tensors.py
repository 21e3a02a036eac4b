"""Tensors that a layout hands out, changed in place: no use of this layout or of another one gives other numbers.

Dimensions: B sequences, T tokens, L positions in a padded row, E features.
"""

import functools

import pytest
import torch
from layouts import LENGTHS, MAKERS
from torch import Tensor

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts.bounded import BoundedLayout

TOKENS, LONGEST = 13, 7
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
X, HEADS = torch.randn(TOKENS, 12), torch.randn(TOKENS, 3, 5)
FOLLOWED = {"operator_offsets"}  # an alias of the offsets that a layout with bounds follows

SOURCES = MAKERS | {
    "bound": lambda lengths: SequenceLayout.from_offsets(OFFSETS.clone(), max_seqlen=11),
    "bounds": lambda lengths: BoundedLayout(OFFSETS.clone(), LONGEST, TOKENS),
    "int32-bounds": lambda lengths: BoundedLayout(OFFSETS.int(), LONGEST, TOKENS),
    "positions": lambda lengths: SequenceLayout.from_position_ids(torch.cat([torch.arange(n) for n in lengths if n])),
    "extended": lambda lengths: SequenceLayout.from_lengths([n - 1 for n in lengths if n]).extended(1),
}
WAYS = {
    "add_": lambda x: x.add_(1),
    "a view": lambda x: x[1:].fill_(1),
    ".data": lambda x: x.data.fill_(0),
    "NumPy": lambda x: x.numpy().fill(1),
}


@pytest.fixture(scope="module")
def uses():
    """What is computed with a layout."""
    plain, rotated = (nta.VarlenMultiheadAttention(12, 3, **more) for more in ({}, {"rotary": nta.Rotary(dims=4)}))

    def pack(layout):
        shape = layout.batch_size, layout.padded_length or layout.max_seqlen, 2
        return layout.pack(torch.arange(torch.Size(shape).numel()).view(shape))

    of_all = {"pad": lambda layout: layout.pad(X), "pack": pack, "positions": lambda layout: layout.position_ids}
    of_known = {
        "attention": lambda layout: varlen_attention(HEADS, HEADS, HEADS, layout, backend="cpu"),
        "reference": lambda layout: varlen_attention(HEADS, HEADS, HEADS, layout, backend="reference"),
        "rotary": lambda layout: rotated(X, X, X, layout=layout)[0],
        "weights": lambda layout: plain(X, X, X, layout=layout, need_weights=True)[1],
        "NestedTensor": lambda layout: layout.to_nested(X).to_padded_tensor(0.0),
        "a layout of its offsets": lambda layout: SequenceLayout.from_offsets(layout.cu_seqlens).lengths,
    }
    return lambda layout: of_all | of_known if layout.knows_lengths else of_all


def handed_out(layout):
    """The names of the public attributes that are tensors."""
    names = [x for x in {*dir(type(layout)), *vars(layout)} if not x.startswith("_")]
    # they are for code of this package, or raise an error
    internal = {"host", "reversed", "device_offsets", "operator_offsets", "safe_offsets", "cached_lengths", "cache"}
    internal |= set() if layout.knows_lengths else {"host_offsets"}
    names = [x for x in names if x not in internal]
    return [name for name in names if isinstance(getattr(layout, name), Tensor)]


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used before"])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_change_reaches_nothing_else(source, how, is_used, uses):
    def make():
        return SOURCES[source](LENGTHS)

    calls = uses(make())
    expected = {use: call(make()) for use, call in calls.items()}
    names = handed_out(make())
    assert {"lengths", "sequence_ids", "position_ids", "offsets", "cu_seqlens"} <= set(names)
    for name in names:
        if name in FOLLOWED and source.endswith("bounds"):
            continue
        layout = make()
        if is_used:
            for call in calls.values():
                call(layout)
        WAYS[how](getattr(layout, name))
        for use, call in calls.items():
            torch.testing.assert_close(
                call(layout), expected[use], msg=functools.partial("{}, {}: {}".format, name, use)
            )

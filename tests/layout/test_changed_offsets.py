"""Offsets that are changed in place after a layout was made from them.

Dimensions: T tokens, H heads, D head dim.
"""

import numpy as np
import pytest
import torch

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

LENGTHS, TOKENS = [5, 9], 14

MODIFIED = "modified by an inplace operation"


def offsets(dtype=torch.int64):
    return torch.tensor([0, 5, 14], dtype=dtype)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


HEADS = torch.randn(TOKENS, 3, 7)
WEIGHTS = nta.VarlenMultiheadAttention(21, 3)
USES = [
    lambda layout: varlen_attention(HEADS, HEADS, HEADS, layout),
    lambda layout: WEIGHTS(*[HEADS.flatten(1)] * 3, layout=layout, need_weights=True)[1],
]


class TestChangedOffsets:
    @pytest.mark.parametrize("how", ["in place", "NumPy", "NumPy, every second number", "an element of .data", ".data"])
    def test_offsets_changed_in_any_way_are_read_again(self, how):
        memory = np.array([0, 7, 5, 7, 14])[::2] if "every second" in how else np.array([0, 5, 14])
        given = torch.from_numpy(memory)
        assert SequenceLayout.from_offsets(given).host_offsets.tolist() == [0, 5, 14]
        if how == "in place":
            given[1] = 3
        elif how.startswith("NumPy"):
            memory[1] = 3
        elif how == ".data":
            given.data = torch.tensor([0, 3, 14])
        else:
            given.data[1] = 3
        again = SequenceLayout.from_offsets(given)
        assert again.host_offsets.tolist() == again.offsets.tolist() == [0, 3, 14]

    def test_lengths_changed_in_place_are_read_again(self):
        lengths = torch.tensor([4, 3])
        x = torch.nested.nested_tensor_from_jagged(torch.randn(11, 3), torch.tensor([0, 5, 11]), lengths=lengths)
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 3]
        lengths[1] = 6
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 6]

    @pytest.mark.parametrize("device", ["cpu", "gpu"])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_offsets_that_are_inference_tensors(self, dtype, device, request):
        if device == "gpu":
            request.getfixturevalue("like_a_gpu")
        with torch.inference_mode():
            source = offsets(dtype)
        layout = SequenceLayout.from_offsets(source)
        x = torch.randn(TOKENS, 22)
        uses = [lambda each: each.pad(x), *USES]
        before = [use(layout) for use in uses]
        with torch.inference_mode():
            source[1] = 3
        for use, want in zip(uses, before, strict=True):
            torch.testing.assert_close(use(layout), want)
        assert SequenceLayout.from_offsets(source).lengths.tolist() == [3, 11]

    def test_alibi_slopes_changed_before_the_backward(self):
        start, slopes = leaf(TOKENS, 3, 7), torch.tensor([0.5, 0.25, 0.125])
        layout = SequenceLayout.from_lengths(LENGTHS)
        out = varlen_attention(start, start, start, layout, alibi_slopes=slopes)
        slopes.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            out.sum().backward()

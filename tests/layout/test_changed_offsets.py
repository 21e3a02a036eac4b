"""Offsets that are changed in place after a layout was made from them.

Dimensions: T tokens, H heads, D head dim.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from calls import PassThrough

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


@pytest.fixture
def module():
    return nta.VarlenMultiheadAttention(22, 2, batch_first=True, dtype=torch.float64)


class TestChangedOffsets:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_int32_and_int64_offsets_of_a_layout_are_independent(self, dtype):
        given = offsets(dtype)
        layout = SequenceLayout.from_offsets(given)
        converted = layout.cu_seqlens if dtype == torch.int64 else layout.offsets
        given[1] = 3
        assert SequenceLayout.from_offsets(converted).lengths.tolist() == [5, 9]
        assert SequenceLayout.from_offsets(given).lengths.tolist() == [3, 11]

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

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_offsets_changed_in_place_are_read_again(self, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        assert SequenceLayout.from_offsets(offsets).position_ids.tolist() == [0, 1, 2, 3, 4, 0]
        offsets[1:3] = torch.tensor([2, 4])
        layout = SequenceLayout.from_offsets(offsets)
        assert layout.lengths.tolist() == [2, 2, 2]
        assert layout.position_ids.tolist() == [0, 1, 0, 1, 0, 1]
        offsets[1] = 5
        with pytest.raises(ValueError, match="decrease from 5 to 4"):
            SequenceLayout.from_offsets(offsets)

    def test_lengths_changed_in_place_are_read_again(self):
        lengths = torch.tensor([4, 3])
        x = torch.nested.nested_tensor_from_jagged(torch.randn(11, 3), torch.tensor([0, 5, 11]), lengths=lengths)
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 3]
        lengths[1] = 6
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 6]

    @pytest.mark.parametrize("how", ["in place", "NumPy", ".data"])
    @pytest.mark.parametrize("name", ["the user's", "offsets", "cu_seqlens"])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_layout_does_not_change_with_tensors_of_others(self, dtype, name, how, module):
        """Those that it was made from, and those that it has handed out."""
        tokens, heads = torch.randn(TOKENS, 22, dtype=torch.float64), torch.randn(TOKENS, 3, 7)
        uses = [
            lambda layout: varlen_attention(heads, heads, heads, layout),
            lambda layout: module(tokens, tokens, tokens, layout=layout, need_weights=True)[1],
            lambda layout: layout.pack(torch.arange(54).view(2, 9, 3)),
            lambda layout: layout.pad(tokens),
            lambda layout: layout.to_nested(tokens).to_padded_tensor(0.0),
            lambda layout: torch.stack([layout.offsets, layout.cu_seqlens, layout.host_offsets]),
            lambda layout: SequenceLayout.from_offsets(layout.offsets).lengths,
            lambda layout: SequenceLayout.from_offsets(layout.cu_seqlens).lengths,
        ]
        source = offsets(dtype)
        layout = SequenceLayout.from_offsets(source)
        changed = source if name == "the user's" else getattr(layout, name)
        (changed.numpy() if how == "NumPy" else changed.data if how == ".data" else changed)[1] = 3
        for use in uses:
            torch.testing.assert_close(use(layout), use(SequenceLayout.from_lengths(LENGTHS)))
        assert SequenceLayout.from_offsets(changed).lengths.tolist() == [3, 11]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_changed_results_do_not_reach_a_later_layout_of_the_same_offsets(self, dtype):
        given = offsets(dtype)
        first = SequenceLayout.from_offsets(given)
        converted = first.cu_seqlens if dtype == torch.int64 else first.offsets
        converted[1] = 3
        first.position_ids.add_(2)
        again = SequenceLayout.from_offsets(given)
        assert again.offsets.tolist() == again.cu_seqlens.tolist() == [0, 5, 14]
        assert again.position_ids.tolist() == [*range(5), *range(9)]
        again.pad(torch.randn(TOKENS))

    @pytest.mark.parametrize("device", ["cpu", "gpu"])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_offsets_that_are_rows_of_one_table(self, dtype, device, request):
        if device == "gpu":
            request.getfixturevalue("like_a_gpu")
        table = torch.stack([offsets(dtype), offsets(dtype)])
        layouts = [SequenceLayout.from_offsets(row) for row in table]
        x = leaf(TOKENS, 3, 7)
        out = varlen_attention(x, x, x, layouts[0])
        table[1, 1] = 3
        assert layouts[0].pad(x).shape == (2, 9, 3, 7)
        torch.autograd.grad(out.sum(), x)
        assert layouts[1].lengths.tolist() == LENGTHS
        assert SequenceLayout.from_offsets(table[1]).lengths.tolist() == [3, 11]

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

    def test_deepcopy_of_a_layout_is_independent_of_its_offsets(self):
        import copy

        given = offsets()
        given.add_(0)  # now its version differs from that of a copy
        layout = SequenceLayout.from_offsets(given)
        copied = copy.deepcopy(layout)
        given[1] = 3
        x = torch.randn(TOKENS, 3, 7)
        want = varlen_attention(x, x, x, SequenceLayout.from_lengths(LENGTHS))
        torch.testing.assert_close(varlen_attention(x, x, x, copied), want)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatch mode"])
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_offsets_changed_before_the_backward(self, dtype, watched, backend):
        given, start = offsets(dtype), leaf(TOKENS, 3, 7)
        want = torch.autograd.grad(attend(start, offsets(dtype), backend=backend).pow(2).sum(), start)[0]
        out = attend(start, given, backend=backend)
        given[1] = 3
        right_or_refused(lambda: torch.autograd.grad(out.pow(2).sum(), start)[0], want, watched)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_offsets_changed_before_the_backward_of_a_graph(self, dtype, compiler):
        torch._dynamo.reset()
        given, start = offsets(dtype), leaf(TOKENS, 3, 7)
        want = torch.autograd.grad(attend(start, offsets(dtype)).pow(2).sum(), start)[0]
        out = torch.compile(attend, backend=compiler, fullgraph=True)(start, given)
        given[1] = 3
        right_or_refused(lambda: torch.autograd.grad(out.pow(2).sum(), start)[0], want)

    def test_alibi_slopes_changed_before_the_backward(self):
        start, slopes = leaf(TOKENS, 3, 7), torch.tensor([0.5, 0.25, 0.125])
        layout = SequenceLayout.from_lengths(LENGTHS)
        out = varlen_attention(start, start, start, layout, alibi_slopes=slopes)
        slopes.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            out.sum().backward()


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_layout_have_its_lengths(copier):
    source = torch.tensor([0, 3, 5, 8])
    layout = SequenceLayout.from_offsets(source, max_seqlen=7)
    source[1] = 4
    copied = copier(layout)
    assert copied.lengths.tolist() == copied.offsets.diff().tolist() == [3, 2, 3]
    assert copied.max_seqlen == 7


def attend(x, given, backend="auto"):
    return varlen_attention(x, x, x, SequenceLayout.from_offsets(given), backend=backend)


def right_or_refused(gradient, want, watched=False):
    try:
        with PassThrough() if watched else torch.enable_grad():
            found = gradient()
    except RuntimeError as error:
        assert MODIFIED in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, want)

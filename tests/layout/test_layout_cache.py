"""What is cached with offsets: read once, freed with them, bounded, and right under inference_mode."""

import gc
import weakref

import pytest
import torch
from layouts import LENGTHS, MAKERS

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts.cache import _entries


class TestCachedOffsets:
    """What offsets say is read once. It is read again if they change, and freed with them."""

    @pytest.fixture(autouse=True, scope="class")
    def _collect_new_objects_only(self):
        """gc.collect() takes long if it looks at all objects of other tests."""
        gc.collect()
        gc.freeze()

    @pytest.fixture
    def reads(self, monkeypatch):
        """Counts the copies of whole offsets to the host."""
        copies = []

        def to(tensor, *args, _to=torch.Tensor.to, **kwargs):
            if args[:1] == ("cpu",):
                copies.append(tensor)
            return _to(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "to", to)
        return copies

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_offsets_are_read_once(self, reads, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        first, second = SequenceLayout.from_offsets(offsets), SequenceLayout.from_offsets(offsets, max_seqlen=7)
        assert len(reads) == 1
        assert first.locate_rows(6)[0] is second.locate_rows(6)[0]

    def test_layouts_of_unchanged_offsets_are_made_once(self):
        offsets = torch.tensor([0, 5, 6])
        for bound in (None, *range(5, 30)):
            layout = SequenceLayout.from_offsets(offsets, bound)
            assert SequenceLayout.from_offsets(offsets, bound) is layout
            assert layout.max_seqlen == (bound or 5)
        offsets[1] = 2
        assert SequenceLayout.from_offsets(offsets, bound).lengths.tolist() == [2, 4]
        assert layout.lengths.tolist() == [5, 1]

    def test_second_call_reads_no_offsets(self, reads):
        values = torch.randn(13, 3, 5)
        made = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 5, 6, 13]))
        holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 7, 13]), lengths=torch.tensor([5, 6]))
        for x in (made, holes):
            varlen_attention(x, x, x, is_causal=True)
            assert reads
            reads.clear()
            varlen_attention(x, x, x, is_causal=True)
            assert reads == []

    def test_offsets_that_are_inference_tensors_are_not_cached(self):
        with torch.inference_mode():
            offsets = torch.tensor([0, 5, 6])
            first = SequenceLayout.from_offsets(offsets)
            offsets[1] = 2  # inference tensors have no version counter
            layout = SequenceLayout.from_offsets(offsets)
            assert layout is not first
            assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
            made = SequenceLayout.from_lengths([2, 4])
            assert SequenceLayout.from_offsets(made.offsets) is made  # its offsets are no inference tensor
        assert SequenceLayout.from_offsets(offsets).lengths.tolist() == [2, 4]

    @staticmethod
    def attend(layout, key_layout=None):
        key_layout = layout if key_layout is None else key_layout
        query, key = (torch.randn(each.total, 3, 5, requires_grad=True) for each in (layout, key_layout))
        for options in ({}, {"is_causal": True}, {"window_size": (2, 0)}):
            out = varlen_attention(query, key, key, layout, key_layout, backend="cpu", **options)
            out.sum().backward()

    @pytest.mark.parametrize(
        "use",
        [
            lambda layout: None,
            lambda layout: (layout.lengths, layout.position_ids, layout.sequence_ids),
            lambda layout: layout.pack(layout.pad(torch.zeros(layout.total, 2))),
            lambda layout: TestCachedOffsets.attend(layout),
            lambda layout: TestCachedOffsets.attend(layout, SequenceLayout.from_lengths([7, 1, 2])),
            lambda layout: TestCachedOffsets.attend(SequenceLayout.from_lengths([7, 1, 2]), layout),
            lambda layout: TestCachedOffsets.attend(layout, layout.extended(1)),
            lambda layout: TestCachedOffsets.attend(layout.extended(1), layout),
            lambda layout: varlen_attention(*[layout.to_nested(torch.randn(6, 3, 5))] * 3),
        ],
        ids=[
            "made", "derived", "padded", "cpu-plan", "cpu-plan-as-query", "cpu-plan-as-key", "cpu-plan-extended-key",
            "cpu-plan-extended-query", "nested",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_cache_is_freed_with_its_offsets(self, use, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        layout = SequenceLayout.from_offsets(offsets)
        use(layout)
        references = [weakref.ref(x) for x in (layout.offsets, layout.cu_seqlens, *layout.locate_rows(6))]
        references.append(weakref.ref(layout.extended(1).offsets))
        del offsets, layout
        gc.collect()
        assert [ref() for ref in references] == [None] * 5

    @pytest.mark.parametrize("order", ["query-with-holes", "key-with-holes"])
    def test_cache_is_freed_with_offsets_with_holes(self, order):
        offsets, lengths, values = torch.tensor([0, 5, 11]), torch.tensor([4, 6]), torch.randn(11, 3, 5)
        whole = torch.nested.nested_tensor_from_jagged(values, offsets)
        holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths)
        query, key = (holes, whole) if order == "query-with-holes" else (whole, holes)
        varlen_attention(query, key, key, backend="cpu")
        inner = SequenceLayout.from_nested(holes)
        references = [weakref.ref(x) for x in (offsets, lengths, inner.offsets)]
        del offsets, lengths, values, whole, holes, query, key, inner
        gc.collect()
        assert [ref() for ref in references] == [None] * 3

    def test_cache_does_not_grow_with_batches(self):
        gc.collect()
        before = len(_entries)
        for n in range(20):
            layout = SequenceLayout.from_lengths([n, 3])
            self.attend(layout, layout.extended(1))
        del layout
        gc.collect()
        assert len(_entries) == before


class TestInferenceMode:
    """What a layout derives under inference_mode can be saved for a backward pass, unlike inference tensors."""

    @pytest.mark.parametrize("make", ["offsets", "cu_seqlens", "list", "mask"])
    def test_layout_used_in_inference_mode_trains(self, make):
        layout = MAKERS[make](LENGTHS)
        padded, slopes = torch.randn(4, layout.padded_length or 7, 3, 5), torch.rand(4, 3)

        def both_ways(padded):
            values = layout.pack(padded)
            out = varlen_attention(values, values, values, layout, alibi_slopes=slopes, window_size=(2, 2))
            return layout.pad(out)

        with torch.inference_mode():
            want = both_ways(padded)
        padded.requires_grad_()
        got = both_ways(padded)
        got.sum().backward()
        assert torch.equal(got.detach(), want)
        assert padded.grad.any()

    @pytest.mark.parametrize("name", ["position_ids", "sequence_ids", "lengths", "host_offsets", "padded_index"])
    def test_copies_that_are_made_in_inference_mode(self, name):
        layout = SequenceLayout.from_attention_mask(torch.arange(7) < torch.tensor([[5], [2]]))
        with torch.inference_mode():
            copy = getattr(layout, name)
        torch.nn.Embedding(100, 3)(copy).sum().backward()

    def test_nested_tensors_with_holes_from_inference_mode_train(self):
        x = torch.nested.nested_tensor_from_jagged(
            torch.randn(11, 3, 5, requires_grad=True), torch.tensor([0, 5, 11]), lengths=torch.tensor([4, 6])
        )
        with torch.inference_mode():
            layout = SequenceLayout.from_nested(x)
        varlen_attention(x, x, x).values().sum().backward()
        assert layout.lengths.tolist() == [4, 6]


class TestSizeOfTheCache:
    def test_cache_of_a_layout_is_bounded(self):
        layout, x = SequenceLayout.from_lengths([5, 9]), torch.randn(14, 3, 7)
        cache = layout.cache
        for i in range(3 * cache.MOST_ENTRIES):
            varlen_attention(x, x, x, layout, scale=0.1 + i / 1000, window_size=(i, 0))
        assert len(cache._entries) <= cache.MOST_ENTRIES

    def test_rotary_tables_are_cached_once_for_any_number_of_rows(self):
        attention = nta.VarlenMultiheadAttention(24, 2, rotary=nta.Rotary())
        layout = SequenceLayout.from_lengths([5, 9])
        tokens = torch.randn(60, 24)
        want = attention(*[tokens[:14]] * 3, layout=layout)[0]
        before = len(layout.cache._entries)
        for rows in range(14, 60):
            found = attention(*[tokens[:rows]] * 3, layout=layout)[0]
            torch.testing.assert_close(found[:14], want)
        assert len(layout.cache._entries) == before

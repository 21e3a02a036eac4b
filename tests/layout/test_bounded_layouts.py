"""Layouts whose lengths only the device knows. Without a GPU, tests make them of offsets on the CPU.

Dimensions: B sequences, T tokens, N the bound of T.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from calls import PassThrough
from layouts import nested
from sweeps import covering, sweep_except
from token_tiled_cases import DEVICE, IGNORED_WARNINGS
from torch._subclasses.fake_tensor import FakeTensorMode

import nt_attention as nta
from nt_attention import SequenceLayout
from nt_attention.layouts.bounded import BoundedLayout, LengthsUnknownError
from nt_attention.layouts.cache import _entries
from nt_attention.layouts.traced import TracedLayout

INT32, INT64 = torch.int32, torch.int64
both_dtypes = pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)

LENGTHS, LONGEST, TOKENS, BATCH = [5, 0, 1, 7], 7, 13, 4
MAX_SEQLEN, MAX_TOKENS = 11, 17

pytestmark = IGNORED_WARNINGS


def tensor(numbers, dtype=INT32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def randn(*shape, **more):
    return torch.randn(*shape, device=DEVICE, **more)


def exact_layout():
    return SequenceLayout.from_lengths(LENGTHS, device=DEVICE)


def offsets(dtype=INT32, device=DEVICE):
    return torch.tensor([0, *LENGTHS]).cumsum(0, dtype=dtype).to(device)


def bounded(given=None, max_seqlen=MAX_SEQLEN, max_tokens=MAX_TOKENS):
    return BoundedLayout(offsets() if given is None else given, max_seqlen, max_tokens)


def attend(layout, key_layout=None, x=None, **options):
    if x is None:
        x = randn(MAX_TOKENS, 2, 16)
    return nta.varlen_attention(x, x, x, layout, key_layout, backend="token_tiled", **options)


class TestArguments:
    def test_max_tokens_needs_max_seqlen(self):
        with pytest.raises(ValueError, match="max_tokens=17 needs max_seqlen"):
            SequenceLayout.from_offsets(offsets(device="cpu"), max_tokens=17)

    @both_dtypes
    def test_offsets_on_a_cpu_are_read(self, dtype):
        given = offsets(dtype, "cpu")
        layout = SequenceLayout.from_offsets(given, max_seqlen=MAX_SEQLEN, max_tokens=MAX_TOKENS)
        assert type(layout) is SequenceLayout
        assert (layout.total, layout.max_seqlen) == (TOKENS, MAX_SEQLEN)
        assert layout.host_offsets.diff().tolist() == LENGTHS
        assert layout.knows_lengths

    @pytest.mark.parametrize(
        ("bounds", "message"),
        [
            ((LONGEST - 1, MAX_TOKENS), "max_seqlen=6 is below the longest sequence of 7 tokens"),
            ((LONGEST, TOKENS - 1), "max_tokens=12 is below the 13 tokens"),
            ((LONGEST, 0), "max_tokens=0 is below"),
            ((LONGEST, -1), "max_tokens=-1"),
            ((-1, MAX_TOKENS), "max_seqlen=-1"),
        ],
    )
    def test_exceeded_bounds_on_a_cpu(self, bounds, message):
        with pytest.raises(ValueError, match=message):
            SequenceLayout.from_offsets(offsets(device="cpu"), *bounds)

    @pytest.mark.parametrize(
        "given",
        [
            torch.tensor([0.0, 5.0]),
            torch.tensor([False, True]),
            torch.tensor([0, 5], dtype=torch.int16),
            torch.tensor([[0, 5]], dtype=INT32),
            torch.tensor(0, dtype=INT32),
            torch.zeros(0, dtype=INT32),
            nested([2, 3]),
        ],
        ids=["float", "bool", "int16", "two-dimensional", "scalar", "empty", "nested"],
    )
    def test_malformed_offsets(self, given):
        with pytest.raises(ValueError, match="offsets"):
            BoundedLayout(given, 9, 9)

    def test_offsets_on_the_meta_device(self):
        with pytest.raises(ValueError, match="on the meta device"):
            SequenceLayout.from_offsets(torch.zeros(3, dtype=INT32, device="meta"), 9, 9)
        with pytest.raises(ValueError, match="on the meta device"):
            bounded(torch.zeros(3, dtype=INT32, device="meta"))

    def test_fake_offsets(self):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(offsets())
        with pytest.raises(ValueError, match="a FakeTensor"):
            bounded(fake)

    @pytest.mark.parametrize("bound", [-1, 2**31, 3.0, "3", None, torch.tensor(3)], ids=repr)
    @pytest.mark.parametrize("which", ["max_seqlen", "max_tokens"])
    def test_bounds_that_are_not_in_the_range_of_kernels(self, which, bound):
        with pytest.raises(ValueError, match=f"{which} must be an integer from 0 to 2147483647, got "):
            BoundedLayout(offsets(), **({"max_seqlen": 9, "max_tokens": 9} | {which: bound}))

    @pytest.mark.gpu
    @pytest.mark.parametrize("bounds", [{}, {"max_seqlen": MAX_SEQLEN}])
    def test_a_gpu_reads_the_lengths_without_both_bounds(self, bounds):
        layout = SequenceLayout.from_offsets(offsets().cuda(), **bounds)
        assert (type(layout), layout.total) == (SequenceLayout, TOKENS)

    @pytest.mark.gpu
    def test_max_seqlen_is_the_same_on_a_cpu_and_a_gpu(self):
        """The shape of a padded batch depends on it."""
        layouts = [SequenceLayout.from_offsets(offsets().to(device), 100, 20) for device in ("cpu", "cuda")]
        assert len({layout.max_seqlen for layout in layouts}) == 1
        shapes = {layout.pad(torch.zeros(20, 2, device=layout.device)).shape for layout in layouts}
        assert len(shapes) == 1


class TestAttributes:
    @both_dtypes
    def test_attributes_are_bounds(self, dtype):
        given = offsets(dtype)
        layout = bounded(given)
        assert isinstance(layout, BoundedLayout)
        assert not layout.knows_lengths
        assert (layout.total, layout.max_seqlen, layout.batch_size, layout.min_seqlen) == (17, 11, 4, 0)
        assert layout.sum_of_squares >= sum(n * n for n in LENGTHS)
        assert (layout.device, layout.padded_length, layout.padded_index) == (given.device, None, None)
        assert not layout.has_holes
        assert (layout.cu_seqlens.dtype, layout.offsets.dtype) == (INT32, INT64)
        assert layout.cu_seqlens.tolist() == layout.offsets.tolist() == given.tolist()
        assert layout.lengths.tolist() == LENGTHS
        assert layout.lengths.dtype == INT64
        assert "17" in repr(layout)
        assert "11" in repr(layout)

    def test_offsets_with_strides(self):
        given = offsets().repeat_interleave(2)[::2]
        layout = bounded(given)
        assert layout.cu_seqlens.is_contiguous()
        assert layout.cu_seqlens.tolist() == given.tolist()
        x = randn(MAX_TOKENS, 2, 16)
        assert torch.equal(attend(layout, x=x), attend(bounded(), x=x))

    @both_dtypes
    def test_rows_past_the_last_offset_have_the_last_sequence_and_position_0(self, dtype):
        layout, exact = bounded(offsets(dtype)), exact_layout()
        past = MAX_TOKENS - TOKENS
        assert layout.sequence_ids.tolist() == [*exact.sequence_ids.tolist(), *[BATCH - 1] * past]
        assert layout.position_ids.tolist() == [*exact.position_ids.tolist(), *[0] * past]
        assert layout.sequence_ids.dtype == layout.position_ids.dtype == INT64

    def test_empty_sequences_at_the_end(self):
        layout = bounded(tensor([0, 0, 3, 3, 3]), 4, 5)
        assert layout.sequence_ids.tolist() == [1, 1, 1, 3, 3]
        assert layout.position_ids.tolist() == [0, 1, 2, 0, 0]

    def test_no_sequences(self):
        layout = bounded(tensor([0]))
        assert (layout.batch_size, layout.total, layout.max_seqlen) == (0, 0, MAX_SEQLEN)
        assert layout.sequence_ids.tolist() == layout.position_ids.tolist() == layout.lengths.tolist() == []
        out, lse = attend(layout, return_lse=True)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert layout.pad(randn(3, 2)).shape == (0, MAX_SEQLEN, 2)
        assert layout.pack(randn(0, MAX_SEQLEN, 2)).shape == (0, 2)

    def test_same_lengths_only_if_they_are_one(self):
        given = offsets()
        layout = bounded(given)
        assert layout.same_lengths(layout)
        assert not layout.same_lengths(bounded(given))
        assert not layout.same_lengths(exact_layout())
        assert not exact_layout().same_lengths(layout)

    def test_extended(self):
        layout = bounded().extended(3)
        assert (layout.max_seqlen, layout.total) == (MAX_SEQLEN + 3, MAX_TOKENS + 3 * BATCH)
        assert layout.lengths.tolist() == [n + 3 for n in LENGTHS]

    def test_fill_past_end(self):
        filled = bounded().fill_past_end(torch.ones(MAX_TOKENS + 2, 3, device=DEVICE), -2.0)
        assert (filled[:TOKENS] == 1).all()
        assert (filled[TOKENS:] == -2).all()

    def test_what_needs_the_lengths_raises_an_error(self):
        layout, x = bounded(), randn(MAX_TOKENS, 3)
        for use in (
            lambda: layout.host_offsets,
            lambda: layout.to_nested(x),
            lambda: layout.reversed,
        ):
            with pytest.raises(LengthsUnknownError, match=r"needs the lengths.*without max_tokens"):
                use()
        assert issubclass(LengthsUnknownError, ValueError)

    def test_too_few_rows(self):
        with pytest.raises(ValueError, match="17 tokens: pass at least 17 rows"):
            attend(bounded(), x=randn(MAX_TOKENS - 1, 2, 16))
        with pytest.raises(ValueError, match="pass at least 17 rows"):
            bounded().pad(randn(MAX_TOKENS - 1, 2))


class TestPackAndPad:
    @both_dtypes
    def test_pad_and_pack_agree_with_an_exact_layout(self, dtype):
        layout, exact = bounded(offsets(dtype)), SequenceLayout.from_offsets(offsets(), max_seqlen=MAX_SEQLEN)
        values = randn(MAX_TOKENS + 2, 3, 2)
        for value in (0.0, -1.5):
            assert torch.equal(layout.pad(values, value), exact.pad(values, value))
        padded = randn(BATCH, MAX_SEQLEN + 2, 3)
        packed = layout.pack(padded)
        assert packed.shape == (MAX_TOKENS, 3)
        assert torch.equal(packed[:TOKENS], exact.pack(padded))
        assert (packed[TOKENS:] == 0).all()

    def test_garbage_past_the_end_and_in_the_padding_is_not_read(self):
        values = randn(MAX_TOKENS, 2)
        values[TOKENS:] = torch.nan
        padded = bounded().pad(values)
        assert padded.isfinite().all()
        is_token = torch.arange(MAX_SEQLEN, device=DEVICE) < tensor(LENGTHS)[:, None]
        padded[~is_token] = torch.nan
        packed = bounded().pack(padded)
        assert torch.equal(packed[:TOKENS], values[:TOKENS])
        assert (packed[TOKENS:] == 0).all()

    def test_gradients(self):
        values = randn(MAX_TOKENS, 2, requires_grad=True)
        grad = randn(BATCH, MAX_SEQLEN, 2)
        got = torch.autograd.grad(bounded().pad(values), values, grad)[0]
        assert torch.equal(got, bounded().pack(grad))
        padded = randn(BATCH, MAX_SEQLEN, 2, requires_grad=True)
        grad = randn(MAX_TOKENS, 2)
        got = torch.autograd.grad(bounded().pack(padded), padded, grad)[0]
        assert torch.equal(got, bounded().pad(grad))

    @pytest.mark.parametrize("shape", [(BATCH, MAX_SEQLEN - 1, 2), (BATCH + 1, MAX_SEQLEN, 2), (BATCH,)])
    def test_pack_of_a_wrong_shape(self, shape):
        with pytest.raises(ValueError, match=r"padded must be \(4, 11 or more"):
            bounded().pack(torch.zeros(shape, device=DEVICE))

    @pytest.mark.parametrize("given", [[0, 10, 12], [0, 5, 3], [0, 3, 40], [-9, 3, 5]], ids=str)
    def test_invalid_offsets_index_nothing_out_of_range(self, given):
        """On a GPU such an index ends the process."""
        layout = BoundedLayout(torch.tensor(given), 5, 12)
        assert layout.pad(torch.randn(12, 3)).shape == (2, 5, 3)
        assert layout.pack(torch.randn(2, 5, 3)).shape == (12, 3)
        assert layout.sequence_ids.min() >= 0
        assert layout.sequence_ids.max() < 2

    @pytest.mark.parametrize(("max_seqlen", "max_tokens"), [(5, 8), (4, 12)])
    def test_results_are_nan_if_a_bound_is_exceeded(self, max_seqlen, max_tokens):
        layout = BoundedLayout(torch.tensor([0, 5, 10]), max_seqlen, max_tokens)
        assert layout.pad(torch.randn(max_tokens, 3)).isnan().all()
        assert layout.pack(torch.randn(2, max_seqlen, 3)).isnan().all()


class TestCopies:
    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies(self, copier):
        copied = copier(bounded())
        assert (copied.total, copied.max_seqlen, copied.lengths.tolist()) == (MAX_TOKENS, MAX_SEQLEN, LENGTHS)
        assert SequenceLayout.from_offsets(copied.operator_offsets) is copied

    @both_dtypes
    def test_inference_mode(self, dtype):
        x = randn(MAX_TOKENS, 2, 16)
        with torch.inference_mode():
            layout = bounded(offsets(dtype))
            out = attend(layout, x=x)
            padded = layout.pad(x)
        leaf = x.clone().requires_grad_()
        again = attend(layout, x=leaf)
        again.sum().backward()
        assert torch.equal(out, again)
        assert torch.equal(padded, layout.pad(x))
        assert leaf.grad.isfinite().all()
        assert copy.deepcopy(layout).lengths.tolist() == LENGTHS


class TestLifetimes:
    """Nothing is kept for longer than the layout, and `cu_seqlens` leads to its layout."""

    @pytest.fixture(autouse=True, scope="class")
    def _collect_new_objects_only(self):
        """gc.collect() takes long if it looks at all objects of other tests."""
        gc.collect()
        gc.freeze()

    @both_dtypes
    def test_cu_seqlens_find_the_layout(self, dtype):
        layout = bounded(offsets(dtype))
        assert SequenceLayout.from_offsets(layout.operator_offsets) is layout

    @both_dtypes
    def test_layout_is_freed_after_forward_and_backward(self, dtype):
        gc.collect()
        before, given = len(_entries), offsets(dtype)
        layout = bounded(given)
        x = randn(MAX_TOKENS, 2, 16, requires_grad=True)
        attend(layout, x=x).sum().backward()
        layout.position_ids, layout.lengths, layout.pad(x)
        freed = weakref.ref(layout), weakref.ref(given)
        del layout, given
        gc.collect()
        assert [x() for x in freed] == [None, None]
        assert len(_entries) == before

    @pytest.mark.parametrize("kept_side", ["queries", "keys"])
    @pytest.mark.parametrize("other_kind", ["bounded", "exact"])
    def test_layout_does_not_keep_others_of_its_calls(self, kept_side, other_kind):
        """An encoder's layout may be used with many layouts of decoders."""
        kept, freed = bounded(), []
        for _ in range(3):
            other = bounded() if other_kind == "bounded" else exact_layout()
            attend(*((kept, other) if kept_side == "queries" else (other, kept)))
            freed.append(weakref.ref(other))
            del other
        gc.collect()
        assert [x() for x in freed] == [None] * 3

    def test_layout_of_freed_offsets(self):
        given = offsets()
        layout = bounded(given)
        cu_seqlens = layout.cu_seqlens
        del layout
        gc.collect()
        assert SequenceLayout.from_offsets(cu_seqlens).host_offsets.diff().tolist() == LENGTHS

    def test_exact_layout_of_the_same_offsets(self):
        """The caller asks for the lengths, so they are read."""
        given = offsets()
        exact = SequenceLayout.from_offsets(given)
        layout = bounded(given)
        attend(layout, exact)
        assert SequenceLayout.from_offsets(given).knows_lengths
        assert SequenceLayout.from_offsets(layout.operator_offsets) is layout

    def test_tensors_of_operators_are_freed(self):
        """The layout that an operator makes is kept with the tensor that it got, and does not keep this tensor."""
        gc.collect()
        before, given = len(_entries), offsets()
        layout = BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS)
        assert BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS) is layout
        assert BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS + 1) is not layout
        attend(layout)
        freed = weakref.ref(given)
        del layout, given
        gc.collect()
        assert freed() is None
        assert len(_entries) == before

    def test_two_layouts_of_the_same_offsets_with_other_bounds(self):
        """An operator must get the layout that was passed, not the last one that was made."""
        given, x = offsets(), randn(MAX_TOKENS, 2, 16)
        wide, narrow = bounded(given), bounded(given, 3, 9)
        assert not attend(wide, x=x).isnan().any()
        with PassThrough() as mode:
            seen = attend(wide, x=x)
        assert mode.operators
        torch.testing.assert_close(seen, attend(wide, x=x))
        assert attend(narrow, x=x[:9]).isnan().all()


class TestChangedOffsets:
    @both_dtypes
    @pytest.mark.parametrize("was_used", [False, True], ids=["unused", "used"])
    @pytest.mark.parametrize("use", ["attention", "pack", "pad", "keys", "lengths", "position_ids", "sequence_ids"])
    def test_layout_of_changed_offsets_is_refused(self, use, was_used, dtype):
        given = offsets(dtype)
        layout = bounded(given)
        calls = {
            "attention": lambda: attend(layout),
            "pack": lambda: layout.pack(randn(BATCH, MAX_SEQLEN, 2)),
            "pad": lambda: layout.pad(randn(MAX_TOKENS, 2)),
            "lengths": lambda: layout.lengths,
            "position_ids": lambda: layout.position_ids,
            "sequence_ids": lambda: layout.sequence_ids,
            "keys": lambda: attend(exact_layout(), layout),
        }
        if was_used:
            calls[use]()
        given[1] = 3
        with pytest.raises(ValueError, match=r"changed in place after it was made: make a new layout"):
            calls[use]()

    @both_dtypes
    @pytest.mark.parametrize("side", ["queries", "keys"])
    def test_offsets_changed_before_the_backward(self, side, dtype):
        given, x = offsets(dtype), randn(MAX_TOKENS, 2, 16, requires_grad=True)
        layout, exact = bounded(given), exact_layout()
        out = attend(*((layout, exact) if side == "queries" else (exact, layout)), x=x)
        given[1] = 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_changed_offsets_do_not_find_the_layout(self):
        given = offsets()
        layout = bounded(given)
        given[1] = 3
        found = SequenceLayout.from_offsets(layout.operator_offsets)
        assert found is not layout
        assert found.lengths.tolist() == [3, 2, 1, 7]

    def test_keys_without_versions_are_not_cached(self):
        """Nothing tells whether their offsets were changed, so no value that depends on them is kept."""
        queries = bounded()
        with torch.inference_mode():
            keys = [bounded(tensor(given)) for given in ([0, 2, 2, 3, 9], [0, 1, 5, 6, 6])]
        found = [queries.cached("a key", lambda one=one: one, one) for one in (*keys, queries)]
        assert [one is want for one, want in zip(found, (*keys, queries), strict=True)] == [True] * 3
        x = randn(MAX_TOKENS, 2, 16)
        with torch.inference_mode():
            for one in keys:
                got = attend(queries, one, x)
                want = attend(bounded(), bounded(one.operator_offsets.clone()), x)
                assert torch.equal(got, want)

    def test_offsets_that_a_graph_of_torch_compile_writes(self, monkeypatch):
        """A replay changes them without a new version, so nothing about them is kept."""
        monkeypatch.setattr("nt_attention.layouts.bounded.is_replayed", lambda tensor: True)
        given, x = offsets(), randn(MAX_TOKENS, 2, 16)
        layout = BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS)
        attend(layout, x=x)
        given.data.copy_(tensor([0, 2, 2, 3, 9]))
        for one in (layout, BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS)):
            assert torch.equal(attend(one, x=x), attend(bounded(given.clone()), x=x))
            assert one.lengths.tolist() == [2, 0, 1, 6]


class TestBackends:
    def test_explain_gives_the_reason(self):
        x = randn(MAX_TOKENS, 2, 16)
        explanation = nta.explain(x, x, x, bounded())
        for name in ("cpu", "reference"):
            assert any("without max_tokens" in why for why in explanation.reasons[name])
        assert explanation.reasons["token_tiled"] == ()
        assert explanation.chosen not in ("cpu", "reference")

    def test_bounded_and_exact_layouts_of_other_batch_sizes(self):
        with pytest.raises(ValueError, match="4 sequences and key_layout 2"):
            attend(bounded(), SequenceLayout.from_lengths([5, 3], device=DEVICE))

    @pytest.mark.parametrize("dtype", sweep_except([INT32, INT64], INT64), ids=str)
    def test_compiled_forward_and_backward(self, dtype, fresh_compiler):
        """On a GPU, `from_offsets` with both bounds makes such a layout in a graph. The lengths may change."""
        given, x = offsets(dtype), randn(MAX_TOKENS, 2, 16, requires_grad=True)

        def function(x, given):
            layout = TracedLayout(given, MAX_SEQLEN, MAX_TOKENS)
            out, lse = attend(layout, layout.extended(0), x=x, is_causal=True, return_lse=True)
            return out.sin() + attend(layout, x=x), lse[:TOKENS].cos()

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for lengths in (LENGTHS, [3, 1, 7, 2], LENGTHS):
            given.copy_(tensor([0, *lengths]).cumsum(0))
            one, two = (
                torch.autograd.grad([y.square().sum() for y in f(x, given)], x)[0] for f in (compiled, function)
            )
            torch.testing.assert_close(one, two)
            assert (one[sum(lengths) :] == 0).all()

    def test_graph_has_one_operator_that_reads_nothing(self, fresh_compiler):
        """So a compiler may capture it in a CUDA graph."""
        given, x, graphs = offsets(), randn(MAX_TOKENS, 2, 16), []

        def function(x, given):
            return attend(TracedLayout(given, MAX_SEQLEN, MAX_TOKENS), x=x)

        def keep(graph, _):
            graphs.append(graph.graph)
            return graph.forward

        torch.compile(function, backend=keep, fullgraph=True)(x, given)
        found = [node.target for node in graphs[0].nodes if "nt_attention" in str(node.target)]
        assert [x.name() for x in found] == ["nt_attention::bounded_forward"]
        assert not any(torch.Tag.cudagraph_unsafe in x.tags for x in found)
        assert torch.Tag.cudagraph_unsafe in torch.ops.nt_attention.attention_forward.default.tags

    def test_one_side_with_lengths_in_a_graph(self, fresh_compiler):
        layout, exact = bounded(), exact_layout()
        compiled = torch.compile(lambda x: attend(layout, exact, x=x), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="make both layouts with max_seqlen and max_tokens"):
            compiled(randn(MAX_TOKENS, 2, 16))

    def test_dropout_in_a_graph_needs_a_backend(self, fresh_compiler):
        layout, x = bounded(), randn(MAX_TOKENS, 2, 16)

        def function(x, backend):
            return nta.varlen_attention(x, x, x, layout, dropout_p=0.5, backend=backend)

        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert (compiled(x, "token_tiled") != attend(layout, x=x)).any()
        with pytest.raises(Exception, match="needs a backend by name"):
            compiled(x, "auto")

    @pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "added keys"])
    def test_module_with_a_bounded_layout(self, options):
        module = nta.VarlenMultiheadAttention(32, 2, batch_first=True, device=DEVICE, **options)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = randn(MAX_TOKENS, 32)
        with nta.use_backend("token_tiled"):
            got, want = (module(x, x, x, layout=y, need_weights=False)[0] for y in (bounded(), exact_layout()))
        torch.testing.assert_close(got[:TOKENS], want[:TOKENS])

    def test_weights_need_the_lengths(self):
        module, x = nta.VarlenMultiheadAttention(32, 2, batch_first=True, device=DEVICE), randn(MAX_TOKENS, 32)
        for more in ({"need_weights": True}, {"attn_mask": torch.zeros(12, 12, dtype=torch.bool, device=DEVICE)}):
            with nta.use_backend("token_tiled"), pytest.raises(LengthsUnknownError, match="need the lengths"):
                module(x, x, x, layout=bounded(), **more)

    @covering(
        {
            "more": [{"rotary": nta.Rotary()}, {"add_bias_kv": True}, {"add_zero_attn": True}, {}],
            "side": ["both", "keys"],
            "compiled": [True, False, False, False],
        }
    )
    def test_module_with_invalid_offsets(self, more, side, compiled, fresh_compiler):
        """All outputs are NaN, and no index is out of range. Added keys do not make the offsets valid."""
        module = nta.VarlenMultiheadAttention(32, 2, batch_first=True, device=DEVICE, backend="token_tiled", **more)
        attend = torch.compile(module, backend="aot_eager") if compiled else module
        for given in ([0, 5, 3, 3, 3], [0, 5, 4, 4, 4], [0, 5, 1000, 1000, 1000], [0, -9, 5, 6, 6]):
            x, invalid = randn(MAX_TOKENS, 32), bounded(tensor(given))
            layout = bounded() if side == "keys" else invalid
            with torch.no_grad():
                out, _ = attend(x, x.clone(), x.clone(), layout=layout, key_layout=invalid)
            assert out[: TOKENS if side == "keys" else None].isnan().all(), given

    @pytest.mark.parametrize("kind", ["bounds", "lengths"])
    def test_parameters_get_no_nan_from_rows_past_the_end(self, kind):
        module = nta.VarlenMultiheadAttention(32, 2, batch_first=True, device=DEVICE, backend="token_tiled")
        layout, x = bounded() if kind == "bounds" else exact_layout(), randn(MAX_TOKENS, 32)
        want = torch.autograd.grad(module(x, x, x, layout=layout)[0].sum(), list(module.parameters()))
        x[TOKENS:] = torch.nan
        got = torch.autograd.grad(module(x, x, x, layout=layout)[0].sum(), list(module.parameters()))
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two)

    def test_rows_past_the_bound_are_nan_if_offsets_are_not_valid(self):
        x = randn(MAX_TOKENS + 3, 2, 16, requires_grad=True)
        layout = bounded(tensor([0, 5, 3, 3, 3]))
        out, lse = attend(layout, x=x, return_lse=True, sinks=randn(2))
        assert out.isnan().all()
        assert lse.isnan().all()
        assert torch.autograd.grad(out.sum(), x)[0].isnan().all()
        _, lse = attend(bounded(), layout, x=x, return_lse=True, sinks=randn(2))
        assert lse.isnan().all()

    def test_from_offsets_with_other_arguments(self):
        given = offsets()
        made = BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS)  # as on a GPU
        assert SequenceLayout.from_offsets(given).knows_lengths
        assert SequenceLayout.from_offsets(given, max_seqlen=20).max_seqlen == 20
        assert BoundedLayout.of(given, MAX_SEQLEN, MAX_TOKENS) is made

"""Attention to keys in pools: as with packed keys, on every backend that supports it.

Without a GPU, Triton's interpreter runs `split_kv`.
"""

import dataclasses

import pytest
import torch
from pools import FORMS, cpu_only, make
from sweeps import covering, sweep_except
from token_tiled_cases import DEVICE, GPU, IGNORED_WARNINGS
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import nt_attention as nta
from nt_attention.kernels.backend import COMMON, Hooks
from nt_attention.kernels.backends import reference
from nt_attention.kernels.split_kv import launches
from nt_attention.layouts.bounded import BoundedLayout

pytestmark = IGNORED_WARNINGS

BACKENDS = ["split_kv", "reference"] if GPU else ["split_kv", "cpu", "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
CHUNK = 256

# lengths of queries and of keys
DECODE = ([1] * 6, [CHUNK, 3, 0, 1, CHUNK + 1, 2 * CHUNK - 1])
MIXED = ([1, 3, 0, 20, 5, 2], [2 * CHUNK + 7, 3, 5, 33, 1, 0])
SHORT = ([1, 3, 0, 2], [CHUNK + 7, 5, 3, 0])
FEW_HEADS = {"heads": 2, "kv_heads": 1}  # Triton's interpreter is slow
BATCHES = {"decode": DECODE, "mixed": MIXED}


@covering({"form": FORMS, "page": [1, 16, CHUNK], "which": BATCHES})
def test_forms_and_sizes_of_pages(which, form, page):
    """Options and masks are rows of the attention table."""
    make(*BATCHES[which], page=page, form=form).check("split_kv", window_size=(100, 0))


@covering({"edge": [-1, 0, 1], "page": [3, 16]})
def test_lengths_at_the_edges_of_pages_and_chunks(page, edge):
    lengths = [page + edge, 2 * page + edge, CHUNK + edge, 3 * CHUNK + edge]
    make([1] * 4, lengths, page=page, kv_heads=1).check("split_kv")


@covering(
    {
        "sizes": [
            {"heads": 71, "kv_heads": 1},
            {"head_dim": 40, "value_dim": 24},
        ]
    }
)
def test_heads_and_head_dims(sizes):
    make([1, 2, 9], [300, 5, 17], **sizes).check("split_kv", is_causal=True)


def test_window_that_begins_in_another_block_for_later_queries():
    make([20, 3], [170, 40], heads=2).check("split_kv", window_size=(30, 3))


def test_more_than_one_tile_of_queries():
    make([70, 1, 33], [290, 300, 33], heads=4, kv_heads=2).check("split_kv", is_causal=True)


@pytest.mark.parametrize("which", sweep_except(BATCHES, "decode"))
def test_more_chunks_than_splits(which, monkeypatch):
    """Chunks are split in pairs and fours."""
    monkeypatch.setattr("nt_attention.kernels.split_kv.launches._MOST_SPLITS", 2)
    lengths, key_lengths = BATCHES[which]
    make(lengths, [5 * n for n in key_lengths], **FEW_HEADS).check("split_kv", is_causal=True)


def test_fewer_splits_in_a_large_batch(monkeypatch):
    monkeypatch.setattr("nt_attention.kernels.split_kv.launches._MOST_PART_ROWS", 48)
    make(*DECODE).check("split_kv")


def test_more_sequences_than_a_program_reads_at_once(monkeypatch):
    monkeypatch.setattr("nt_attention.kernels.split_kv.launches.BLOCKS", (2, 4))
    make([1, 2, 0, 1, 1, 3, 1, 1, 0, 1], [5, 300, 4, 0, 1, 260, 3, 2, 9, 31]).check("split_kv", is_causal=True)


@pytest.mark.parametrize("form", sweep_except(FORMS, "indices"))
def test_same_bits_alone_and_in_a_batch(form):
    case = make(*MIXED, form=form)
    options = {"is_causal": True, "batch_invariant": True, "backend": "split_kv", "return_lse": True}
    out, lse = nta.varlen_attention(case.query, *case.pools, case.layout, case.paged, **options)
    keys = [x.flatten(0, 1) if x.dim() == 4 else x for x in case.pools]
    for b, (begin, end) in enumerate(zip(case.layout.offsets[:-1], case.layout.offsets[1:], strict=True)):
        rows = torch.arange(case.key_layout.offsets[b], case.key_layout.offsets[b + 1], device=DEVICE)
        where = case.paged.rows(case.key_layout.sequence_ids[rows], case.key_layout.position_ids[rows])
        pools = [x[where] if len(where) else x[:1] for x in keys]  # in one piece
        alone = nta.PagedLayout.from_slots(
            torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([len(where)], device=DEVICE), 700
        )
        layout = nta.SequenceLayout.from_lengths([int(end - begin)], device=DEVICE)
        one, its_lse = nta.varlen_attention(case.query[begin:end], *pools, layout, alone, **options)
        assert torch.equal(one, out[begin:end])
        assert torch.equal(its_lse, lse[begin:end])


@pytest.mark.parametrize("form", sweep_except(FORMS, "indices"))
def test_parts_of_batch_invariant_calls_are_bounded(form, monkeypatch):
    """The sequences of a batch run in several launches, with the same bits."""
    queries, keys = [1, 2, 0, 1, 3, 9, 1], [513, 5, 4, 0, 260, 17, 300]
    case = make(queries, keys, form=form)
    slopes = torch.linspace(0, 1, 28, device=DEVICE).view(7, 4)
    options = {"is_causal": True, "batch_invariant": True, "backend": "split_kv", "alibi_slopes": slopes}
    want = nta.varlen_attention(case.query, *case.pools, case.layout, case.paged, **options)
    rows, make_work = [], launches.SplitWork.make

    def recorded(*arguments):
        work = make_work(*arguments)
        rows.append(work.part_lse.numel())
        return work

    monkeypatch.setattr(launches, "_MOST_PART_ROWS", 100)
    monkeypatch.setattr(launches.SplitWork, "make", recorded)
    assert torch.equal(nta.varlen_attention(case.query, *case.pools, case.layout, case.paged, **options), want)
    assert len(rows) > 2
    assert max(rows) <= 100


@every_backend
def test_lengths_and_pages_that_change_between_calls_are_seen(backend):
    case = make([1, 1], [300, 7])
    with torch.inference_mode():
        case.check(backend)
        case.paged.lengths.sub_(5)
        keys = torch.cat([x for part in case.keys.split([300, 7]) for x in [part[:-5]]])
        values = torch.cat([x for part in case.values.split([300, 7]) for x in [part[:-5]]])
        case.keys, case.values = keys, values
        case.key_layout = nta.SequenceLayout.from_lengths([295, 2], device=DEVICE)
        case.check(backend)
        key, value = case.pools
        table = case.paged.table
        key[table[0, 0]], key[table[1, 0]] = key[table[1, 0]].clone(), key[table[0, 0]].clone()
        value[table[0, 0]], value[table[1, 0]] = value[table[1, 0]].clone(), value[table[0, 0]].clone()
        table[:, 0] = table[:, 0].flip(0).clone()
        case.check(backend)


@every_backend
def test_pools_with_strides(backend):
    """Keys and values of one cache (pages, 2, page, G, D), and heads before rows."""
    case = make(*DECODE)
    key, value = case.pools
    cache = torch.stack([key, value], 1)
    case.pools = cache.unbind(1)
    case.check(backend)
    case.pools = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    case.check(backend)


def test_rows_past_the_last_query():
    case = make([1, 2], [5, 300])
    case.query = torch.cat([case.query, case.query.new_full((2, 4, 16), torch.nan)])
    out, lse = case.solve("split_kv")
    assert (out[3:] == 0).all()
    assert (lse[3:] == -torch.inf).all()
    assert out[:3].isfinite().all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_queries(lengths):
    table = torch.zeros(len(lengths), 2, dtype=torch.int32, device=DEVICE)
    paged = nta.PagedLayout(table, table[:, 0] + 1, 4)
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    pool, query = torch.randn(3, 4, 2, 16, device=DEVICE), torch.randn(2, 4, 16, device=DEVICE)
    for backend in BACKENDS:
        out, lse = nta.varlen_attention(query, pool, pool, layout, paged, backend=backend, return_lse=True)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


WRONG = {
    "negative length": ("lengths", -1),
    "longer than max_seqlen": ("lengths", 10_000),
    "negative page": ("table", -1),
    "page past the end": ("table", 10_000),
    "largest page": ("table", 2**31 - 1),
}


class TestInvalid:
    """Lengths and pages that only the device knows can't raise an error: they give NaN in their sequence."""

    @pytest.mark.parametrize("page", [16])
    @pytest.mark.parametrize(
        "which", sweep_except(WRONG, "longer than max_seqlen", "negative page", "page past the end")
    )
    def test_split_kv(self, which, page):
        case = make([1, 2, 1], [300, 290, 5], page=page, **FEW_HEADS)
        want, _ = case.solve("split_kv")
        name, value = WRONG[which]
        (case.paged.lengths if name == "lengths" else case.paged.table[:, 0])[1] = value
        out, lse = case.solve("split_kv")
        assert out[1:3].isnan().all()
        assert lse[1:3].isnan().all()
        assert torch.equal(out[[0, 3]], want[[0, 3]])

    @pytest.mark.parametrize(
        "offsets", [[5, 6, 8], [0, 1, 4], [-2, 1, 3], [0, 3, 1], [10**7, 10**7 + 1, 10**7 + 3]], ids=str
    )
    def test_offsets_of_indices(self, offsets):
        """Or a sequence would read the pages of another one, or memory that is no page."""
        case = make([1, 1], [1, 2], form="indices", page=1)
        want, _ = case.solve("split_kv")
        given = torch.tensor(offsets, device=DEVICE)
        lengths = torch.tensor([1, 2], device=DEVICE)
        case.paged = nta.PagedLayout.from_indices(case.paged.table, given, lengths, 1, 3)
        out, _ = case.solve("split_kv")
        valid = [0 <= a <= b <= 3 and n <= b - a for n, a, b in zip([1, 2], offsets, offsets[1:], strict=False)]
        for i, is_valid in enumerate(valid):
            assert torch.equal(out[i], want[i]) if is_valid else out[i].isnan().all()
        if not GPU:
            with pytest.raises(ValueError, match=r"its offsets give it pages for .*: pass offsets from 0 to 3"):
                case.solve("cpu")

    @pytest.mark.parametrize("page", [1, 16])
    def test_more_keys_than_pages_of_the_sequence(self, page):
        case = make([1, 1], [2 * page, 3 * page], form="indices", page=page)
        case.paged.given_lengths[0] += 1
        out, _ = case.solve("split_kv")
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        if not GPU:
            with pytest.raises(ValueError, match="sequence 0 has"):
                case.solve("reference")

    def test_slots_past_the_end(self):
        case = make([1, 1], [5, 7], form="slots")
        case.paged.table[1] = len(case.pools[0]) - 3
        out, _ = case.solve("split_kv")
        assert out[0].isfinite().all()
        assert out[1].isnan().all()

    @cpu_only
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    @pytest.mark.parametrize(
        ("which", "message"),
        [
            ("negative length", "length -1 of sequence 1 must be from 0 to max_seqlen=320"),
            ("longer than max_seqlen", "length 10000 of sequence 1"),
            ("negative page", "the table has the page -1 for a key"),
            ("page past the end", "but the pool"),
        ],
    )
    def test_an_error_on_a_cpu(self, backend, which, message):
        case = make([1, 2, 1], [300, 290, 5])
        name, value = WRONG[which]
        (case.paged.lengths if name == "lengths" else case.paged.table[:, 0])[1] = value
        with pytest.raises(ValueError, match=message):
            case.solve(backend)

    def test_invalid_offsets_of_queries(self):
        case = make([1, 2, 1], [300, 290, 5])
        case.layout = BoundedLayout(torch.tensor([0, 3, 2, 4], dtype=torch.int32, device=DEVICE), 3, 4)
        out, lse = case.solve("split_kv")
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("form", sweep_except(FORMS, "indices"))
def test_queries_whose_lengths_only_the_device_knows(form):
    case = make(*MIXED, form=form)
    want, want_lse = case.solve("split_kv", is_causal=True)
    rows = len(case.query)
    case.layout = BoundedLayout(case.layout.cu_seqlens.clone(), 40, rows + 5)
    case.query = torch.cat([case.query, torch.randn(5, 4, 16, device=DEVICE)])
    out, lse = case.solve("split_kv", is_causal=True)
    torch.testing.assert_close(out[:rows], want)
    torch.testing.assert_close(lse[:rows], want_lse)
    assert (out[rows:] == 0).all()
    assert (lse[rows:] == -torch.inf).all()


class TestGraphs:
    @pytest.mark.parametrize("backend", sweep_except(BACKENDS, "split_kv"))
    def test_torch_compile(self, backend, fresh_compiler):
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter, fullgraph=True, dynamic=True)
        def attend(query, key, value, offsets, table, lengths, page):
            layout = nta.SequenceLayout.from_offsets(offsets)
            paged = nta.PagedLayout(table, lengths, page)
            return nta.varlen_attention(
                2 * query, key, value, layout, paged, is_causal=True, backend=backend, return_lse=True
            )

        for lengths in (SHORT, ([1, 1, 4], [300, 2, 9])):
            case = make(*lengths, **FEW_HEADS)
            got = attend(case.query, *case.pools, case.layout.cu_seqlens, case.paged.table, case.paged.lengths, 16)
            case.query = 2 * case.query
            for one, two in zip(got, case.solve(backend, is_causal=True), strict=True):
                torch.testing.assert_close(one, two)
        assert counter.frame_count <= 2

    def test_layouts_of_outside(self, fresh_compiler):
        case = make(*SHORT, **FEW_HEADS)
        attend = torch.compile(nta.varlen_attention, backend="aot_eager", fullgraph=True)
        got = attend(case.query, *case.pools, case.layout, case.paged, backend="split_kv")
        torch.testing.assert_close(got, case.solve("split_kv")[0])
        case.paged.lengths[1] = 1
        got = attend(case.query, *case.pools, case.layout, case.paged, backend="split_kv")
        torch.testing.assert_close(got, case.solve("split_kv")[0])

    @pytest.mark.gpu
    def test_captured_while_lengths_grow(self):
        case = make([1] * 6, [CHUNK, 3, 100, 1, CHUNK + 1, 2 * CHUNK - 1], spare=4)
        key, value = case.pools
        key.nan_to_num_()
        value.nan_to_num_()
        lengths = case.paged.lengths
        case.solve("split_kv")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = case.solve("split_kv", is_causal=True)
            lengths.add_(1)
        for _ in range(20):
            before = lengths.clone()
            graph.replay()
            after = lengths.clone()
            lengths.copy_(before)
            want, want_lse = case.solve("split_kv", is_causal=True)
            assert torch.equal(out, want)
            assert torch.equal(lse, want_lse)
            lengths.copy_(after)


class TestErrors:
    def test_gradients(self):
        case = make([1, 2], [5, 7])
        case.query.requires_grad_()
        with pytest.raises(ValueError, match=r"keys in pools are for inference, .* in\s+torch.no_grad\(\)"):
            case.solve("reference")
        with torch.no_grad():
            case.solve("reference")

    @pytest.mark.parametrize("backend", ["split_kv", "reference"])
    def test_forward_mode(self, backend):
        case = make([1, 2], [5, 7])
        key, value = case.pools
        with pytest.raises(ValueError, match="or forward-mode AD is active"):
            torch.func.jvp(
                lambda x: nta.varlen_attention(case.query, key, x, case.layout, case.paged, backend=backend),
                (value,),
                (value,),
            )

    @pytest.mark.parametrize("backend", ["split_kv", "reference", "auto"])
    def test_gradients_of_a_recorded_graph(self, backend):
        case = make([1, 2], [5, 7])

        class Program(torch.nn.Module):
            def forward(self, query, offsets):
                layout = nta.SequenceLayout.from_offsets(offsets)
                return nta.varlen_attention(query, *case.pools, layout, case.paged, backend=backend)

        graph = torch.export.export(Program(), (case.query, case.layout.cu_seqlens)).module()
        with torch.no_grad():
            torch.testing.assert_close(graph(case.query, case.layout.cu_seqlens), case.solve(backend)[0])
        with pytest.raises(RuntimeError, match="keys in pools are for inference"):
            graph(case.query.requires_grad_(), case.layout.cu_seqlens).sum().backward()

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"relative": True}, ValueError, "relative biases are not supported with a PagedLayout"),
            ({"paged": 3}, ValueError, "layout has 2 sequences and key_layout 3"),
            *[
                ({"key": shape, "value": shape}, ValueError, "key must be a pool")
                for shape in ((4, 8, 2, 16), (5, 2), (2, 2, 16, 2, 16))
            ],
            ({"key": (4, 16, 2, 16), "value": (3, 16, 2, 16)}, ValueError, "key and value must have the same rows"),
            ({"form": "slots", "key": (4, 16, 2, 16), "value": (4, 16, 2, 16)}, ValueError, r"\(N, G, D\) for slots"),
            ({"nested": True}, TypeError, "query is nested, key is a plain tensor"),
        ],
        ids=str,
    )
    def test_refused_calls(self, changes, error, words):
        case = make([1, 2], [5, 7], form=changes.get("form", "table"))
        case.solve("reference")
        key, value = (
            torch.randn(changes[name], device=DEVICE) if name in changes else pool
            for name, pool in zip(("key", "value"), case.pools, strict=True)
        )
        paged = make([1, 2, 1], [5, 7, 1]).paged if "paged" in changes else case.paged
        bias = nta.RelativeBias(torch.zeros(3, dtype=torch.int64), torch.randn(4, 5)) if "relative" in changes else None
        query = case.layout.to_nested(case.query) if "nested" in changes else case.query
        layout = None if "nested" in changes else case.layout
        with pytest.raises(error, match=words):
            nta.varlen_attention(query, key, value, layout, paged, relative=bias)

    def test_pool_that_is_not_contiguous_in_the_head_dim(self):
        case = make([1, 2], [5, 7])
        case.pools = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in case.pools)
        with pytest.raises(ValueError, match="key must be contiguous in its last dimension"):
            case.solve("split_kv")
        with pytest.raises(ValueError, match="key must be contiguous in its last dimension"):
            nta.explain(case.query, *case.pools, case.layout, case.paged)

    def test_strides_of_a_head_dim_of_1(self):
        case = make([1, 2], [5, 7], head_dim=1)
        case.pools = tuple(x.as_strided(x.shape, (*x.stride()[:-1], 7)) for x in case.pools)
        case.check("split_kv")

    def test_backends_that_do_not_support_pools(self):
        case = make([1, 2], [5, 7])
        explanation = nta.explain(case.query, *case.pools, case.layout, case.paged)
        assert "keys in a pool are not supported" in " ".join(explanation.reasons["token_tiled"])
        assert not explanation.reasons["reference"]
        assert GPU or explanation.chosen == "cpu"

    def test_gradients_on_split_kv(self):
        x = torch.randn(5, 2, 16, requires_grad=True, device=DEVICE)
        layout = nta.SequenceLayout.from_lengths([2, 3], device=DEVICE)
        with pytest.raises(ValueError, match=r"gradients are not supported: call it in torch\.no_grad"):
            nta.varlen_attention(x, x, x, layout, backend="split_kv")


class TestPackedKeys:
    """`split_kv` takes packed keys too."""

    def test_bounds(self):
        case = make(*MIXED)
        layout = BoundedLayout(case.layout.cu_seqlens.clone(), 40, len(case.query))
        key_layout = BoundedLayout(case.key_layout.cu_seqlens.clone(), 600, len(case.keys))
        given = (case.query, case.keys, case.values, layout, key_layout)
        got = nta.varlen_attention(*given, backend="split_kv", is_causal=True)
        torch.testing.assert_close(got, case.exact(is_causal=True)[0].float(), rtol=1e-5, atol=1e-5)
        key_layout = BoundedLayout(case.key_layout.cu_seqlens.clone(), 50, len(case.keys))  # one is longer
        got = nta.varlen_attention(*given[:4], key_layout, backend="split_kv", is_causal=True)
        assert got.isnan().all()


def test_autocast_casts_the_query_only():
    case = make([1, 2], [5, 7])
    want, _ = case.solve("cpu" if not GPU else "split_kv")
    half = case.query.bfloat16()
    with torch.autocast(DEVICE.type, torch.bfloat16), PoolsAreNotCast(case.pools[0].shape):
        out = nta.varlen_attention(half, *case.pools, case.layout, case.paged)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0.1, atol=0.1)


class PoolsAreNotCast(TorchDispatchMode):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._to_copy.default or args[0].shape != self.shape
        return func(*args, **(kwargs or {}))


def test_backend_that_needs_adapters_gets_gathered_keys():
    ran = []

    def forward(query, key, value, call):
        ran.append("pools")
        layout, (key, value) = call.paged.gather(key, value)
        return reference.forward(query, key, value, call._replace(key_layout=layout))

    def packed_forward(*inputs):
        ran.append("packed")
        return reference.forward(*inputs)

    case = make([1, 2], [5, 7])
    mine = nta.Backend(
        *("mine", "a test", lambda: None, packed_forward),
        features=COMMON | {"paged"},
        traits={"lower_right_only"},
        hooks=Hooks(paged_forward=forward),
    )
    with nta.register_backend(mine):
        case.check("mine", is_causal=True)
        case.check("mine", is_causal=True, causal_alignment="upper_left")
    for change in ({"head_dims": nta.HeadDims(multiple=32)}, {"traits": {"no_fully_masked_rows"}}):
        with nta.register_backend(dataclasses.replace(mine, **change)):
            case.check("mine")
    assert ran == ["pools", "packed", "packed", "packed"]


@cpu_only
def test_keys_in_one_piece_are_not_copied():
    case = make(*DECODE, form="slots")
    with PoolsAreNotRead(case.pools[0].shape):
        case.check("cpu")
    case = make([1, 1], [300, 310])
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    case.paged = nta.PagedLayout(table, case.paged.lengths, 16)
    case.pools = tuple(torch.randn(640, 2, 16) for _ in range(2))
    case.keys, case.values = (torch.cat([x[:300], x[320:630]]) for x in case.pools)
    with PoolsAreNotRead(case.pools[0].shape):
        case.check("cpu")


class PoolsAreNotRead(TorchDispatchMode):
    """No operator copies rows of pools of this shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor):
            assert args[0].shape != self.shape
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("apart", ["pages", "rows"])
def test_offsets_exceed_32_bits(apart):
    """Of pages, or of rows in a page that is longer than a block of keys. Memory between them is never touched."""
    page, stride, pages = (1, 2**29, 5) if apart == "pages" else (96, 33_000_000, 1)
    try:
        memory = torch.empty(max(page, pages) * stride + 16, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("there is no memory")
    pool = memory.as_strided((pages, page, 1, 16), (stride if page == 1 else page * stride, stride, 16, 1))
    pool.copy_(torch.randn(pages, page, 1, 16))
    table = torch.tensor([[4, 0, 3, 1]] if page == 1 else [[0]], device=DEVICE)
    length = table.shape[1] * page
    paged = nta.PagedLayout(table, torch.tensor([length], device=DEVICE), page)
    layout, key_layout = (nta.SequenceLayout.from_lengths([n], device=DEVICE) for n in (1, length))
    query, keys = torch.randn(1, 1, 16, device=DEVICE).half(), pool[table[0]].flatten(0, 1)
    out = nta.varlen_attention(query, pool, pool, layout, paged, backend="split_kv")
    want = nta.varlen_attention(query, keys, keys, layout, key_layout, backend="reference")
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)

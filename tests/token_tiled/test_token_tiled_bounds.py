"""Layouts whose lengths only the device knows, on the token-tiled kernels: the same results as with known lengths.

Without a GPU Triton's interpreter runs them, on layouts that are made directly.

Dimensions: B sequences, T query tokens, S key tokens, N the bound of the tokens of one side, H query heads, D head dim.
"""

import gc
import itertools
from functools import partial

import pytest
import torch
from oracle import assert_same
from sweeps import covering
from token_tiled_cases import DEVICE, IGNORED_WARNINGS, TOLERANCE, bits, exact, random_inputs

import nt_attention as nta
from nt_attention.kernels import bounds
from nt_attention.kernels.token_tiled.bounded_plan import BoundedPlan
from nt_attention.layouts.bounded import BoundedLayout

gpu = pytest.mark.gpu

pytestmark = IGNORED_WARNINGS

INT32, INT64 = torch.int32, torch.int64

LENGTHS = {
    "mixed": [5, 0, 1, 37, 17, 13],
    "one": [70],
    "many": [1, 2, 0, 3, 1] * 5,
    "long": [150, 3],
    "mostly-empty": [0, 0, 5, 0],
    "all-empty": [0, 0],
}
KEY_LENGTHS = {
    "mixed": [11, 3, 0, 17, 41, 13],
    "one": [33],
    "many": [2, 0, 1, 3, 4] * 5,
    "long": [7, 141],
    "mostly-empty": [3, 1, 0, 0],
    "all-empty": [3, 2],
}
BOUNDS = {"exact": lambda n: n, "larger": lambda n: n + 5, "twice": lambda n: 2 * n + 1}


def offsets_of(lengths, dtype=INT32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=DEVICE)


def bounded(lengths, bound=BOUNDS["larger"], dtype=INT32):
    return BoundedLayout(offsets_of(lengths, dtype), bound(max(lengths)), bound(sum(lengths)))


def known(lengths):
    return nta.SequenceLayout.from_lengths(lengths, device=DEVICE)


def tensors_of(layout, key_layout=None, heads=2, kv_heads=2, head_dim=16, value_dim=None, dtype=torch.float32):
    """query, key, value and the gradients of out and lse, with two rows more than the layouts need."""
    rows, keys = layout.total + 2, (key_layout or layout).total + 2
    value_dim = value_dim or head_dim
    shapes = [(rows, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim)]
    shapes += [(rows, heads, value_dim), (rows, heads)]
    drawn = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return drawn[:3], (drawn[3], drawn[4].float())


def solve(tensors, grads, layout, key_layout=None, sinks=None, biases=None, **options):
    """out, lse and the gradients of `tensors`, of the sinks and of the biases, by name."""
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    leaves |= {} if sinks is None else {"sinks": sinks}
    leaves |= {name: x for name, x in (biases or {}).items() if name != "buckets"}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    q, k, v = (leaves[name] for name in ("query", "key", "value"))
    if biases is not None:
        given = {name: leaves.get(name, x) for name, x in biases.items()}
        options["relative"] = nta.RelativeBias(**given)
    out, lse = nta.varlen_attention(q, k, v, layout, key_layout, sinks=leaves.get("sinks"), return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}


def assert_as_known(layout, key_layout, lengths, key_lengths, inputs=None, more=None, **options):
    """The results are those of the reference with known lengths. `more` are the sizes of `tensors_of`."""
    tensors, grads = inputs or tensors_of(layout, key_layout, **(more or {}))
    got = solve(tensors, grads, layout, key_layout, backend="token_tiled", **options)
    for name in ("deterministic", "batch_invariant"):
        options.pop(name, None)
    keys = None if key_lengths is None else known(key_lengths)
    want = solve(tensors, grads, known(lengths), keys, backend="reference", **options)
    assert_same(got, want, 2 * TOLERANCE[tensors[0].dtype])
    return got


def check(lengths, key_lengths=None, bound=BOUNDS["larger"], more=None, dtype=INT32, **options):
    layout = bounded(lengths, bound, dtype)
    key_layout = None if key_lengths is None else bounded(key_lengths, bound, dtype)
    return assert_as_known(layout, key_layout, lengths, key_lengths, more=more, **options)


MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (7, 3)},
    "causal-window": {"window_size": (5, -1), "is_causal": True},
    "own-position": {"window_size": (0, 0)},
}


@exact
def test_bounds_of_each_side_and_of_one_side():
    """Sequences share no tiles, or all do. Results with other options are in the attention table."""
    lengths, key_lengths = LENGTHS["mixed"], KEY_LENGTHS["mixed"]
    short = [n % 9 for n in lengths]
    for queries, keys, sides in (
        (lengths, key_lengths, (bounded(lengths, lambda n: n), bounded(key_lengths, lambda n: 3 * n, INT64))),
        (short, short[::-1], (bounded(short, lambda n: n), bounded(short[::-1], lambda n: n + 20))),
        (lengths, key_lengths, (bounded(lengths), known(key_lengths))),
        (lengths, key_lengths, (known(lengths), bounded(key_lengths))),
    ):
        assert_as_known(*sides, queries, keys, is_causal=True, causal_alignment="upper_left")


@exact
@pytest.mark.parametrize("which", ["mixed", "many"])
def test_dropout_drops_the_same_weights_as_with_known_lengths(which):
    lengths = LENGTHS[which]
    layout = bounded(lengths)
    tensors, grads = tensors_of(layout)
    found = []
    for one in (layout, known(lengths)):
        torch.manual_seed(3)
        found.append(solve(tensors, grads, one, dropout_p=0.3, backend="token_tiled"))
    assert_same(*found, TOLERANCE[torch.float32])
    assert not torch.allclose(found[0]["out"], solve(tensors, grads, layout, backend="token_tiled")["out"])


@exact
@covering({"which": ["mixed", "many"], "relative": [False, True]})
def test_deterministic_call_gives_the_same_bits_again(which, relative):
    lengths = LENGTHS[which]
    options = {"deterministic": True, "backend": "token_tiled", "is_causal": True}
    if relative:
        biases = {"buckets": torch.randint(5, (15,)), "bias": torch.randn(2, 5)}
        options["biases"] = {name: x.to(DEVICE) for name, x in biases.items()}
    tensors, grads = tensors_of(bounded(lengths))
    one, two = (solve(tensors, grads, bounded(lengths), **options) for _ in range(2))
    for name in one:
        assert torch.equal(one[name], two[name]), name


@exact
@covering({"mask": ["full", "causal-window"], "alone_kind": ["known", "bounded"]})
def test_batch_invariant_sequence_gives_the_same_bits_alone(mask, alone_kind):
    lengths = [3, 17, 1, 33, 0, 5, 70]
    layout = bounded(lengths, BOUNDS["twice"])
    tensors, grad = random_inputs(layout.total, 2, 1, 16, torch.float32)
    options = {"batch_invariant": True, "backend": "token_tiled", **MASKS[mask]}
    together = bits(partial(nta.varlen_attention, layout=layout, **options), tensors, grad)
    parts = [x[: sum(lengths)].split(lengths) for x in (*tensors, grad, *together)]
    for q, k, v, upper, *want in zip(*parts, strict=True):
        alone = known([len(q)]) if alone_kind == "known" else bounded([len(q)], lambda n: n)
        got = bits(partial(nta.varlen_attention, layout=alone, **options), (q, k, v), upper)
        for name, one, two in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.equal(one, two), (name, len(q))


INVALID = {
    "decreasing": [0, 5, 3, 9],
    "ends-below-0": [0, 5, -4],
    "longer-than-max_seqlen": [0, 2, 15],
    "more-than-max_tokens": [0, 11, 22],
    "begins-late": [1, 5, 9],
    "begins-below-0": [-1, 5, 9],
    "largest-integer": [0, 2**31 - 1, 4],
    "smallest-integer": [0, -(2**31), 4],
    "of-64-bits": [0, 2**32 + 3, 2**32 + 9],
    "of-63-bits": [0, 2**63 - 1, 9],
}


FORMS = ("fused", "fixed", "aligned", "queries", "keys", "sinks", "alibi", "relative", "bias")


@exact
@covering({"which": INVALID, "form": FORMS})
def test_invalid_offsets_give_nan(which, form):
    """Of both sides or of one, in each form of tiles, and with options."""
    given = torch.tensor(INVALID[which], dtype=INT64 if max(INVALID[which]) >= 2**31 else INT32, device=DEVICE)
    layout = bad = BoundedLayout(given, 12, 20)
    batch, key_layout = layout.batch_size, None
    if form in ("fixed", "queries", "keys"):  # long keys keep sequences from sharing tiles
        good = known([70] * batch) if form == "fixed" else bounded([5] * batch, lambda n: n)
        layout, key_layout = (good, bad) if form == "keys" else (bad, good)
    rows = key_layout or layout
    tensors = [torch.randn(x.total, 2, 16, device=DEVICE) for x in (layout, rows, rows)]
    grads = torch.randn(layout.total, 2, 16, device=DEVICE), torch.randn(layout.total, 2, device=DEVICE)
    biases = {"buckets": torch.randint(5, (15,)), "bias": torch.randn(2, 5)}
    biases |= {name: torch.randn(20, 2, 5) for name in ("query_bias", "key_bias") if form == "relative"}
    of_biases = {"biases": {name: x.to(DEVICE) for name, x in biases.items()}}
    options = {
        "aligned": {"batch_invariant": True, "is_causal": True},
        "sinks": {"sinks": torch.randn(2, device=DEVICE)},
        "alibi": {"alibi_slopes": torch.rand(batch, 2, device=DEVICE)},
        "relative": of_biases,
        "bias": of_biases,
    }.get(form, {"is_causal": True})
    for name, x in solve(tensors, grads, layout, key_layout, backend="token_tiled", **options).items():
        assert x.isnan().all(), name


@exact
def test_offsets_that_exceed_a_bound_of_0_give_nan():
    """Such a call has no rows to launch a kernel for."""
    layout, none = bounded([3, 2], lambda n: n), BoundedLayout(offsets_of([3, 2]), 5, 0)
    tensors, _ = tensors_of(layout, none)
    out = nta.varlen_attention(*tensors, layout, none, backend="token_tiled")
    assert out[: layout.total].isnan().all()


class TestManySequences:
    """The kernels that run as one program take sequences in steps of 1024."""

    def test_tiny_sequences(self):
        lengths = torch.randint(0, 3, (1100,)).tolist()
        check(lengths, None, lambda n: n + 1, {"heads": 1, "kv_heads": 1, "head_dim": 16}, is_causal=True)

    @pytest.mark.parametrize("at", [0, 1023, 1024, 2047, 2048, 2099])
    @pytest.mark.parametrize("change", ["decrease", "exceed"])
    def test_one_invalid_offset_among_many(self, at, change):
        given = torch.arange(2101, dtype=INT32, device=DEVICE) // 2
        given[at + 1 :] += -2000 if change == "decrease" else 4
        x = torch.randn(1100, 1, 16, device=DEVICE)
        layout = BoundedLayout(given, 3, 1100)
        assert nta.varlen_attention(x, x, x, layout, backend="token_tiled").isnan().all()


PLANNED = {
    **LENGTHS,
    "empty-1024": [0] * 1024 + [3],
    "full-1025": [1] * 1025,
    "random-2100": [n % 7 for n in range(2100)],
    "random-3000": [(n * n) % 31 if n % 5 == 0 else 0 for n in range(3000)],
    "long-last": [0] * 1030 + [31],
}


class TestPlans:
    """Every row of a sequence is in one tile, and every other row is filled. Tiles are as `bounded_plan.py` says."""

    def plan(self, lengths, key_lengths=None, bound=BOUNDS["larger"], aligned=False):
        """A plan without intervals, on which tiles do not depend, and its layouts."""
        layout = bounded(lengths, bound)
        key_layout = layout if key_lengths is None else bounded(key_lengths, bound)
        rows, longest = (layout.total, key_layout.total), max(layout.max_seqlen, key_layout.max_seqlen)
        return BoundedPlan(None, None, bounds.check(layout, key_layout), rows, longest, aligned), layout, key_layout

    @staticmethod
    def decode(tiles, columns=2):
        """The tiles, and the rows that are filled: first and last of each side."""
        if not tiles.most:
            return [], [[0, 0], [0, 0]]
        numbers = tiles.tensor.tolist()
        used, fill, *ranges = numbers[:6]
        assert used <= tiles.most
        assert fill == 0
        assert tiles.programs >= 1
        flat = numbers[8 : 8 + used * columns]
        return [flat[i : i + columns] for i in range(0, len(flat), columns)], [ranges[:2], ranges[2:]]

    @staticmethod
    def assert_cover(pairs, end):
        """These rows are all rows before `end`, each once."""
        at = 0
        for begin, stop in sorted((b, e) for b, e in pairs if b != e):
            assert begin == at
            at = stop
        assert at == end

    @covering({"which": PLANNED, "bound": BOUNDS, "aligned": [False, True]})
    def test_tiles(self, which, bound, aligned):
        lengths = PLANNED[which]
        plan, layout, _ = self.plan(lengths, None, BOUNDS[bound], aligned)
        if not layout.total:
            return
        borders = set(layout.cu_seqlens.tolist())
        for rows in (16, 64):
            for made in (plan.query_tiles(rows, 0), plan.key_tiles(rows, 0)):
                tiles, (filled, _) = self.decode(made)
                self.assert_cover(tiles, sum(lengths))
                assert filled == [sum(lengths), layout.total]
                assert all(e - b <= rows for b, e in tiles)
                if aligned:
                    assert not any(borders & set(range(b + 1, e)) for b, e in tiles)

    @covering({"which": PLANNED, "bound": BOUNDS, "cross": [False, True], "longest": [31, 200]})
    def test_fused_and_long_tiles(self, which, bound, cross, longest):
        lengths = [n % (longest + 1) for n in PLANNED[which]]
        key_lengths = [(3 * n + 1) % (longest + 1) for n in lengths[::-1]] if cross else None
        plan, *layouts = self.plan(lengths, key_lengths, BOUNDS[bound])
        if not all(x.total for x in layouts):
            return
        totals = [sum(lengths), sum(key_lengths or lengths)]
        # whole sequences: the queries and the keys of a tile belong to the same ones
        borders = set(zip(*[x.cu_seqlens.tolist() for x in layouts], strict=True))
        for shared in (32, 64):
            fused, filled = self.decode(plan.fused_tiles(shared), 4)
            assert filled == [[end, x.total] for end, x in zip(totals, layouts, strict=True)]
            for first, last, start, end in fused:
                assert {(first, start), (last, end)} <= borders
            long = (plan.query_tiles(16, shared, without_fused=True), plan.key_tiles(16, shared))
            for side, made in enumerate(long):
                tiles, (not_filled, _) = self.decode(made)
                assert not_filled[0] == not_filled[1]
                pairs = [tile[2 * side : 2 * side + 2] for tile in fused]
                assert all(e - b <= shared for b, e in pairs)
                assert all(e - b <= 16 for b, e in tiles)
                self.assert_cover([*pairs, *tiles], totals[side])
            if plan.longest <= shared:
                assert not any(x.most for x in long)


@gpu
class TestOnAGpu:
    """Bounded layouts of offsets on a GPU: captured CUDA graphs, and no syncs."""

    MAX_SEQLEN, MAX_TOKENS, BATCH = 300, 640, 7
    BACKENDS = ("token_tiled", "torch_flash")
    STEPS = (
        [129, 5, 0, 300, 17, 1, 64],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [300, 300, 40, 0, 0, 0, 0],
        [0, 17, 31, 33, 128, 129, 2],
    )

    def layout(self, offsets):
        return nta.SequenceLayout.from_offsets(offsets, max_seqlen=self.MAX_SEQLEN, max_tokens=self.MAX_TOKENS)

    def inputs(self, rows=None, dtype=torch.bfloat16):
        tensors, grad = random_inputs(rows or self.MAX_TOKENS, 4, 2, 64, dtype)
        return [*tensors, grad]

    @staticmethod
    def both(layout, static, key_layout=None, **options):
        """out, lse and the gradients of query, key and value."""
        *tensors, grad = static
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = nta.varlen_attention(*leaves, layout, key_layout, return_lse=True, **options)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]

    @staticmethod
    def warm_up(function):
        """Run it on another stream, as a capture needs it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)

    def assert_as_known(self, got, lengths, static, tolerance=2e-2, **options):
        rows = self.MAX_TOKENS
        want = self.both(known(lengths), static, **options)
        for name, one, two in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(
                one, two, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}, {lengths}: {text}"
            )
            assert (one[sum(lengths) : rows] == (-torch.inf if name == "lse" else 0)).all(), name

    def test_from_offsets_knows_bounds_only(self):
        given = offsets_of(self.STEPS[0])
        layout = self.layout(given)
        assert type(layout) is BoundedLayout
        assert (layout.total, layout.max_seqlen, layout.device) == (self.MAX_TOKENS, self.MAX_SEQLEN, given.device)
        assert nta.SequenceLayout.from_offsets(layout.operator_offsets) is layout

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("given", [[0, 5, 3, 9], [0, 301, 310, 320], [0, 300, 600, 641], [1, 5, 9, 12]], ids=str)
    @pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
    def test_invalid_offsets_give_nan(self, backend, given, dtype):
        layout = self.layout(torch.tensor(given, dtype=dtype, device="cuda"))
        for x in self.both(layout, self.inputs(), backend=backend):
            assert x.isnan().all()

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
    @pytest.mark.parametrize("made", ["before", "before and used", "inside"])
    def test_captured_graph_replays_with_other_offsets(self, backend, dtype, made):
        static, given = self.inputs(), offsets_of(self.STEPS[0], dtype)
        options = {"backend": backend, "is_causal": True}
        self.warm_up(lambda: self.both(self.layout(given), static, **options))
        layout = self.layout(given) if made != "inside" else None
        if made == "before and used":
            self.both(layout, static, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = self.layout(given) if layout is None else layout
            captured = self.both(inside, static, **options)
        del layout, inside
        gc.collect()
        for lengths in self.STEPS:
            given.copy_(offsets_of(lengths, dtype))
            for x in static:
                x.copy_(torch.randn_like(x))
            graph.replay()
            self.assert_as_known(captured, lengths, static, **options)
        given[1] = -1
        graph.replay()
        assert all(x.isnan().all() for x in captured)
        given.copy_(offsets_of(self.STEPS[0], dtype))
        graph.replay()
        self.assert_as_known(captured, self.STEPS[0], static, **options)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
    def test_two_graphs_of_one_layout_are_independent(self, backend, dtype):
        """The second graph must compute the plan itself, and not read that of the first."""
        static, given = self.inputs(), offsets_of(self.STEPS[0], dtype)
        options = {"backend": backend, "is_causal": True}
        self.warm_up(lambda: self.both(self.layout(given), static, **options))
        layout, graphs, captured = self.layout(given), [], []
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                captured.append(self.both(layout, static, **options))
        for which, lengths in ((1, self.STEPS[3]), (0, self.STEPS[4]), (1, self.STEPS[2])):
            given.copy_(offsets_of(lengths, dtype))
            graphs[which].replay()
            self.assert_as_known(captured[which], lengths, static, **options)

    @pytest.mark.parametrize("backend", ["auto", *BACKENDS])
    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_compiled_with_reduce_overhead(self, backend, where, fresh_compiler):
        """A compiler captures such calls in CUDA graphs, forward and backward, with other lengths in each replay."""
        static = self.inputs()
        *tensors, grad = static
        counters = torch._dynamo.utils.counters["inductor"]
        counters.clear()

        def attend(query, key, value, given):
            layout = self.layout(given) if where == "inside" else given
            for _ in range(2):  # two layers
                query = nta.varlen_attention(query, key, value, layout, backend=backend, is_causal=True)
            return query

        compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
        for lengths in self.STEPS * 2:
            given = offsets_of(lengths) if where == "inside" else self.layout(offsets_of(lengths))
            found = []
            for function in (compiled, attend):
                torch.compiler.cudagraph_mark_step_begin()
                leaves = [x.detach().clone().requires_grad_() for x in tensors]
                out = function(*leaves, given)
                found.append([out.detach().clone(), *torch.autograd.grad(out, leaves, grad)])
            for one, two in zip(*found, strict=True):
                torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
        assert counters["cudagraph_skips"] == 0

    @pytest.mark.parametrize("kind", ["alibi-each", "sinks", "pad"])
    def test_captured_options(self, kind):
        """What these options derive from the offsets is computed again in each replay."""
        static, given = self.inputs(), offsets_of(self.STEPS[0])
        options = {
            "alibi-each": {"alibi_slopes": torch.rand(self.BATCH, 4, device="cuda")},
            "sinks": {"sinks": torch.randn(4, device="cuda")},
        }.get(kind, {})

        def run():
            layout = self.layout(given)
            results = self.both(layout, static, backend="token_tiled", **options)
            return [*results, layout.pad(static[0]), layout.pack(layout.pad(static[0]))]

        self.warm_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *captured, padded, packed = run()
        for lengths in self.STEPS:
            given.copy_(offsets_of(lengths))
            graph.replay()
            self.assert_as_known(captured, lengths, static, backend="token_tiled", **options)
            exact_layout = nta.SequenceLayout.from_offsets(offsets_of(lengths), max_seqlen=self.MAX_SEQLEN)
            assert torch.equal(padded, exact_layout.pad(static[0]))
            assert torch.equal(packed[: sum(lengths)], static[0][: sum(lengths)])
            assert (packed[sum(lengths) :] == 0).all()

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
    @pytest.mark.parametrize("other", ["self", "bounded keys", "known keys"])
    def test_calls_do_not_sync(self, backend, dtype, other):
        given, static = offsets_of(self.STEPS[0], dtype), self.inputs()
        # `STEPS[3]` has as many tokens, so that all rows of keys are there
        key_given, keys = offsets_of(self.STEPS[3], dtype), known(self.STEPS[3])

        def run():
            layout = self.layout(given)
            key_layout = {"self": None, "bounded keys": self.layout(key_given), "known keys": keys}[other]
            self.both(layout, static, key_layout, backend=backend, is_causal=True)
            layout.pack(layout.pad(static[0]))
            layout.position_ids, layout.sequence_ids, layout.lengths  # noqa: B018

        run()  # kernels are compiled
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

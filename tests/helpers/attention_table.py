"""The attention table: rows are calls with options and lengths, columns are backends, and kernels that lack something.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, D and Dv head dims.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import EXTRAS, GEOMETRIES, LENGTHS, Problem, assert_same
from token_tiled_cases import DEVICE, GPU, device_of, placed, truth
from token_tiled_cases import LENGTHS as FEW_TOKENS

import nt_attention as nta
from nt_attention.kernels.backend import COMMON, HeadDims, Hooks
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.call import FEATURES
from nt_attention.kernels.select import BACKENDS
from nt_attention.layouts.bounded import BoundedLayout

TERMS = ("bias", "query_bias", "key_bias")
LONGEST = 600  # no sequence is longer, so i - j + LONGEST is a valid index of a table of 2 × LONGEST rows
CPU = torch.device("cpu")


# (7, 2 × LONGEST) for heads or sequences, and distances
TABLE = torch.randn(7, 2 * LONGEST, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TABLES = {kind: TABLE.to(kind) for kind in {"cpu", "meta", DEVICE.type}}  # in a graph, it can't be moved


def by_distance(score, b, h, i, j):
    return score + TABLES[score.device.type][h, i - j + LONGEST].to(score.dtype)


def by_sequence(score, b, h, i, j):
    return torch.where(i > 2 * j, torch.tanh(score), score * (1 + b + 0.1 * h))


def every_third(b, h, i, j):
    return (i + 2 * j + h + b) % 3 != 0


def documents(b, h, i, j):
    return i // 17 == j // 17


def even_heads(b, h, i, j):
    return (h % 2 == 0).expand(torch.broadcast_shapes(h.shape, i.shape, j.shape))


def both_mods(**more):
    return {"score_mod": by_sequence, "mask_mod": every_third, **more}


def row(lengths="cross", geometry="full", extra="plain", options=(), **more):
    """The fields of a `Problem`. `lengths` is the name of lengths, or (lengths, key lengths)."""
    fields = dict(EXTRAS[extra])
    options = {**GEOMETRIES[geometry], **fields.pop("options", {}), **dict(options)}
    return {"lengths": lengths, **fields, "options": options, **more}


# Every geometry with both kinds of lengths, and with them the other options one at a time.
ROWS: dict[str, dict[str, Any]] = {
    f"{lengths} {geometry} {extra}": row(lengths, geometry, extra)
    for i, geometry in enumerate(GEOMETRIES)
    for at, lengths in enumerate(LENGTHS)
    for extra in [list(EXTRAS)[(i * 4 + at * 7) % len(EXTRAS)]]
}
ROWS |= {
    "all, causal": row("cross", "causal", "all"),
    "all, window": row("self", "both-sides-upper_left", "all"),
    "softcap": row(options={"softcap": 1.3}),
    "softcap, most scores at the cap": row("self", "causal-window", "gqa", {"softcap": 0.7, "scale": 2.0}),
    "softcap, no score near the cap": row(options={"softcap": 30.0, "scale": 0.02}),
    "softcap, all": row("cross", "causal-window", "all", {"softcap": 1.3, "scale": -0.3}, relative=TERMS),
    "negative scale": row("cross", "causal", "gqa", {"scale": -0.3}),
    "negative scale, self": row("self", "causal", "plain", {"scale": -0.3}),
    "scale of 0": row("cross", "both-sides-upper_left", "wide-values-gqa", {"scale": 0.0}),
    "score_mod": row("cross", "full", "gqa", {"score_mod": by_distance}),
    "score_mod, window": row("self", "causal-window", "sinks", {"score_mod": by_sequence, "softcap": 2.3}),
    "mask_mod": row("cross", "causal", "gqa", {"mask_mod": every_third}),
    "mask_mod of documents": row("self", "full", "gqa", {"mask_mod": documents}),
    "mask_mod that hides heads": row("cross", "both-sides-upper_left", "gqa", {"mask_mod": even_heads}),
    "mods, all": row("cross", "causal", "relative-alibi-gqa", both_mods(softcap=1.3)),
    **{f"only {x}": row("cross", "causal-window", "gqa", relative=(x,)) for x in TERMS},
    "biases, upper left": row("cross", "both-sides-upper_left", "relative-alibi-gqa"),
    "two biases": row("self", "causal-upper_left", "gqa", relative=TERMS[::2]),
    "bias of one distance": row("self", "causal", "plain", relative=("bias",), buckets=(0, 1)),
    "biases of many distances": row("self", "causal", "plain", relative=TERMS, buckets=(130, 21)),
    "no keys": row(([3, 2], [0, 0]), extra="sinks", past=(3, 2)),
    "no keys, relative": row(([3, 2], [0, 0]), extra="relative", past=(3, 2)),
    "no queries": row(([0, 0], [5, 2]), extra="relative", past=(3, 2)),
    "all empty": row(([0, 0], [0, 0]), past=(3, 2)),
    "queries or keys": row(([0, 3, 0], [5, 0, 7]), extra="sinks", past=(3, 2)),
    "queries or keys, relative": row(([0, 3, 0], [5, 0, 7]), extra="relative", past=(3, 2)),
    "many keys for no query": row(([5, 0], [3, 131]), past=(3, 2)),
    "more queries": row(([7, 19, 3], [5, 11, 2]), "causal", "alibi-each-gqa"),
    "more keys": row(([5, 11, 2], [7, 19, 3]), "causal-upper_left", "alibi-each-gqa"),
    "some without keys": row(([0, 7, 5, 3], [2, 0, 11, 0]), "full", "alibi-each-gqa"),
    "as many keys in another layout": row(([5, 0, 1, 31, 13], [5, 0, 1, 31, 13]), "causal-upper_left", "gqa"),
    "many short sequences": row(([1, 2, 0, 3, 1] * 5, None), "causal", "gqa"),
    "many short sequences, cross": row(([1, 2, 0, 3, 1] * 5, [2, 0, 1, 3, 4] * 5), "both-sides", "plain"),
    "long window": row(([70], None), "full", "alibi", {"window_size": (23, 29)}),
    "window without a right end": row(([67], None), "full", "plain", {"window_size": (3, 2**63 - 1)}),
    "more keys than a tile": row(([150, 3], [7, 141]), "causal-window", "gqa"),
    "head dim of 1": row("cross", "causal", "gqa", head_dim=1, value_dim=67),
    "value dim of 7": row("cross", "causal", "gqa", head_dim=67, value_dim=7),
    "eight heads of one key head": row("cross", "causal", "plain", heads=8, kv_heads=1),
}
# Only for kernels on tiles of scores in memory; others have no softcap or mods.
LONG = {
    "tiles of a window": row(([263, 128, 1, 0], [149, 257, 7, 3]), "full", "gqa", {"window_size": (40, 3)}),
    "tiles of a causal window": row(([263, 128, 1, 0], [149, 257, 7, 3]), "causal", "gqa", {"window_size": (7, 0)}),
    "a window over several tiles": row(([701], None), extra="alibi", options={"window_size": (520, 60)}, head_dim=5),
    "equal lengths": row(([17] * 13 + [0, 5, 0] + [17, 5] * 7, None), "both-sides", "alibi-each-gqa"),
}


def problem_of(name: str, small: bool, dtype: torch.dtype, device: torch.device, **more: Any) -> Problem:
    """The call of a row. With `small` its heads and tokens are few, for an interpreter."""
    fields = {**(ROWS | LONG)[name], **more}
    lengths = fields.pop("lengths")
    sizes = (FEW_TOKENS if small else LENGTHS)[lengths] if isinstance(lengths, str) else {"lengths": lengths[0]}
    sizes = sizes if isinstance(lengths, str) else sizes | {"key_lengths": lengths[1]}
    if small and "heads" not in fields:
        fields |= {"heads": 2, "kv_heads": 2}
    elif small and fields["kv_heads"] == 3:
        fields |= {"heads": 4, "kv_heads": 2}
    return placed(Problem(**{**sizes, **fields}, dtype=dtype), device)


@functools.lru_cache(maxsize=256)
def _truth(name: str, small: bool, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    return truth(problem_of(name, small, dtype, device))


@dataclass(frozen=True)
class Column:
    """A backend, and how it is called.

    Attributes:
        backend: its name; "fake" is the CPU backend with `changes`, whose kernel gets only what these allow.
        dtype: of the inputs.
        tolerance: of all results.
        small: whether tokens are few.
        lacks: the features of calls that it refuses; None if it depends on the machine.
        options: more options of the calls.
        bounded: whether the host knows bounds of the lengths only.
        paged: whether keys are in pages of 16 rows, in an order of their own.
        gradients: whether it has any.
        changes: of the fields of the CPU backend.
        tiles: numbers of `cpu_tiles` to replace.
        rows: the rows that it runs.
    """

    backend: str
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    small: bool = False
    lacks: frozenset[str] | None = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    bounded: bool = False
    paged: bool = False
    gradients: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = tuple(ROWS)

    @property
    def device(self) -> torch.device:
        return device_of(self.backend)

    def problem(self, name: str) -> Problem:
        return problem_of(name, self.small, self.dtype, self.device)

    def truth(self, name: str) -> dict[str, torch.Tensor]:
        return dict(_truth(name, self.small, self.dtype, self.device))

    def call(self, case: Problem, **options: Any) -> Callable[..., Any]:
        layouts = layouts_of(case, self.device, self.bounded)
        given = {"return_lse": True, "backend": self.backend, **layouts, **self.options, **options}
        function = functools.partial(nta.varlen_attention, **given)
        return in_pages(function) if self.paged else function

    def check(self, name: str, got: Mapping[str, torch.Tensor], slack: float = 1) -> None:
        want = {key: x for key, x in self.truth(name).items() if key in got}
        assert_same(got, want, slack * self.tolerance)


def layouts_of(case: Problem, device: torch.device = DEVICE, bounded: bool = False) -> dict[str, Any]:
    """`layout` and `key_layout` of a problem."""

    def make(lengths, past):
        if lengths is None:
            return None
        layout = nta.SequenceLayout.from_lengths(lengths, device=device)
        if not bounded:
            return layout
        return BoundedLayout(layout.cu_seqlens.clone(), max(lengths, default=0) + 5, layout.total + past)

    return {"layout": make(case.lengths, case.past[0]), "key_layout": make(case.key_lengths, case.past[1])}


def in_pages(function: Callable[..., Any], size: int = 16) -> Callable[..., Any]:
    """The call with keys and values in pools, which are NaN where no key is stored."""
    layout = function.keywords["key_layout"] or function.keywords["layout"]
    each = layout.max_seqlen // size + 2
    pages = torch.randperm(layout.batch_size * each + 3, device=layout.device)[: layout.batch_size * each]
    paged = nta.PagedLayout(pages.view(-1, each), layout.lengths.clone(), size)
    rows = paged.rows(layout.sequence_ids, layout.position_ids)

    def pool(x):
        empty = x.new_full(((layout.batch_size * each + 3) * size, *x.shape[1:]), torch.nan)
        return empty.index_copy(0, rows, x[: layout.total]).unflatten(0, (-1, size))

    def call(key, value, **arguments):
        return function(**arguments, key=pool(key), value=pool(value), key_layout=paged)

    return call


def _check_limits(changes: Mapping[str, Any], call: Any, query: Any, key: Any, value: Any) -> None:
    spec, layout, key_layout = call.spec, call.layout, call.key_layout
    traits = changes.get("traits", ())
    if "lower_right_only" in traits:
        assert spec.lower_right or spec.window.is_open
    if "no_fully_masked_rows" in traits:
        queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
        assert not (queries[keys == 0] > 0).any()
        assert spec.window in ((math.inf, math.inf), (math.inf, 0))
        assert not (spec.is_causal and spec.lower_right) or (queries <= keys).all()
    for x, side in ((query, layout), (key, key_layout), (value, key_layout)):
        assert len(x) == side.total or (len(x) > side.total and "reads_past_end" not in traits)
        if "aligned_rows" in traits:
            assert x.data_ptr() % 16 == x.stride(0) * x.itemsize % 16 == x.stride(1) * x.itemsize % 16 == 0
    if (dims := changes.get("head_dims")) is not None:
        assert dims.padded(query.shape[2], value.shape[2]) == (query.shape[2], value.shape[2])


def fields_of_fake(changes: Mapping[str, Any], calls: list[tuple[str, int]] | None = None) -> dict[str, Any]:
    """The fields of the CPU backend with these changes. `calls` gets the name and the head dim of each kernel call."""
    calls = [] if calls is None else calls

    def forward(query, key, value, call):
        _check_limits(changes, call, query, key, value)
        calls.append(("forward", query.shape[2]))
        return cpu.forward(query, key, value, call)

    def backward(saved, query, key, value, call):
        _check_limits(changes, call, query, key, value)
        assert saved.grad.shape == saved.out.shape == (*query.shape[:2], value.shape[2])
        assert saved.grad_lse is None
        calls.append(("backward", query.shape[2]))
        return cpu.backward(saved, query, key, value, call)

    traits = cpu.BACKEND.traits | changes.get("traits", set())
    return {"forward": forward, "backward": backward, "hooks": Hooks(), **changes, "traits": traits}


MODS = frozenset({"score_mod", "mask_mod"})
WITHOUT_WINDOW = {"traits": {"no_fully_masked_rows"}, "features": cpu.BACKEND.features - {"window"} - MODS}
SMALL_TILES = {"MASKED_ROWS": 7, "FEW_ROWS": 2, "MOST_SCORES": 300, "PAIRS_OF_CALL": 9000}
NEW_FAKE = functools.partial(Column, "fake", small=True)
NO_SECOND_CALL = ("softcap", "score_mod", "mods", "value", "wide", "head", "bias", "relative", "scale of 0", "all")
ON_TILES = functools.partial(Column, "token_tiled", dtype=torch.float32, tolerance=4e-5, small=True, lacks=MODS)
FEW_ROWS = (
    *tuple(ROWS)[:20:3],
    *("all, causal", "softcap, all", "two biases", "no keys, relative", "queries or keys", "many short sequences"),
    *("many short sequences, cross", "more keys than a tile", "value dim of 7", "eight heads of one key head"),
)
WITHOUT_BIASES = tuple(x for x, fields in ROWS.items() if not fields.get("relative"))  # a PagedLayout takes none
ON_SPLITS = functools.partial(
    Column,
    "split_kv",
    dtype=torch.float32,
    tolerance=2e-5,
    small=True,
    lacks=MODS,
    gradients=False,
    rows=WITHOUT_BIASES,
)
COLUMNS = {
    "reference": Column("reference"),
    "cpu": Column("cpu", rows=(*ROWS, *LONG)),
    "cpu in float32": Column("cpu", torch.float32, 5e-5, rows=tuple(ROWS)[:23]),
    "cpu in bfloat16": Column("cpu", torch.bfloat16, 4e-2, rows=FEW_ROWS),
    "reference in float16": Column("reference", torch.float16, 4e-3, rows=FEW_ROWS),
    "cpu in a call for each shape": Column("cpu", tiles={"PAIRS_OF_CALL": 0}, rows=tuple(ROWS)[::2]),
    "cpu in a call for all": Column("cpu", tiles={"PAIRS_OF_CALL": 10**9}, rows=tuple(ROWS)[1::2]),
    "cpu in small tiles": Column("cpu", tiles=SMALL_TILES, rows=(*tuple(ROWS)[15:], *LONG)),
    # the gradient of lse is a column more of the head dims, or a second call where they are full
    "fake without gradients of lse": NEW_FAKE(changes={"head_dims": HeadDims(80, equal=True)}),
    "fake without room for them": NEW_FAKE(
        changes={"head_dims": HeadDims(11, equal=True)},
        rows=tuple(x for x in ROWS if not any(word in x for word in NO_SECOND_CALL)),
    ),
    "fake of multiples of 8": NEW_FAKE(
        changes={"head_dims": HeadDims(multiple=8, equal=True), "traits": {"aligned_rows"}}, rows=tuple(ROWS)[:22]
    ),
    "fake of lower right masks": NEW_FAKE(changes={"traits": {"lower_right_only"}}),
    "fake without masked rows": NEW_FAKE(changes=WITHOUT_WINDOW, lacks=MODS | {"window"}),
    "fake that needs both": NEW_FAKE(
        changes={"traits": {"no_fully_masked_rows", "lower_right_only"}, "features": COMMON},
        lacks=frozenset(FEATURES) - COMMON,
        rows=tuple(x for x in ROWS if "causal-upper_left" not in x),  # which would be a window
    ),
    "fake that reads all rows": NEW_FAKE(changes={"traits": {"reads_past_end", "lower_right_only"}}),
    "token_tiled": ON_TILES(),
    "token_tiled in float16": ON_TILES(dtype=torch.float16, tolerance=8e-3, rows=FEW_ROWS[::2]),
    "token_tiled, batch invariant": ON_TILES(options={"batch_invariant": True}, rows=FEW_ROWS[1::2]),
    "token_tiled, deterministic": ON_TILES(
        options={"deterministic": True},
        rows=(*FEW_ROWS[6::3], "two biases", "bias of one distance", "biases of many distances"),
    ),
    "token_tiled with bounds": ON_TILES(bounded=True, rows=(*tuple(ROWS)[1:20:2], *FEW_ROWS[8:], "no keys")),
    "split_kv": ON_SPLITS(rows=WITHOUT_BIASES[1::3]),
    "split_kv of pages": ON_SPLITS(paged=True),
    "split_kv of pages in float16": ON_SPLITS(
        dtype=torch.float16, tolerance=8e-3, paged=True, rows=WITHOUT_BIASES[:15:5]
    ),
    "cpu of pages": Column("cpu", torch.float32, 2e-5, gradients=False, paged=True, rows=WITHOUT_BIASES),
    "reference of pages": Column("reference", gradients=False, paged=True, rows=WITHOUT_BIASES[::2]),
}  # fmt: skip
ON_GPUS = tuple(x for x in BACKENDS if BACKENDS[x].device_type == "cuda")  # ours run in an interpreter as well
if GPU:
    on_a_gpu = functools.partial(Column, dtype=torch.bfloat16, tolerance=6e-2, small=True, lacks=None)
    COLUMNS |= {
        **{name: on_a_gpu(name) for name in ON_GPUS if BACKENDS[name].missing() is None},
        "token_tiled in bfloat16": on_a_gpu("token_tiled"),
        "split_kv in bfloat16": on_a_gpu("split_kv", gradients=False),
        "torch_flash with bounds": on_a_gpu("torch_flash", bounded=True),
    }
    if "torch_efficient" in COLUMNS:
        COLUMNS["torch_efficient"] = on_a_gpu("torch_efficient", dtype=torch.float32, tolerance=1e-4)
    if "flex" in COLUMNS:  # it compiles
        COLUMNS["flex"] = on_a_gpu("flex", rows=(*FEW_ROWS, "score_mod", "mask_mod", "mods, all"))


def poison(case: Problem) -> None:
    """NaN in the rows past the end, of the inputs and of the gradients from above."""
    ends = {"query": case.past[0], "query_bias": case.past[0], "key": case.past[1], "value": case.past[1]}
    for name, rows in (ends | {"key_bias": case.past[1]}).items():
        if rows and name in case.inputs:
            case.inputs[name][-rows:] = torch.nan
    if case.past[0] and not case.sinks:  # sinks have a gradient in these rows
        for grad in case.grads:
            grad[-case.past[0] :] = torch.nan


def spec_of(column: Column, name: str) -> Any:
    """The `AttentionSpec` of a call of the table, with layouts whose lengths are known and packed keys."""
    case = column.problem(name)
    leaves = {key: x.detach().requires_grad_(column.gradients) for key, x in case.inputs.items()}
    given = case.arguments(leaves) | case.options | layouts_of(case, column.device)
    given.pop("sinks", None)
    spec = nta.functional.plan(**given, backend="reference").spec
    return dataclasses.replace(spec, bounded=column.bounded, paged=column.paged, sinks=case.sinks, **column.options)

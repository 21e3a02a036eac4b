"""Every option on every backend, and in every mode, against the float64 oracle: see `helpers/attention_table.py`."""

import dataclasses
import inspect
import itertools

import oracle
import pytest
import torch
from attention_table import COLUMNS, ON_GPUS, ROWS, TERMS, fields_of_fake, layouts_of, poison, spec_of
from calls import STRIDES, PassThrough
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import GEOMETRIES, Problem, assert_same, problem, visible_pairs
from token_tiled_cases import GPU, IGNORED_WARNINGS, placed
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import nt_attention as nta
from nt_attention.kernels.backends import cpu, cpu_tiles
from nt_attention.kernels.call import FEATURES, OPTIONS, AttentionSpec
from nt_attention.kernels.select import BACKENDS

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")]


@pytest.fixture
def kernel_calls():
    """The name and the head dim of each call of the kernel of a column "fake"."""
    return []


@pytest.fixture
def column(request, monkeypatch, registered_variant, kernel_calls):
    found = COLUMNS[request.param]
    if found.backend == "fake":
        registered_variant(cpu.BACKEND, "fake", **fields_of_fake(found.changes, kernel_calls))
    for name, value in found.tiles.items():
        monkeypatch.setattr(cpu_tiles, name, value)
    return found


def is_interpreted(name):
    return not GPU and COLUMNS[name].backend in ("token_tiled", "split_kv")


def is_swept(name, index):
    """Triton's interpreter runs a part of the rows in `make test`, but all options of the first column of a backend."""
    return is_interpreted(name) and index % 3 > 0 and not (name == "token_tiled" and index > len(GEOMETRIES) * 2)


def on_columns(columns, names, cases, few):
    """The cases on each of the columns. In `make test`, Triton's interpreter runs a few of them."""
    params = [
        pytest.param(name, *case, id=f"{name}-{' '.join(map(str, case))}", marks=pytest.mark.sweep if swept else ())
        for name in columns
        if name in COLUMNS
        for i, case in enumerate(cases)
        for swept in [is_interpreted(name) and i >= few]
    ]
    return pytest.mark.parametrize(("column", *names), params, indirect=["column"])


def table(cells):
    """The cells of these columns and rows."""
    cells = [
        pytest.param(name, row, id=f"{name}-{row}", marks=pytest.mark.sweep if is_swept(name, i) else ())
        for name, rows in cells.items()
        if name in COLUMNS
        for i, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(("column", "row"), cells, indirect=["column"])


def why_not(column, case, **options):
    """Why this machine can't run a call of a column; empty if it can."""
    given = case.arguments({name: x.detach().requires_grad_(column.gradients) for name, x in case.inputs.items()})
    return " ".join(
        nta.explain(**given, **column.call(case, **options).keywords, **case.options).reasons[column.backend]
    )


def loss_of(case, out, lse):
    return (out * case.grads[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grads[1]).sum()


@table({name: column.rows for name, column in COLUMNS.items()})
def test_results_and_gradients(column, row, kernel_calls, request):
    """Rows past the end, and memory that nobody has written, are NaN. Inputs are not changed."""
    if column.backend != "flex":  # the compiler can't follow it
        request.getfixturevalue("uninitialized_is_nan")
    case = column.problem(row)
    poison(case)
    before = {name: x.clone() for name, x in case.inputs.items()}
    call = column.call(case)
    if column.lacks is None and (reasons := why_not(column, case)):
        pytest.skip(reasons)
    if lacking := (column.lacks or set()) & spec_of(column, row).features:
        with pytest.raises(ValueError, match=r"cannot run this call") as refused:
            call(**case.arguments(case.inputs), **case.options)
        assert all(FEATURES[name] in str(refused.value) for name in lacking)
        return
    if column.gradients:
        got = case.solve(call)
    else:
        got = dict(zip(("out", "lse"), call(**case.arguments(case.inputs), **case.options), strict=True))
    assert {x.dtype for name, x in got.items() if name != "lse"} == {case.dtype}
    assert got["lse"].dtype == torch.promote_types(case.dtype, torch.float32)
    if case.sinks:  # the oracle's gradient includes the rows past the end
        got = {name: x for name, x in got.items() if name != "d sinks" or not case.past[0]}
    column.check(row, got)
    for name, rows in (("query", case.past[0]), ("key", case.past[1]), ("value", case.past[1])):
        assert not rows or not column.gradients or not got[f"d {name}"][-rows:].any()
    for name, x in case.inputs.items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
    if column.changes.get("head_dims") is not None and sum(case.lengths) and sum(case.key_lengths or case.lengths):
        check_kernel_calls(column, case, kernel_calls)


def check_kernel_calls(column, case, calls):
    """The gradient of lse takes a column more, unless values are narrower than keys, or a second call."""
    names, dims = zip(*calls, strict=True) if calls else ((), ())
    if column.changes["head_dims"].most == 11:
        assert names.count("forward") == names.count("backward") in (0, 2)
    elif calls and column.changes["head_dims"].most == 80:
        wide = max(case.head_dim, case.value_dim + 1)
        assert calls == [("forward", max(case.head_dim, case.value_dim)), ("backward", wide)]
    assert all(column.changes["head_dims"].padded(dim, dim) == (dim, dim) for dim in dims)


def test_every_option_feature_and_backend_is_in_the_table():
    """Options by name, all fields of `AttentionSpec` with two values, every feature, and every backend."""
    specs = [spec_of(column, row) for column in COLUMNS.values() for row in column.rows if row in ROWS]
    specs.append(dataclasses.replace(specs[0], tree=True, dropout_p=0.5, relative_grad=False, deterministic=True))
    for each in dataclasses.fields(AttentionSpec):
        assert GPU or each.name == "device" or len({getattr(spec, each.name) for spec in specs}) > 1, each.name
    assert set().union(*[spec.features for spec in specs]) == set(FEATURES)
    in_rows = {name for fields in ROWS.values() for name in fields["options"]}
    in_rows |= {name for column in COLUMNS.values() for name in column.options}
    assert in_rows | {"dropout_p"} == set(OPTIONS)  # see `test_dropout`
    arguments = set(inspect.signature(nta.varlen_attention).parameters) - {"options"}
    tensors = {"query", "key", "value", "layout", "key_layout", "sinks", "alibi_slopes", "relative"}
    assert arguments - set(OPTIONS) == tensors | {"return_lse", "backend"}
    assert {column.backend for column in COLUMNS.values()} - {"fake"} | {*ON_GPUS} == set(BACKENDS)


# Rows that have most of the options of these columns.
EXACT = ("reference", "cpu")
BY_MODE = {
    **dict.fromkeys(EXACT, ("all, causal", "softcap, all", "mods, all", "no keys, relative")),
    "token_tiled": ("all, causal", "two biases"),
}
BY_MODE |= {x: ("cross causal plain",) for x in ON_GPUS if x in COLUMNS and BACKENDS[x].backward is not None}
every_mode = table(BY_MODE)


@every_mode
@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradients_of_one_result(column, row, which):
    case = column.problem(row)
    case.grads = tuple(
        g * (name == which) if name != "lse" else g for name, g in zip(("out", "lse"), case.grads, strict=True)
    )

    def chosen(function):
        leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
        out, lse = function(**case.arguments(leaves), **case.options)
        grad = case.grads[0].to(out.dtype) if which == "out" else case.grads[1].to(lse.dtype)
        found = torch.autograd.grad((out if which == "out" else lse), tuple(leaves.values()), grad, allow_unused=True)
        return {
            name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), found, strict=True)
        }

    def exact(**arguments):
        with column.device:
            return oracle.attention(**arguments, lengths=case.lengths, key_lengths=case.key_lengths)

    assert_same(chosen(column.call(case)), chosen(exact), column.tolerance)


@every_mode
def test_nan_gradient_of_lse_in_fully_masked_rows_is_ignored(column, row):
    case = column.problem(row)
    masked = column.truth(row)["lse"] == -torch.inf
    case.grads = (case.grads[0], case.grads[1].masked_fill(masked, torch.nan))
    column.check(row, case.solve(column.call(case)))


@every_mode
def test_function_transforms(column, row):
    case = column.problem(row)
    call = column.call(case)
    if column.backend == "cpu" and (case.options.get("score_mod") or case.options.get("mask_mod")):
        call = column.call(case, backend="auto")  # falls back to the reference

    def loss(inputs):
        return loss_of(case, *call(**case.arguments(inputs), **case.options))

    column.check(row, {f"d {name}": x for name, x in torch.func.grad(loss)(case.inputs).items()})


@every_mode
def test_dispatch_modes(column, row):
    """Under one, the call and its backward are operators, but those of the reference."""
    case = column.problem(row)
    has_mods = bool(case.options.get("score_mod"))
    with PassThrough() as mode:
        got = case.solve(column.call(case, **({"backend": "auto"} if has_mods else {})))
    column.check(row, got)
    assert has_mods or column.backend == "reference" or len(mode.operators) >= 2


@every_mode
def test_one_graph(column, row, fresh_compiler):
    case = column.problem(row)
    if case.options.get("score_mod"):  # see tests/backends/test_cpu_backend.py
        pytest.skip("score_mod breaks the graph")
    function = torch.compile(column.call(case), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        column.check(row, case.solve(function))


@pytest.mark.parametrize("column", ["cpu", "reference", "token_tiled"], indirect=True)
@pytest.mark.parametrize("row", ["all, causal", "two biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(column, row, dtype):
    """Only query, key and value are cast, to the dtype of scaled_dot_product_attention, and not if it is off."""
    case = column.problem(row)
    case = dataclasses.replace(case, dtype=torch.float32)
    case = placed(case, column.device)
    call, leaves = column.call(case), {name: x.requires_grad_() for name, x in case.inputs.items()}
    with torch.autocast(column.device.type, dtype):
        out, lse = call(**case.arguments(leaves), **case.options)
    rounded = {name: x.detach().to(dtype) if name in ("query", "key", "value") else x for name, x in leaves.items()}
    want_out, want_lse = call(**case.arguments(rounded), **case.options)
    assert out.dtype == dtype
    torch.testing.assert_close((out, lse), (want_out.detach(), want_lse.detach()), rtol=0, atol=0)
    assert {g.dtype for g in torch.autograd.grad(loss_of(case, out, lse), tuple(leaves.values()))} == {torch.float32}
    with torch.autocast(column.device.type, dtype, enabled=False):
        assert call(**case.arguments(case.inputs), **case.options)[0].dtype == torch.float32


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16), (torch.float64,) * 3], ids=str
)
def test_autocast_dtypes_are_those_of_scaled_dot_product_attention(to, dtypes):
    layout = nta.SequenceLayout.from_lengths([4, 0, 3])
    tensors = [torch.randn(7, 3, 5, dtype=dtype, requires_grad=True) for dtype in dtypes]
    with torch.autocast("cpu", dtype=to):
        usual = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in tensors)).dtype
        out = nta.varlen_attention(*tensors, layout)
        assert nta.explain(*tensors, layout).chosen == "cpu"
        nested = layout.to_nested(torch.randn(7, 3, 5))
        assert nta.varlen_attention(nested, nested, nested).dtype == to
    assert out.dtype == usual
    out.sum().backward()
    assert [x.grad.dtype for x in tensors] == list(dtypes)


ALL_STRIDES = STRIDES | {"one-element-on": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape)}
ALL_STRIDES |= {"rows-apart": lambda x: F.pad(x.flatten(1), (0, 1))[:, :-1].unflatten(1, x.shape[1:])}
ALL_STRIDES |= {"heads-apart": lambda x: F.pad(x, (0, 1))[..., :-1]}
STRIDED = [
    (name, stride, tensor)
    for i, stride in enumerate(ALL_STRIDES)
    for name in ("cpu", "fake of multiples of 8", "token_tiled", "token_tiled in float16")
    if name in COLUMNS
    for at, tensor in enumerate(["query", "key", "value", "grad"])
    if name == "cpu" or (i + at) % 4 < (3 if "fake" in name else 1)
]


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("column", "stride", "name"), STRIDED, indirect=["column"])
def test_any_strides(column, stride, name):
    case = dataclasses.replace(column.problem("all, causal"), head_dim=16, value_dim=32, past=(0, 0), sinks=False)
    case = placed(case, column.device)
    function, change = column.call(case), ALL_STRIDES[stride]

    def strided(**arguments):
        return function(**{key: change(x) if key == name else x for key, x in arguments.items()})

    with column.device:
        want = case.truth()
    if name == "grad":
        case.grads = (change(case.grads[0]), case.grads[1])
    assert_same(case.solve(strided), want, column.tolerance)


SLOPES = {
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand_as(x),
    "float64": lambda x: x.double(),
}
BIASES = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand_as(x),
    "every other bucket": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "buckets first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
}


@on_columns(
    ("cpu", "token_tiled", "reference"),
    ["change"],
    [("slopes float64",), ("biases buckets first",), ("slopes strided",), ("slopes expanded",)]
    + [(f"biases {x}",) for x in BIASES if x != "buckets first"],
    few=2,
)
def test_any_strides_of_slopes_and_biases(column, change):
    kind, _, which = change.partition(" ")
    case = column.problem("two biases")
    if kind == "slopes":
        case = column.problem("all, causal")
        case.options["alibi_slopes"] = SLOPES[which](case.options["alibi_slopes"])
        with column.device:
            want = case.truth()
        got = case.solve(column.call(case))
    else:

        def both(relative, **arguments):
            changed = relative.with_tensors([BIASES[which](x) for x in relative.tensors])
            changed = dataclasses.replace(changed, buckets=relative.buckets.repeat_interleave(2)[::2].int())
            return (column.call(case) if ours else exact)(relative=changed, **arguments)

        def exact(**arguments):
            with column.device:
                return oracle.attention(**arguments, lengths=case.lengths, key_lengths=case.key_lengths)

        ours = True
        got = case.solve(both)
        ours = False
        want = case.solve(both)
    assert_same(got, want, column.tolerance)


@pytest.mark.parametrize("column", [x for x in ("cpu", "token_tiled") if x in COLUMNS], indirect=True)
def test_expanded_tensors(column):
    """Gradients that are one number, key heads that are one head, and views of one projection."""
    case = dataclasses.replace(column.problem("all, causal"), kv_heads=1, value_dim=11, sinks=False)
    case = placed(case, column.device)
    case.grads = tuple(torch.ones((), dtype=g.dtype, device=column.device).expand(g.shape) for g in case.grads)
    with column.device:
        want = case.truth()
    function = column.call(case)

    def expanded(key, value, **arguments):
        return function(**arguments, key=key.expand(-1, case.heads, -1), value=value.expand(-1, case.heads, -1))

    assert_same(case.solve(expanded), want, column.tolerance)
    case = column.problem("many short sequences" if column.small else "self left-open alibi")
    case = dataclasses.replace(case, kv_heads=case.heads)
    case = placed(case, column.device)
    qkv = torch.stack([case.inputs[name] for name in ("query", "key", "value")], 1).requires_grad_()
    out, lse = column.call(case)(*qkv.unbind(1), **case.options)
    (got,) = torch.autograd.grad((out, lse), qkv, (case.grads[0].to(out.dtype), case.grads[1].to(lse.dtype)))
    with column.device:
        want = case.truth()
    want = {"d qkv": torch.stack([want[f"d {name}"] for name in ("query", "key", "value")], 1)}
    assert_same({"d qkv": got}, want, column.tolerance)


BY_NAME = [x for x in COLUMNS if (x in BACKENDS and BACKENDS[x].backward is not None) or x == "reference"]
WITH_DROPOUT = [x for x in BY_NAME if "dropout" in BACKENDS[x].features]


def accuracy(column):
    """The dtype and the tolerance of tests that compare weights: float32, where the backend takes it."""
    dtypes = BACKENDS[column.backend].dtypes
    return (torch.float32, 1e-4) if dtypes is None or torch.float32 in dtypes else (column.dtype, column.tolerance)


@pytest.mark.usefixtures("uninitialized_is_nan")
@on_columns(
    WITH_DROPOUT, ["options"], [({"softcap": 1.3, "window_size": (19, 3)},), ({},), ({"relative": TERMS},)], few=1
)
def test_dropout(column, options):
    """With the identity as values, the output is the weights that were kept. The gradients must be of these weights."""
    lengths, p = [61, 5, 0, 13, 29, 1], 0.31
    options = dict(options)
    relative = options.pop("relative", ())
    dtype, tolerance = accuracy(column)
    case = placed(Problem(lengths, None, 4, 2, 11, 61, dtype=dtype, options=options, relative=relative), column.device)
    if column.lacks is None and (reasons := why_not(column, case, dropout_p=p)):
        pytest.skip(reasons)
    eye = torch.eye(61, device=column.device, dtype=dtype)
    case.inputs["value"] = torch.cat([eye[:n] for n in lengths])[:, None].repeat(1, 2, 1)
    torch.manual_seed(3)
    got = case.solve(column.call(case, dropout_p=p))
    kept = got["out"].detach() != 0

    def by_hand(value, **arguments):
        ones = torch.cat([eye[:n] for n in lengths])[:, None].repeat(1, 2, 1)
        with column.device:
            weights, lse = oracle.attention(value=ones, lengths=lengths, **arguments)
        weights = (weights * kept / (1 - p)).split(lengths)
        parts = zip(weights, value.double().repeat_interleave(2, 1).split(lengths), strict=True)
        return torch.cat([torch.einsum("thj,jhd->thd", w[..., : len(v)], v) for w, v in parts]), lse

    assert_same(got, case.solve(by_hand), tolerance)


@pytest.mark.parametrize("column", WITH_DROPOUT, indirect=True)
@pytest.mark.parametrize("p", [0.1, 0.75])
def test_dropout_drops_its_share_and_keeps_the_mean(column, p):
    n = 1021 if GPU else 61
    case = placed(Problem([n], None, 2, 2, 5, 5, dtype=accuracy(column)[0], options={"scale": 1e-9}), column.device)
    case.inputs["value"] = torch.eye(n, device=column.device, dtype=case.dtype)[:, None].repeat(1, 2, 1)[..., :256]
    function, found = column.call(case, dropout_p=p), []
    for is_first in (True, True, False):
        if is_first:
            torch.manual_seed(3)
        found.append(function(**case.inputs, **case.options)[0])
    weights, again, other = found
    kept = weights > 0
    torch.testing.assert_close(weights[kept] * n * (1 - p), torch.ones_like(weights[kept]))
    rounded = 1 / 256 if column.backend == "torch_flash" else 0.0  # it draws 8 bits
    assert abs(1 - kept.double().mean().item() - p) < 5 * (p * (1 - p) / kept.numel()) ** 0.5 + rounded
    # and not in step over heads, queries, keys or calls: two masks agree where both keep or both drop
    agree = p**2 + (1 - p) ** 2
    pairs = [(kept[:, 0], kept[:, 1]), (kept[1:], kept[:-1]), (kept[..., 1:], kept[..., :-1]), (kept, other > 0)]
    for one, two in pairs:
        same = (one == two).double().mean().item()
        assert abs(same - agree) < 5 * (agree * (1 - agree) / one.numel()) ** 0.5 + rounded
    assert torch.equal(again, weights)


TREE = ([30, 4, 1, 0, 7, 13, 5, 9], [-1, 0, 0, 0, 0, -1, 5, 5])


@on_columns(
    BY_NAME,
    ["options", "extra"],
    [({}, "sinks"), ({}, "gqa"), ({"softcap": 3.0}, "plain"), ({"window_size": (9, 0)}, "alibi")],
    few=1,
)
def test_trees(column, options, extra):
    """Segments that sequences share are computed once, with the results of each sequence alone."""
    tree = nta.TreeLayout(*TREE, device=column.device)
    if lacking := ({extra, *options} & set(FEATURES)) - BACKENDS[column.backend].features:
        pytest.skip(FEATURES[lacking.pop()])
    case = problem("self", "causal", extra, lengths=[tree.total], dtype=column.dtype, options=options)
    case = placed(case, column.device)
    lengths = tree.sequences.lengths.tolist()

    def shared(**arguments):
        out, lse = nta.varlen_attention(layout=tree, return_lse=True, backend=column.backend, **arguments)
        return tree.expand(out), tree.expand(lse)

    def each(query, key, value, **arguments):
        with column.device:
            return oracle.attention(*(tree.expand(x) for x in (query, key, value)), lengths=lengths, **arguments)

    case.grads = tuple(tree.expand(g) for g in case.grads)
    assert_same(case.solve(shared), case.solve(each), 10 * column.tolerance)


META = ("self causal-window alibi", "softcap, all", "score_mod", "mask_mod", "all, causal")


@pytest.mark.parametrize("row", META)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_meta_device(row, backend):
    """Shapes and dtypes are those of a CPU."""
    found = []
    for device in ("cpu", "meta"):
        row = row if row in ROWS else list(ROWS)[8]
        case = COLUMNS["cpu"].problem(row)
        leaves = {name: x.to(device).requires_grad_() for name, x in case.inputs.items()}
        case.bucket_table = case.bucket_table.to(device)
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
        layouts = layouts_of(case, torch.device(device))
        out = nta.varlen_attention(**case.arguments(leaves), **layouts, **options, backend=backend)
        grads = torch.autograd.grad(out.sum(), tuple(leaves.values()))
        found.append([(x.shape, x.dtype) for x in (out, *grads)])
        assert {x.device.type for x in (out, *grads)} == {device}
    assert found[0] == found[1]


FLOPS = [("cpu", row) for row in list(ROWS)[:20:2]] + [("auto", "softcap"), ("token_tiled", "more keys than a tile")]


@pytest.mark.parametrize(("backend", "row"), FLOPS)
def test_flops_are_those_of_the_visible_keys(backend, row):
    column = COLUMNS.get(backend, COLUMNS["cpu"])
    case = dataclasses.replace(column.problem(row), relative=(), sinks=False, alibi="")
    case = placed(case, column.device)
    options = {name: x for name, x in case.options.items() if name not in ("scale", "softcap", "alibi_slopes")}
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    pairs = visible_pairs(case.lengths, case.key_lengths or case.lengths, **options) * case.heads
    with FlopCounterMode(display=False) as counter:
        out, _ = column.call(case, backend=backend)(*leaves, **case.options)
    assert counter.get_total_flops() == 2 * pairs * (case.head_dim + case.value_dim)
    with FlopCounterMode(display=False) as counter:
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 2 * pairs * (3 * case.head_dim + 2 * case.value_dim)
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.nt_attention.attention_backward}


lengths = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 31, 64, 65, 127, 129, 150]))
window_side = st.one_of(st.just(-1), st.integers(0, 12), st.sampled_from([64, 127, 128, 140]))
SUBSETS = [x for count in (0, 0, 1, 2, 3) for x in itertools.combinations(TERMS, count)]


@st.composite
def problems(draw):
    pairs = draw(st.lists(st.tuples(lengths, lengths), max_size=5))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Problem(
        lengths=[q for q, _ in pairs],
        key_lengths=None if draw(st.booleans()) else [k for _, k in pairs],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        past=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        sinks=draw(st.booleans()),
        alibi=draw(st.sampled_from(["", "H", "BH"])) if pairs else "",
        relative=draw(st.sampled_from(SUBSETS)),
        buckets=(draw(st.integers(0, 30)), draw(st.integers(1, 20))),
        options={
            "is_causal": draw(st.booleans()),
            "causal_alignment": draw(st.sampled_from(["lower_right", "upper_left"])),
            "window_size": (draw(window_side), draw(window_side)),
            "scale": draw(st.sampled_from([None, 0.3])),
        },
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_random_calls(case):
    for backend in ("cpu", "reference") if case.relative and case.lengths else ("cpu",):
        assert_same(case.solve(COLUMNS["cpu"].call(case, backend=backend)), case.truth(), 1e-9)

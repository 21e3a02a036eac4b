"""The token-tiled kernels: accuracy, strides, tiles, bits and operators, beside the rows of the attention table.

Without a GPU Triton's interpreter runs small cases in float32 and float16. On a GPU the same tests run whole.
"""

import itertools
from functools import partial

import pytest
import torch
from operators import BACKWARD, FORWARD
from oracle import GEOMETRIES, Problem, assert_same
from sweeps import sweep_product
from token_tiled_cases import (
    DEVICE,
    DTYPES,
    GPU,
    HALVES,
    IGNORED_WARNINGS,
    TOLERANCE,
    bits,
    case_of,
    cases_of,
    check,
    exact,
    on_tiles,
    placed,
    random_inputs,
    truth,
)  # fmt: skip

import nt_attention as nta
from nt_attention.kernels.token_tiled import configs, ops
from nt_attention.kernels.token_tiled.configs import Config, Tile, config_for
from nt_attention.kernels.token_tiled.plan import Plan

gpu = pytest.mark.gpu
pytestmark = IGNORED_WARNINGS


# Accuracy


@exact
def test_softcap_is_accurate_in_float32():
    """The lse of a single key is its score. Scores are near 0, near the cap, and far above it."""
    products = torch.cat([torch.linspace(-2, 2, 401), torch.tensor([-90.0, -9.0, 1e-4, 9.0, 90.0])])
    case = placed(Problem([len(products)], [1], 1, 1, 1, 1, dtype=torch.float32, options={"softcap": 1.0}))
    case.inputs["query"] = products.to(DEVICE).reshape(-1, 1, 1)
    case.inputs["key"] = torch.ones_like(case.inputs["key"])
    got, want = case.solve(on_tiles(case)), truth(case)
    for name in ("lse", "d query"):
        assert_same({name: got[name]}, {name: want[name]}, 1e-6)


@exact
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alibi_is_not_rounded_by_token_tiled(dtype):
    """257 times a slope near 1 would be rounded in 16 bits, and weights would be off by tens of percent."""
    case = placed(Problem([301], None, 1, 1, 5, 5, dtype=dtype))
    case.inputs["query"] *= 0
    case.options["alibi_slopes"] = -torch.tensor([0.993], device=DEVICE)  # grows with the distance
    got, want = on_tiles(case)(**case.inputs, **case.options)[1], truth(case)["lse"]
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-3)


HEAD_DIMS = [(7, 67), (67, 7), (1, 131)]

WIDE_HEAD_DIMS = [(270, 5), (5, 330), (512, 16), (576, 512)]

if GPU:
    HEAD_DIMS += [(d, d) for d in (16, 20, 32, 64, 80, 96, 128, 160, 192, 256)] + [(24, 256), (256, 24)]
    WIDE_HEAD_DIMS += [(d, d) for d in (257, 320, 384, 512, 576)]


@exact
@cases_of("dims, dtype", 1, HEAD_DIMS, DTYPES)
def test_head_dims(dims, dtype):
    head_dim, value_dim = dims
    # one number's gradient is a sum in which much may cancel, so that the rounding of its terms is left
    slack = 4 if head_dim == 1 else 1
    check(case_of("cross", "causal", "gqa", dtype=dtype, head_dim=head_dim, value_dim=value_dim), slack)


@exact
@cases_of("dims, extra, dtype", 1, WIDE_HEAD_DIMS, ["gqa", "all"], HALVES)
def test_head_dims_above_256(dims, extra, dtype):
    head_dim, value_dim = dims
    check(case_of("cross", "causal-window", extra, dtype=dtype, head_dim=head_dim, value_dim=value_dim))


def test_layout_made_in_inference_mode():
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    with torch.inference_mode():
        out, _ = on_tiles(case)(**case.inputs, **case.options)
    assert_same({"out": out}, {"out": truth(case)["out"]}, TOLERANCE[torch.float16])


# Strides


def test_stride_of_heads_exceeds_32_bits():
    """As in a view of one long (H, T, D) tensor. Here the memory between heads is never touched."""
    dtype, apart = torch.float16, 2**30 + 16
    case = placed(Problem([37, 5], None, 3, 3, 16, 16, dtype=dtype))
    memory = torch.empty(2 * apart + 4 * 42 * 16, dtype=dtype, device=DEVICE)

    def far(x, index):
        return memory.as_strided(x.shape, (x.shape[2], apart, 1), index * x[:, 0].numel()).copy_(x)

    *tensors, grad = (far(x, index) for index, x in enumerate((*case.inputs.values(), case.grads[0])))
    got = bits(lambda *qkv: on_tiles(case)(*qkv)[0], tensors, grad)
    case.grads = (case.grads[0], torch.zeros_like(case.grads[1]))
    want = truth(case)
    names = ("out", "d query", "d key", "d value")
    assert_same(dict(zip(names, got, strict=True)), {name: want[name] for name in names}, TOLERANCE[dtype])


@gpu
def test_tensors_exceed_32_bit_sizes():
    """If each query sees its own key alone, out is the value, and only the value has a gradient."""
    rows, heads = 2**24 + 129, 3
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
    layout = nta.SequenceLayout.from_lengths([rows - 129, 129], device="cuda")
    # rows × 64 fit into 31 bits; heads × rows × 64 and rows × (heads × 64) do not
    q, k, v, grad = (torch.empty(heads, rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v, grad):
        x.normal_()
    v, grad = (x.view(rows, heads, 64) for x in (v, grad))
    function = partial(nta.varlen_attention, layout=layout, window_size=(0, 0), backend="token_tiled")
    out, dq, dk, dv = bits(function, (q.transpose(0, 1), k.transpose(0, 1), v), grad)
    assert torch.equal(out, v)
    assert torch.equal(dv, grad)
    # dout · out − delta, the same sum in two orders
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2


# Tiles and plans


TILES = {
    "wide": Config(16, *[Tile(16, 32, 4, 1)] * 4),
    "tall": Config(16, *[Tile(32, 16, 4, 1)] * 4),
    "each-its-own": Config(32, Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
    "nothing-shared": Config(0, Tile(32, 16, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@exact
@cases_of("tiles, geometry, extra, dtype", 11, TILES, GEOMETRIES, ["plain", "all"], DTYPES)
def test_any_tile_sizes(monkeypatch, tiles, geometry, extra, dtype):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(case_of("cross", geometry, extra, dtype=dtype))


@exact
@sweep_product(
    "tiles, window", ["tall", "nothing-shared"], [(2, -1), (-1, 2), (17, -1), (-1, 17), (23, 29), (3, 2**63 - 1)]
)
def test_windows_within_a_tile(monkeypatch, tiles, window):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(placed(Problem([67], None, 1, 1, 5, 5, dtype=torch.float16, options={"window_size": window})))


@pytest.mark.parametrize("table", configs.TABLES.values(), ids=map(str, configs.TABLES))
def test_tile_size_tables_are_valid(table):
    assert set(table) == {*itertools.product([64, 128, 256], [2, 4]), (384, 2), (512, 2), (576, 2)}
    for profiles in table.values():
        assert list(profiles)[-1] == (configs.ANY, configs.ANY), "no batch is left out"
        for config in profiles.values():
            assert config.fused.block_n >= config.shared, "the keys of a fused tile are one block"
            for tile in (config.forward, config.query, config.key, config.fused):
                for size in (tile.block_m, tile.block_n):
                    assert size >= 16, "matrix instructions"
                    assert size & (size - 1) == 0, "tl.arange"


@pytest.mark.parametrize(
    ("capability", "kib", "table"),
    [(9, 227, "H200"), (10, 227, "B200"), (8, 163, "A100"), (8, 99, "SMALL"), (12, 99, "SMALL"), (9, 63, "SMALL")],
)
def test_table_of_a_gpu(capability, kib, table):
    assert configs.table_for(capability, kib) is getattr(configs, table)


def test_plan_is_shared_by_all_layers_and_both_directions(monkeypatch):
    made = []
    monkeypatch.setattr(Plan, "make", lambda *args, make=Plan.make: made.append(1) or make(*args))
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    function = on_tiles(case)
    for _ in range(2):
        case.solve(function)
    function(**case.inputs, **case.options, softcap=1.3, batch_invariant=True)
    assert len(made) == 1


def test_plans_of_one_query_layout_are_cached_separately():
    """Plans differ by key layout, alignment and window."""
    lengths = [5, 3, 17]
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    key_layouts = {keys: nta.SequenceLayout.from_lengths(keys, device=DEVICE) for keys in ((7, 2, 19), (2, 7, 19))}
    for _ in range(2):
        for keys, name in itertools.product(key_layouts, ["causal", "causal-upper_left", "causal-window"]):
            case = placed(Problem(lengths, keys, 1, 1, 5, 5, dtype=torch.float32, options=GEOMETRIES[name]))
            out, lse = nta.varlen_attention(
                **case.inputs, **case.options, layout=layout, key_layout=key_layouts[keys], return_lse=True,
                backend="token_tiled",
            )  # fmt: skip
            want = truth(case)
            assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-5)


# Bits


def assert_repeats(lengths, dtype, times):
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    tensors, grad = random_inputs(layout.total, 4 if GPU else 2, 2 if GPU else 1, 64 if GPU else 5, dtype)
    function = partial(nta.varlen_attention, layout=layout, is_causal=True, deterministic=True, backend="token_tiled")
    first = bits(function, tensors, grad)
    for _ in range(times):
        for one, two in zip(first, bits(function, tensors, grad), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_call_gives_the_same_bits_again(dtype):
    assert_repeats([37, 5, 0, 13, 17], dtype, 1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_1000_deterministic_calls_give_the_same_bits(dtype):
    assert_repeats([2049, 5, 0, 129, 17, 1031, *[31] * 97], dtype, 1000)


def assert_alone_as_in_the_batch(lengths, heads, kv_heads, head_dim, dtype, **options):
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    tensors, grad = random_inputs(layout.total, heads, kv_heads, head_dim, dtype)
    options |= {"batch_invariant": True, "backend": "token_tiled"}
    together = bits(partial(nta.varlen_attention, layout=layout, **options), tensors, grad)
    parts = [x.split(lengths) for x in (*tensors, grad, *together)]
    for q, k, v, upper, *want in zip(*parts, strict=True):
        alone = nta.SequenceLayout.from_lengths([len(q)], device=DEVICE)
        got = bits(partial(nta.varlen_attention, layout=alone, **options), (q, k, v), upper)
        for name, one, two in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.equal(one, two), (name, len(q))


@cases_of("dtype, geometry", 1, DTYPES, ["full", "both-sides"])
def test_batch_invariant_sequence_gives_the_same_bits_alone(dtype, geometry):
    assert_alone_as_in_the_batch([3, 17, 1, 33, 0, 5, 16, 2], 2, 1, 5, dtype, **GEOMETRIES[geometry])


def test_batch_invariant_tile_sizes_are_always_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(ops, "config_for", lambda *args: asked.append(args) or config_for(*args))

    def ask(lengths, **options):
        layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
        x = torch.zeros(layout.total, 1, 5, device=DEVICE, dtype=torch.float16)
        nta.varlen_attention(x, x, x, layout, window_size=(0, 0), backend="token_tiled", **options)

    for lengths in ([1], [3] * 17, [131, 1], [257]):
        ask(lengths, batch_invariant=True)
    assert len(set(asked)) == 1
    ask([1])
    ask([257])
    assert len(set(asked)) == 3


@gpu
@pytest.mark.parametrize("geometry", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_batch_invariant_1000_sequences_give_the_same_bits_alone(dtype, head_dim, geometry):
    lengths = [1, 15, 16, 17, 31, 33, 127, 128, 129, 2049] * 5
    lengths += torch.randint(0, 200, (1000 - len(lengths),)).tolist()
    lengths = [lengths[i] for i in torch.randperm(len(lengths)).tolist()]
    assert_alone_as_in_the_batch(lengths, 4, 2, head_dim, dtype, **GEOMETRIES[geometry])


@exact
@pytest.mark.parametrize("geometry", ["full", "causal"])
def test_batch_invariant_sequence_is_independent_of_nan_in_others(geometry):
    case = case_of("self", geometry, "gqa", dtype=torch.float16)
    want = truth(case)
    last = case.lengths[-1]
    for name in ("query", "key", "value"):
        case.inputs[name][-last:] = torch.nan
    got = case.solve(on_tiles(case, batch_invariant=True))
    assert got["out"][-last:].isnan().all()
    got, want = ({name: x[:-last] for name, x in found.items()} for found in (got, want))
    assert_same(got, want, TOLERANCE[torch.float16])


# Operators


def operands(
    lengths=(5, 37, 1, 13), heads=4, kv_heads=2, head_dim=20, value_dim=12, alibi=True, relative=False, dropout_p=0.0
):
    """The positional arguments of an operator, and a gradient of its output."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    rows = sum(lengths)
    with DEVICE:
        q, k = torch.randn(rows, heads, head_dim), torch.randn(rows, kv_heads, head_dim)
        v, grad = torch.randn(rows, kv_heads, value_dim), torch.randn(rows, heads, value_dim)
        slopes = torch.rand(len(lengths), heads) if alibi else None
        biases = [None] * 4
        if relative:
            rows_of = torch.randn(2, rows, heads, 13)
            biases = [torch.randint(13, (9,)), torch.randn(heads, 13), *rows_of]
    options = (0.3, False, "lower_right", (11, 0), 0.0, dropout_p, False, False, True, relative)
    return (q, k, v, cu_seqlens, cu_seqlens, slopes, *biases, None, None, None, [], *options, [], "token_tiled"), grad


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("relative", [False, True], ids=["", "relative"])
def test_opcheck(alibi, relative):
    arguments, grad = operands(lengths=(5, 17, 1), heads=2, kv_heads=1, alibi=alibi, relative=relative)
    torch.library.opcheck(FORWARD, arguments)
    out, lse, *more = FORWARD(*arguments)
    torch.library.opcheck(BACKWARD, (grad, torch.randn_like(lse) if alibi else None, out, lse, *more, *arguments))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared", "batch-invariant"])
def test_heads_first_gradient_of_lse(batch_invariant):
    """The strides of lse itself. Autograd never passes such a gradient, but operators can be called directly."""
    arguments, grad = operands(lengths=(37, 5), heads=2, kv_heads=1, alibi=False)
    arguments = (*arguments[:-5], batch_invariant, *arguments[-4:])
    out, lse, *more = FORWARD(*arguments)
    grad_lse = torch.randn_like(lse)
    assert grad_lse.stride() == (1, len(lse))
    one, two = (BACKWARD(grad, g, out, lse, *more, *arguments)[:3] for g in (grad_lse, grad_lse.contiguous()))
    assert all(map(torch.equal, one, two))


def both_ways(grad, *arguments):
    out, lse, *more = FORWARD(*arguments)
    return out, lse, *BACKWARD(grad, lse, out, lse, *more, *arguments)[:3]


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_token_tiled_operators_in_one_graph(compiler):
    compiled = torch.compile(both_ways, fullgraph=True, backend=compiler)
    for lengths in ((5, 37, 1, 13), (17, 3, 0, 19), (1, 2, 3, 4, 5)):
        arguments, grad = operands(lengths)
        for one, two in zip(compiled(grad, *arguments), both_ways(grad, *arguments), strict=True):
            assert one.stride() == two.stride()
            assert torch.equal(one, two)

"""The token-tiled kernels against the float64 oracle, against PyTorch's own attention, and against themselves.

Without a GPU Triton's interpreter runs them: slow, so a few small cases of each kind, and right in float32 and float16
alone. On a GPU the same tests run whole.

Dimensions: T query tokens, S key tokens, H query heads, D and Dv head dims.
"""

import dataclasses
import itertools
from functools import partial

import oracle
import pytest
import torch
from oracle import EXTRAS, GEOMETRIES, Problem, assert_same
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import nt_attention as nta
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.token_tiled import backend, configs, ops
from nt_attention.kernels.token_tiled.configs import Config, Tile, config_for
from nt_attention.kernels.token_tiled.plan import Plan

gpu = pytest.mark.gpu
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),  # tanh's far end, on the CPU
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
DTYPES = [torch.float32, *HALVES]
# what comes back is rounded to 10 bits, or 7, and so are weights on their way
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}

# Around the sizes of tiles; and one sequence that is too long to share one, on either side.
LENGTHS = {
    "self": {"lengths": [5, 0, 1, 37, 17, 13], "key_lengths": None},
    "cross": {"lengths": [5, 0, 1, 37, 17, 13, 3], "key_lengths": [11, 3, 0, 17, 41, 13, 1], "past": (3, 2)},
}
if GPU:
    short = [31, 0, 127, 1, 15, 16, 129, 17, 33, 128]
    LENGTHS = {
        "self": {"lengths": short, "key_lengths": None},
        "cross": {"lengths": [*short, 3, 257], "key_lengths": [129, 3, 33, 0, 16, 15, 127, 17, 1, 128, 0, 131]}
        | {"past": (3, 2)},
    }


def cases_of(names, every, *axes):
    """All combinations on a GPU; on the interpreter one in ``every``, each value of each axis among them."""
    chosen = list(itertools.product(*axes))[:: 1 if GPU else every]
    assert [len(set(column)) for column in zip(*chosen, strict=True)] == [len(axis) for axis in axes]
    return pytest.mark.parametrize(names, chosen, ids=str)


def case_of(lengths, geometry, extra, /, **more) -> Problem:
    """The oracle's case with the lengths above and few heads, on the device."""
    heads = EXTRAS[extra] if "heads" in EXTRAS[extra] else {"heads": 2, "kv_heads": 2}
    heads = {"heads": 4, "kv_heads": 2} if heads["kv_heads"] == 3 else heads
    return placed(oracle.problem("self", geometry, extra, **{**LENGTHS[lengths], **heads, **more}))


def placed(case: Problem) -> Problem:
    def move(x):
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    case.inputs, case.options = ({k: move(x) for k, x in d.items()} for d in (case.inputs, case.options))
    case.grads = tuple(map(move, case.grads))
    return case


def layouts(case):
    first = nta.SequenceLayout.from_lengths(case.lengths, device=DEVICE)
    second = None if case.key_lengths is None else nta.SequenceLayout.from_lengths(case.key_lengths, device=DEVICE)
    return {"layout": first, "key_layout": second}


def on_tiles(case, **options):
    return partial(nta.varlen_attention, **layouts(case), return_lse=True, backend="token_tiled", **options)


def truth(case):
    with DEVICE:
        return case.truth()


def check(case, slack=1, **options):
    dtype = case.inputs["query"].dtype
    got = case.solve(on_tiles(case, **options))
    assert (got["out"].dtype, got["lse"].dtype) == (dtype, torch.float32)
    assert_same(got, truth(case), slack * TOLERANCE[dtype])


@pytest.fixture
def uninitialized_is_nan(uninitialized_is_nan):
    """What kernels leave unwritten shows, and so does what they read before it is written."""
    x = torch.ones(1, 1, 1)
    assert all(buffer.isnan().all() for buffer in (x.new_empty(3), torch.empty_like(x), torch.empty(3)))


exact = pytest.mark.usefixtures("uninitialized_is_nan")


@exact
@cases_of("lengths, geometry, extra, dtype, batch_invariant", 31, LENGTHS, GEOMETRIES, EXTRAS, DTYPES, [False, True])
def test_agrees_with_the_oracle(lengths, geometry, extra, dtype, batch_invariant):
    check(case_of(lengths, geometry, extra, dtype=dtype), batch_invariant=batch_invariant)


SCORES = {
    "softcap": ("plain", {"softcap": 1.3}),
    "softcap-far": ("gqa", {"softcap": 0.7, "scale": 2.0}),  # most scores at the cap, where tanh has no slope
    "softcap-near": ("plain", {"softcap": 30.0, "scale": 0.02}),  # and none near it, where tanh cancels
    "softcap-alibi": ("alibi-each-gqa", {"softcap": 1.3}),
    "softcap-all": ("all", {"softcap": 1.3, "scale": -0.3}),
    "negative-scale": ("gqa", {"scale": -0.3}),
    "zero-scale": ("wide-values-gqa", {"scale": 0.0}),
    "negative-scale-alibi": ("alibi", {"scale": -0.3}),
}


@exact
@cases_of("scores, geometry, dtype", 3, SCORES, ["full", "causal-window"], DTYPES)
def test_what_is_done_to_scores(scores, geometry, dtype):
    extra, options = SCORES[scores]
    check(case_of("cross", geometry, extra, dtype=dtype, options=options))


@exact
def test_a_capped_score_in_float32():
    """The lse of a single key is its score: tanh's series, where they meet, and its far end."""
    products = torch.cat([torch.linspace(-2, 2, 401), torch.tensor([-90.0, -9.0, 1e-4, 9.0, 90.0])])
    case = placed(Problem([len(products)], [1], 1, 1, 1, 1, dtype=torch.float32, options={"softcap": 1.0}))
    case.inputs["query"] = products.to(DEVICE).reshape(-1, 1, 1)
    case.inputs["key"] = torch.ones_like(case.inputs["key"])
    got, want = case.solve(on_tiles(case)), truth(case)
    for name in ("lse", "d query"):
        assert_same({name: got[name]}, {name: want[name]}, 1e-6)


@exact
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alibi_is_not_rounded(dtype):
    """A distance of 257 times a slope near 1 has no place in 16 bits; weights would be off by tens of percent."""
    case = placed(Problem([301], None, 1, 1, 5, 5, dtype=dtype))
    case.inputs["query"] *= 0
    case.options["alibi_slopes"] = -torch.tensor([0.993], device=DEVICE)  # grows with the distance
    got, want = on_tiles(case)(**case.inputs, **case.options)[1], truth(case)["lse"]
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-3)


HEAD_DIMS = [(7, 67), (67, 7), (1, 131)]
if GPU:
    HEAD_DIMS += [(d, d) for d in (16, 20, 32, 64, 80, 96, 128, 192, 256)] + [(24, 256), (256, 24)]


@exact
@cases_of("dims, dtype", 1, HEAD_DIMS, DTYPES)
def test_head_dims(dims, dtype):
    head_dim, value_dim = dims
    # one number's gradient is a sum in which much may cancel, so that the rounding of its terms is left
    slack = 4 if head_dim == 1 else 1
    check(case_of("cross", "causal", "gqa", dtype=dtype, head_dim=head_dim, value_dim=value_dim), slack)


@exact
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared", "batch-invariant"])
@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (7, 1)], ids=str)
def test_groups_of_heads(heads, batch_invariant):
    """A group's heads may be added up by one program, or by several."""
    case = placed(Problem([37, 0, 5], [17, 3, 19], *heads, 5, 5, dtype=torch.float16, options={"is_causal": True}))
    check(case, batch_invariant=batch_invariant)


@exact
@pytest.mark.parametrize("extra", ["plain", "sinks"])
@pytest.mark.parametrize(
    ("lengths", "key_lengths"),
    [([0, 0], [0, 0]), ([3, 2], [0, 0]), ([0, 0], [5, 2]), ([], []), ([0, 3, 0], [5, 0, 7]), ([5, 0], [3, 131])],
    ids=["all-empty", "no-keys", "no-queries", "no-sequences", "never-both", "many-keys-for-none"],
)
def test_where_there_is_nothing_to_attend_to(lengths, key_lengths, extra):
    check(placed(Problem(lengths, key_lengths, past=(3, 2), sinks=extra == "sinks", dtype=torch.float32)))


@exact
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared", "batch-invariant"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_past_the_sequences_is_never_read(dtype, batch_invariant):
    case = case_of("cross", "causal-window", "alibi-each-gqa", dtype=dtype)
    want = truth(case)
    past, key_past = case.past
    case.inputs["query"][-past:] = torch.nan
    for name in ("key", "value"):
        case.inputs[name][-key_past:] = torch.nan
    for grad in case.grads:
        grad[-past:] = torch.nan
    got = case.solve(on_tiles(case, batch_invariant=batch_invariant))
    assert_same(got, want, TOLERANCE[dtype])
    for name, rows, value in (
        ("out", past, 0),
        ("lse", past, -torch.inf),
        ("d query", past, 0),
        ("d key", key_past, 0),
    ):
        assert (got[name][-rows:] == value).all(), name


@exact
@pytest.mark.parametrize("which", ["out", "lse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_on_one_of_both(dtype, which):
    case = case_of("cross", "causal", "gqa", dtype=dtype)
    case.grads = tuple(
        g if name == which else torch.zeros_like(g) for name, g in zip(("out", "lse"), case.grads, strict=True)
    )
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
    found = dict(zip(("out", "lse"), on_tiles(case)(*leaves, **case.options), strict=True))[which]
    grad = case.grads[which == "lse"].to(found.dtype)
    got = torch.autograd.grad(found, leaves, grad, materialize_grads=True)
    want = truth(case)
    names = ("d query", "d key", "d value")
    assert_same(dict(zip(names, got, strict=True)), {name: want[name] for name in names}, TOLERANCE[dtype])


STRIDES = {
    "every-other-column": lambda x: x.repeat_interleave(2, dim=2)[..., ::2],
    "columns-before-heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens-last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "heads-first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other-token": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "one-of-three": lambda x: torch.stack([x - 1, x, x + 1], 1)[:, 1],
    "one-element-on": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


@exact
@cases_of("name, stride, dtype", 5, ["query", "key", "value", "grad"], STRIDES, DTYPES)
def test_tensors_may_lie_in_memory_as_they_like(name, stride, dtype):
    case = case_of("cross", "causal", "gqa", dtype=dtype, head_dim=16, value_dim=32)  # kernels read 16 bytes at a time
    stride, function = STRIDES[stride], on_tiles(case)

    def strided(**arguments):
        if name in arguments:
            arguments[name] = stride(arguments[name])
        return function(**arguments)

    want = truth(case)
    if GPU:  # so that a compiled form is there, and must not serve
        assert_same(case.solve(function), want, TOLERANCE[dtype])
    if name == "grad":
        case.grads = (stride(case.grads[0]), case.grads[1])
    assert_same(case.solve(strided), want, TOLERANCE[dtype])


def test_heads_may_lie_farther_apart_than_32_bits_count():
    """As those of one long (H, T, D) tensor do; here what lies between them is never touched."""
    dtype, apart = torch.float16, 2**30 + 16
    case = placed(Problem([37, 5], None, 3, 3, 16, 16, dtype=dtype))
    memory = torch.empty(2 * apart + 4 * 42 * 16, dtype=dtype, device=DEVICE)

    def far(x, place):
        return memory.as_strided(x.shape, (x.shape[2], apart, 1), place * x[:, 0].numel()).copy_(x)

    *tensors, grad = (far(x, place) for place, x in enumerate((*case.inputs.values(), case.grads[0])))
    got = bits(lambda *qkv: on_tiles(case)(*qkv)[0], tensors, grad)
    case.grads = (case.grads[0], torch.zeros_like(case.grads[1]))
    want = truth(case)
    names = ("out", "d query", "d key", "d value")
    assert_same(dict(zip(names, got, strict=True)), {name: want[name] for name in names}, TOLERANCE[dtype])


@exact
def test_gradients_may_be_expanded_from_one_number():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    case.grads = tuple(torch.ones((), dtype=g.dtype, device=DEVICE).expand(g.shape) for g in case.grads)
    check(case)


@exact
def test_key_heads_may_be_expanded_from_one():
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    for name in ("key", "value"):
        case.inputs[name] = case.inputs[name][:, :1]
    want = truth(case)
    function = on_tiles(case)

    def expanded(query, key, value, **options):
        return function(query, key.expand(-1, 2, -1), value.expand(-1, 2, -1), **options)

    assert_same(case.solve(expanded), want, TOLERANCE[torch.float16])


@exact
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_projection_s_views(dtype):
    """Queries, keys and values as ``qkv.unbind(1)``, and their gradients in one tensor."""
    case = case_of("self", "causal", "plain", dtype=dtype)
    qkv = torch.stack([case.inputs[name] for name in ("query", "key", "value")], 1).requires_grad_()
    out, lse = on_tiles(case)(*qkv.unbind(1), **case.options)
    (got,) = torch.autograd.grad((out, lse), qkv, (case.grads[0], case.grads[1].float()))
    want = truth(case)
    want = {"out": want["out"], "d qkv": torch.stack([want[f"d {name}"] for name in ("query", "key", "value")], 1)}
    assert_same({"out": out, "d qkv": got}, want, TOLERANCE[dtype])


@exact
@pytest.mark.parametrize("extra", ["alibi", "alibi-each-gqa"])
@pytest.mark.parametrize(
    "change",
    [lambda x: x.repeat_interleave(2, -1)[..., ::2], lambda x: x[..., :1].expand_as(x), lambda x: x.double()],
    ids=["strided", "expanded", "float64"],
)
def test_slopes_may_lie_in_memory_as_they_like(change, extra):
    case = case_of("cross", "causal", extra, dtype=torch.float16)
    case.options["alibi_slopes"] = change(case.options["alibi_slopes"])
    check(case)


TILES = {
    "wide": Config(16, *[Tile(16, 32, 4, 1)] * 4),
    "tall": Config(16, *[Tile(32, 16, 4, 1)] * 4),
    "each-its-own": Config(32, Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
    "nothing-shared": Config(0, Tile(32, 16, 4, 1), Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@exact
@cases_of("tiles, geometry, extra, dtype", 11, TILES, GEOMETRIES, ["plain", "all"], DTYPES)
def test_any_sizes_of_tiles_give_the_same(monkeypatch, tiles, geometry, extra, dtype):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(case_of("cross", geometry, extra, dtype=dtype))


@exact
@pytest.mark.parametrize("window", [(2, -1), (-1, 2), (17, -1), (-1, 17), (23, 29), (3, 2**63 - 1)], ids=str)
@pytest.mark.parametrize("tiles", ["tall", "nothing-shared"])
def test_blocks_that_only_some_rows_see_whole(monkeypatch, tiles, window):
    monkeypatch.setattr(ops, "config_for", lambda *_: TILES[tiles])
    check(placed(Problem([67], None, 1, 1, 5, 5, dtype=torch.float16, options={"window_size": window})))


@pytest.mark.parametrize("table", configs.TABLES.values(), ids=configs.TABLES)
def test_the_tables_hold_to_what_kernels_assume(table):
    assert set(table) == set(itertools.product([64, 128, 256], [2, 4]))
    for profiles in table.values():
        assert list(profiles)[-1] == (configs.ANY, configs.ANY), "no batch is left out"
        for config in profiles.values():
            assert config.fused.block_n >= config.shared, "the keys of a fused tile are one block"
            for tile in (config.forward, config.query, config.key, config.fused):
                for size in (tile.block_m, tile.block_n):
                    assert size >= 16, "matrix instructions"
                    assert size & (size - 1) == 0, "tl.arange"


def test_one_plan_serves_all_layers_and_both_directions(monkeypatch):
    made = []
    monkeypatch.setattr(Plan, "make", lambda *args, make=Plan.make: made.append(1) or make(*args))
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    function = on_tiles(case)
    for _ in range(2):
        case.solve(function)
    function(**case.inputs, **case.options, softcap=1.3, batch_invariant=True)
    assert len(made) == 1


def test_plans_of_one_query_layout_stay_apart():
    """By the keys' layout, the alignment and the window."""
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


def test_a_layout_made_in_inference_mode_serves_there():
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    with torch.inference_mode():
        out, _ = on_tiles(case)(**case.inputs, **case.options)
    assert_same({"out": out}, {"out": truth(case)["out"]}, TOLERANCE[torch.float16])


# --- dropout


def dropped(case, dropout_p, seed=3, **options):
    """out, lse and gradients of a call that drops weights."""
    torch.manual_seed(seed)
    return case.solve(on_tiles(case, dropout_p=dropout_p, **options))


DROPOUT_LENGTHS = [61, 5, 0, 13, 29, 1]


@exact
@pytest.mark.parametrize("options", [{}, {"softcap": 1.3, "window_size": (19, 3)}], ids=["full", "softcap-window"])
def test_dropout_is_the_same_forward_and_backward(options):
    """With the identity as values, the output holds the weights that were kept; gradients must be of these."""
    case = placed(Problem(DROPOUT_LENGTHS, None, 4, 2, 11, max(DROPOUT_LENGTHS), dtype=torch.float32, options=options))
    eye = torch.eye(max(DROPOUT_LENGTHS), device=DEVICE)
    case.inputs["value"] = torch.cat([eye[:n] for n in DROPOUT_LENGTHS])[:, None].repeat(1, 2, 1)
    p = 0.31
    got = dropped(case, p)

    def by_hand(query, key, value, **options):
        outs, lses = [], []
        begins = itertools.accumulate(DROPOUT_LENGTHS, initial=0)
        for begin, n in zip(begins, DROPOUT_LENGTHS, strict=False):
            rows = slice(begin, begin + n)
            with DEVICE:
                weights, lse = oracle.attention(query[rows], key[rows], eye[:n, None].expand(-1, 2, -1), [n], **options)
            kept = got["out"][rows].detach() != 0
            weights = weights * kept / (1 - p)
            outs.append(torch.einsum("thj,jhd->thd", weights[..., :n], value[rows].double().repeat_interleave(2, 1)))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    assert_same(got, case.solve(by_hand), 1e-4)


@pytest.mark.parametrize("p", [0.1, 0.75])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    n = 1021 if GPU else 61
    case = placed(Problem([n], None, 2, 2, 5, 5, dtype=torch.float32, options={"scale": 0.0}))
    with DEVICE:
        case.inputs["value"] = torch.eye(n)[:, None].repeat(1, 2, 1)[..., :256]
        function = on_tiles(case, dropout_p=p)
        torch.manual_seed(3)
        weights, _ = function(**case.inputs, **case.options)
        torch.manual_seed(3)
        again, _ = function(**case.inputs, **case.options)
        other, _ = function(**case.inputs, **case.options)
    kept = weights > 0
    torch.testing.assert_close(weights[kept] * n * (1 - p), torch.ones_like(weights[kept]))
    count = kept.numel()
    spread = (p * (1 - p) / count) ** 0.5
    assert abs(1 - kept.double().mean().item() - p) < 5 * spread
    # and not in step over heads, queries, keys or calls: two masks agree where both keep or both drop
    agree = p**2 + (1 - p) ** 2
    pairs = [(kept[:, 0], kept[:, 1]), (kept[1:], kept[:-1]), (kept[..., 1:], kept[..., :-1]), (kept, other > 0)]
    for one, two in pairs:
        found = (one == two).double().mean().item()
        assert abs(found - agree) < 5 * (agree * (1 - agree) / one.numel()) ** 0.5
    assert torch.equal(again, weights)


# --- the same bits


def bits(function, tensors, grad):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def random_inputs(rows, heads, kv_heads, head_dim, dtype):
    """q, k, v and the gradient from above."""
    shapes = [(rows, heads, head_dim), *[(rows, kv_heads, head_dim)] * 2, (rows, heads, head_dim)]
    q, k, v, grad = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes)
    return (q, k, v), grad


def assert_repeats(lengths, dtype, times):
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    tensors, grad = random_inputs(layout.total, 4 if GPU else 2, 2 if GPU else 1, 64 if GPU else 5, dtype)
    function = partial(nta.varlen_attention, layout=layout, is_causal=True, deterministic=True, backend="token_tiled")
    first = bits(function, tensors, grad)
    for _ in range(times):
        for one, two in zip(first, bits(function, tensors, grad), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_call_gives_the_same_bits_again(dtype):
    assert_repeats([37, 5, 0, 13, 17], dtype, 1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_calls_give_the_same_bits(dtype):
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
def test_a_sequence_gives_the_same_bits_alone(dtype, geometry):
    assert_alone_as_in_the_batch([3, 17, 1, 33, 0, 5, 16, 2], 2, 1, 5, dtype, **GEOMETRIES[geometry])


def test_the_tiles_of_a_batch_invariant_call_are_always_the_same(monkeypatch):
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
def test_one_of_a_thousand_gives_the_same_bits_alone(dtype, head_dim, geometry):
    lengths = [1, 15, 16, 17, 31, 33, 127, 128, 129, 2049] * 5
    lengths += torch.randint(0, 200, (1000 - len(lengths),)).tolist()
    lengths = [lengths[i] for i in torch.randperm(len(lengths)).tolist()]
    assert_alone_as_in_the_batch(lengths, 4, 2, head_dim, dtype, **GEOMETRIES[geometry])


@exact
@pytest.mark.parametrize("geometry", ["full", "causal"])
def test_a_batch_invariant_sequence_does_not_suffer_from_its_neighbour_s_nan(geometry):
    case = case_of("self", geometry, "gqa", dtype=torch.float16)
    want = truth(case)
    last = case.lengths[-1]
    for name in ("query", "key", "value"):
        case.inputs[name][-last:] = torch.nan
    got = case.solve(on_tiles(case, batch_invariant=True))
    assert got["out"][-last:].isnan().all()
    got, want = ({name: x[:-last] for name, x in found.items()} for found in (got, want))
    assert_same(got, want, TOLERANCE[torch.float16])


# --- the operators

FORWARD = torch.ops.nt_attention.token_tiled_forward.default
BACKWARD = torch.ops.nt_attention.token_tiled_backward.default


def operands(lengths=(5, 37, 1, 13), heads=4, kv_heads=2, head_dim=20, value_dim=12, alibi=True, dropout_p=0.0):
    """An operator's arguments by position, and a gradient from above."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    rows = sum(lengths)
    with DEVICE:
        q, k = torch.randn(rows, heads, head_dim), torch.randn(rows, kv_heads, head_dim)
        v, grad = torch.randn(rows, kv_heads, value_dim), torch.randn(rows, heads, value_dim)
        slopes = torch.rand(len(lengths), heads) if alibi else None
    options = (0.3, False, "lower_right", (11, 0), 0.0, dropout_p, False, False, True)
    return (q, k, v, cu_seqlens, cu_seqlens, slopes, *options), grad


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_operators_are_what_they_say(alibi):
    arguments, grad = operands(lengths=(5, 17, 1), heads=2, kv_heads=1, alibi=alibi)
    torch.library.opcheck(FORWARD, arguments)
    out, lse, state = FORWARD(*arguments)
    torch.library.opcheck(BACKWARD, (grad, torch.randn_like(lse) if alibi else None, out, lse, state, *arguments))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared", "batch-invariant"])
def test_the_gradient_of_lse_may_lie_heads_first(batch_invariant):
    """As lse itself does. From above it never comes so, but operators may be called by anybody."""
    arguments, grad = operands(lengths=(37, 5), heads=2, kv_heads=1, alibi=False)
    arguments = (*arguments[:-2], batch_invariant, True)
    out, lse, state = FORWARD(*arguments)
    grad_lse = torch.randn_like(lse)
    assert grad_lse.stride() == (1, len(lse))
    one, two = (BACKWARD(grad, g, out, lse, state, *arguments) for g in (grad_lse, grad_lse.contiguous()))
    assert all(map(torch.equal, one, two))


def both_ways(grad, *arguments):
    out, lse, state = FORWARD(*arguments)
    return out, lse, *BACKWARD(grad, lse, out, lse, state, *arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_operators_compile_into_one_graph(compiler):
    compiled = torch.compile(both_ways, fullgraph=True, backend=compiler)
    for lengths in ((5, 37, 1, 13), (17, 3, 0, 19), (1, 2, 3, 4, 5)):
        arguments, grad = operands(lengths)
        for one, two in zip(compiled(grad, *arguments), both_ways(grad, *arguments), strict=True):
            assert one.stride() == two.stride()
            assert torch.equal(one, two)


def visible_pairs(case):
    """How many (query, key) pairs the mask leaves: those of the oracle's own weights that are not 0."""
    n = max(case.key_lengths)
    total = 0
    for queries, keys in zip(case.lengths, case.key_lengths, strict=True):
        q, k, v = torch.ones(queries, 1, 1), torch.ones(keys, 1, 1), torch.eye(n)[:keys, None]
        total += int((oracle.attention(q, k, v, [queries], [keys], **case.options)[0] > 0).sum())
    return total


@pytest.mark.parametrize("geometry", ["full", "causal-upper_left", "causal-window"])
def test_flops_are_counted_by_the_pairs_that_are_seen(geometry):
    case = case_of("cross", geometry, "wide-values-gqa", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    function = on_tiles(case)
    with FlopCounterMode(display=False) as counter:
        out, _ = function(*leaves, **case.options)
    pairs = visible_pairs(case) * case.heads
    assert counter.get_total_flops() == 2 * pairs * (case.head_dim + case.value_dim)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * case.head_dim + 2 * case.value_dim)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_functional_gradients_are_autograd_s(dtype):
    case = case_of("cross", "causal", "gqa", dtype=dtype)
    function = on_tiles(case, is_causal=True)

    def loss(query, key, value):
        out, lse = function(query, key, value)
        return out.float().square().sum() + lse.clamp(min=-9).sum()

    tensors = tuple(case.inputs.values())
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    for one, two in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_decides_the_precision(dtype):
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    function = on_tiles(case, **case.options)
    with torch.autocast(DEVICE.type, dtype):
        out, lse = function(*leaves)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad((out, lse), leaves, (case.grads[0].to(dtype), case.grads[1].float()))
    assert {g.dtype for g in grads} == {torch.float32}
    want = truth(case)
    got = dict(zip(want, (out, lse, *grads), strict=True))
    assert_same(got, want, 2 * TOLERANCE[dtype])  # the inputs are rounded as well


# --- on a GPU alone


@gpu
def test_tensors_may_outgrow_32_bits():
    """Where each query sees its own key alone, the output is the value, and no gradient is left but the value's."""
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


SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 4, 4, 64, 64, 0.125)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 20, "value_dim": 12, "num_kv_heads": 2}, None),
        ({"head_dim": 256, "dtype": torch.float32}, None),
        ({"causal_alignment": "upper_left", "is_causal": True, "equal_lengths": False}, None),
        ({"softcap": 2.0, "alibi": True, "window_size": (3, 5), "dropout_p": 0.1}, None),
        ({"deterministic": True, "batch_invariant": True, "needs_grad": True}, None),
        ({"batch_invariant": True, "dropout_p": 0.1}, "leave dropout_p at 0"),
        ({"dtype": torch.float64}, "torch.autocast"),
        ({"head_dim": 320}, "got 320"),
        ({"value_dim": 257}, "got 257"),
        ({"score_mod": lambda score, *_: score}, "score_mod"),
        ({"mask_mod": lambda *_: True}, "mask_mod"),
        ({"device": torch.device("cpu")}, "got cpu: move them"),
    ],
)
def test_refuses_what_the_kernels_lack(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    reasons = backend.BACKEND.unsupported(dataclasses.replace(SPEC, **change))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_refuses_an_old_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a T4")
    assert ["a T4" in reason for reason in backend.BACKEND.unsupported(SPEC)] == [True]


def test_the_interpreter_stands_in_for_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    assert backend.BACKEND.unsupported(dataclasses.replace(SPEC, device=torch.device("cpu"))) == []

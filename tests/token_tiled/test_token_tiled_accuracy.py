"""The token-tiled kernels against the float64 oracle.

Without a GPU Triton's interpreter runs small cases in float32 and float16. On a GPU the same tests run whole.
"""

import pytest
import torch
from oracle import EXTRAS, GEOMETRIES, Problem, assert_same
from sweeps import sweep_product
from token_tiled_cases import (
    DEVICE,
    DTYPES,
    GPU,
    HALVES,
    IGNORED_WARNINGS,
    LENGTHS,
    TOLERANCE,
    case_of,
    cases_of,
    check,
    exact,
    on_tiles,
    placed,
    truth,
)

pytestmark = IGNORED_WARNINGS


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
def test_softcap_scale_and_alibi(scores, geometry, dtype):
    extra, options = SCORES[scores]
    check(case_of("cross", geometry, extra, dtype=dtype, options=options))


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


@exact
@sweep_product("heads, batch_invariant", [(8, 4), (8, 2), (7, 1)], [False, True])
def test_grouped_heads(heads, batch_invariant):
    """The gradients of a group of heads are summed by one program or by several."""
    case = placed(Problem([37, 0, 5], [17, 3, 19], *heads, 5, 5, dtype=torch.float16, options={"is_causal": True}))
    check(case, batch_invariant=batch_invariant)


EMPTY = {
    "all-empty": ([0, 0], [0, 0]),
    "no-keys": ([3, 2], [0, 0]),
    "no-queries": ([0, 0], [5, 2]),
    "no-sequences": ([], []),
    "never-both": ([0, 3, 0], [5, 0, 7]),
    "many-keys-for-none": ([5, 0], [3, 131]),
}


@exact
@sweep_product("which, extra", EMPTY, ["plain", "sinks"])
def test_empty_sequences_and_no_keys(which, extra):
    check(placed(Problem(*EMPTY[which], past=(3, 2), sinks=extra == "sinks", dtype=torch.float32)))


@exact
@sweep_product("dtype, batch_invariant", DTYPES, [False, True])
def test_rows_past_the_end_are_never_read(dtype, batch_invariant):
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
@sweep_product("dtype, which", DTYPES, ["out", "lse"])
def test_gradients_of_out_or_lse_alone(dtype, which):
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


def test_layout_made_in_inference_mode():
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    with torch.inference_mode():
        out, _ = on_tiles(case)(**case.inputs, **case.options)
    assert_same({"out": out}, {"out": truth(case)["out"]}, TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_torch_func_grad_agrees_with_autograd(dtype):
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
def test_autocast_decides_the_dtype(dtype):
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

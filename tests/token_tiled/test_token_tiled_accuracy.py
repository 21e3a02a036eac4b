"""The token-tiled kernels against the float64 oracle.

Without a GPU Triton's interpreter runs small cases in float32 and float16. On a GPU the same tests run whole.
"""

import pytest
import torch
from oracle import Problem, assert_same
from token_tiled_cases import (
    DEVICE,
    DTYPES,
    GPU,
    HALVES,
    IGNORED_WARNINGS,
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

"""Cases for the token-tiled kernels: on a GPU whole, in Triton's interpreter with small sizes.

Dimensions: T query tokens, S key tokens, H query heads, D and Dv head dims.
"""

import itertools
from functools import partial

import oracle
import pytest
import torch
from oracle import EXTRAS, Problem, assert_same
from sweeps import sweep
from torch import Tensor

import nt_attention as nta

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),  # tanh's far end, on the CPU
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if GPU else "cpu")

HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]

DTYPES = [torch.float32, *HALVES]

# what comes back is rounded to 10 bits, or 7, and so are weights on their way
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}

# Lengths around the sizes of tiles, and one sequence of queries and of keys that is too long to share a tile.
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
    """All combinations on a GPU. Triton's interpreter runs one in `every`, with each value of each axis."""
    chosen = list(itertools.product(*axes))[:: 1 if GPU else every]
    assert [len(set(column)) for column in zip(*chosen, strict=True)] == [len(axis) for axis in axes]
    return sweep(names, chosen)


def device_of(backend):
    """Where the tables call a backend: the CPU's own and the reference on the CPU."""
    return torch.device("cpu") if backend in ("cpu", "fake", "reference") else DEVICE


def case_of(lengths, geometry, extra, /, device=DEVICE, **more) -> Problem:
    """The oracle's case with the lengths above and few heads."""
    heads = EXTRAS[extra] if "heads" in EXTRAS[extra] else {"heads": 2, "kv_heads": 2}
    heads = {"heads": 4, "kv_heads": 2} if heads["kv_heads"] == 3 else heads
    return placed(oracle.problem("self", geometry, extra, **{**LENGTHS[lengths], **heads, **more}), device)


def placed(case: Problem, device: torch.device = DEVICE) -> Problem:
    def move(x):
        return x.to(device) if isinstance(x, Tensor) else x

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
    with case.inputs["query"].device:
        return case.truth()


def check(case, slack=1, **options):
    dtype = case.inputs["query"].dtype
    got = case.solve(on_tiles(case, **options))
    assert (got["out"].dtype, got["lse"].dtype) == (dtype, torch.float32)
    assert_same(got, truth(case), slack * TOLERANCE[dtype])


exact = pytest.mark.usefixtures("uninitialized_is_nan")


def bits(function, tensors, grad):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def random_inputs(rows, heads, kv_heads, head_dim, dtype):
    """q, k, v and the gradient of out."""
    shapes = [(rows, heads, head_dim), *[(rows, kv_heads, head_dim)] * 2, (rows, heads, head_dim)]
    q, k, v, grad = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes)
    return (q, k, v), grad

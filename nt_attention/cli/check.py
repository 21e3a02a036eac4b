"""``python -m nt_attention check``: compare every backend on this machine with the reference in float64.

Several head dims, and each feature that a backend supports, run forward and backward on lengths around the edges of
tiles. ``tools/verify_backends.py`` compares more strictly, and writes the verified support of a kind of GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import registry
from ..kernels.measurements import versions
from .calls import CAUSAL, CaseInputs, NotSupportedError, Workload, attention, chosen
from .environment import backends_of, device_name, devices

# The largest L2 error of out and of each gradient, relative to its norm.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 129, 0, 17, 300, 15, 31, 128, 33, 127, 16, 5)
KEY_LENGTHS = (4, 129, 0, 31, 290, 16, 257, 128, 33, 130, 19, 5)  # fewer and more than queries
KEYLESS = (4, 129, 3, 31, 0, 16, 257, 128, 33, 0, 19, 5)
HEADS = 4
HEAD_DIMS = (*[(n, n) for n in (16, 32, 64, 80, 96, 128, 192, 256)], (192, 128), (512, 512))


def tilt(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + 0.01 * (i - j) * (h + 1)


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j + b) % 3 == 0


# feature → the fields of its workload
FIELDS: dict[str, dict[str, Any]] = {
    "window": {"options": {"window_size": (70, 30)}},
    "softcap": {"options": {"softcap": 5.0}},
    "alibi": {"options": {"alibi_slopes": (0.05, 0.2, 0.35, 0.5)}},
    "score_mod": {"options": {"score_mod": tilt}},
    "mask_mod": {"options": {"mask_mod": every_third}},
    "deterministic": {"options": CAUSAL | {"deterministic": True}},
    "batch_invariant": {"options": {"batch_invariant": True}},
    "grouped heads": {"options": CAUSAL, "kv_heads": 2},
    "cross": {"options": CAUSAL, "key_lengths": KEY_LENGTHS},
    "upper_left": {"options": CAUSAL | {"causal_alignment": "upper_left"}, "key_lengths": KEY_LENGTHS},
    "no keys": {"key_lengths": KEYLESS},
    "scale ≤ 0": {"options": CAUSAL | {"scale": -0.2}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=devices(), default=devices()[0])
    add("--backends", nargs="+", choices=list(registry.backends()), help="default: all that are available")
    add("--which", nargs="+", help="only these head dims and features, such as 64 192/128 window")


def main(options: argparse.Namespace) -> int:
    """Print what is right and what is not. The exit status is 1 if something is not, or nothing ran."""
    device, compared, is_bad = torch.device(options.device), 0, False
    backends, names = registry.backends(), [workload.name for workload in workloads()]
    if unknown := set(options.which or ()) - set(names):
        options.error(f"{unknown.pop()!r} is not one of {', '.join(names)}")
    for name in options.backends or ():
        if missing := backends[name].missing():
            options.error(f"{name} is not available: {missing}")
    print(f"{device_name(device)}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    for name in options.backends or [name for name in backends_of(device) if name != "reference"]:
        for dtype in (each for each in TOLERANCE if each in (backends[name].dtypes or TOLERANCE)):
            found = {"right": list[str](), "not right": list[str]()}
            for workload in workloads(options.which):
                if (error := difference(name, workload, device, dtype)) is not None:
                    found["not right" if error else "right"].append(f"{workload.name}{error}")
                    compared += 1
            for result, which in found.items():
                if which:
                    print(f"{name:<16} {str(dtype).removeprefix('torch.'):<9} {result}: {', '.join(which)}", flush=True)
            is_bad |= bool(found["not right"])
    if not compared:
        print("nothing was compared: no backend that was asked for supports any of these cases")
    return int(is_bad or not compared)


def workloads(which: list[str] | None = None) -> Iterator[Workload]:
    """A causal one of each head dim, and one of each feature at head dim 64."""
    for head_dim, value_dim in HEAD_DIMS:
        name = str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
        if which is None or name in which:
            yield Workload(name, "", LENGTHS, HEADS, HEADS, head_dim, CAUSAL, value_dim=value_dim)
    for name, fields in FIELDS.items():
        if which is None or name in which:
            yield replace(Workload(name, "", LENGTHS, HEADS, HEADS, 64), **fields)


def difference(backend: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is not right: an error above the tolerance, or why a call failed. None if the call is not supported."""
    inputs = CaseInputs.random(workload, device, dtype, past_end=2)
    backward = not registry.backends()[backend].inference_only
    try:
        chosen(backend, inputs, backward)
        got = attention(backend, inputs).results(backward)
        if "deterministic" in inputs.options:
            again = attention(backend, inputs).results(backward)
            assert all(torch.equal(again[name], x) for name, x in got.items()), "the same call gave other bits"
        exact = attention("reference", inputs.in_dtype(torch.float64)).results(backward)
        return _compare(got, exact, TOLERANCE[dtype])
    except NotSupportedError:
        return None
    except Exception as error:  # kernels of other libraries raise errors of any type: each is a result
        return f" ({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})"


def _compare(got: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> str:
    """Which results are off. The gradients of query and key are as large as out, but 0 if a query sees one key."""
    magnitude, wrong = exact["out"].square().mean().sqrt(), []
    for name, x in exact.items():
        error = float((got[name].double() - x).norm() / torch.maximum(x.norm(), magnitude * x.numel() ** 0.5))
        wrong += [] if error <= tolerance else [f"{name} off by {error:.1e}"]  # NaN is wrong
    return f" ({', '.join(wrong)})" if wrong else ""

"""The host time of a call with gradients on this GPU, on a batch that the device finishes quickly.

    python benchmarks/host_time.py [--save FILE]

For each backend: a direct call of its kernel, ``varlen_attention`` on packed tensors, and on NestedTensors that are
leaves or the results of a projection; then NestedTensor SDPA. A second table has forward and backward, also of
PyTorch's own ``varlen_attn``, and of an autograd function without any attention, which copies tensors only: its time is
PyTorch's own. It wraps values as PyTorch's operators do, or by its public function. "One thread" is under
``torch.autograd.set_multithreading_enabled(False)``, or else a second thread runs backwards. Times are in µs, medians
over bursts of calls in one run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import host_us, show
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

import nt_attention as nta
from nt_attention.functional import plan
from nt_attention.kernels.registry import BACKENDS

LENGTHS = [30, 7, 64, 27]
CALLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    layout = nta.SequenceLayout.from_lengths(LENGTHS, device="cuda")
    us = functools.partial(host_us, calls=CALLS)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of host time, forward with gradients",
        "",
        "| backend | kernel alone | packed | overhead | NestedTensor | overhead | from a projection | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    both = ["", "Forward and backward:", "", "| backend | packed | packed, one thread | NestedTensor | difference |"]
    both.append("|---|---|---|---|---|")
    for name, backend in BACKENDS.items():
        dtype = torch.float32 if name == "torch_efficient" else torch.bfloat16
        if backend.missing() or backend.backward is None or backend.device_type == "cpu":
            continue
        packed = [torch.randn(layout.total, 4, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
        plain = [x.detach() for x in packed]
        nested = [layout.to_nested(x).requires_grad_() for x in plain]
        projected = [layout.to_nested(x) for x in packed]
        call = plan(*packed, layout, backend=name)
        attend = functools.partial(nta.varlen_attention, backend=name)
        raw = us(functools.partial(backend.forward, *plain, call))
        times = [us(functools.partial(attend, *packed, layout)), us(functools.partial(attend, *nested))]
        times.append(us(functools.partial(attend, *projected)))
        cells = " | ".join(f"{t:.0f} | {t - raw:.0f}" for t in times)
        lines.append(f"| {name} | {raw:.0f} | {cells} |")
        a, one_thread = _steps(_with_backward(attend, packed, layout))
        b, _ = _steps(_with_backward(attend, nested))
        both.append(f"| {name} | {a:.0f} | {one_thread:.0f} | {b:.0f} | {b - a:.0f} |")
    offsets, length = layout.cu_seqlens, layout.max_seqlen
    packed = [torch.randn(layout.total, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    stock = _with_backward(varlen_attn, packed, offsets, offsets, length, length)
    a, one_thread = _steps(stock)
    lines += [*both, f"| PyTorch's varlen_attn | {a:.0f} | {one_thread:.0f} | – | – |"]
    nested = [layout.to_nested(x.detach()).requires_grad_() for x in packed]
    a, one_thread = _steps(_with_backward(_NoAttention.apply, packed, lambda values, offsets: values))
    for name, wrap in (("as operators do", _wrap_directly), ("by the public function", nested_tensor_from_jagged)):
        b, _ = _steps(_with_backward(_NoAttention.apply, nested, wrap))
        lines.append(f"| no attention, wrapped {name} | {a:.0f} | {one_thread:.0f} | {b:.0f} | {b - a:.0f} |")
    lines += ["", f"NestedTensor SDPA: {host_us(_nested_sdpa(layout), 20):.0f} µs."]
    show(lines, options.save)


def _with_backward(attend: Callable[..., Any], inputs: list[Tensor], *arguments: Any) -> Callable[[], object]:
    grad = attend(*inputs, *arguments).detach()
    return lambda: torch.autograd.grad(attend(*inputs, *arguments), inputs, grad)


def _steps(step: Callable[[], object]) -> tuple[float, float]:
    """The host time of a forward and backward, and that with the backward in the calling thread."""
    times = host_us(step, 20, 25)  # more calls would fill the device's queue
    with torch.autograd.set_multithreading_enabled(False):
        return times, host_us(step, 20, 25)


class _NoAttention(torch.autograd.Function):
    """Returns the first input, and its gradient for each of three inputs. They are packed, or all NestedTensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, *_, ctx.wrap = inputs
        with torch._C.DisableTorchFunctionSubclass():
            ctx.offsets = query._offsets if query.is_nested else None
            return ctx.wrap(_values(query).clone(), ctx.offsets)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            values = _values(grad)
            return (*(ctx.wrap(values.clone(), ctx.offsets) for _ in range(3)), None)


def _values(x: Any) -> Tensor:
    return x._values if x.is_nested else x


def _wrap_directly(values: Tensor, offsets: Tensor) -> Tensor:
    return NestedTensor(values, offsets)


def _nested_sdpa(layout: nta.SequenceLayout) -> Callable[[], torch.Tensor]:
    leaves = [
        torch.nested.nested_tensor_from_jagged(
            torch.randn(layout.total, 4, 64, device="cuda", dtype=torch.bfloat16), layout.offsets
        ).requires_grad_()
        for _ in range(3)
    ]
    return lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves))


if __name__ == "__main__":
    main()

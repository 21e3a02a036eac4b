"""The host time of the operators that a graph of torch.compile calls, and of the same calls outside of graphs.

    python benchmarks/operator_host_time.py [--backend NAME] [--bursts 300] [--save FILE]

On a GPU the kernels of the backend are queued, by default those of ``token_tiled``. On a CPU the kernels are replaced
by functions that return empty tensors, so that only the host time of this library is measured. A batch has 128 tokens.
"forward and backward" outside of graphs includes PyTorch's autograd for each call; a compiled model runs autograd once
for all of its operators. Bursts of 10 calls alternate. Times are medians in µs of one thread; "ratio" is the median of
the ratios of neighboring bursts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import show
from torch import Tensor

import nt_attention as nta
from nt_attention.cli.environment import device_name
from nt_attention.functional import plan
from nt_attention.kernels import adapters, custom_ops, registry
from nt_attention.kernels.adapters import Tensors
from nt_attention.kernels.backend import Backend, BackwardInputs, Gradients
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.call import Call

LENGTHS, HEADS, HEAD_DIM = [30, 7, 64, 27], 4, 64
CALLS, WARMUP = 10, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="token_tiled", help="on a GPU")
    parser.add_argument("--bursts", type=int, default=300)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = registry.BACKENDS[options.backend] if device.type == "cuda" else without_kernels()
    kernels = f"kernels of {backend.name}" if device.type == "cuda" else "no kernels"
    lines = [
        f"{device_name(device)}, torch {torch.__version__}, {kernels}: µs of host time for a call",
        "",
        "| call | outside of graphs | operator | ratio |",
        "|---|---|---|---|",
    ]
    for name, calls in pairs(backend, device).items():
        lines.append(row(name, *alternate(*calls, options.bursts)))
    show(lines, options.save)


def without_kernels() -> Backend:
    """The CPU backend with functions in the place of its kernels, under the name "none"."""

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
        return torch.empty_like(query), query.new_empty(query.shape[1::-1]).T

    def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    backend = dataclasses.replace(cpu.BACKEND, name="none", forward=forward, backward=backward)
    registry.BACKENDS[backend.name] = backend
    return backend


def pairs(backend: Backend, device: torch.device) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """The forward, the backward and both: outside of graphs, and as operators."""
    layout = nta.SequenceLayout.from_lengths(LENGTHS, device=device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    query, key, value, grad = torch.randn(4, layout.total, HEADS, HEAD_DIM, device=device, dtype=dtype).unbind()
    inputs = Tensors(query, key, value)
    leaves = [x.clone().requires_grad_() for x in inputs]
    call = plan(*leaves, layout, is_causal=True, backend=backend.name)
    arguments = (*inputs, *custom_ops.arguments_of(call, backend.name))
    operators = torch.ops.nt_attention
    out, lse, state, selected = operators.attention_forward(*arguments)
    saved = BackwardInputs(grad, None, out, lse, None)

    def forward() -> Tensor:
        with torch.no_grad():
            return nta.varlen_attention(query, key, value, layout, is_causal=True, backend=backend.name)  # type: ignore[return-value]

    def forward_operator() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return operators.attention_forward.default(*arguments)

    def backward() -> Gradients:
        call.layout.check_saved()
        return adapters.backward(backend, saved, inputs, call)

    def backward_operator() -> Any:
        return operators.attention_backward.default(grad, None, out, lse, state, selected, *arguments)

    def with_autograd() -> None:
        attended = nta.varlen_attention(*leaves, layout, is_causal=True, backend=backend.name)
        torch.autograd.grad(attended, leaves, grad)

    def both_operators() -> None:
        forward_operator()
        backward_operator()

    return {
        "forward": (forward, forward_operator),
        "backward": (backward, backward_operator),
        "forward and backward": (with_autograd, both_operators),
    }


def alternate(one: Callable[[], Any], other: Callable[[], Any], bursts: int) -> tuple[list[float], list[float]]:
    """The host time of a call of each, in µs, for each burst."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUP):
        one(), other()
    for _ in range(bursts):
        for function, its_times in zip((one, other), times, strict=True):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                function()
            its_times.append(1e6 * (time.perf_counter() - began) / CALLS)
    return times


def row(name: str, outside: list[float], operator: list[float]) -> str:
    ratio = statistics.median(b / a for a, b in zip(outside, operator, strict=True))
    return f"| {name} | {statistics.median(outside):.0f} | {statistics.median(operator):.0f} | {ratio:.2f} |"


if __name__ == "__main__":
    main()

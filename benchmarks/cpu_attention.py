"""Attention on the CPU: packed, padded SDPA, NestedTensor SDPA, and one call of SDPA for each sequence.

    python benchmarks/cpu_attention.py [--repeats 9]

8192 tokens in sequences of lognormal lengths, 12 heads of head dim 64. Each round runs every implementation, so that
noise affects all alike. Times are medians over rounds. NestedTensor SDPA takes seconds and runs once.

The last columns are measured while other processes keep as many CPUs busy as PyTorch has threads, as the workers of a
data loader do. Whatever starts threads then waits until they run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from workloads import draw_lengths

import nt_attention as nta
from nt_attention.cli.environment import device_name

TOKENS, HEADS, HEAD_DIM = 8192, 12, 64
ONCE = {"NestedTensor SDPA"}  # takes seconds


class Workload:
    """The tensors of a workload in the form of each implementation, and the implementations by name."""

    def __init__(self, lengths: tuple[int, ...], dtype: torch.dtype, backward: bool) -> None:
        self.layout = nta.SequenceLayout.from_lengths(lengths)
        self.lengths, self.backward = lengths, backward
        draw = torch.Generator().manual_seed(1)
        qkv = torch.randn(TOKENS, 3, HEADS, HEAD_DIM, generator=draw).to(dtype)
        self.packed = [x.detach().requires_grad_(backward) for x in qkv.unbind(1)]
        self.grad = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=draw).to(dtype)
        self.padded = [self.layout.pad(x).transpose(1, 2).detach().requires_grad_(backward) for x in self.packed]
        self.mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]
        self.padded_grad = self.layout.pad(self.grad).transpose(1, 2)
        self.implementations: dict[str, Callable[[], Tensor]] = {
            "nt_attention": self.ours,
            "padded SDPA": self.padded_sdpa,
            "SDPA a sequence": self.loop,
        }
        if not backward:
            self.implementations["NestedTensor SDPA"] = self.nested_sdpa

    def finish(self, out: Tensor, grad: Tensor, leaves: list[Tensor]) -> Tensor:
        if self.backward:
            torch.autograd.grad(out, leaves, grad)
        return out.detach()

    def ours(self) -> Tensor:
        return self.finish(nta.varlen_attention(*self.packed, self.layout), self.grad, self.packed)

    def padded_sdpa(self) -> Tensor:
        out = F.scaled_dot_product_attention(*self.padded, attn_mask=self.mask)
        return self.layout.pack(self.finish(out, self.padded_grad, self.padded).transpose(1, 2))

    def loop(self) -> Tensor:
        parts = zip(*(x.split(self.lengths) for x in self.packed), strict=True)
        outs = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv))[0] for qkv in parts]
        return self.finish(torch.cat([out.transpose(0, 1) for out in outs]), self.grad, self.packed)

    def nested_sdpa(self) -> Tensor:
        nested = (self.layout.to_nested(x.contiguous()).transpose(1, 2) for x in self.packed)
        return F.scaled_dot_product_attention(*nested).transpose(1, 2).values()


def measure(workload: Workload, repeats: int) -> dict[str, float]:
    """The median time of each implementation in ms. Their results are compared first."""
    times: dict[str, list[float]] = {name: [] for name in workload.implementations}

    def timed(name: str) -> Tensor:
        start = time.perf_counter()
        out = workload.implementations[name]()
        times[name].append((time.perf_counter() - start) * 1e3)
        return out

    outs = {name: timed(name) for name in workload.implementations}
    for name, out in outs.items():
        torch.testing.assert_close(
            out, outs["padded SDPA"], rtol=0.03, atol=0.03, msg=lambda text, n=name: f"{n}: {text}"
        )
    often = [name for name in workload.implementations if name not in ONCE]
    for name in often:
        times[name].clear()  # the first run was the warm-up
    for i in range(repeats):
        for name in often if i % 2 else reversed(often):  # so that none always follows the same one
            timed(name)
    return {name: statistics.median(taken) for name, taken in times.items()}


@contextlib.contextmanager
def busy_cpus() -> Iterator[None]:
    """Another process for each thread of PyTorch, which never rests."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(torch.get_num_threads())]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    names = ["nt_attention", "padded SDPA", "NestedTensor SDPA", "SDPA a sequence"]
    rows = [
        "| lengths | dtype | pass | pad ratio | nt_attention ms | "
        + " | ".join(f"{n}, ms (ratio)" for n in names[1:])
        + " | beside a busy process: nt_attention ms | padded SDPA, ms (ratio) |",
        "|---" * (5 + len(names) + 1) + "|",
    ]
    about = f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; medians of {options.repeats} rounds"
    print(about, "", *rows, sep="\n", flush=True)
    for longest, dtype, backward in itertools.product((512, 64), (torch.float32, torch.bfloat16), (False, True)):
        lengths = draw_lengths(f"lognormal:{longest}", TOKENS)
        workload = Workload(lengths, dtype, backward)
        taken = measure(workload, options.repeats)
        for each in [*ONCE, "SDPA a sequence"]:
            workload.implementations.pop(each, None)
        with busy_cpus():
            busy = measure(workload, options.repeats)
        ours = taken["nt_attention"]
        cells = [f"{taken[n]:.1f} ({taken[n] / ours:.2f} ×)" if n in taken else "–" for n in names[1:]]
        cells.append(f"{busy['nt_attention']:.1f}")
        cells.append(f"{busy['padded SDPA']:.1f} ({busy['padded SDPA'] / busy['nt_attention']:.2f} ×)")
        what = [
            f"{len(lengths)} lognormal ≤ {longest}",
            str(dtype)[6:],
            "forward + backward" if backward else "forward",
        ]
        ratio = f"{max(lengths) * len(lengths) / TOKENS:.2f}"
        rows.append(f"| {' | '.join([*what, ratio, f'{ours:.1f}', *cells])} |")
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()

"""Time every tile size of the token-tiled kernels on this GPU, each kernel alone.

    python benchmarks/tune_token_tiled.py [--workloads A B] [--kernels forward fused] [--relative rows] [--out FILE]

Prints the fastest few of each kernel, and writes all as JSON lines. The fastest ones belong in
``nt_attention/kernels/token_tiled/configs.py``. Many processes compile the kernels, then one process times them. Each
result is compared with float64 first. With a relative bias, its gradients are computed as well.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources
from workloads import WORKLOADS, Workload

from nt_attention import RelativeBias, SequenceLayout
from nt_attention.cli.timing import device_ms
from nt_attention.functional import plan
from nt_attention.kernels import support
from nt_attention.kernels.token_tiled import ops
from nt_attention.kernels.token_tiled.configs import Tile
from nt_attention.kernels.token_tiled.plan import Tiles

KERNELS = ("forward", "query", "key", "fused")
# "bias": one bias for each of 32 buckets, as in T5. "rows": one for each token and each of 512 buckets, as in DeBERTa.
RELATIVE = ("none", "bias", "rows")


def candidates(kernel: str, workload: Workload, relative: str = "none") -> list[tuple[int, Tile]]:
    """The pairs (shared, tile) to time. With a relative bias, one stage less than `tile.stages` is used."""
    big, short = workload.head_dim > 64, max(workload.lengths) <= 128
    found = []
    for m, n, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        if not 256 <= m * n // warps <= 2048 or (stages == 4 and (big or kernel != "forward")):
            continue
        if relative != "none" and (stages == 1 or m * n // warps > 1024):
            continue
        if warps == 8 and 16 in (m, n):
            continue  # with some of these Triton 3.6's code for float32 accesses invalid memory
        if kernel == "fused" and n >= m and stages <= 2:
            found.append((n, Tile(m, n, warps, stages)))
        elif kernel == "forward" and m >= 32 and n >= 16:
            found += [(shared, Tile(m, n, warps, stages)) for shared in ((64, 128) if short else (64,))]
        elif kernel in ("query", "key") and not short:
            found.append((0, Tile(m, n, warps, stages)))
    return found


class Bench:
    """The tensors of a workload, the expected results of the kernels, and each kernel as a function of its tile."""

    def __init__(
        self, workload: Workload, dtype: torch.dtype, relative: str = "none", tokens: int | None = None
    ) -> None:
        lengths = workload.lengths if tokens is None else (tokens,)
        self.layout = SequenceLayout.from_lengths(lengths, device="cuda")
        total = self.layout.total

        def random(heads: int) -> torch.Tensor:
            return torch.randn(total, heads, workload.head_dim, device="cuda", dtype=dtype)

        self.q, self.grad = random(workload.heads), random(workload.heads)
        self.k, self.v = random(workload.kv_heads), random(workload.kv_heads)
        self.relative = make_relative(relative, total, workload.heads, dtype)
        with support.by_documentation():
            call = plan(
                self.q, self.k, self.v, self.layout, backend="token_tiled", relative=self.relative, **workload.options
            )
        self.window = call.spec.window
        self.forward = ops.Launcher.make(self.q, self.k, self.v, call)
        self.backward = ops.Launcher.make(self.q, self.k, self.v, call, self.relative is not None)
        self.biases = ops._BiasGradients()
        if self.relative is not None:
            from nt_attention.kernels.token_tiled import triton_kernels as kernels

            self.biases = ops._BiasGradients.zeros(self.relative, kernels.PARTS.value)
        self.out, self.lse = torch.empty_like(self.q), self.q.new_empty(workload.heads, total, dtype=torch.float32).T
        self.delta = torch.empty_like(self.lse)
        self.grads = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.heads, self.kv_heads = workload.heads, workload.kv_heads

    def run(self, kernel: str, shared: int, tile: Tile) -> None:
        from nt_attention.kernels.token_tiled import triton_kernels as kernels

        call = self.forward if kernel == "forward" else self.backward
        plan, (bias, query_bias, key_bias) = call.settings.plan, self.biases
        inputs = (self.q, self.k, self.v)
        grad_query, grad_key, grad_value = self.grads
        rows = self.lse.stride(1)
        if kernel == "forward":
            tensors = (self.q, self.k, self.v, self.out, self.lse)
            strided = (*inputs, self.out)
            tiles = plan.query_tiles(tile.block_m, shared)
            work = (kernels.forward_kernel, tile, tiles, self.heads, plan.queries, tensors, None, strided, (rows,))
        elif kernel == "query":
            tensors = (self.q, self.k, self.v, self.out, self.grad, self.lse, None, self.delta, grad_query)
            tensors += (bias, query_bias)
            strided = (*inputs, self.out, self.grad, grad_query)
            tiles = plan.query_tiles(tile.block_m, shared, without_fused=True)
            strides = (rows, 0, 0)
            work = (kernels.query_kernel, tile, tiles, self.heads, plan.queries, tensors, None, strided, strides, False)
        elif kernel == "key":
            tensors = (self.q, self.k, self.v, self.grad, self.lse, self.delta, grad_key, grad_value)
            tensors += (key_bias,)
            strided = (*inputs, self.grad, grad_key, grad_value)
            tiles = plan.key_tiles(tile.block_n, shared)
            group = self.heads // self.kv_heads
            work = (kernels.key_kernel, tile, tiles, self.kv_heads, plan.keys, tensors, None, strided, (rows,), group)
        else:
            tensors = (self.q, self.k, self.v, self.out, self.grad, self.lse, None, *self.grads)
            tensors += self.biases
            strided = (*inputs, self.out, self.grad, *self.grads)
            tiles = plan.fused_tiles(shared)
            strides = (rows, 0, 0)
            work = (
                *(kernels.fused_kernel, tile, tiles, self.kv_heads, plan.keys, tensors, None, strided, strides),
                False,
            )
        call.launch(*work[:2], Tiles.of(work[2]), *work[3:])

    def compute_expected(self) -> None:
        """Set the results of the forward and delta, and the expected result of each kernel, from float64."""
        lengths = self.layout.host_offsets.diff().tolist()
        group = self.heads // self.kv_heads
        outs, lses, grads = [], [], []
        tokens = torch.arange(self.layout.total, device="cuda")
        for q, k, v, grad, rows in zip(
            *(x.double().split(lengths) for x in (self.q, self.k, self.v, self.grad)),
            tokens.split(lengths),
            strict=True,
        ):
            leaves = [x.transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
            scores = leaves[0] @ leaves[1].repeat_interleave(group, 0).mT * q.shape[2] ** -0.5
            position = torch.arange(len(q), device="cuda")
            left, right = self.window
            distance = position - position[:, None]
            if self.relative is not None:
                of_rows = functools.partial(heads_first, rows)
                biases = self.relative.map_rows(of_rows, of_rows)
                scores = scores + biases.scores(self.relative.bucket_of(distance), torch.float64)
            scores = scores.masked_fill((distance < -left) | (distance > right), -torch.inf)
            out = scores.softmax(-1) @ leaves[2].repeat_interleave(group, 0)
            found = torch.autograd.grad(out, leaves, grad.transpose(0, 1))
            outs.append(out.detach().transpose(0, 1))
            lses.append(scores.detach().logsumexp(-1).T)
            grads.append([x.transpose(0, 1) for x in found])
        out, dq, dk, dv = torch.cat(outs), *(torch.cat(x) for x in zip(*grads, strict=True))
        self.out.copy_(out)
        self.lse.copy_(torch.cat(lses))
        self.delta.copy_((out * self.grad).sum(-1))
        self.want = {"forward": [out], "query": [dq], "key": [dk, dv], "fused": [dq, dk, dv]}

    def error(self, kernel: str, shared: int) -> float:
        """The largest relative error of the results that the kernel has just written, over the rows that it writes."""
        fused = self.backward.settings.plan.fused_tiles(shared).tolist() if kernel == "fused" else []
        rows = torch.cat([torch.arange(a, b) for a, b, _, _ in fused]) if fused else slice(None)
        got = {"forward": [self.out], "query": self.grads[:1], "key": self.grads[1:], "fused": self.grads}[kernel]
        pairs = [(a[rows].double(), b[rows]) for a, b in zip(got, self.want[kernel], strict=True)]
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def heads_first(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(H, L, N), some rows of a (T, H, N)."""
    return x[rows].transpose(0, 1)


def make_relative(kind: str, total: int, heads: int, dtype: torch.dtype) -> RelativeBias | None:
    """The relative bias of `RELATIVE`. Gradients of its biases are summed over all runs, so they are not compared."""
    if kind == "none":
        return None
    radius, shape = (128, (heads, 32)) if kind == "bias" else (512, (total, heads, 512))
    buckets = torch.arange(2 * radius + 1, device="cuda") * shape[-1] // (2 * radius + 1)
    biases = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]
    return RelativeBias(buckets, bias=biases[0]) if kind == "bias" else RelativeBias(buckets, None, *biases)


def compile_some(jobs: list[tuple[str, str, int, Tile]], dtype: torch.dtype, relative: str) -> None:
    """Compile these kernels into Triton's cache."""
    benches = {name: Bench(WORKLOADS[name], dtype, relative, tokens=16) for name in {job[0] for job in jobs}}
    for name, kernel, shared, tile in jobs:
        try:
            benches[name].run(kernel, shared, tile)
        except OutOfResources:
            continue  # the process that times them gets this error too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list("ABCDEFG"), choices=WORKLOADS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--relative", default="none", choices=RELATIVE)
    parser.add_argument("--out", type=Path, default=Path("tune.jsonl"))
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)

    jobs = [
        (name, kernel, shared, tile)
        for name in options.workloads
        for kernel in options.kernels
        for shared, tile in candidates(kernel, WORKLOADS[name], options.relative)
    ]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        parts = [jobs[i :: options.processes] for i in range(options.processes)]
        list(pool.map(compile_some, parts, [dtype] * len(parts), [options.relative] * len(parts)))

    with options.out.open("w") as file:
        for name in options.workloads:
            bench = Bench(WORKLOADS[name], dtype, options.relative)
            bench.compute_expected()
            for kernel in options.kernels:
                rows = []
                for shared, tile in candidates(kernel, WORKLOADS[name], options.relative):
                    run = functools.partial(bench.run, kernel, shared, tile)
                    try:
                        run()
                    except OutOfResources:
                        continue
                    error = bench.error(kernel, shared)
                    row = {"workload": name, "kernel": kernel, "shared": shared, "tile": tile, "error": error}
                    rows.append({**row, "ms": device_ms(run, repeats=3)})
                    file.write(json.dumps(rows[-1]) + "\n")
                for row in sorted(rows, key=lambda row: row["ms"])[:5]:
                    numbers = f"{row['ms']:.4f} ms, error {row['error']:.1e}"
                    print(
                        f"{name} {kernel:<8} shared {row['shared']:>3} {tuple(row['tile'])!s:<18} {numbers}", flush=True
                    )


if __name__ == "__main__":
    main()

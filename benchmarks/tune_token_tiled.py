"""Time every tile size of the token-tiled kernels on this machine's GPU, each kernel alone.

    python benchmarks/tune_token_tiled.py [--batches A B] [--kernels forward closed] [--dtype bfloat16] [--out FILE]

Prints the best few of each, and writes all as JSON lines. What wins goes into
``nt_attention/kernels/token_tiled/configs.py``. Kernels are compiled by many processes at once, then timed by one, with
a CUDA graph around each so that the host's time stays out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from batches import BATCHES, Batch

from nt_attention import SequenceLayout
from nt_attention.kernels.token_tiled import ops
from nt_attention.kernels.token_tiled.configs import Tile

KERNELS = ("forward", "query", "key", "closed")


def candidates(kernel: str, batch: Batch) -> list[tuple[int, Tile]]:
    """(shared, tile) to try."""
    big = batch.head_dim > 64
    short = max(batch.lengths) <= 128
    found = []
    for m, n, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        area = m * n // warps
        if area > 128 * 64 // 4 or area < 32 * 32 // 4:
            continue
        if warps == 8 and kernel in ("forward", "query") and m < 128:
            continue
        if kernel == "forward" and (m < 64 or n == 128 and big and stages > 2):
            continue
        if kernel == "query" and (m < 64 or big and n == 128):
            continue
        if kernel == "key" and (n < 64 or (big and m == 128)):
            continue
        if stages == 4 and (big or kernel != "forward"):
            continue
        if kernel == "closed":
            if n < 64 or stages > 2 or n < m:
                continue
            found.append((n, Tile(m, n, warps, stages)))
        elif kernel == "forward":
            for shared in (64, 128) if short else (64,):
                found.append((shared, Tile(m, n, warps, stages)))
        elif not short:
            found.append((0, Tile(m, n, warps, stages)))
    return found


class Bench:
    """One batch's tensors, and each kernel as a function of its tile."""

    def __init__(self, batch: Batch, dtype: torch.dtype, tokens: int | None = None) -> None:
        lengths = batch.lengths if tokens is None else (tokens,)
        self.layout = SequenceLayout.from_lengths(lengths, device="cuda")
        total = self.layout.total

        def random(heads: int) -> torch.Tensor:
            return torch.randn(total, heads, batch.head_dim, device="cuda", dtype=dtype)

        self.q, self.grad = random(batch.heads), random(batch.heads)
        self.k, self.v = random(batch.kv_heads), random(batch.kv_heads)
        left, right = batch.window_size
        cu = self.layout.cu_seqlens
        scale = batch.head_dim**-0.5
        self.rest = (cu, cu, None, None, scale, left, 0 if batch.is_causal else right, False, 0.0, 0.0, False)
        self.call = ops._Call.prepare(self.q, self.k, self.v, *self.rest)
        self.out, self.lse = ops._forward_outputs(self.q, self.k, self.v)
        self.delta = torch.empty_like(self.lse)
        self.grads = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.heads, self.kv_heads = batch.heads, batch.kv_heads

    def run(self, kernel: str, shared: int, tile: Tile) -> None:
        from nt_attention.kernels.token_tiled import triton_kernels as kernels

        call, plan = self.call, self.call.recipe.plan
        inputs = ops._rows_and_heads(self.q, self.k, self.v)
        grad_query, grad_key, grad_value = self.grads
        rows = self.lse.stride(1)
        if kernel == "forward":
            tensors = (self.q, self.k, self.v, self.out, self.lse)
            strides = (*inputs, *ops._rows_and_heads(self.out))
            tiles = plan.query_tiles(tile.block_m, shared)
            work = (kernels.forward_kernel, tile, tiles, self.heads, plan.queries, tensors, strides, (rows,))
        elif kernel == "query":
            tensors = (self.q, self.k, self.v, self.out, self.grad, self.lse, None, self.delta, grad_query)
            strides = (*inputs, *ops._rows_and_heads(self.out, self.grad, grad_query))
            tiles = plan.query_tiles(tile.block_m, shared, without_closed=True)
            work = (kernels.query_kernel, tile, tiles, self.heads, plan.queries, tensors, strides, (rows, 0, 0), False)
        elif kernel == "key":
            tensors = (self.q, self.k, self.v, self.grad, self.lse, self.delta, grad_key, grad_value)
            strides = (*inputs, *ops._rows_and_heads(self.grad, grad_key, grad_value))
            tiles = plan.key_tiles(tile.block_n, shared)
            group = self.heads // self.kv_heads
            work = (kernels.key_kernel, tile, tiles, self.kv_heads, plan.keys, tensors, strides, (rows,), group)
        else:
            tensors = (self.q, self.k, self.v, self.out, self.grad, self.lse, None, *self.grads)
            strides = (*inputs, *ops._rows_and_heads(self.out, self.grad, *self.grads))
            tiles = plan.closed_tiles(shared)
            lse_strides = (rows, 0, 0)
            work = (
                *(kernels.closed_kernel, tile, tiles, self.kv_heads, plan.keys, tensors, strides, lse_strides),
                False,
            )
        call.launch(*work)


def compile_some(jobs: list[tuple[str, str, int, Tile]], dtype: torch.dtype) -> None:
    """Leave these kernels in Triton's cache."""
    benches = {}
    for name, kernel, shared, tile in jobs:
        if name not in benches:
            benches[name] = Bench(BATCHES[name], dtype, tokens=96)
        try:
            benches[name].run(kernel, 128 if kernel == "closed" else shared, tile)
        except Exception as error:  # noqa: BLE001 — too much shared memory, say; the timing process will meet it again
            if "out of resource" not in str(error):
                print(kernel, tile, error, flush=True)


def flash(batch: Batch, bench: Bench):
    layout = bench.layout
    left, right = (None if s < 0 else s for s in batch.window_size)
    options = {"scale": batch.head_dim**-0.5, "window_size_left": left, "window_size_right": right}
    cu, n = layout.cu_seqlens, layout.max_seqlen
    q, k, v = bench.q, bench.k, bench.v

    def forward():
        return torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, n, n, 0.0, batch.is_causal, False, **options)

    out, lse, seed, unused, _ = forward()

    def backward():
        return torch.ops.aten._flash_attention_backward(
            bench.grad, q, k, v, out, lse, cu, cu, n, n, 0.0, batch.is_causal, seed, unused, **options
        )

    return forward, backward, out, lse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=["A", "B", "D", "E", "F", "G"])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="tune.jsonl")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)

    jobs = [
        (name, kernel, shared, tile)
        for name in options.batches
        for kernel in options.kernels
        for shared, tile in candidates(kernel, BATCHES[name])
    ]
    # batches with the same heads share compiled kernels
    distinct = {}
    for job in jobs:
        batch = BATCHES[job[0]]
        distinct[(batch.head_dim, batch.heads // batch.kv_heads, batch.is_causal, job[1], job[3])] = job
    work = list(distinct.values())
    began = time.time()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        parts = [work[i :: options.processes] for i in range(options.processes)]
        list(pool.map(compile_some, parts, [dtype] * len(parts)))
    print(f"{len(work)} kernels compiled in {time.time() - began:.0f} s", flush=True)

    from triton.testing import do_bench_cudagraph

    with open(options.out, "w") as file:
        for name in options.batches:
            batch = BATCHES[name]
            torch.manual_seed(0)
            bench = Bench(batch, dtype)
            rival_forward, rival_backward, out, lse = flash(batch, bench)
            want = {"forward": [out]}
            bench.out.copy_(out)
            bench.lse.copy_(lse.T)
            grads = rival_backward()[:3]
            want |= {"query": grads[:1], "key": grads[1:], "closed": grads}
            bench.delta.copy_((out.float() * bench.grad.float()).sum(-1))
            times = {
                side: do_bench_cudagraph(f, rep=20, return_mode="median")
                for side, f in (("forward", rival_forward), ("backward", rival_backward))
            }
            print(f"== {name} {batch.about}: FA2 forward {times['forward']:.3f} backward {times['backward']:.3f} ms")
            for kernel in options.kernels:
                rows = []
                got = {
                    "forward": [bench.out],
                    "query": bench.grads[:1],
                    "key": bench.grads[1:],
                    "closed": bench.grads,
                }[kernel]
                closed_only = kernel == "closed" and max(batch.lengths) > 128
                for shared, tile in candidates(kernel, batch):
                    try:
                        for x in got:
                            x.fill_(float("nan"))
                        bench.run(kernel, shared, tile)
                        torch.cuda.synchronize()
                        wrong = max(
                            ((a.float() - b.float()).norm() / b.float().norm()).item()
                            for a, b in zip(got, want[kernel], strict=True)
                        )
                        ms = do_bench_cudagraph(lambda: bench.run(kernel, shared, tile), rep=10, return_mode="median")
                    except Exception as error:  # noqa: BLE001 — what does not fit the card is left out
                        if "out of resource" not in str(error):
                            print(kernel, shared, tile, str(error)[:200])
                        continue
                    if wrong > 0.02 and not closed_only and not (kernel == "closed" and shared < max(batch.lengths)):
                        print("WRONG", kernel, shared, tile, wrong)
                    row = {"batch": name, "kernel": kernel, "shared": shared, "tile": tile, "ms": ms, "error": wrong}
                    rows.append(row)
                    file.write(json.dumps(row) + "\n")
                rows.sort(key=lambda row: row["ms"])
                for row in rows[:5]:
                    print(f"  {kernel:<8} shared {row['shared']:>3} {tuple(row['tile'])!s:<18} {row['ms']:.4f} ms")
            sys.stdout.flush()
            del bench


if __name__ == "__main__":
    main()

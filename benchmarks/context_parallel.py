"""One ragged batch over several GPUs: `varlen_attention` with a `ShardedLayout`, against one GPU.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--workloads "one of 16k" "one of 131k"] [--save FILE]

32 query heads, 8 key heads, head dim 128, bfloat16, causal, forward and backward of attention alone.

- one GPU: each GPU runs the whole batch by itself.
- keys: each GPU gets the keys that its queries see.
- no exchange: the pieces of each GPU, with all keys that they see already on this GPU.
- all-gather: each GPU gets the keys and values of all others.
- context_parallel: PyTorch's ring attention with `scaled_dot_product_attention`. It takes one sequence.

Times are medians in ms for a call, by turns, of the slowest GPU. Behind each is its share of linear: the time on one
GPU over that of all GPUs together.

- in a row: wall-clock time of calls one after the other, as in the layers of a model, from a barrier to a device sync.
- alone: the same for a single call. The GPU waits at first until the host has launched something.
- host: the part of "in a row" until the calls return.
- device: the time on the GPU if all kernels of a call are launched before it starts.

Errors are relative to the result on one GPU, by norm, the largest of output and gradients. Memory is the peak of one
GPU in GB, with the inputs of this way alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_turns import reserve_memory, show, slowest, synchronize
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from workloads import draw_lengths

import nt_attention as nta
from nt_attention.distributed.exchange_plan import ExchangePlan, Geometry
from nt_attention.distributed.planner import Mask

GPU = torch.cuda.is_available()
HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPE = torch.bfloat16 if GPU else torch.float32


def workloads(scale: int) -> dict[str, Any]:
    """Name → lengths. There are 1 / `scale` as many tokens."""
    return {
        "45 short, 16k": draw_lengths("lognormal:1700", 16384 // scale, seed=6),
        "160 short, 64k": draw_lengths("lognormal:1700", 65536 // scale, seed=8),
        "11 with a long tail, 16k": [x // scale for x in (7680, 3840, 1920, 1024, 640, 480, 320, 200, 140, 90, 50)],
        "one of 16k": [16384 // scale],
        "one of 131k": [131072 // scale],
    }


WORKLOADS = workloads(1 if GPU else 64)  # a test run has fewer tokens
CALLS = 6  # in a row
Grads = tuple[Tensor, ...]


class AllGather(torch.autograd.Function):
    """(N, ·) → (P·N, ·) of all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(len(grad) // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


class Case:
    """The inputs of a workload on this GPU, and the ways to run it. Each returns out and three gradients."""

    def __init__(self, lengths: Any, mesh: DeviceMesh) -> None:
        self.mesh, device = mesh, torch.device(mesh.device_type)
        self.layout = nta.SequenceLayout.from_lengths(lengths, device=device)
        self.sharded = self.layout.shard(mesh)
        plan = ExchangePlan.make(self.sharded, self.sharded, Geometry(Mask.of(True, (-1, -1)), True, False))
        self.pieces = plan.all_layouts
        begins, lengths = self.layout.host_offsets.tolist(), self.sharded.lengths
        self.seen_rows = torch.cat([  # of the gathered keys, in the order of the packed tensor
            torch.arange(begins[p.sequence], begins[p.sequence] + p.stop) for p in self.sharded.pieces
        ]).to(device)  # fmt: skip
        self.is_one = len(lengths) == 1
        self.inputs = {"one GPU": self._draw(self.layout.total), "no exchange": self._draw(
            self.sharded.total, self.pieces[1].total)}  # fmt: skip
        whole = self.inputs["one GPU"]
        local = [self.sharded.local(x.detach()).requires_grad_(x.requires_grad) for x in whole]
        self.inputs |= dict.fromkeys(("keys", "all-gather"), local)

    def _draw(self, tokens: int, keys: int | None = None) -> list[Tensor]:
        generator = torch.Generator(self.mesh.device_type).manual_seed(0)
        counts = [(tokens, HEADS), *[(tokens if keys is None else keys, KV_HEADS)] * 2, (tokens, HEADS)]
        make = [torch.randn(n, h, DIM, generator=generator, device=self.mesh.device_type).to(DTYPE) for n, h in counts]
        return [*[x.requires_grad_() for x in make[:3]], make[3]]

    def run(self, way: str) -> Grads:
        q, k, v, grad = self.inputs[way]
        options: dict[str, Any] = {"is_causal": True}
        if way == "keys":
            out = nta.varlen_attention(q, k, v, self.sharded, **options)
        elif way == "one GPU":
            out = nta.varlen_attention(q, k, v, self.layout, **options)
        elif way == "no exchange":
            out = nta.varlen_attention(q, k, v, *self.pieces, causal_alignment="lower_right", **options)
        elif way == "all-gather":
            everything = AllGather.apply(torch.cat([k.flatten(1), v.flatten(1)], 1))
            order = self.sharded.inverse_order.index_select(0, self.seen_rows)
            keys, values = everything.index_select(0, order).unflatten(1, (2, KV_HEADS, DIM)).unbind(1)
            # the keys of a piece end with the piece
            key_layout = self.sharded.cached("seen", lambda: nta.SequenceLayout.from_lengths(
                [p.stop for p in self.sharded.pieces], device=q.device))  # fmt: skip
            layouts = self.sharded.local_layout, key_layout
            out = nta.varlen_attention(
                q, keys.contiguous(), values.contiguous(), *layouts, causal_alignment="lower_right", **options
            )
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out, *torch.autograd.grad(out, (q, k, v), grad))

    @contextmanager
    def ring(self) -> Iterator[None]:
        """A context in which "context_parallel" can run. Its key heads are repeated, because it takes no others."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        whole = [x.detach() for x in self.inputs["one GPU"]]
        buffers = [x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1)[None].contiguous() for x in whole]
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        with (
            sdpa_kernel(backends),
            context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        ):
            self.inputs["context_parallel"] = [*[x.requires_grad_() for x in buffers[:3]], buffers[3]]
            yield


def measure(case: Case, way: str, calls: int) -> tuple[float, float]:
    """The time of a call on the slowest GPU in ms, if several follow each other, and the time until it returns."""
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        case.run(way)
    returned = time.perf_counter()
    synchronize()
    ended, device = time.perf_counter(), case.mesh.device_type
    return slowest(1e3 * (ended - began) / calls, device), slowest(1e3 * (returned - began) / calls, device)


def device_time(case: Case, way: str) -> float:
    """The time of a call on the slowest GPU in ms, without waiting for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize()
    dist.barrier()
    torch.cuda._sleep(20_000_000)  # cycles, about 10 ms, in which the calls are made
    start.record()
    case.run(way)
    end.record()
    synchronize()
    return slowest(start.elapsed_time(end), case.mesh.device_type)


def error(found: Grads, case: Case) -> float:
    """The largest relative error against one GPU."""
    errors = []
    for x, want in zip(found, case.run("one GPU"), strict=True):
        want = case.sharded.local(want)
        errors.append(float((x - want).detach().float().norm() / want.detach().float().norm().clamp(min=1e-9)))
    return slowest(max(errors), case.mesh.device_type)


def peak(lengths: Any, mesh: DeviceMesh, way: str) -> float:
    """The peak of the memory of this GPU in GB, with the inputs of this way alone."""
    case = Case(lengths, mesh)
    case.inputs = {way: case.inputs[way]}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    case.run(way)
    synchronize()
    return slowest(torch.cuda.max_memory_allocated() / 1e9, mesh.device_type)


def run(name: str, lengths: Any, mesh: DeviceMesh, rounds: int, is_long: bool) -> list[str]:
    """The table of a workload, with a row for each way."""
    calls = 2 if is_long else CALLS
    case = Case(lengths, mesh)
    ways = ["one GPU", "keys", "no exchange", "all-gather"]
    errors = {way: error(case.run(way), case) for way in ("keys", "all-gather")}
    ring = nullcontext()
    if GPU and case.is_one:
        ways.append("context_parallel")
        ring = case.ring()
    times: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    with ring:
        for _ in range(3 + rounds):
            for way in ways:
                in_a_row, host = measure(case, way, calls)
                alone, _ = measure(case, way, 1)
                times[way].append((in_a_row, alone, device_time(case, way) if GPU else 0.0, host))
    median = {way: [statistics.median(x) for x in zip(*each[3:], strict=True)] for way, each in times.items()}
    plan, one, size = case.sharded.plan, median["one GPU"], mesh.size()
    del case
    about = f"{len(lengths)} sequences; work over the mean {plan.imbalance:.3f}; rows received {plan.received}"
    header = "| way | in a row | share | alone | share | device | share | host | error | memory |"
    lines = [f"**{name}** ({about})", "", header, "|---|" + 9 * "---|"]
    for way in ways:
        *found, host = median[way]
        shares = [f"{a / b / size:.0%}" if way != "one GPU" and b else "" for a, b in zip(one, found, strict=False)]
        numbers = " | ".join(f"{ms:.2f} | {share}" for ms, share in zip(found, shares, strict=True))
        wrong = f"{errors[way]:.1e}" if way in errors else ""
        memory = f"{peak(lengths, mesh, way):.2f}" if is_long and GPU and way != "context_parallel" else ""
        lines.append(f"| {way} | {numbers} | {host:.2f} | {wrong} | {memory} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    dist.init_process_group("nccl" if GPU else "gloo")
    device = "cuda" if GPU else "cpu"
    if GPU:
        torch.cuda.set_device(dist.get_node_local_rank())
        reserve_memory()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    where = torch.cuda.get_device_name() if GPU else "CPU"
    lines = [f"{mesh.size()} × {where}, torch {torch.__version__}, {args.rounds} rounds", ""]
    for name in args.workloads:
        is_long = name == "one of 131k"
        lines += run(name, WORKLOADS[name], mesh, min(args.rounds, 4) if is_long else args.rounds, is_long)
    if dist.get_rank() == 0:
        show(lines, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

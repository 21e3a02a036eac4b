"""Training steps of a Llama over several GPUs: context parallelism against data parallelism; one very long sequence.

    torchrun --nproc-per-node 2 benchmarks/context_parallel_training.py [--parts batches long] [--save FILE]

A Llama of 8 layers (2048 wide, 32 query heads, 8 key heads, vocabulary 32000, random weights) under FSDP2, with
bfloat16 parameters in forward and backward, and AdamW.

- batches: 16384 tokens a GPU, lognormal ≤ 4096, padded rows with labels. "dp": each GPU has a batch of its own. "cp":
  all GPUs share these batches as one, with `patch(model, mesh=...)`. Steps run by turns, with other lengths in each.
  Times are medians of wall-clock times of a step, from a barrier to the device sync of the slowest GPU.
- long: one sequence of 524288 tokens, with activation checkpointing and a loss in chunks of 8192 tokens.

Without a GPU it is a test run of a small model in float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_turns import show, slowest, synchronize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from workloads import draw_lengths

import nt_attention as nta

GPU = torch.cuda.is_available()
TOKENS, LONGEST, LONG, CHUNK = (16384, 4096, 524288, 8192) if GPU else (256, 64, 1024, 256)
VOCABULARY = 32000 if GPU else 100
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8} if GPU else {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2
}  # fmt: skip


def make_model(mesh: DeviceMesh) -> LlamaForCausalLM:
    """The model on the ranks of a mesh. Its base model and its head can be called one after the other."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCABULARY,
                         max_position_embeddings=LONG, use_cache=False)  # fmt: skip
    with torch.device(mesh.device_type):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if GPU else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for part in (model.model, model.lm_head):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def batch_of(lengths: Any, seed: int, device: str) -> dict[str, Tensor]:
    """A padded batch with labels. It is the same on all ranks that pass the same lengths and seed."""
    lengths = torch.tensor(lengths)
    length = -(-int(lengths.max()) // 8) * 8
    mask = torch.arange(length) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return {name: x.to(device) for name, x in batch.items()}


class Training:
    """A model with its optimizer, patched with or without a mesh."""

    def __init__(self, mesh: DeviceMesh, is_cp: bool) -> None:
        self.model, self.is_cp = make_model(mesh), is_cp
        self.handle = nta.patch(self.model, mesh=mesh if is_cp else None, packing="always", on_fallback="raise")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=GPU)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        return self.update(loss)

    def step_in_chunks(self, ids: Tensor) -> Tensor:
        """A step on one sequence (1, T), whose logits do not fit into memory at once."""
        hidden = self.model.model(input_ids=ids).last_hidden_state[0, :-1]

        def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")

        chunks = zip(hidden.split(CHUNK), ids[0, 1:].split(CHUNK), strict=True)
        loss = sum([checkpoint(loss_of, *chunk, use_reentrant=False) for chunk in chunks]) / (ids.shape[1] - 1)
        loss.backward()
        return self.update(loss)

    def update(self, loss: Tensor) -> Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def timed(call: Any, device: str) -> tuple[float, float]:
    """The time of a call on the slowest GPU in ms, and the loss."""
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    loss = float(call())
    return slowest(1e3 * (time.perf_counter() - began), device), loss


def compare(mesh: DeviceMesh, steps: int, warmup: int) -> list[str]:
    """The table of "batches"."""
    device, rank, ranks = mesh.device_type, mesh.get_local_rank(), mesh.size()
    ways = {"dp": Training(mesh, False), "cp": Training(mesh, True)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(warmup + steps):
        each = [draw_lengths(f"lognormal:{LONGEST}", TOKENS, seed=ranks * number + r) for r in range(ranks)]
        everything = [length for lengths in each for length in lengths]
        batches = {"dp": batch_of(each[rank], number, device), "cp": batch_of(everything, number, device)}
        for way, training in ways.items():
            times[way].append(timed(lambda t=training, b=batches[way]: t.step(b), device)[0])
    median = {way: statistics.median(each[warmup:]) for way, each in times.items()}
    lines = ["| way | step, ms | tokens/s | against dp |", "|---|---|---|---|"]
    for way, ms in median.items():
        lines.append(f"| {way} | {ms:.1f} | {1e3 * ranks * TOKENS / ms:,.0f} | {median['dp'] / ms:.3f} |")
    return [*lines, ""]


def train_long(mesh: DeviceMesh) -> list[str]:
    """The table of "long"."""
    device = mesh.device_type
    training = Training(mesh, True)
    training.model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    lines = ["| tokens of the sequence | step, s | loss | peak memory of a GPU, GB |", "|---|---|---|---|"]
    for tokens in (LONG // 16, LONG):
        ids = torch.randint(1, VOCABULARY, (1, tokens), device=device)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        ms, loss = timed(lambda ids=ids: training.step_in_chunks(ids), device)
        memory = slowest(torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0, device)
        lines.append(f"| {tokens} | {ms / 1e3:.1f} | {loss:.3f} | {memory:.1f} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["batches", "long"], choices=["batches", "long"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    dist.init_process_group("nccl" if GPU else "gloo")
    if GPU:
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh("cuda" if GPU else "cpu", (dist.get_world_size(),))
    where = torch.cuda.get_device_name() if GPU else "CPU"
    lines = [f"{mesh.size()} × {where}, torch {torch.__version__}", ""]
    for part in args.parts:
        lines += compare(mesh, args.steps, args.warmup) if part == "batches" else train_long(mesh)
    if dist.get_rank() == 0:
        show(lines, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train on long sequences over several processes, with FSDP2. The losses are those of one process.

``torchrun --nproc-per-node 2 examples/long_context.py`` runs on GPUs with NCCL, or on CPUs with gloo. Each process runs
its part of the tokens of every batch. Without ``torchrun``, there is one process. The model has random weights, and the
text is Python's own documentation as bytes, so nothing is downloaded. At full size, on GPUs: add ``--bf16 --length
65536 --hidden-size 2048 --layers 16 --heads 16``.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from shared_data import llama_config, padded_batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaForCausalLM

import nt_attention as nta


def make_batches(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Padded batches of ``options.rows`` articles of different lengths: the same on every process."""
    articles = [text[: options.length] for text in topics.values() if text.isascii()]
    rows = options.rows
    return [padded_batch(articles[step * rows : (step + 1) * rows]) for step in range(options.steps)]


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The loss at every step, and the tokens of this process at every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(options.hidden_size, options.layers, options.heads))

    # What matters:
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model.to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["cp"], mp_policy=precision)
    fully_shard(model, mesh=mesh["cp"], mp_policy=precision)
    nta.patch(model, mesh=mesh["cp"], on_fallback="raise")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    losses, tokens = [], []
    for batch in make_batches(options):  # each process has all rows
        out = model(**{name: x.to(device) for name, x in batch.items()})
        out.loss.backward()  # the loss of all tokens, on every process
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        tokens.append(len(nta.hf.packed(out.logits)[0]))  # of this process; `out.logits` are those of all tokens
        if dist.get_rank() == 0:
            total = int(batch["attention_mask"].sum())
            print(f"loss {losses[-1]:.4f}, {tokens[-1]} of {total} tokens on rank 0", flush=True)
    return {"losses": losses, "tokens": tokens}


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="articles in a batch")
    parser.add_argument("--length", type=int, default=4096, help="characters that are used of each article")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = options_of(argv)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fine-tune the LoRA adapters of a Llama, padded and packed, with activation checkpointing. The gradients agree.

``nta.patch`` finds the model inside the PEFT model. The model has random weights, and the text is Python's own
documentation as bytes, so nothing is downloaded. At full size, on a GPU:
``python examples/fine_tune_lora.py --device cuda --bf16 --hidden-size 2048 --layers 16 --heads 16 --length 2048``.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from shared_data import llama_config, padded_batch, paragraphs
from torch import Tensor
from transformers import LlamaForCausalLM

import nt_attention as nta


def make_model(options: argparse.Namespace) -> PeftModel:
    torch.manual_seed(0)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    llama = LlamaForCausalLM(llama_config(options.hidden_size, options.layers, options.heads))
    model = get_peft_model(llama, adapters).to(options.device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Training:
    """A model and its optimizer; ``step`` returns the loss and the gradient of all adapters as one vector."""

    def __init__(self, model: PeftModel, options: argparse.Namespace) -> None:
        self.model, self.device, self.bf16, self.seconds = model, options.device, options.bf16, 0.0
        self.adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, 1e-2)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        start = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            loss = self.model(**batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        gradient = torch.cat([adapter.grad.flatten() for adapter in self.adapters])
        self.optimizer.step()
        found = loss.item()
        self.seconds += time.perf_counter() - start
        return found, gradient


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="characters that count of a paragraph")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    options = parser.parse_args(argv)

    size = options.batch_size
    texts = paragraphs(options.length, size * options.steps)
    model = make_model(options)
    padded, patched = (Training(copy.deepcopy(model), options) for _ in range(2))
    with nta.patch(patched.model) as handle:
        print(handle)
        losses, differences = {"padded": [], "patched": []}, []
        for start in range(0, size * options.steps, size):
            batch = padded_batch(texts[start : start + size])
            batch = {name: tensor.to(options.device) for name, tensor in batch.items()}
            want, theirs = padded.step(batch)
            got, ours = patched.step(batch)
            losses["padded"].append(want)
            losses["patched"].append(got)
            differences.append(((ours - theirs).norm() / theirs.norm()).item())
    for name, curve in losses.items():
        print(f"{name:>8}: " + " ".join(f"{loss:.4f}" for loss in curve))
    print(f"largest difference of the adapters' gradients, relative to their norm: {max(differences):.1e}")
    print(f"{padded.seconds:.2f} s padded, {patched.seconds:.2f} s patched")
    return {**losses, "gradients": differences, "packed": handle.calls[None]}


if __name__ == "__main__":
    main()

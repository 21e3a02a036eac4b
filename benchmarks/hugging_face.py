"""Hugging Face models on this GPU: ``nta.patch`` on padded batches, sdpa on padded batches, and rows packed by hand.

    python benchmarks/hugging_face.py [--models bert llama llama-base mixtral gemma olmo2 camembert] [--save FILE]

BERT-base, CamemBERT-base with its head and labels, and models of 8 layers (2048 wide), with their heads and labels or
as a base model: Llama, Gemma and OLMo 2; and Mixtral with 4 layers (1024 wide, 8 experts). The loss of a base model is
the mean of its output. Random weights, bf16, 16384 tokens of lognormal lengths. Times are wall-clock times, medians
over rounds in which all alternate. Packed by hand is one row with ``cu_seq_lens`` and ``position_ids``, without a mask.
Implementations of transformers that do not run are named on stderr.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import wall_clock_ms
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

import nt_attention as nta
from nt_attention.cli.workloads import draw_lengths

TOKENS = 16384
LLAMA = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=8192,
)  # fmt: skip
LONG = draw_lengths("lognormal:4096", TOKENS, seed=276)
SHORT = draw_lengths("lognormal:512", TOKENS, seed=82)
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000}
MODELS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "bert": (BertModel, BertConfig(), SHORT),
    "llama": (LlamaForCausalLM, LLAMA, LONG),
    "llama-base": (LlamaModel, LLAMA, LONG),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=4, num_local_experts=8,
        ),
        SHORT,
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**WIDE, num_attention_heads=8, num_key_value_heads=1), SHORT),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**WIDE, num_attention_heads=16), SHORT),
    "camembert": (CamembertForMaskedLM, CamembertConfig(vocab_size=32005, max_position_embeddings=514), SHORT),
}  # fmt: skip


@dataclass
class Way:
    """A model, its batch, and the times in ms and the peak memory in GiB of its calls."""

    model: Any
    batch: dict[str, Any]
    ms: dict[str, list[float]] = field(default_factory=dict)
    peak: float = 0.0

    def infer(self) -> Any:
        with torch.no_grad():
            return self.model(**{**self.batch, "labels": None} if "labels" in self.batch else self.batch)

    def train(self) -> None:
        out = self.model(**self.batch)
        loss = out.loss if "labels" in self.batch else out.last_hidden_state.mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def ways(name: str) -> dict[str, Way]:
    kind, config, lengths = MODELS[name]
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
    ids = torch.randint(5, config.vocab_size, (layout.total,), device="cuda")
    mask = layout.pad(torch.ones_like(ids))
    padded = {"input_ids": layout.pad(ids), "attention_mask": mask}
    packed = {
        "input_ids": ids[None], "position_ids": layout.position_ids[None],
        "cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen,
    }  # fmt: skip
    if kind.__name__.startswith("Camembert"):
        packed["position_ids"] = packed["position_ids"] + config.pad_token_id + 1
    elif kind is not BertModel:
        packed["use_cache"] = False
    if "For" in kind.__name__:
        padded["labels"] = padded["input_ids"].masked_fill(mask == 0, -100)
        predicted = (layout.position_ids > 0) | kind.__name__.endswith("ForMaskedLM")
        packed["labels"] = ids.masked_fill(~predicted, -100)[None]

    def make(implementation: str) -> Any:
        torch.manual_seed(0)
        model = kind._from_config(config.__class__(**config.to_dict()), attn_implementation=implementation)
        return model.to("cuda", torch.bfloat16)

    patched = make("sdpa")
    nta.patch(patched)
    found = {
        "nta.patch": Way(patched, padded),
        "sdpa, padded": Way(make("sdpa"), padded),
        "nt_attention, packed by hand": Way(make(nta.hf.register()), packed),
    }
    for form, batch, implementations in (
        ("padded", padded, ("eager", "flex_attention", "flash_attention_4", "flash_attention_2")),
        ("packed by hand", packed, ("flash_attention_4", "flash_attention_2")),
    ):
        for implementation in implementations:
            try:
                way = Way(make(implementation), batch)
                way.train()
            except Exception as error:  # each implementation has its own
                print(f"{name}, {implementation}, {form}: does not run: {str(error)[:120]}", file=sys.stderr)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                found[f"{implementation}, {form}"] = way
    return found


def measure(found: dict[str, Way], rounds: int) -> None:
    for what in ("infer", "train"):
        for way in found.values():
            way.model.train(what == "train")
            for _ in range(3):
                wall_clock_ms(getattr(way, what))
        for _ in range(rounds):
            for way in found.values():
                way.ms.setdefault(what, []).append(wall_clock_ms(getattr(way, what)))
    for way in found.values():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way.train()
        way.peak = (torch.cuda.max_memory_allocated() - before) / 2**30


def hidden(way: Way, mask: Tensor) -> Tensor:
    """The output at the real tokens, (T, …)."""
    out = way.infer()
    states = out.logits if "logits" in out else out.last_hidden_state
    return states[mask.bool()] if states.shape[:2] == mask.shape else states[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, bf16; "
        "ms of wall-clock time; × is over that of nta.patch",
        "",
        "| model | way | forward, no gradients | forward + backward | memory of training, GiB |",
        "|---|---|---|---|---|",
    ]
    for name in options.models:
        found = ways(name)
        for way in found.values():
            way.model.eval()
        ours = found["nta.patch"]
        mask = ours.batch["attention_mask"]
        want = hidden(found["sdpa, padded"], mask).float()
        for way_name, way in found.items():
            # The median of the tokens: rounding sends some tokens of Mixtral to another expert.
            error = ((hidden(way, mask).float() - want).norm(dim=-1) / want.norm(dim=-1)).median()
            if not error < 0.03:
                raise SystemExit(f"{name}, {way_name}: tokens differ from sdpa by {error:.3f} of their norm")
        del want
        measure(found, options.rounds)
        lengths = MODELS[name][2]
        ratio = len(lengths) * max(lengths) / sum(lengths)
        for way_name, way in found.items():
            cells = []
            for what in ("infer", "train"):
                ms, base = statistics.median(way.ms[what]), statistics.median(ours.ms[what])
                cells.append(f"{ms:.2f} ({ms / base:.2f} ×)")
            about = f"{name}, {len(lengths)} sequences, pad ratio {ratio:.2f}" if way is ours else ""
            lines.append(
                f"| {about} | {way_name} | {' | '.join(cells)} | {way.peak:.2f} ({way.peak / ours.peak:.2f} ×) |"
            )
            print(lines[-1], flush=True)
        del found, ours
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(lines))
    if options.save:
        command = f"`python benchmarks/hugging_face.py {' '.join(sys.argv[1:])}`"
        options.save.write_text("\n".join([command, "", *lines]) + "\n")


if __name__ == "__main__":
    main()

"""Hugging Face models: padded, with `nta.patch`, with its CUDA graphs, compiled, and with rows packed by hand.

    python benchmarks/hugging_face.py [--models bert llama t5 …] [--ways NAME …] [--steps 10] [--save FILE]

- Base models, whose loss is the mean of their output: BERT-base, ModernBERT-base, MPNet-base, DeBERTa-v3-base.
- With head and labels: a Llama of 8 layers (2048 wide), and T5-base, whose targets are a quarter as long.

Random weights, bf16, no dropout, 16,384 tokens a batch. Lengths are lognormal, and each step has a batch of other
lengths, padded to a multiple of 8. All ways run it by turns: once before, because new shapes take PyTorch's libraries
longer, and once timed. Times are medians of wall-clock times from device sync to device sync; memory is the peak of a
training step without the weights.

"padded" is the fastest implementation that transformers has without other packages. "graphs" is
``patch(model, cuda_graphs="training")``. Compiled ways are ``torch.compile(model, dynamic=True)``, and run only if
``--ways`` names them. "by hand" is one row with ``cu_seq_lens`` and ``position_ids``, without a mask.

Without a GPU it is a test run of small models in float32.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import show, wall_clock_ms
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5ForConditionalGeneration,
)
from workloads import draw_lengths

import nt_attention as nta

GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)
TOKENS = 16384 if GPU else 512
TINY: dict[str, Any] = {} if GPU else {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
DEBERTA = {
    "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 0, "relative_attention": True,
    "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}  # fmt: skip
T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12} if GPU else {
    "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 100,
}  # fmt: skip
# class, config, lengths, the padded implementation that is fastest
MODELS: dict[str, tuple[Any, Any, str, str]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA | TINY | {"num_key_value_heads": 8 if GPU else 2}),
              "lognormal:2048", "sdpa"),
    "bert": (BertModel, BertConfig(**NO_DROPOUT | TINY), "lognormal:512", "sdpa"),
    "modernbert": (ModernBertModel, ModernBertConfig(**TINY), "lognormal:512", "sdpa"),
    "t5": (T5ForConditionalGeneration, T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0),
           "lognormal:512", "eager"),
    "deberta-v3": (DebertaV2Model, DebertaV2Config(**DEBERTA | NO_DROPOUT | TINY), "lognormal:512", "eager"),
    "mpnet": (MPNetModel, MPNetConfig(**{"vocab_size": 30527, "max_position_embeddings": 514} | NO_DROPOUT | TINY),
              "lognormal:512", "eager"),
}  # fmt: skip
WAYS = ("padded", "padded, FA4", "patch", "graphs", "by hand, FA4")
COMPILED = ("padded, compiled", "patch, compiled", "graphs, compiled")
WARMUP = 2  # steps, in which kernels, programs and graphs are made
Batch = tuple[nta.SequenceLayout, Tensor]


@dataclass
class Way:
    """A model, the function that runs it, how it takes a batch, and the times in ms and the peak memory in GiB."""

    model: Any
    run: Callable[..., Any]
    inputs: Callable[[Batch], dict[str, Any]]
    ms: dict[str, list[float]] = field(default_factory=lambda: {"infer": [], "train": []})
    peak: float = 0.0

    def infer(self, inputs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self.run(**{name: x for name, x in inputs.items() if name != "labels"})

    def train(self, inputs: dict[str, Any]) -> None:
        if "labels" in inputs:
            inputs = {name: x for name, x in inputs.items() if not name.startswith("decoder_")}
        out = self.run(**inputs)
        loss = out.loss if "labels" in inputs else out.last_hidden_state.mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def pad(layout: nta.SequenceLayout, packed: Tensor, value: float = 0) -> Tensor:
    """(T, …) → (B, L, …), where L is a multiple of 8: with other lengths, padded sdpa copies its mask for each head."""
    longest = -(-layout.max_seqlen // 8) * 8
    return nta.SequenceLayout.from_offsets(layout.offsets, max_seqlen=longest).pad(packed, value)


def target_of(batch: Batch) -> Batch:
    """The targets of an encoder-decoder: a quarter of the tokens of each sequence."""
    layout, ids = batch
    lengths = (layout.lengths // 4).clamp(min=1)
    target = nta.SequenceLayout.from_lengths(lengths.tolist(), device=DEVICE)
    return target, ids[: target.total]


def padded(kind: Any, batch: Batch) -> dict[str, Any]:
    layout, ids = batch
    mask = pad(layout, torch.ones_like(ids))
    inputs = {"input_ids": pad(layout, ids), "attention_mask": mask}
    if "ForConditional" in kind.__name__:
        target, of_target = target_of(batch)
        inputs["labels"] = pad(target, of_target, -100)
        inputs["decoder_input_ids"] = pad(target, of_target)
        inputs["decoder_attention_mask"] = pad(target, torch.ones_like(of_target))
    elif "For" in kind.__name__:
        inputs["labels"] = inputs["input_ids"].masked_fill(mask == 0, -100)
    return inputs


def by_hand(kind: Any, batch: Batch) -> dict[str, Any]:
    layout, ids = batch
    inputs: dict[str, Any] = {
        "input_ids": ids[None], "position_ids": layout.position_ids[None],
        "cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen,
    }  # fmt: skip
    if "For" in kind.__name__:
        labels = ids.masked_fill(layout.position_ids == 0, -100)
        inputs |= {"labels": labels[None], "use_cache": False}
    return inputs


def make_way(name: str, way: str) -> Way:
    kind, config, _, stock = MODELS[name]
    patched = way.startswith(("patch", "graphs"))
    implementation = "flash_attention_4" if "FA4" in way else "sdpa" if patched and kind._supports_sdpa else stock
    if "FA4" in way and not (kind._supports_flash_attn and GPU):
        raise NotImplementedError("it needs a GPU, and a model that flash-attn supports")
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # a model writes its attention to its config
    model = kind._from_config(config, attn_implementation=implementation).to(DEVICE, DTYPE)
    if patched:
        graphs = {"cuda_graphs": "training"} if way.startswith("graphs") else {"on_fallback": "raise"}
        nta.patch(model, **graphs)
    run = torch.compile(model, dynamic=True) if "compiled" in way else model
    inputs = by_hand if "by hand" in way else padded
    return Way(model, run, lambda batch: inputs(kind, batch))


def draw(name: str, seed: int) -> Batch:
    _, config, distribution, _ = MODELS[name]
    layout = nta.SequenceLayout.from_lengths(draw_lengths(distribution, TOKENS, seed=seed), device=DEVICE)
    return layout, torch.randint(5, min(30000, config.vocab_size), (layout.total,), device=DEVICE)


def tokens_of(name: str, way: Way, batch: Batch) -> Tensor:
    """The output at the tokens, (T, …)."""
    out = way.infer(way.inputs(batch))
    states = out.logits if "logits" in out else out.last_hidden_state
    layout = target_of(batch)[0] if MODELS[name][1].is_encoder_decoder else batch[0]
    return (states[0] if states.shape[:2] == (1, layout.total) else layout.pack(states)).float()


def found_ways(name: str, names: list[str]) -> dict[str, Way]:
    """The ways that run. Their outputs are those of the first, or the program ends."""
    found: dict[str, Way] = {}
    batch, want = draw(name, 1000), None
    for way_name in names:
        try:
            way = make_way(name, way_name)
            got = tokens_of(name, way, batch)
            way.model.train()
            way.train(way.inputs(batch))
        except Exception as error:  # each implementation has its own
            print(f"{name}, {way_name}: does not run: {str(error)[:200]}", file=sys.stderr, flush=True)
            continue
        want = got if want is None else want
        error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
        if not error < 0.05:
            raise SystemExit(f"{name}, {way_name}: tokens differ from {names[0]} by {error:.3f} of their norm")
        found[way_name] = way
    return found


def step(way: Way, what: str, batch: Batch) -> float:
    """The time of a call in ms, in which the inputs exist already."""
    inputs = way.inputs(batch)
    return wall_clock_ms(lambda: getattr(way, what)(inputs))


def measure(name: str, found: dict[str, Way], steps: int) -> float:
    """Time the ways by turns. Returns the mean pad ratio."""
    ratios = []
    for what in ("infer", "train"):
        for way in found.values():
            way.model.train(what == "train")
        for seed in range(WARMUP + steps):
            batch = draw(name, seed)
            ratios.append(len(batch[0].lengths) * batch[0].max_seqlen / batch[0].total)
            for is_timed, (way_name, way) in itertools.product((False, True), list(found.items())):
                try:
                    ms = step(way, what, batch)
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    print(f"{name}, {way_name}: {what} fails: {str(error)[:200]}", file=sys.stderr, flush=True)
                    found.pop(way_name, None)
                    gc.collect()
                    continue
                way.ms[what] += [ms] if is_timed and seed >= WARMUP else []
    batch = draw(name, 0)
    for way in found.values() if GPU else ():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way.train(way.inputs(batch))
        way.peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return statistics.mean(ratios)


def row(name: str, names: list[str], steps: int) -> str:
    found = found_ways(name, names)
    ratio = measure(name, found, steps)
    ms = {way: [statistics.median(found[way].ms[what]) for what in ("infer", "train")] for way in found}
    cells = [" / ".join(f"{x:.1f}" for x in ms[way]) if way in ms else "–" for way in names]
    for way in names[1:]:
        both = zip(ms[names[0]], ms[way], strict=True) if way in ms and names[0] in ms else ()
        print(f"{name}, {way}: {[f'{a / b:.2f} ×' for a, b in both]}", file=sys.stderr, flush=True)
    ours = next((way for way in names if way.startswith("patch")), names[-1])
    if ours in found and names[0] in found:
        speedups = [f"{a / b:.2f}" for a, b in zip(ms[names[0]], ms[ours], strict=True)]
        cells += [f"{' / '.join(speedups)} ×", f"{found[names[0]].peak:.1f} → {found[ours].peak:.1f}"]
    else:
        cells += ["–", "–"]
    return f"| {name}, {ratio:.1f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=[*WAYS, *COMPILED])
    parser.add_argument("--steps", type=int, default=10 if GPU else 2, help="that are timed, of inference and training")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    ours = next((way for way in options.ways if way.startswith("patch")), options.ways[-1])
    lines = [
        f"{torch.cuda.get_device_name() if GPU else 'CPU'}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {str(DTYPE)[6:]}; wall-clock ms of inference / training",
        "",
        f"| model, pad ratio | {' | '.join(options.ways)} | {options.ways[0]} over {ours} | GiB of training |",
        "|---" * (len(options.ways) + 3) + "|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.models:
        lines.append(row(name, options.ways, options.steps))
        print(lines[-1], flush=True)
        torch._dynamo.reset()
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
    if options.save:
        show(lines, options.save)


if __name__ == "__main__":
    main()

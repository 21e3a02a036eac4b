"""Hugging Face models on this GPU: ``nta.patch`` and transformers on padded batches, and rows packed by hand.

    python benchmarks/hugging_face.py [--models bert llama t5 …] [--without-attention] [--save FILE]

- Base models, whose loss is the mean of their output: BERT-base, MPNet-base, DeBERTa-v3-base.
- Encoder-decoders with labels: T5-base, BART-base. Targets are a quarter as long as their sources.
- Models of 8 layers (2048 wide), with their heads and labels or as a base model: Llama, Gemma and OLMo 2.
- With head and labels: CamemBERT-base, and Mixtral with 4 layers (1024 wide, 8 experts).

Random weights, bf16, 16384 tokens of lognormal lengths, no dropout. Times are wall-clock times, medians over rounds in
which all alternate. Padded batches run with each implementation of transformers; those that do not run are named on
stderr. Packed by hand is one row with ``cu_seq_lens`` and ``position_ids``, without a mask. Without attention is the
stock BART on as many tokens, whose attention returns the query. No attention can make the step faster than that.
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
from by_turns import show, wall_clock_ms
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertForMaskedLM,
    DebertaV2Config,
    DebertaV2Model,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    MPNetConfig,
    MPNetModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from workloads import draw_lengths

import nt_attention as nta

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
    "mpnet": (MPNetModel, MPNetConfig(vocab_size=30527, max_position_embeddings=514), SHORT),
    "deberta-v3": (
        DebertaV2Model,
        DebertaV2Config(
            vocab_size=128100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
            max_position_embeddings=512, type_vocab_size=0, relative_attention=True, position_buckets=256,
            norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        ),
        SHORT,
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0),
        SHORT,
    ),
    "bart": (
        BartForConditionalGeneration,
        BartConfig(
            vocab_size=50265, d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
            decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        ),
        SHORT,
    ),
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


# Model and implementation → why it is not run.
LEFT_OUT = {("t5", "flex_attention"): "accesses invalid memory, with torch 2.11 and transformers 5.17"}
# Rates of dropout, which are set to 0.
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate", "attention_dropout")


class _QueryAsOutput(torch.autograd.Function):
    """An attention that computes nothing. Its gradients reach query, key and value, so all projections are trained."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.inputs = key, value
        return query.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.transpose(1, 2), *map(torch.zeros_like, ctx.inputs)


def query_as_output(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    return _QueryAsOutput.apply(query, key, value), None


@dataclass
class Way:
    """A model, its batch, which tokens of the output are real, and the times in ms and the peak memory in GiB."""

    model: Any
    batch: dict[str, Any]
    tokens: Tensor
    ms: dict[str, list[float]] = field(default_factory=dict)
    peak: float = 0.0

    def infer(self) -> Any:
        batch = {name: x for name, x in self.batch.items() if name != "labels"}
        if self.model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = batch["input_ids"][:, : self.tokens.shape[1]]
            batch["decoder_attention_mask"] = self.tokens
        with torch.no_grad():
            return self.model(**batch)

    def train(self) -> None:
        out = self.model(**self.batch)
        loss = out.loss if "labels" in self.batch else out.last_hidden_state.mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def make(kind: Any, config: Any, implementation: str) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config.__class__(**config.to_dict()), attn_implementation=implementation)
    return model.to("cuda", torch.bfloat16)


def ways(name: str) -> dict[str, Way]:
    """Each way to run a model. The first is `nta.patch`, the second is what it is compared with."""
    kind, config, lengths = MODELS[name]
    for key in DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
    ids = torch.randint(5, config.vocab_size, (layout.total,), device="cuda")
    mask = layout.pad(torch.ones_like(ids))
    padded = {"input_ids": layout.pad(ids), "attention_mask": mask}
    of_output, packed = mask, packed_by_hand(kind, config, layout, ids)
    if config.is_encoder_decoder:
        target = nta.SequenceLayout.from_lengths([max(1, length // 4) for length in lengths], device="cuda")
        of_output = target.pad(torch.ones(target.total, dtype=torch.long, device="cuda"))
        labels = torch.randint(5, config.vocab_size, (target.total,), device="cuda")
        padded["labels"] = target.pad(labels, -100)
    elif "For" in kind.__name__:
        padded["labels"] = padded["input_ids"].masked_fill(mask == 0, -100)

    stock = "sdpa" if kind._supports_sdpa else "eager"
    patched = make(kind, config, stock)
    nta.patch(patched, on_fallback="raise")
    found = {
        "nta.patch": Way(patched, padded, of_output),
        f"{stock}, padded": Way(make(kind, config, stock), padded, of_output),
    }
    if packed is not None:
        found["nt_attention, packed by hand"] = Way(make(kind, config, nta.hf.register()), packed, mask)
    for form, batch, implementations in (
        ("padded", padded, ("eager", "flex_attention", "flash_attention_4", "flash_attention_2")),
        ("packed by hand", packed, ("flash_attention_4", "flash_attention_2")),
    ):
        for implementation in implementations:
            if batch is None or f"{implementation}, {form}" in found:
                continue
            try:
                if (name, implementation) in LEFT_OUT:
                    raise NotImplementedError(LEFT_OUT[name, implementation])
                way = Way(make(kind, config, implementation), batch, of_output)
                way.train()
            except Exception as error:  # each implementation has its own
                print(f"{name}, {implementation}, {form}: does not run: {str(error)[:120]}", file=sys.stderr)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                found[f"{implementation}, {form}"] = way
    return found


def without_attention(name: str) -> Way:
    """The stock model with `query_as_output`, on 32 rows of equal length with as many tokens, without a mask."""
    kind, config, lengths = MODELS[name]
    totals = {"input_ids": sum(lengths), "labels": sum(max(1, length // 4) for length in lengths)}
    batch = {x: torch.randint(5, config.vocab_size, (32, total // 32), device="cuda") for x, total in totals.items()}
    return Way(make(kind, config, "query_as_output"), batch, torch.ones_like(batch["labels"]))


def packed_by_hand(kind: Any, config: Any, layout: nta.SequenceLayout, ids: Tensor) -> dict[str, Any] | None:
    """The batch as one row, or None for models that can't run it."""
    if config.is_encoder_decoder or not kind._supports_flash_attn:
        return None
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
        predicted = (layout.position_ids > 0) | kind.__name__.endswith("ForMaskedLM")
        packed["labels"] = ids.masked_fill(~predicted, -100)[None]
    return packed


def measure(found: dict[str, Way], rounds: int) -> None:
    for name in list(found):
        try:
            found[name].model.train()
            wall_clock_ms(found[name].train)
        except torch.OutOfMemoryError:
            print(f"{name}: not enough memory", file=sys.stderr)
            del found[name]
        gc.collect()
        torch.cuda.empty_cache()
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


def hidden(way: Way) -> Tensor:
    """The output at the real tokens, (T, …)."""
    out = way.infer()
    states = out.logits if "logits" in out else out.last_hidden_state
    return states[way.tokens.bool()] if states.shape[:2] == way.tokens.shape else states[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-attention", action="store_true", help="BART only")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    AttentionInterface.register("query_as_output", query_as_output)
    AttentionMaskInterface.register("query_as_output", lambda *_, **__: None)
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
        (_, ours), (stock, other), *_ = found.items()
        want = hidden(other).float()
        for way_name, way in found.items():
            # The median of the tokens: rounding sends some tokens of Mixtral to another expert.
            error = ((hidden(way).float() - want).norm(dim=-1) / want.norm(dim=-1)).median()
            if not error < 0.03:
                raise SystemExit(f"{name}, {way_name}: tokens differ from {stock} by {error:.3f} of their norm")
        del want
        if options.without_attention and name == "bart":
            found["without attention"] = without_attention(name)
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
            print(lines[-1], file=sys.stderr, flush=True)
        del found, ours
        gc.collect()
        torch.cuda.empty_cache()
    show(lines, options.save)


if __name__ == "__main__":
    main()

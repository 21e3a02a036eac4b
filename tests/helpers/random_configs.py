"""Random configurations of Hugging Face text models, patched and compared with each sequence alone.

``python tests/helpers/random_configs.py --count 200 --jobs 14 [TYPE...]`` prints a line for each class and all errors.
A class of which none of the first 60 configurations is packed is not tried further.
Each configuration is checked by ``patch``; this comparison shares no code with the check.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import transformers
from small_models import on_meta_device, text_classes
from transformers import PreTrainedConfig

import nt_attention as nta
from nt_attention import NotPackedError

ACTS = ["gelu", "relu", "silu", "gelu_new", "tanh"]
REDRAWN = (
    *ACTS,
    "gelu_pytorch_tanh",
)  # default activations that a random one replaces; a class with another may take no other
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "embedding_dim",
          "word_embed_proj_dim")  # fmt: skip
INNER = ("intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "d_ff", "dff", "moe_intermediate_size",
         "shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp",
         "ffn_hidden_size", "expert_ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim")  # fmt: skip
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
NEEDED = ("pad_token_id", "mask_token_id")  # drawn though their default is None: ESM does not run without them
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "sliding_window_size")


def random_config(default, draw: random.Random):
    """A config of the type of `default` with random sizes, flags and kinds of layers."""
    fields = {k: v for k, v in default.to_dict().items() if k not in ("model_type", "transformers_version")}
    heads = draw.choice([2, 4, 6])
    head_dim = draw.choice([8, 16, 24])
    layers = draw.choice([1, 2, 3, 5])
    experts = draw.choice([2, 4, 5])
    kinds = list(dict.fromkeys(fields.get("layer_types") or []))
    vocabulary = draw.choice([61, 130])
    drawn = {
        **dict.fromkeys(WIDTHS, heads * head_dim), **dict.fromkeys(INNER, draw.choice([32, 56])),
        **dict.fromkeys(HEADS, heads), **dict.fromkeys(LAYERS, layers), **dict.fromkeys(EXPERTS, experts),
        **dict.fromkeys(CHOSEN, draw.choice([1, 2])), **dict.fromkeys(WINDOWS, draw.choice([3, 7, 20, 300])),
        "num_key_value_heads": draw.choice([1, 2, heads]), "head_dim": head_dim,
        **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), vocabulary),
        "kv_lora_rank": 16, "q_lora_rank": draw.choice([16, 24]), "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": draw.choice([8, 16]), "n_group": 1, "topk_group": 1, "rotary_dim": 8,
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 160),
        "pad_token_id": draw.choice([0, 1, 3]), "bos_token_id": 2, "eos_token_id": 4, "mask_token_id": 5,
        "type_vocab_size": 2,
        "first_k_dense_replace": draw.choice([0, 1]), "decoder_sparse_step": draw.choice([1, 2]), "mlp_only_layers": [],
        "query_pre_attn_scalar": 16, "qk_head_dim": 16, "num_kv_shared_layers": 0, "per_layer_config": {},
        "tie_word_embeddings": draw.random() < 0.5,
        "layer_types": [draw.choice(kinds) for _ in range(layers)] if kinds else None,
    }  # fmt: skip
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        drawn["head_dim"] = 8
    if default.model_type == "neomme":  # M-RoPE of a quarter of the dims; layers without a window say so
        drawn |= {"head_dim": 16, "layer_types": [*drawn["layer_types"][:-1], "full_attention"]}
        full = [n for n, layer_kind in enumerate(drawn["layer_types"]) if layer_kind == "full_attention"]
        drawn["per_layer_config"] = {str(n): {"sliding_window": None} for n in full}
    for name, value in fields.items():
        if isinstance(part := vars(default).get(name), PreTrainedConfig):
            fields[name] = random_config(part, draw).to_dict()
        elif name in drawn and (value is not None or name in NEEDED):
            fields[name] = drawn[name]
        elif isinstance(value, list) and len(value) == getattr(default, "num_hidden_layers", -1):
            fields[name] = [draw.choice(value) for _ in range(layers)]
        elif name.endswith(("dropout", "_prob", "pdrop", "jitter_noise", "layerdrop")) and isinstance(value, float):
            fields[name] = 0.0
        elif (
            isinstance(value, bool)
            and draw.random() < 0.25
            and not name.startswith(("output_", "return_", "use_cache"))
        ):
            fields[name] = not value
        elif name in ("hidden_act", "activation_function", "hidden_activation") and value in REDRAWN:
            fields[name] = draw.choice(ACTS)
        elif name == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
            fields[name] = value | draw.choice([
                {}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
                {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16,
                 "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            ])  # fmt: skip
            if fields[name]["rope_type"] == "dynamic":
                fields["max_position_embeddings"] = draw.choice([11, 160])
    if "num_layers_per_stack" in fields:  # layers run several times, and are counted each time
        fields["num_layers_per_stack"] = 1
        fields["num_hidden_layers"] = default.num_hidden_layers // default.num_layers_per_stack
    return type(default)(**fields)


def outcome(class_name: str, default, seed: int) -> tuple[str, str]:
    """What happens to one random configuration: exact, WRONG, refused, or skipped because it does not run unpatched."""
    draw = random.Random(f"{class_name} {seed}")
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    try:
        config = random_config(default, draw)
        config.is_encoder_decoder = default.is_encoder_decoder and not class_name.endswith("CausalLM")
        model = getattr(transformers, class_name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if draw.random() < 0.5 and not any(getattr(config, name, None) for name in EXPERTS):
            model.double()
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(2, 5))]
        batch = [torch.randint(6, 61, (1, n), generator=generator) for n in lengths]
        # copies, because RoPE of the type "dynamic" keeps the frequencies of a longer row
        alone = [_run(copy.deepcopy(model), input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in batch]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        pad = getattr(config, "pad_token_id", None) or 0
        ids = torch.full(mask.shape, pad).masked_scatter(mask, torch.cat(batch, 1))
        padded = _run(model, input_ids=ids, attention_mask=mask.long())
        if not all(x.isfinite().all() for x in alone):
            return "skipped", "not finite"
    except Exception as error:  # a config that the model does not support
        return "skipped", f"{type(error).__name__}: {error}"[:150]
    try:
        handle = nta.patch(model, on_fallback="raise")
    except ValueError as error:
        return "refused", str(error).partition("packed: ")[2][:150]
    with handle:
        try:
            got = _run(model, input_ids=ids, attention_mask=mask.long())
        except NotPackedError as error:
            return "padded", str(error)[:150]
        except Exception as error:
            return "FAILS", f"{type(error).__name__}: {error}"[:200]
    if len(set(lengths)) > 1 and not handle.calls[None]:
        return "padded", str(handle.calls)
    tolerance = 1e-4 if got.dtype == torch.float64 else 5e-3
    per_token = got.shape[:2] == mask.shape and len(alone[0]) == 1 and alone[0].shape[1:2] == (lengths[0],)
    for n, (x, length) in enumerate(zip(alone, lengths, strict=True)):
        y, stock = (got[n, :length], padded[n, :length]) if per_token else (got[n], padded[n])
        error = float((y - x[0]).abs().max() / x.abs().max())
        if not error < tolerance:
            noise = float((stock - x[0]).abs().max() / x.abs().max())  # the unpatched model's own difference
            return "WRONG", f"error {error:.1e} (unpatched {noise:.1e}) {lengths} {got.dtype} {config.to_diff_dict()}"
    return "exact", ""


@torch.no_grad()
def _run(model, **inputs):
    out = model(**inputs)
    for name in ("logits", "last_hidden_state", "start_logits", "prediction_logits"):
        if out.get(name) is not None:
            return out[name]
    return next(x for x in out.values() if isinstance(x, torch.Tensor))


def outcomes(class_name: str, model_type: str, count: int) -> Counter:
    """Try random configurations of a class, and print those that are wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    default, found = on_meta_device(model_type, class_name).config, Counter()
    for seed in range(count):
        state, why = outcome(class_name, default, seed)
        found[state] += 1
        if state in ("WRONG", "FAILS"):
            print(class_name, seed, state, why, flush=True)
        elif seed == 59 and not found["exact"] + found["padded"]:
            break
    return found


def in_a_process(row: tuple[str, str, str], count: int, until: float) -> tuple[str, Counter, str]:
    """`outcomes` in a process of its own, because a configuration may need all memory, or crash."""
    command = [sys.executable, __file__, "--class", row[1], row[0], "--count", str(count)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=max(1, until - time.monotonic()))
        *errors, last = run.stdout.strip().splitlines() or ["{}"]
        states = Counter(json.loads(last)) if not run.returncode else Counter({"not built": 1})
    except subprocess.TimeoutExpired:
        errors, states = [], Counter({"no time": 1})
    return f"{row[0]:24}{row[1]}", states, "\n".join(errors)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", help="values of config.model_type; by default all")
    parser.add_argument("--count", type=int, default=200, help="configurations of each class")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--heads", default="causal LM,masked LM")
    parser.add_argument("--seconds", type=float, default=86400, help="stop after this time")
    parser.add_argument("--class", dest="class_name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.class_name:
        print(json.dumps(outcomes(options.class_name, options.types[0], options.count)))
        return 0
    rows = [row for row in text_classes() if row[2] in options.heads.split(",")]
    rows = [row for row in rows if not options.types or row[0] in options.types]
    until = time.monotonic() + options.seconds
    total, packed = Counter(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, states, errors in pool.map(lambda row: in_a_process(row, options.count, until), rows):
            print(f"{name:64}", dict(states), errors, flush=True)
            total += states
            packed += states["exact"] > 0
    print(f"{packed} classes with packed configurations; in all: {dict(total)}")
    return 1 if total["WRONG"] or total["FAILS"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

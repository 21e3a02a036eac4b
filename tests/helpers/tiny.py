"""Tiny random models of every family in the table, and what each sequence gives by itself under eager attention."""

from __future__ import annotations

import functools

import torch
from seeds import seed

from nt_attention.hf.families import CACHE

VOCABULARY, PAD = 97, 1
LENGTHS, LENGTH = [7, 1, 13, 11], 17
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 2,
    "num_attention_heads": 6, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "num_labels": 3,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SLIDING = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}

# model type: prefix of the class names, what its config takes beside TEXT
CONFIGS = {
    "albert": ("Albert", {**NO_DROPOUT, "embedding_size": 19, "classifier_dropout_prob": 0.0}),
    "bert": ("Bert", NO_DROPOUT),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
         "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
         "num_key_value_heads": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "classifier_dropout": 0.0},
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 48, "hidden_dim": 53, "n_layers": 2, "n_heads": 6, "dropout": 0.0, "attention_dropout": 0.0,
         "seq_classif_dropout": 0.0, "qa_dropout": 0.0},
    ),
    "electra": ("Electra", {**NO_DROPOUT, "embedding_size": 19}),
    "esm": (
        "Esm",
        {**NO_DROPOUT, "mask_token_id": 4, "position_embedding_type": "rotary", "token_dropout": True,
         "emb_layer_norm_before": False},
    ),
    "eurobert": ("EuroBert", {**GROUPED, "mask_token_id": 4, "classifier_pooling": "mean"}),
    "gemma2": (
        "Gemma2",
        {**GROUPED, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.7,
         "classifier_dropout": 0.0},
    ),
    "gemma3_text": ("Gemma3", {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": (
        "GPT2",
        {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 53, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "classifier_dropout": 0.0, "hidden_dropout": 0.0},
    ),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}),
    "gpt_oss": (
        "GptOss",
        {**GROUPED, "sliding_window": 5, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["sliding_attention", "full_attention"], "classifier_dropout": 0.0},
    ),
    "llama": ("Llama", {**GROUPED, "classifier_dropout": 0.0}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5, "classifier_dropout": 0.0}),
    "modernbert": (
        "ModernBert",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "attention_dropout": 0.0, "mlp_dropout": 0.0,
         "classifier_dropout": 0.0, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "opt": ("OPT", {"ffn_dim": 53, "dropout": 0.0, "word_embed_proj_dim": 48}),
    "phi3": ("Phi3", {**GROUPED, "sliding_window": 5, "resid_pdrop": 0.0, "classifier_dropout": 0.0}),
    "qwen2": ("Qwen2", {**GROUPED, **SLIDING, "classifier_dropout": 0.0}),
    "qwen3": ("Qwen3", {**GROUPED, **SLIDING, "classifier_dropout": 0.0}),
    "roberta": ("Roberta", NO_DROPOUT),
    "xlm-roberta": ("XLMRoberta", NO_DROPOUT),
}  # fmt: skip
ENDINGS = (
    "Model", "TextModel", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification",
    "ForSequenceClassification", "ForQuestionAnswering",
)  # fmt: skip
ENCODERS = (
    "albert", "bert", "distilbert", "electra", "esm", "eurobert", "modernbert", "roberta", "xlm-roberta",
)  # fmt: skip
# Positions that an encoder or GPT-2 learns stay those of the padded row; the others count a row's own tokens, or turn.
LEARNED_BY_PLACE = ("albert", "bert", "distilbert", "electra", "gpt2")


def classes(model_type):
    """The base model and every head that the family has, by name."""
    import transformers

    prefix = CONFIGS[model_type][0]
    names = [prefix + ending for ending in ENDINGS if not (prefix == "Gemma3" and ending == "Model")]
    if model_type in ENCODERS:
        names = [name for name in names if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    there = [name for name in names if hasattr(transformers, name)]
    return [*there, *(["Gemma3TextForSequenceClassification"] if prefix == "Gemma3" else [])]


EVERY = [(model_type, name) for model_type in CONFIGS for name in classes(model_type)]


def config_of(model_type, **more):
    import transformers

    return transformers.CONFIG_MAPPING[model_type](**{**TEXT, **CONFIGS[model_type][1], **more})


def make(model_type, name, implementation="eager", **more):
    """A model in float32 and eval. No parameter is constant, as some are after initialization."""
    import transformers

    kind = getattr(transformers, name)
    seed(7)
    if name.endswith("ForQuestionAnswering"):
        more["num_labels"] = 2
    model = kind._from_config(config_of(model_type, **more), attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@functools.cache
def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def mask_of(side):
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    return mask if side == "right" else mask.flip(1)


def pad(tokens, side, value=0):
    """(T, …) to (B, L, …)."""
    padded = tokens.new_full((len(LENGTHS), LENGTH, *tokens.shape[1:]), value)
    padded[mask_of(side)] = tokens
    return padded


def batch_of(model_type, side):
    """The sequences as a padded batch, with position_ids if padding on the left would change learned positions."""
    batch = {"input_ids": pad(torch.cat(sequences()), side, PAD), "attention_mask": mask_of(side).long()}
    if side == "left" and model_type in LEARNED_BY_PLACE:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def per_sequence(name):
    return name.endswith("ForSequenceClassification")


def run_alone(model, rows):
    """The outputs of each row by itself, by name: (T, …) for tokens, (B, …) for sequences."""
    with torch.no_grad():
        outs = [model(**row, output_hidden_states=True) for row in rows]
    found = {}
    for key in (key for key in outs[0] if key not in CACHE):
        if key == "hidden_states":
            found[key] = [torch.cat(layer, 1)[0] for layer in zip(*(out[key] for out in outs), strict=True)]
        elif key == "pooler_output" or (key == "logits" and per_sequence(type(model).__name__)):
            found[key] = torch.cat([out[key] for out in outs])
        else:
            found[key] = torch.cat([out[key] for out in outs], 1)[0]
    return found


@functools.cache
def alone(model_type, name):
    """What each sequence gives by itself, under eager attention."""
    return run_alone(make(model_type, name), [{"input_ids": ids[None]} for ids in sequences()])

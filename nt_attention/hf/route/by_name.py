"""Which models may have our attention by its name alone, without `nt_attention.patch`.

Under the name alone, rows that the caller packed are kept apart where transformers passes `position_ids` or
`cu_seq_lens_q` on to attention. Other models are refused when they get the name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from .. import families
from ..transformers_private import asks_for_attention, attention_of, can_set_attention, flash_implementations

_OURS = "nt_attention"
_CALL_PATCH = "leave attn_implementation out, and call nt_attention.patch(model)."
# Measured by tools/rows_matrix.py, by config.model_type:
# Models that do not pass position_ids, or cu_seq_lens_q, on to all of their layers, or count positions along the row.
MIX_ROWS = frozenset({
    "axk2", "bailing_hybrid", "bamba", "bart", "blenderbot", "blenderbot-small", "clip_text_model", "ctrl",
    "deepseek_v4", "distilbert", "doge", "encoder-decoder", "esm", "esmc", "falcon_h1", "falcon_mamba", "fuyu",
    "gpt_bigcode", "granitemoehybrid", "gte", "hy_v4", "inkling2_text", "inkling_text", "jamba",
    "jina_embeddings_v3", "kimi_linear", "layoutlm", "lfm3", "llama4", "llama4_text", "longt5", "m2m_100", "marian",
    "markuplm", "mbart", "minimax", "mobilebert", "modernbert", "modernvbert", "moshi", "nemotron", "nemotron_h",
    "neomme", "olmo_hybrid", "pegasus", "pegasus_x", "persimmon", "plbart", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "seamless_m4t", "seamless_m4t_v2",
    "stablelm", "switch_transformers", "t5gemma", "t5gemma2", "t5gemma2_decoder", "tipsv2_text_model", "whisper",
    "zamba", "zamba2", "zaya",
})  # fmt: skip
# Models with RoPE whose values also depend on the position in the row.
COUNT_POSITIONS = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3", "mistral4"})
# Models that compute with the mask of eager attention, in numbers.
NEED_EAGER = frozenset({"bigbird_pegasus", "git", "nllb-moe"})
# Models whose attention takes more arguments than ours.
NOT_SUPPORTED = frozenset({"glm_moe_dsa"})
_SCALED_BY_LENGTH = {"dynamic", "longrope"}


class _Naming(threading.local):
    """Whether `nt_attention.patch` gives models of this thread the name."""

    is_for_patch = False


_naming = _Naming()


@contextmanager
def name_for_patch() -> Iterator[None]:
    """A context in which models get the name from `nt_attention.patch`, which keeps sequences apart by itself."""
    _naming.is_for_patch = True
    try:
        yield
    finally:
        _naming.is_for_patch = False


def why_rows_mixed(model: Any) -> str | None:
    """Why a model mixes the sequences of a row that the caller packed, though it runs our attention; or None."""
    config = model.config
    if config.model_type in MIX_ROWS or "conv" in (getattr(config, "layer_types", None) or ()):
        return "it does not tell all of its layers where sequences begin"
    if getattr(config, "token_dropout", False):
        return "its token_dropout counts masks along the whole row"
    if not _SCALED_BY_LENGTH.isdisjoint(_rope_types(config)):
        return "its RoPE would be scaled by the length of the whole row"
    return None


def _part_with_other_config(model: Any) -> str | None:
    """Why a part of a model would not get the name with it, as a layer that was copied with its config; or None."""
    configs = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    configs += [getattr(config, name, None) for config in configs for name in config.sub_configs]
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if "Attention" in type(module).__name__ and config is not None and not any(config is x for x in configs):
            return (
                f"has {path}, which has a config of its own, with the attention {attention_of(config)!r}: give it that "
                "of the model, or call nt_attention.patch(model)."
            )
    return None


def counts_positions(config: Any) -> bool:
    """Whether a model may compute other values for other positions, even if their distances are the same."""
    if config is None or getattr(config, "position_embedding_type", None) == "rotary":
        return False
    return config.model_type in COUNT_POSITIONS or not any(_rope_types(config))


def _rope_types(config: Any) -> Iterator[str]:
    """The types of RoPE in a config, which has one for all layers or one for each type of layers."""
    of_config = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (of_config, *of_config.values()):
        kind = each.get("rope_type", each.get("type")) if isinstance(each, dict) else None
        if isinstance(kind, str):
            yield kind


def refuse_name(model: Any, name: Any) -> None:
    """Refuse our attention for a class of transformers that would not run it, or would mix the sequences of a row.

    Parts of a model that take no text, such as convolutions over images, are left as they are.

    Raises:
        ValueError: its layers ask for no attention implementation; or it runs only other ones for flash attention; or
            it does not pass on where sequences begin; or it needs what our attention, or this one of them, lacks.
    """
    if not isinstance(name, str) or not name.startswith(_OURS):
        return
    cls: Any = families.class_of(model)
    if cls.__module__.startswith("transformers.") and (reason := _why_not_by_name(model, cls, name)) is not None:
        raise ValueError(f"{cls.__name__} {reason}")


def _why_not_by_name(model: Any, cls: Any, name: str) -> str | None:
    """Why a class of transformers can't have the name, and what to do."""
    is_flash, model_type = "flash" in name, model.config.model_type
    is_run = asks_for_attention(cls) or (can_set_attention(cls) and cls.main_input_name != "input_ids")
    if not is_run or (is_flash and model_type == "longt5"):  # LongT5 runs it in its decoder only
        return (
            f"does not run an attention implementation by name, so {name!r} would do nothing, and rows packed by hand "
            f"would be mixed: {_CALL_PATCH}"
        )
    listed = flash_implementations(model)
    if is_flash and listed and name not in listed:  # transformers would load one of these in its place
        return (
            f"runs flash attention only by one of {', '.join(map(repr, listed))}, not by {name!r}: use "
            "attn_implementation=nt_attention.hf.register(), or call nt_attention.patch(model)."
        )
    if _naming.is_for_patch or cls.main_input_name != "input_ids":
        return None
    if model_type in NOT_SUPPORTED:
        return f"passes arguments to its attention that {name!r} ignores: use 'sdpa'."
    if model_type in NEED_EAGER and not name.endswith("eager"):
        use = "use nt_attention.hf.register('eager')"
        return f"computes with the mask of eager attention, and is wrong with {name!r}: {use}."
    if (other := _part_with_other_config(model)) is not None:
        return other
    reason = why_rows_mixed(model)
    return (
        None if reason is None else f"would mix the sequences of rows packed by hand, because {reason}: {_CALL_PATCH}"
    )

"""A twin of a Hugging Face model: the same class with a small config, to try on the CPU what the class does.

The twin has random weights, few layers of each kind, and small sizes: widths, numbers of heads and experts, windows.
All other fields of the config stay as they are, so two models with the same twin need the same treatment.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...kernels.select import automatic_choice
from ..families import base_model, class_of, config_of, is_encoder_decoder, is_of_transformers
from ..transformers_private import attention_of
from .parts import marks_of, parts_of

HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 16, 64, 96
VOCABULARY, PADDING = 99, 1
WINDOW = 8
LAYERS = 4  # if all are of one kind
LARGEST = 2_000_000  # parameters

# Config field → its value in a twin.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embedding_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(("output_embedding_size", "pooler_hidden_size", "shared_experts_intermediate_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "dff"), HIDDEN),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp", "dim_ff"), HIDDEN),
    **dict.fromkeys(("hidden_dim", "n_inner", "feed_forward_size", "d_inner", "expert_ffn_hidden_size"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "d_head", "kv_channels"), HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head"), HEAD_DIM),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_head_dim", "mamba_dt_rank"), HEAD_DIM),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * HEADS),
    "attention_head_dim": 2 * HEAD_DIM,
    "mamba_d_ssm": 2 * WIDTH,
    **dict.fromkeys(("attention_head_size", "d_kv", "dim_head"), HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), HEAD_DIM // 2),
    "qk_head_dim": HEAD_DIM,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "attention_window"), WINDOW),
    **dict.fromkeys(("attention_window_size", "sliding_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length", "model_max_length"), 128),
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_size_per_layer_input"), HEAD_DIM),
    **dict.fromkeys(("type_vocab_size",), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index"), 1),
}  # fmt: skip
KEY_HEADS = re.compile("num_key_value_heads|swa_num_key_value_heads|num_kv_heads|num_query_groups|multi_query_heads")
LAYER_NUMBERS = re.compile("(num_)?(hidden_|encoder_|decoder_)?layers?|n_layers?")
# Sizes that models need, though they are None in the default configs of some.
_NEEDED = {"head_dim", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "vocab_size"}
_PERIOD = re.compile("period|interval|every_n|pattern|_step$|freq")
# Rates and small constants: they change numbers, but not which tokens depend on each other.
_RATE = re.compile("dropout|drop_path|layerdrop|layer_drop|pdrop|drop_rate|jitter|_drop$|^drop$")
_CONSTANT = re.compile("_eps$|epsilon$|^eps$|initializer|init_std|_init$|init_scale|init_floor")
# Fields that do not change what `forward` computes for a batch without labels.
_NO_MATTER = {
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "output_hidden_states",
    "output_attentions", "return_dict", "use_cache", "id2label", "label2id", "tokenizer_class", "task_specific_params",
    "prefix", "finetuning_task", "auto_map", "_attn_implementation", "attn_implementation", "quantization_config",
    "output_router_logits", "_commit_hash", "_attn_implementation_autoset", "transformers.js_config", "pretraining_tp",
}  # fmt: skip


def twin_config(kind: type, config: Any, unknown: bool | None = None) -> dict[str, Any]:
    """The fields of the twin's config, for a class and the config of a model.

    Args:
        kind: the class.
        config: the config of the model.
        unknown: whether large integers whose name is not known become small too. None: if transformers has the config.
    """
    given = config.to_dict()
    own = not is_of_transformers(type(config))
    left_out = _NO_MATTER & (SWITCHES | NAMES)
    if is_of_transformers(kind):
        left_out = _NO_MATTER if own else _NO_MATTER | (_OLD - _default_fields(config.__class__))
    fields = shrink(given, not own if unknown is None else unknown, LAYERS, own, left_out)
    if is_of_transformers(kind):  # whose code has no padding id of its own
        fields["pad_token_id"] = 0 if _default_padding(config.__class__) == 0 else PADDING
    labels = 1 if len(given.get("id2label") or "12") == 1 else 2
    fields["id2label"] = {n: f"LABEL_{n}" for n in range(labels)}
    fields["label2id"] = {f"LABEL_{n}": n for n in range(labels)}
    return fields


# Fields that older versions of transformers wrote for all models. They matter where they are in a default config.
_OLD = {"gradient_checkpointing", "position_embedding_type", "pruned_heads", "use_bfloat16", "torchscript"}
# Fields that name a checkpoint or its files. The code of few classes reads them.
NAMES = {"_name_or_path", "transformers_version", "_commit_hash", "architectures", "transformers.js_config"}
# Switches of a call, and what a twin sets itself.
SWITCHES = {
    "output_attentions", "output_router_logits", "return_dict", "dtype", "torch_dtype", "quantization_config",
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip


@functools.lru_cache(64)
def _default_fields(kind: Any) -> frozenset[str]:
    """The names of the fields of a default config of a class."""
    try:
        return frozenset(kind().to_dict())
    except Exception:  # there is no default config
        return frozenset(_OLD)


@functools.lru_cache(64)
def _default_padding(kind: Any) -> int | None:
    """The padding id of a default config of a class."""
    try:
        padding = kind().pad_token_id
    except Exception:  # there is no default config
        return None
    return padding if isinstance(padding, int) else None


def shrink(
    given: dict[str, Any],
    unknown: bool,
    most: int | None = LAYERS,
    own: bool = False,
    left_out: Collection[str] = _NO_MATTER,
) -> dict[str, Any]:
    """The fields of a small config. `most`: of how many layers, if all are of one kind; None keeps all layers."""
    fields = {name: value for name, value in given.items() if name not in left_out}
    layers = next((v for k, v in given.items() if LAYER_NUMBERS.fullmatch(k) and isinstance(v, int)), 0)
    chosen = list(range(layers)) if most is None else _choose_layers(fields, layers, most)
    by_value = {fields[name]: size for name, size in SIZES.items() if is_int(fields.get(name)) and fields[name] > 32}
    heads = next((fields[k] for k, v in SIZES.items() if v == HEADS and "head" in k and is_int(fields.get(k))), None)
    for name, value in fields.items():
        if isinstance(value, dict):
            if is_by_index(value):
                new = ((place, of_layer(value, layer)) for place, layer in enumerate(chosen))
                kept = {place: shrink(of_layer, unknown) for place, of_layer in new if of_layer is not None}
                fields[name] = {n: {k: x for k, x in kept[n].items() if k != "pad_token_id"} for n in kept}
            elif "model_type" in value:
                fields[name] = shrink(value, unknown, None if most is None else LAYERS)
            elif "rope_type" in str(value):
                fields[name] = _shrink_rope(value)
            else:
                small = {
                    k: _shrink_integer(str(k), v, 0, heads, by_value, unknown) for k, v in value.items() if is_int(v)
                }
                fields[name] = {**value, **small}
        elif isinstance(value, list | tuple):
            fields[name] = _shrink_list(name, value, layers, chosen)
        elif isinstance(value, float):
            if _RATE.search(name):
                fields[name] = 0.0
            elif _CONSTANT.search(name) and not own:
                fields[name] = 0.02 if "init" in name else 1e-6
            elif name == "rope_theta":
                fields[name] = 10000.0
        elif is_int(value):
            fields[name] = _shrink_integer(name, value, len(chosen), heads, by_value, unknown)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    if rope and re.search("dynamic|longrope", str(rope)) and "max_position_embeddings" in fields:
        fields["max_position_embeddings"] = 2 * WINDOW  # above it, frequencies depend on the length
    if shared := _shared_layers(given):
        fields["num_kv_shared_layers"] = sum(layer >= layers - shared for layer in chosen)
    if fields.get("head_dim") and given.get("head_dim") == given.get("qk_rope_head_dim"):
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if {"num_heads", "expand", "state_size"} <= fields.keys():  # Mamba 2: heads · head dim = expand · width
        fields["num_heads"] = fields["expand"] * WIDTH // HEAD_DIM
    fields["pad_token_id"] = 0 if given.get("pad_token_id") == 0 else PADDING
    return fields


def _shrink_integer(
    name: str, value: int, layers: int, heads: int | None, by_value: dict[int, int], unknown: bool
) -> int:
    if LAYER_NUMBERS.fullmatch(name):
        return layers
    if name.endswith(("_token_id", "_token_index", "_id")) and value >= 0:
        known = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "mask_token_id": 4}
        return known.get(name, 5 if value > 16 else value)
    if KEY_HEADS.fullmatch(name):
        return 1 if value == 1 else HEADS if value == heads else 2
    if name in SIZES:
        return value if value <= 0 or (value == 1 and SIZES[name] <= HEADS) else SIZES[name]
    if _PERIOD.search(name) or not unknown or value <= 16:
        return value
    for size in sorted(by_value, reverse=True):
        if value % size == 0 and value // size <= 8:
            return value // size * by_value[size]
    return WINDOW


def _choose_layers(fields: dict[str, Any], layers: int, most: int) -> list[int]:
    """The indices of the model's layers of which the twin has copies: two of each kind."""
    kinds: list[tuple[Any, ...]] = []
    lists = [value for name, value in fields.items() if _is_by_layer(value, layers)]
    indices = [value for name, value in fields.items() if _is_of_indices(name, value, layers)]
    periods = [v for k, v in fields.items() if _PERIOD.search(k) and is_int(v) and 1 < v <= 8]
    shared = _shared_layers(fields)
    for layer in range(layers):
        of_lists = [_hashable(value[layer]) for value in lists]
        of_dicts = [_hashable(of_layer(value, layer)) for value in fields.values() if is_by_index(value)]
        kinds.append((*of_lists, *of_dicts, *(layer in value for value in indices), layer >= layers - shared))
    if len(set(kinds)) > 1:
        by_kind = {kind: [n for n in range(layers) if kinds[n] == kind] for kind in kinds}
        return [layer for found in by_kind.values() for layer in (found[0], found[min(1, len(found) - 1)])]
    number = max([LAYERS, min(layers, most), *(period + 1 for period in periods)]) if layers else 0
    return [min(layer, layers - 1) for layer in range(number)]


def _shared_layers(fields: dict[str, Any]) -> int:
    """The number of last layers that use the keys and values of earlier ones."""
    value = fields.get("num_kv_shared_layers")
    return value if isinstance(value, int) else 0


def _is_by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers > 1 and list(value) != list(range(layers))


def is_by_index(value: Any) -> bool:
    """Whether a field has a dict with layer indices as keys, such as per_layer_config."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(str(key).isdigit() and isinstance(of_layer, dict) for key, of_layer in value.items())
    )


def of_layer(value: dict[Any, Any], layer: int) -> Any:
    return next((kept for key, kept in value.items() if int(key) == layer), None)


def _is_of_indices(name: str, value: Any, layers: int) -> bool:
    """Whether a field lists layers by their indices."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= layers or not re.search("layer|idx|index", name):
        return False
    return not _is_by_layer(value, layers) and all(is_int(v) and 0 <= v < layers for v in value)


def _shrink_list(name: str, value: Any, layers: int, chosen: list[int]) -> Any:
    if _is_by_layer(value, layers):
        kept = [value[layer] for layer in chosen]
        window = re.search("window|span|chunk|local", name)
        return [v if not is_int(v) or v <= 16 else WINDOW if window else min(v, HIDDEN) for v in kept]
    if _is_of_indices(name, value, layers):
        return [new for new, old in enumerate(chosen) if old in value]
    if name == "eos_token_id":
        return [3]
    return value


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    if "rope_type" not in rope:
        return {kind: _shrink_rope(x) if isinstance(x, dict) else x for kind, x in rope.items()}
    small = {**rope}
    if "rope_theta" in rope:
        small["rope_theta"] = 10000.0
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = WINDOW
    dims = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            spread = [rope[name][n * len(rope[name]) // dims] for n in range(dims)]
            small[name] = spread
    if section := rope.get("mrope_section"):  # the rotated pairs of dims of each axis
        ends = [round(end * dims / sum(section)) for end in itertools.accumulate(section)]
        small["mrope_section"] = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    return small


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str | float | None) else repr(value)


_lock = threading.RLock()


@contextmanager
def isolated() -> Iterator[None]:
    """A context for a twin: on the CPU, with gradients, and without an effect on the caller's random state."""
    with _lock:  # because the default dtype, warnings and Python's random state belong to all threads
        yield from _isolate()


def _isolate() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    dtype, verbosity, threads = torch.get_default_dtype(), logging.get_verbosity(), torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
        automatic_choice(),  # the backend that the caller asked for may not run on a CPU, or in float64
    ):
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)  # in a small model, threads wait for each other longer than they compute
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also change the state of GPUs
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            logging.set_verbosity(verbosity)
            random.setstate(states[0])
            np.random.set_state(states[1])


class CannotBuild(Exception):
    """No small model of the class can be built."""


def new_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """What the class makes from the config of a model, on the meta device. None if it raises an error."""
    try:
        with isolated(), torch.device("meta"):
            return class_of(model)(copy.deepcopy(config_of(model)))
    except (Exception, SystemExit):  # any class, any config
        return None


def changed_numbers(model: PreTrainedModel) -> dict[str, float]:
    """The numbers of modules that are not what the class makes from the config of the model, by path."""
    new = new_model(model)
    parts = dict(new.named_modules()) if new is not None else {}
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if path in parts and type(value) in (int, float) and vars(parts[path]).get(name, value) != value
    }


_MOST_FLAGS = 64


def flags_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers with a few truth values or integers, by path, which a program may have set. Not those on meta."""
    return {
        path: buffer
        for path, buffer in model.named_buffers()
        if not buffer.is_floating_point() and buffer.numel() <= _MOST_FLAGS and not buffer.is_meta
    }


def build_twin(original: PreTrainedModel) -> PreTrainedModel:
    """A small model of the class of a model, with random weights, in evaluation mode, on the CPU.

    It is in float64, or in float32 if the class can't run in float64.

    Raises:
        CannotBuild: no small config gives a model that has all kinds of modules of the original and runs.
    """
    attempts = _attempts(class_of(original), config_of(original))
    return build(original, attempts, (torch.float64, torch.float32), LARGEST, LARGEST)


def build(
    original: PreTrainedModel,
    attempts: Iterable[dict[str, Any]],
    dtypes: Iterable[torch.dtype],
    largest: int,
    largest_tables: int,
    keep_dropout: bool = False,
) -> PreTrainedModel:
    kind, config, parts, marks = class_of(original), config_of(original), parts_of(original), marks_of(original)
    error: BaseException | None = None
    for fields in attempts:
        for dtype in dtypes:
            try:
                with torch.device("meta"):
                    new = kind(type(config)(**fields))
                vocabulary = vocabulary_of(new, None)
                embeddings = {id(x.weight) for x in new.modules() if isinstance(x, nn.Embedding)}
                tables = sum(p.numel() for p in new.parameters() if id(p) in embeddings or vocabulary in p.shape)
                size = sum(p.numel() for p in new.parameters())
                if size - tables > largest or tables > largest_tables:
                    raise TooLargeError(f"it still has {size / 1e6:.0f} million parameters")
                model = kind(type(config)(**fields))
                if missing := parts - parts_of(model):
                    raise CannotBuild(f"it has no {', '.join(sorted(missing))}")
                if _shares_keys(model.config) != _shares_keys(config):
                    raise CannotBuild("it runs only with another number of key heads")
                kept = marks_of(model)
                flags = (mark for mark in marks if mark[2] not in ("None", "a number"))
                if lost := next((mark for mark in flags if mark not in kept), None):
                    raise CannotBuild(f"none of its {lost[0]} has {lost[1]} = {lost[2]}")
                _randomize(model, keep_dropout)
                for path, buffer in flags_of(original).items():
                    if (flag := flags_of(model).get(path)) is not None and flag.shape == buffer.shape:
                        flag.copy_(buffer)
                model.to(dtype).eval()
                model.config.use_cache = False
                if is_encoder_decoder(model) and getattr(model.config, "decoder_start_token_id", None) is None:
                    model.config.decoder_start_token_id = padding_of(model)
                if not is_of_transformers(kind) and attention_of(config) == "eager":
                    model.set_attn_implementation("eager")
                _try(model)
                return model
            except (Exception, SystemExit) as failure:  # any class, any config
                error = failure if error is None or isinstance(error, TooLargeError) else error
    raise CannotBuild(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _shares_keys(config: Any) -> bool | None:
    """Whether several query heads of a model share a key head, or None if the config does not say."""
    fields = config.get_text_config().to_dict()
    heads = next((x for name, x in fields.items() if name == "num_attention_heads" and is_int(x)), None)
    keys = next((x for name, x in fields.items() if name == "num_key_value_heads" and is_int(x)), heads)
    return None if heads is None else keys < heads


class TooLargeError(CannotBuild):
    """A config gives a model with too many parameters."""


def fill_config(config: Any) -> Any:
    """Set sizes that are None in a default config, such as head_dim, in place, if models of the class need them."""
    fields = config.to_dict()
    for name, size in {**SIZES, "num_key_value_heads": HEADS}.items():
        if fields.get(name, 0) is None and name in _NEEDED:
            setattr(config, name, size)
    return config


def _attempts(kind: type, config: Any) -> Iterator[dict[str, Any]]:
    """The fields of the configs to try, one after the other."""
    for fill in (False, True):
        for unknown in (None, not is_of_transformers(type(config))):
            fields = twin_config(kind, config, unknown)
            if fill:
                fields |= {name: size for name, size in SIZES.items() if name in fields and fields[name] is None}
                fields |= {name: 2 for name in fields if KEY_HEADS.fullmatch(name) and fields[name] is None}
            yield fields
            for without in (("head_dim",), ("head_dim", "num_key_value_heads")):
                yield {name: value for name, value in fields.items() if name not in without}


@torch.no_grad()
def _try(model: Any) -> None:
    """Run a batch with padding on the left.

    Raises:
        CannotBuild: the output of a token is not finite.
    """
    ids = torch.arange(3 * 23).view(3, 23) % (vocabulary_of(model) - 6) + 6
    mask = torch.arange(23) >= torch.tensor([[11], [0], [22]])
    inputs = {"input_ids": ids.masked_fill(~mask, padding_of(model)), "attention_mask": mask.long()}
    if is_encoder_decoder(model):
        inputs["decoder_input_ids"] = ids
    if not type(model).__name__.endswith("ForMultipleChoice"):  # it takes rows of choices
        model(**inputs)
    for value in base_model(model)(**inputs).values():
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape:
            # masks that are made for float32 give NaN at padding in float64, and later also at tokens
            checked = value if value.dtype == torch.float64 else value[mask]
            if not checked.isfinite().all():
                raise CannotBuild(f"its outputs are not finite in {value.dtype}")


def padding_of(twin: Any) -> int:
    """The id at padding."""
    given = twin.config.get_text_config().pad_token_id
    return PADDING if given is None else int(given)


def vocabulary_of(model: Any, most: int | None = VOCABULARY) -> int:
    """The number of ids that a twin takes, or `most`, if that is less."""
    size = getattr(model.config.get_text_config(), "vocab_size", None) or VOCABULARY
    return size if most is None else min(most, size)


@torch.no_grad()
def _randomize(model: nn.Module, keep_dropout: bool) -> None:
    """Random weights at a scale at which every part of the model has an effect."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not keep_dropout:
            module.p = 0.0
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 1:
            p.copy_(torch.randn(p.shape) / math.prod(p.shape[1:]) ** 0.5)
        elif p.is_floating_point():
            p.clamp_(-2, 2).add_(0.3 * torch.randn(p.shape))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.any():
            buffer.copy_(0.3 * torch.randn(buffer.shape))

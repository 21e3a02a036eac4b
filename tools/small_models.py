"""Small models of the classes of transformers: with random weights, few layers of each kind, and small sizes.

For `supported_models.py`, which checks how each class is packed, and for tests. `small_configs.json` has the names of
the fields of configs, by what they mean.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from nt_attention.hf.families import base_model, is_encoder_decoder

HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 16, 64, 96
VOCABULARY, PADDING = 99, 1
WINDOW = 8
LAYERS = 4  # if all are of one kind
LARGEST = 2_000_000  # parameters
# Of the inputs of encoders: the lengths of rows, as shares of the longest, and the numbers of patches of images.
SHARES = (1.0, 0.55, 0.3, 0.12)  # of the positions of a row that are not padding
SAMPLES, FRAMES = 8_000, 168  # of a row: sound, and features of sound, which models make shorter
SHAPES = ((4, 6), (3, 5), (2, 2), (1, 3))  # of images, in patches

_FIELDS = json.loads(Path(__file__).with_name("small_configs.json").read_text())
SIZES: dict[str, int] = {name: group["size"] for group in _FIELDS["sizes"] for name in group["fields"]}
NEEDED = set(_FIELDS["sizes that models need"])  # though they are None in the default configs of some
LEFT_OUT = set(_FIELDS["left out"])  # names of a checkpoint, and what a call may set
KEY_HEADS, LAYER_NUMBERS, _PERIOD, _RATE, _CONSTANT, _NO_WIDTH, _NOT_BY_LAYER = map(
    re.compile, _FIELDS["patterns"].values()
)


# The mappings of transformers' Auto classes for text: mapping → the name of its heads in the documentation.
MAPPINGS = {
    "MODEL_MAPPING_NAMES": "base",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal LM",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq LM",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "token",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "QA",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "multiple choice",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES": "next sentence",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": "pretraining",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "text encoding",
}
_OF_TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE", "TEXT_ENCODING")


def text_classes() -> list[tuple[str, str, str]]:
    """Model type, class name and head of every text model, each class once."""
    text = {kind for name in MAPPINGS if any(part in name for part in _OF_TEXT) for kind in _mapping(name)}
    names = set(dir(transformers))  # hasattr would import the code of every model
    found: dict[str, tuple[str, str, str]] = {}
    for name, head in MAPPINGS.items():
        for model_type, class_names in _mapping(name).items():
            for class_name in [class_names] if isinstance(class_names, str) else class_names:
                if model_type in text and class_name in names:
                    found.setdefault(f"{model_type} {class_name}", (model_type, class_name, head))
    return sorted(found.values())


def _mapping(name: str) -> dict[str, Any]:
    mapping: dict[str, Any] = getattr(modeling_auto, name)
    return mapping


def on_meta_device(source: str, class_name: str) -> PreTrainedModel:
    """A model of a class without values, with the default config of a model type, or of a folder."""
    kind: Any = getattr(transformers, class_name)
    is_type = source in transformers.CONFIG_MAPPING
    config = transformers.CONFIG_MAPPING[source]() if is_type else AutoConfig.from_pretrained(source)
    if not isinstance(config, kind.config_class):
        config = kind.config_class()
    with torch.device("meta"):
        model: PreTrainedModel = kind(fill_config(config))
        return model


class CannotBuildError(Exception):
    """No small model of the class can be built."""


@contextmanager
def isolated(seed: int = 0) -> Iterator[None]:
    """A context with one thread and random numbers from a seed, which shows no warnings and restores all of this."""
    state, verbosity, threads = random.getstate(), logging.get_verbosity(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        torch.set_num_threads(1)  # in a small model, threads wait for each other longer than they compute
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            logging.set_verbosity(verbosity)
            random.setstate(state)


def build_small(source: str, class_name: str, dtypes: Iterable[torch.dtype] = (torch.float64, torch.float32)) -> Any:
    """A small model of a text class, in the first of these dtypes in which it runs, in evaluation mode.

    Args:
        source, class_name: as in `on_meta_device`.
        dtypes: the dtypes to try.

    Raises:
        CannotBuildError: no small config gives a model that runs.
    """
    with isolated():
        model = on_meta_device(source, class_name)
        return build(type(model), _attempts(model.config), dtypes, _try)


def small_of(model: PreTrainedModel, dtypes: Iterable[torch.dtype] = (torch.float64, torch.float32)) -> Any:
    """As `build_small`, for the class and the config of a model."""
    with isolated():
        return build(type(model), _attempts(model.config), dtypes, _try)


def small_encoder(model: PreTrainedModel, try_: Callable[[Any], Any]) -> Any:
    """As `small_of`, for a model whose input is not tokens. `try_` runs it."""
    config = model.config
    lists = {name: x for name, x in config.to_dict().items() if name.startswith(("conv_", "tdnn_"))}
    lists = {name: x for name, x in lists.items() if isinstance(x, list | tuple)}  # they are not those of layers
    attempts = [_shrink_lists(small_config(config, unknown) | lists) for unknown in (True, False)]
    with isolated():
        return build(type(model), attempts, (torch.float64, torch.float32), try_)


def encoder_inputs(model: Any) -> dict[str, Tensor]:
    """The inputs of a padded batch, of the first form that the model takes.

    Raises:
        CannotBuildError: it takes none of the known forms.
    """
    error: Exception | None = None
    for inputs in _forms_of_inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as failure:  # any class
            error = error or failure
    raise CannotBuildError(f"no form of its inputs is known: {error}")


def _forms_of_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs (B, …) that models of audio and images take, with a mask of padding."""
    names = inspect.signature(model.forward).parameters
    dtype, main = next(model.parameters()).dtype, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    others = {}
    if "decoder_input_ids" in names:
        others["decoder_input_ids"] = torch.randint(6, 20, (len(SHARES), 5), generator=generator)

    def padded(length: int, *width: int) -> tuple[Tensor, Tensor]:
        mask = torch.arange(length) < torch.tensor([[round(share * length)] for share in SHARES])
        x = torch.randn(len(SHARES), length, *width, generator=generator, dtype=dtype)
        return x * mask.view(*mask.shape, *[1] * len(width)), mask.long()

    if main == "input_values":
        values, mask = padded(SAMPLES)
        yield {main: values, "attention_mask": mask, **others}
    for width in _widths(model.config) if main == "input_features" else ():
        values, mask = padded(FRAMES, width)
        yield {main: values, "attention_mask": mask, **others}
        length = 2 * getattr(model.config, "max_source_positions", FRAMES)  # with the width first, as in Whisper
        values, mask = padded(length, width)
        yield {main: values.transpose(1, 2), "attention_mask": mask, **others}
    if main == "pixel_values" and {"pixel_attention_mask", "spatial_shapes"} <= names.keys():
        shapes = torch.tensor(SHAPES)
        mask = torch.arange(int(shapes.prod(1).max())) < shapes.prod(1)[:, None]
        config = getattr(model.config, "vision_config", model.config)
        width = config.num_channels * config.patch_size**2
        values = torch.randn(*mask.shape, width, generator=generator, dtype=dtype) * mask[:, :, None]
        yield {main: values, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def _widths(config: Any) -> list[int]:
    """The numbers in a config and its parts that may be the width of features."""
    configs = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()))]
    words = ("mel", "feat", "input")
    found = {
        value: None
        for each in configs
        for name, value in each.to_dict().items()
        if any(word in name for word in words) and isinstance(value, int) and value > 4
    }
    return list(found)


def build(
    kind: Any, attempts: Iterable[dict[str, Any]], dtypes: Iterable[torch.dtype], try_: Callable[[Any], Any]
) -> Any:
    """The first model of these configs and dtypes that runs.

    Raises:
        CannotBuildError: none does.
    """
    error: BaseException | None = None
    for fields in attempts:
        for dtype in dtypes:
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in kind(kind.config_class(**fields)).parameters())
                if size > 2 * LARGEST:
                    raise CannotBuildError(f"it still has {size / 1e6:.0f} million parameters")
                model = kind(kind.config_class(**fields))
                randomize(model)
                model.to(dtype).eval()
                model.config.use_cache = False
                if is_encoder_decoder(model) and getattr(model.config, "decoder_start_token_id", None) is None:
                    model.config.decoder_start_token_id = padding_of(model)
                try_(model)
                return model
            except (Exception, SystemExit) as failure:  # any class, any config
                error = error or failure
    raise CannotBuildError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def fill_config(config: Any) -> Any:
    """Set sizes that are None in a default config, such as head_dim, in place, if models of the class need them."""
    fields = config.to_dict()
    for name, size in {**SIZES, "num_key_value_heads": HEADS}.items():
        if fields.get(name, 0) is None and name in NEEDED:
            setattr(config, name, size)
    return config


def _attempts(config: Any) -> Iterator[dict[str, Any]]:
    """The fields of the configs to try, one after the other."""
    for fill in (False, True):
        for unknown in (True, False):
            fields = small_config(config, unknown)
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
        CannotBuildError: the output of a token is not finite.
    """
    ids = torch.arange(3 * 23).view(3, 23) % (vocabulary_of(model) - 6) + 6
    mask = torch.arange(23) >= torch.tensor([[11], [0], [22]])
    inputs = {"input_ids": ids.masked_fill(~mask, padding_of(model)), "attention_mask": mask.long()}
    if is_encoder_decoder(model):
        inputs["decoder_input_ids"] = ids
    if not type(model).__name__.endswith("ForMultipleChoice"):  # it takes rows of choices
        model(**inputs)
    for value in base_model(model)(**inputs).values():
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape and not value[mask].isfinite().all():
            raise CannotBuildError(f"its outputs are not finite in {value.dtype}")


def padding_of(model: Any) -> int:
    """The id at padding."""
    given = model.config.get_text_config().pad_token_id
    return PADDING if given is None else int(given)


def vocabulary_of(model: Any) -> int:
    """The number of ids that a small model takes."""
    return min(VOCABULARY, getattr(model.config.get_text_config(), "vocab_size", None) or VOCABULARY)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Random weights at a scale at which every part of the model has an effect, and no dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 1:
            p.copy_(torch.randn(p.shape) / math.prod(p.shape[1:]) ** 0.5)
        elif p.is_floating_point():
            p.clamp_(-2, 2).add_(0.3 * torch.randn(p.shape))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.any():
            buffer.copy_(0.3 * torch.randn(buffer.shape))


def small_config(config: Any, unknown: bool = True) -> dict[str, Any]:
    """The fields of a small config. `unknown`: whether large integers whose name is not known become small too."""
    fields = shrink(config.to_dict(), unknown)
    try:  # models with the padding id 0 in their default configs count positions from 0
        fields["pad_token_id"] = 0 if type(config)().pad_token_id == 0 else PADDING
    except Exception:  # there is no default config
        fields["pad_token_id"] = PADDING
    fields["id2label"], fields["label2id"] = {0: "A", 1: "B"}, {"A": 0, "B": 1}
    return fields


def shrink(given: dict[str, Any], unknown: bool, most: int = LAYERS) -> dict[str, Any]:
    """The fields of a small config. `most`: of how many layers, if all are of one kind."""
    fields = {name: value for name, value in given.items() if name not in LEFT_OUT}
    layers = next((v for k, v in given.items() if LAYER_NUMBERS.fullmatch(k) and isinstance(v, int)), 0)
    chosen = _choose_layers(fields, layers, most)
    by_value = {fields[name]: size for name, size in SIZES.items() if _is_int(fields.get(name)) and fields[name] > 32}
    heads = next((fields[k] for k, v in SIZES.items() if v == HEADS and "head" in k and _is_int(fields.get(k))), None)
    for name, value in fields.items():
        if isinstance(value, dict):
            if _is_by_index(value):
                new = ((place, _of_layer(value, layer)) for place, layer in enumerate(chosen))
                kept = {place: shrink(of_layer, unknown) for place, of_layer in new if of_layer is not None}
                fields[name] = {n: {k: x for k, x in kept[n].items() if k != "pad_token_id"} for n in kept}
            elif "model_type" in value:
                fields[name] = shrink(value, unknown)
            elif "rope_type" in str(value):
                fields[name] = _shrink_rope(value)
            else:
                small = {
                    k: _shrink_integer(str(k), v, 0, heads, by_value, unknown) for k, v in value.items() if _is_int(v)
                }
                fields[name] = {**value, **small}
        elif isinstance(value, list | tuple):
            fields[name] = _shrink_list(name, value, layers, chosen)
        elif isinstance(value, float):
            if _RATE.search(name):
                fields[name] = 0.0
            elif _CONSTANT.search(name):
                fields[name] = 0.02 if "init" in name else 1e-6
            elif name == "rope_theta":
                fields[name] = 10000.0
        elif _is_int(value):
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


def _shrink_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, with small widths in lists of widths, and few patches of an image."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            small[name] = _shrink_lists(value)
        elif isinstance(value, list | tuple) and value and all(_is_int(x) and x > 32 for x in value):
            small[name] = [32] * len(value)
        else:
            small[name] = 16 if name == "num_patches" and _is_int(value) else value
    return small


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
    """The indices of the model's layers of which the small model has copies: two of each kind."""
    kinds: list[tuple[Any, ...]] = []
    lists = [value for name, value in fields.items() if _is_by_layer(name, value, layers)]
    indices = [value for name, value in fields.items() if _is_of_indices(name, value, layers)]
    periods = [v for k, v in fields.items() if _PERIOD.search(k) and _is_int(v) and 1 < v <= 8]
    shared = _shared_layers(fields)
    for layer in range(layers):
        of_lists = [_hashable(value[layer]) for value in lists]
        of_dicts = [_hashable(_of_layer(value, layer)) for value in fields.values() if _is_by_index(value)]
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


def _is_by_layer(name: str, value: Any, layers: int) -> bool:
    is_list = isinstance(value, list | tuple) and not _NOT_BY_LAYER.search(name)
    return is_list and len(value) == layers > 1 and list(value) != list(range(layers))


def _is_by_index(value: Any) -> bool:
    """Whether a field has a dict with layer indices as keys, such as per_layer_config."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(str(key).isdigit() and isinstance(of_layer, dict) for key, of_layer in value.items())
    )


def _of_layer(value: dict[Any, Any], layer: int) -> Any:
    return next((kept for key, kept in value.items() if int(key) == layer), None)


def _is_of_indices(name: str, value: Any, layers: int) -> bool:
    """Whether a field lists layers by their indices."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= layers or not re.search("layer|idx|index", name):
        return False
    return not _is_by_layer(name, value, layers) and all(_is_int(v) and 0 <= v < layers for v in value)


def _shrink_list(name: str, value: Any, layers: int, chosen: list[int]) -> Any:
    if _is_by_layer(name, value, layers) or (len(value) == layers == 1 and name.startswith("layer")):
        kept = [value[layer] for layer in chosen]
        window = re.search("window|span|chunk|local", name)
        return [v if not _is_int(v) or v <= 16 else WINDOW if window else min(v, HIDDEN) for v in kept]
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str | float | None) else repr(value)

"""The fields of a twin's config: small sizes and few layers of each kind. All other fields stay as they are.

`config_fields.json` has the names of the fields, by what they mean.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..families import is_of_transformers

HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 16, 64, 96
VOCABULARY, PADDING = 99, 1
WINDOW = 8
LAYERS = 4  # if all are of one kind

_FIELDS = json.loads((Path(__file__).parent / "config_fields.json").read_text())
SIZES: dict[str, int] = {name: group["size"] for group in _FIELDS["sizes of a twin"] for name in group["fields"]}
NEEDED = set(_FIELDS["sizes that models need"])  # though they are None in the default configs of some
NAMES = set(_FIELDS["names of a checkpoint"])  # the code of few classes reads them
SWITCHES = set(_FIELDS["switches of a call"])  # and what a twin sets itself
# Fields that do not change what `forward` computes for a batch without labels.
_WITHOUT_EFFECT = NAMES | SWITCHES | set(_FIELDS["others without effect on a call"])
_OLD = set(_FIELDS["written by older versions"])  # for all models. They matter where they are in a default config.
KEY_HEADS, LAYER_NUMBERS, _PERIOD, _RATE, _CONSTANT, _NO_WIDTH, _NOT_BY_LAYER = map(
    re.compile, _FIELDS["patterns"].values()
)
WIDTHS = {name for name in SIZES if not _NO_WIDTH.search(name)}


def twin_config(kind: type, config: Any, unknown: bool | None = None) -> dict[str, Any]:
    """The fields of the twin's config, for a class and the config of a model.

    Args:
        kind: the class.
        config: the config of the model.
        unknown: whether large integers whose name is not known become small too. None: if transformers has the config.
    """
    given = config.to_dict()
    own = not is_of_transformers(type(config))
    left_out = NAMES | SWITCHES
    if is_of_transformers(kind):
        left_out = _WITHOUT_EFFECT if own else _WITHOUT_EFFECT | (_OLD - _default_fields(config.__class__))
    fields = shrink(given, not own if unknown is None else unknown, LAYERS, own, left_out)
    if is_of_transformers(kind):  # whose code has no padding id of its own
        fields["pad_token_id"] = 0 if _default_padding(config.__class__) == 0 else PADDING
    labels = 1 if len(given.get("id2label") or "12") == 1 else 2
    fields["id2label"] = {n: f"LABEL_{n}" for n in range(labels)}
    fields["label2id"] = {f"LABEL_{n}": n for n in range(labels)}
    return fields


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
    left_out: Collection[str] = _WITHOUT_EFFECT,
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


def shrink_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, with small widths in lists of widths, and few patches of an image."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            small[name] = shrink_lists(value)
        elif isinstance(value, list | tuple) and value and all(is_int(x) and x > 32 for x in value):
            small[name] = [32] * len(value)
        else:
            small[name] = 16 if name == "num_patches" and is_int(value) else value
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
    """The indices of the model's layers of which the twin has copies: two of each kind."""
    kinds: list[tuple[Any, ...]] = []
    lists = [value for name, value in fields.items() if _is_by_layer(name, value, layers)]
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


def _is_by_layer(name: str, value: Any, layers: int) -> bool:
    is_list = isinstance(value, list | tuple) and not _NOT_BY_LAYER.search(name)
    return is_list and len(value) == layers > 1 and list(value) != list(range(layers))


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
    return not _is_by_layer(name, value, layers) and all(is_int(v) and 0 <= v < layers for v in value)


def _shrink_list(name: str, value: Any, layers: int, chosen: list[int]) -> Any:
    if _is_by_layer(name, value, layers) or (len(value) == layers == 1 and name.startswith("layer")):
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

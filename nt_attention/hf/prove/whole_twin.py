"""A whole twin of a Hugging Face model: the same class with the model's own config, or with smaller widths only.

The code of a user's class may compare with any field of its config, any id, and the index of any layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families import config_of
from .twin import LARGEST, build, changed_numbers
from .twin_config import (
    HEAD_DIM,
    KEY_HEADS,
    LAYER_NUMBERS,
    NAMES,
    PADDING,
    SIZES,
    SWITCHES,
    VOCABULARY,
    WIDTHS,
    is_by_index,
    is_int,
    of_layer,
    shrink,
)
from .user_code import UserCode, leaves_of

_FEW_IDS = 32_768  # if tables for the largest ids have too many parameters
LARGEST_TABLES = 40_000_000  # parameters of the embeddings, and of an output layer


def whole_fields(config: Any, code: UserCode) -> dict[str, Any]:
    """All fields of a config that a model of a class with code of its own may read."""
    left_out = SWITCHES | (NAMES - code.names)
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _narrow(fields: dict[str, Any], small: dict[str, Any], others: bool, names: set[str]) -> dict[str, Any]:
    """The fields of a config with the widths, and the numbers of heads and experts, of a small one.

    Args:
        fields: all fields.
        small: the fields of the small config, which has as many layers.
        others: whether integers whose name is not known become small too, if they are not in `names`.
    """
    narrow: dict[str, Any] = {}
    for name, value in fields.items():
        new = small.get(name, value)
        if isinstance(value, dict) and isinstance(new, dict):
            if is_by_index(value):
                layers: dict[Any, Any] = {key: of_layer(new, int(key)) or {} for key in value}
                narrow[name] = {key: _narrow(value[key], layers[key], others, names) for key in value}
            elif "model_type" in value:
                narrow[name] = _narrow(value, new, others, names)
            else:  # of RoPE, lists with a number for each dimension
                narrow[name] = {**value, **{k: x for k, x in new.items() if isinstance(x, list | dict)}}
        else:
            is_small = name in WIDTHS or KEY_HEADS.fullmatch(name) is not None
            if others and name not in SIZES and not LAYER_NUMBERS.fullmatch(name) and not name.endswith("_id"):
                is_small = is_small or (is_int(value) and name not in names)
            narrow[name] = new if is_small else value
    return narrow


def _halved(fields: dict[str, Any]) -> dict[str, Any]:
    """A small config with half of the widths."""
    halves = {**fields}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            halves[name] = _halved(value)
        elif name in WIDTHS and is_int(value) and not re.search("heads?$|expert|topk|_k$|group", name):
            halves[name] = value // 2 if value >= HEAD_DIM // 2 else value
    return halves


def build_whole_twin(original: PreTrainedModel, code: UserCode, dtype: torch.dtype) -> PreTrainedModel:
    """As `build_twin`, with the model's own config if it is small. If not, with smaller widths, and fewer heads.

    Raises:
        CannotBuild: as for `build_twin`, or the model has too many layers or too large a vocabulary.
    """
    twin = build(original, _whole_attempts(config_of(original), code), (dtype,), LARGEST, LARGEST_TABLES, True)
    parts = dict(twin.named_modules())
    for path, (value, _) in changed_numbers(original).items():
        path, _, name = path.rpartition(".")
        if path in parts and hasattr(parts[path], name):
            setattr(parts[path], name, value)
    return twin


def _fewer_ids(fields: dict[str, Any], numbers: set[int]) -> dict[str, Any]:
    """The fields with vocabularies that have the numbers, but not all other ids."""
    fewer = {**fields}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            fewer[name] = _fewer_ids(value, numbers)
        elif name in ("vocab_size", "vocab_size_per_layer_input") and is_int(value):
            largest = max([number for number in numbers if number < fields.get("vocab_size", value)], default=0)
            fewer[name] = min(value, max(largest + 64, VOCABULARY))
    return fewer


def _whole_attempts(config: Any, code: UserCode) -> Iterator[dict[str, Any]]:
    """The fields of the configs of a whole twin to try: all of the model, or those with smaller widths."""
    fields = whole_fields(config, code)
    if fields.get("pad_token_id") is None:
        fields["pad_token_id"] = PADDING
    yield fields
    numbers = {*code.numbers, *(x for x in leaves_of(fields) if is_int(x))}
    few = _fewer_ids(fields, numbers)
    fewest = _fewer_ids(fields, code.numbers | {number for number in numbers if number <= _FEW_IDS})
    whole = fields if "vocab_size" in code.names else few  # only ids that the code may compare with
    for ids, others, halves in (
        (whole, False, True),
        (whole, False, False),
        (whole, True, False),
        (fewest, False, True),
        (fewest, True, False),
    ):
        small = shrink(config.to_dict(), others, None)
        yield (narrow := _narrow(ids, _halved(small) if halves else small, others, code.names))
        for without in (("head_dim",), ("head_dim", "num_key_value_heads")):
            yield {name: value for name, value in narrow.items() if name not in without}

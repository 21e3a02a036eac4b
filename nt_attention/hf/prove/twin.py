"""A twin of a Hugging Face model: the same class with a small config, to try on the CPU what the class does.

The twin has random weights, few layers of each kind, and small sizes: widths, numbers of heads and experts, windows.
All other fields of the config stay as they are, so two models with the same twin need the same treatment.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import NoneType
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
from .twin_config import HEADS, KEY_HEADS, NEEDED, PADDING, SIZES, VOCABULARY, is_int, shrink_lists, twin_config

LARGEST = 2_000_000  # parameters


_lock = threading.RLock()


@contextmanager
def isolated() -> Iterator[None]:
    """A context for a twin: with gradients, new tensors on the CPU, and no effect on the caller's random state."""
    with _lock:  # because the default dtype, warnings and Python's random state belong to all threads
        yield from _isolate()


def _isolate() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    dtype, verbosity, threads = torch.get_default_dtype(), logging.get_verbosity(), torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext(),  # it slows each operator
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
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


def changed_numbers(model: PreTrainedModel) -> dict[str, tuple[float | None, Any]]:
    """The numbers, or None, of modules that are not what the class makes from the config, and what it makes."""
    new = new_model(model)
    parts = dict(new.named_modules()) if new is not None else {}
    return {
        f"{path}.{name}": (value, vars(parts[path]).get(name))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if path in parts and type(value) in (int, float, NoneType) and vars(parts[path]).get(name) != value
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
    """A small model of the class of a model, with random weights, in evaluation mode.

    It is on the CPU, or on the GPU if its layers need packages that only run there. It is in float64, or in float32 if
    the class can't run in float64.

    Raises:
        CannotBuild: no small config gives a model that has all kinds of modules of the original and runs.
    """
    try:
        return _build_small(original, "cpu")
    except CannotBuild:
        if not may_need_gpu():
            raise
    return _build_small(original, "cuda")


def _build_small(original: PreTrainedModel, device: str) -> PreTrainedModel:
    attempts = _attempts(class_of(original), config_of(original))
    return build(original, attempts, (torch.float64, torch.float32), LARGEST, LARGEST, device=device)


@functools.cache
def has_packages() -> list[bool]:
    """Whether packages are there with which some layers of transformers keep packed sequences apart, on a GPU."""
    return [importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d", "mamba_ssm")]


def may_need_gpu() -> bool:
    """Whether a twin that does not run on the CPU may run on the GPU, because of these packages."""
    return any(has_packages()) and torch.cuda.is_available()


def build_layers_twin(original: PreTrainedModel, try_: Callable[[PreTrainedModel], Any]) -> PreTrainedModel:
    """As `build_twin`, for a model whose input is not tokens. `try_` runs it.

    Raises:
        CannotBuild: as in `build_twin`.
    """
    kind, config = class_of(original), config_of(original)
    lists = {name: x for name, x in config.to_dict().items() if name.startswith(("conv_", "tdnn_"))}
    lists = {name: x for name, x in lists.items() if isinstance(x, list | tuple)}  # they are not those of layers
    attempts = [shrink_lists(twin_config(kind, config, unknown) | lists) for unknown in (None, False)]
    return build(original, attempts, (torch.float64, torch.float32), LARGEST, LARGEST, try_=try_)


def build(
    original: PreTrainedModel,
    attempts: Iterable[dict[str, Any]],
    dtypes: Iterable[torch.dtype],
    largest: int,
    largest_tables: int,
    keep_dropout: bool = False,
    device: str = "cpu",
    try_: Callable[[PreTrainedModel], Any] | None = None,
) -> PreTrainedModel:
    kind, config, parts, marks = class_of(original), config_of(original), parts_of(original), marks_of(original)
    error: BaseException | None = None
    other_heads = False
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
                    raise CannotBuild(f"it still has {size / 1e6:.0f} million parameters")
                model = kind(type(config)(**fields))
                if missing := parts - parts_of(model):
                    raise CannotBuild(f"it has no {', '.join(sorted(missing))}")
                kept = marks_of(model)
                flags = (mark for mark in marks if mark[2] not in ("None", "a number"))
                if lost := next((mark for mark in flags if mark not in kept), None):
                    raise CannotBuild(f"none of its {lost[0]} has {lost[1]} = {lost[2]}")
                _randomize(model, keep_dropout)
                for path, buffer in flags_of(original).items():
                    if (flag := flags_of(model).get(path)) is not None and flag.shape == buffer.shape:
                        flag.copy_(buffer)
                model.to(device, dtype).eval()
                model.config.use_cache = False
                if is_encoder_decoder(model) and getattr(model.config, "decoder_start_token_id", None) is None:
                    model.config.decoder_start_token_id = padding_of(model)
                if not is_of_transformers(kind) and attention_of(config) == "eager":
                    model.set_attn_implementation("eager")
                (try_ or _try)(model)
                if _shares_keys(model.config) != _shares_keys(config):
                    other_heads = True
                    raise CannotBuild("it runs only with another number of key heads")
                return model
            except (Exception, SystemExit) as failure:  # any class, any config
                error = error or failure
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise CannotBuild(f"a batch with padding needs another num_key_value_heads: {reason}" if other_heads else reason)


def _shares_keys(config: Any) -> bool | None:
    """Whether several query heads of a model share a key head, or None if the config does not say."""
    fields = config.get_text_config().to_dict()
    heads = next((x for name, x in fields.items() if name == "num_attention_heads" and is_int(x)), None)
    keys = next((x for name, x in fields.items() if name == "num_key_value_heads" and is_int(x)), heads)
    return None if heads is None else keys < heads


def fill_config(config: Any) -> Any:
    """Set sizes that are None in a default config, such as head_dim, in place, if models of the class need them."""
    fields = config.to_dict()
    for name, size in {**SIZES, "num_key_value_heads": HEADS}.items():
        if fields.get(name, 0) is None and name in NEEDED:
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
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
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

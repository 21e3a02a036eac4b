"""The private names of transformers, and of accelerate, that this package uses because no public one does the same.

No other file has one. If a version of transformers does not have a name, models fall back or are refused with a reason,
or an error says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

ATTENTION = "_attn_implementation_internal"  # the attribute of a config with the name of its attention implementation


def attention_of(config: Any) -> Any:
    """The name of the attention implementation of a config; None if it has none."""
    return getattr(config, ATTENTION, None)


def attention_attributes(config: Any) -> dict[str, Any]:
    """What a config stores about its attention implementation."""
    return {name: value for name, value in vars(config).items() if name.startswith("_attn")}


def can_set_attention(model: Any) -> bool:
    """Whether a model runs its attention through transformers' interface, by its source."""
    return bool(getattr(model, "_can_set_attn_implementation", bool)())


def asks_for_attention(cls: Any) -> bool:
    """Whether a class of transformers, or a part of it in another file, may run an attention implementation by name."""
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except OSError:  # not known
        return True
    return supports_sdpa(cls) or "ALL_ATTENTION_FUNCTIONS" in source or "AutoModel" in source


def check_attention_names(check: Callable[[Any, Any], None]) -> None:
    """Call `check(model, name)` before a model gets an attention implementation, if this version has the method."""
    name = "_check_and_adjust_attn_implementation"
    if (original := getattr(PreTrainedModel, name, None)) is None:
        return

    @functools.wraps(original)
    def adjust(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, attn_implementation)
        return original(self, attn_implementation, *args, **kwargs)

    setattr(PreTrainedModel, name, adjust)


def supports_sdpa(model: Any) -> bool:
    """Whether a model, or a class of models, can run sdpa. If not known, eager attention runs, which all support."""
    return bool(getattr(model, "_supports_sdpa", False))


def flash_implementations(model: Any) -> list[str]:
    """The names for flash attention that a model lists, if it runs no other ones."""
    return list(getattr(model, "_compatible_flash_implementations", None) or ())


def has_other_loss(model: nn.Module) -> bool:
    """Whether the `loss_function` of a model was replaced."""
    return vars(model).get("_loss_function") is not None


def bucket_of_t5(attention: Any) -> Callable[..., Tensor]:
    """The function of an attention module of T5 and its relatives that gives the bucket of each distance."""
    return _attribute(attention, "_relative_position_bucket")


def _attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        import transformers

        raise RuntimeError(
            f"{type(owner).__name__} of transformers {transformers.__version__} has no {name}, which this call needs: "
            "install a version of transformers with which nt_attention is tested."
        )
    return getattr(owner, name)


def scales_losses_by_tp_size(trainer: type) -> bool:
    """Whether a Trainer asks how many ranks pass the same batch, in both methods that scale losses."""
    names = [name for name in vars(trainer) if name == "compute_loss" or name.endswith("num_items_in_batch")]
    codes = [inspect.unwrap(getattr(trainer, name)).__code__ for name in names]
    return len(codes) == 2 and all("get_tp_size" in code.co_names for code in codes)


class TrainerOverrides:
    """Methods of a base class of Trainers that Trainer calls by private names. A subclass defines what they call."""

    state: Any
    get_tp_size: Callable[[], int]

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Called with the inputs of each step, on the device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = _attribute(super(), "_prepare_inputs")(inputs)
        self.check_inputs(inputs)
        return inputs

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        return contextlib.nullcontext, inputs

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        _attribute(super(), "_track_num_input_tokens")(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()


def keep_masks(accelerator: Any) -> None:
    """Let accelerate leave attention masks and windows as they are, though the batch is divided over ranks."""
    _attribute(accelerator, "_prepare_cp")
    accelerator._prepare_cp = lambda *objects: objects


def set_mesh(accelerator: Any, mesh: Any) -> None:
    """Give accelerate a mesh, from which it reads which ranks get the same batch."""
    _attribute(accelerator, "_prepare_device_mesh")
    accelerator._prepare_device_mesh = lambda: mesh

"""What the model that runs was called with, for our mask function.

transformers gives a mask function and an attention function only what each model passes on, which may be neither
`position_ids` nor `cu_seq_lens_q`. So the mask function looks at the arguments of the model that called it.

Dimensions: B rows, L positions in a row.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...layouts.protocol import Layout
from ...torch_private import buffers_of, parameters_of
from .. import families
from ..transformers_private import asks_for_attention, attention_of, can_set_attention, flash_implementations
from . import positions
from .hand_packed import layout_of_lengths, mixed_rows_error
from .packed_mask import PackedMask, is_bypass_mask
from .packed_row import counts_positions, has_known_rows
from .rope import scaled_for, scales_by_length


class RunningCall(NamedTuple):
    """The call of a model that runs.

    Attributes:
        model: the innermost Hugging Face model that runs.
        position_ids: those that a caller passed to it, or to a model around it.
        lengths: `cu_seq_lens_q` and `cu_seq_lens_k`, or empty.
        token_mask: the attention_mask of two dimensions that came with them.
        has_own_mask: whether the caller passed a mask of four dimensions.
        has_seq_idx: whether the caller passed `seq_idx`, for layers that keep a state along the row.
        is_patched: whether a patched model runs it, which has decided how.
    """

    model: PreTrainedModel
    position_ids: Tensor | None = None
    lengths: dict[str, Tensor] = {}  # noqa: RUF012  it is not changed
    token_mask: Tensor | None = None
    has_own_mask: bool = False
    has_seq_idx: bool = False
    is_patched: bool = False

    @property
    def names_sequences(self) -> bool:
        """Whether the caller may have said where sequences begin."""
        return self.position_ids is not None or bool(self.lengths)

    def check(self, over: str) -> None:
        """Check that our attention runs, and that `cu_seq_lens_q` comes with what the model needs. Needs no sync.

        Args:
            over: the underlying implementation.

        Raises:
            ValueError: the model does not run our attention in all of its layers, or needs `position_ids` too.
        """
        if self.is_patched:
            return
        name = type(self.model).__name__
        if self._is_of_transformers() and not families.routes_attention(self.model):
            raise ValueError(
                f"{name} does not run its attn_implementation {attention_of(self.model.config)!r}: load it with "
                "'eager', and call nt_attention.patch(model)."
            )
        model_type = getattr(self.model.config, "model_type", None)
        implementation = attention_of(self.model.config)
        if model_type in NOT_SUPPORTED:
            raise ValueError(f"{name} passes arguments to its attention that {implementation!r} ignores: use 'sdpa'.")
        if model_type in NEED_EAGER and over != "eager":
            raise ValueError(
                f"{name} computes with the mask of eager attention, and is wrong with {implementation!r}: use "
                "nt_attention.hf.register('eager')."
            )
        if self.lengths and self.position_ids is None and self._counts_positions():
            raise ValueError(
                f"{name} got cu_seq_lens_q without position_ids, and would count positions along the whole row: pass "
                "position_ids that begin again with each sequence, or call nt_attention.patch(model)."
            )
        for path, module in self.model.named_modules() if self.names_sequences else ():
            other = attention_of(vars(module).get("config"))
            if "Attention" in type(module).__name__ and isinstance(other, str) and not other.startswith(_OURS):
                raise ValueError(
                    f"{path} of {name} has a config of its own, with the attention {other!r}, which would mix the "
                    "sequences of a row: set_attn_implementation of that part too, or call nt_attention.patch(model)."
                )

    def _is_of_transformers(self) -> bool:
        return families.class_of(self.model).__module__.startswith("transformers.")

    def _takes_positions(self) -> bool:
        return "position_ids" in _parameters(cast(Any, type(self.model)))

    def _counts_positions(self) -> bool:
        """Whether the model may compute other values for other positions, even if their distances are the same."""
        if not self._takes_positions():
            return False
        has_table = embeds_positions(self.model) or has_scaled_rope(self.model)
        return has_table or not self._is_of_transformers() or self.model.config.model_type in COUNT_POSITIONS

    def layout(self, rows: int, length: int, token_mask: Tensor | None) -> Layout | None:
        """The sequences of all B · L positions, or None if each row is one. Syncs once for each tensor.

        Raises:
            ValueError: positions and lengths say different things, or the model can't keep the sequences apart.
        """
        ids = self.position_ids
        if ids is not None and ids.shape not in ((rows, length), (1, length)):
            ids = None
        if self.lengths:
            tokens = torch.empty((rows, length), device=self.lengths["cu_seq_lens_q"].device)
            by_lengths = layout_of_lengths({**self.lengths, "position_ids": ids}, tokens, may_jump=False)
            layout = by_lengths if by_lengths.batch_size > rows else None
        elif ids is None or length < 2 or not positions.can_read_layout(ids, rows, None, token_mask):
            return None
        else:
            layout = positions.read_layout(ids, rows, None, token_mask)
        if layout is not None and (reason := self._why_mixed(layout)) is not None:
            raise mixed_rows_error(self.model, reason)
        return layout

    def _why_mixed(self, layout: Layout) -> str | None:
        """Why the model mixes sequences, whatever its attention does, or None."""
        model = self.model
        model_type = getattr(model.config, "model_type", None)
        mixes = model_type in MIX_ROWS or "conv" in (getattr(model.config, "layer_types", None) or ())
        if mixes and not self.has_seq_idx:
            return "it has layers that do not know where sequences begin: pass a padded batch"
        if model_type in NEED_LENGTHS and not self.lengths:
            return "its layers need cu_seq_lens_q and cu_seq_lens_k"
        if getattr(model.config, "token_dropout", False):
            return "its token_dropout counts masks along the whole row: call nt_attention.patch(model)"
        if not self._takes_positions() and embeds_positions(model):
            return "it takes no position_ids, and counts positions along the whole row: call nt_attention.patch(model)"
        lengths = layout.lengths.tolist() if has_scaled_rope(model) else []
        for rotary in [x for x in model.modules() if lengths and scales_by_length(x)]:
            layer_types = rotary.rope_type.keys() if isinstance(rotary.rope_type, dict) else (None,)
            if any(len({scaled_for(rotary, n, x) for n in lengths}) > 1 for x in layer_types):
                return "its RoPE would be scaled by the longest one for all: call nt_attention.patch(model)"
        return None


_OURS = "nt_attention"
# From the outcomes of tests/hugging_face/rows_matrix.py, by config.model_type:
# Models with layers that mix the sequences of a row, or count along it, whatever attention does.
MIX_ROWS = frozenset({
    "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text",
    "inkling_text", "jamba", "kimi_linear", "lfm3", "llama4_text", "longt5", "minimax", "mobilebert", "nemotron_h",
    "recurrent_gemma", "switch_transformers", "zamba", "zamba2", "zaya",
})  # fmt: skip
# Models whose layers need cu_seq_lens_q. They raise an error if they lack a package to use it.
NEED_LENGTHS = frozenset({
    "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "t5gemma2",
    "t5gemma2_decoder",
})  # fmt: skip
# Models without a table of positions whose values also depend on the position in the row.
COUNT_POSITIONS = frozenset({
    "hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "ministral3", "mistral4", "tipsv2_text_model",
})  # fmt: skip
# Models that compute with the mask of eager attention, in numbers.
NEED_EAGER = frozenset({"bigbird_pegasus", "deepseek_v4", "git", "inkling2_text", "nllb-moe"})
# Models whose attention takes more arguments than ours.
NOT_SUPPORTED = frozenset({"glm_moe_dsa"})


def refuse_unused(model: Any, name: Any) -> None:
    """Refuse our attention for a class of transformers that would not run it, and would mix the sequences of a row.

    transformers refuses names of flash attention only. Parts of a model that take no text, such as convolutions over
    images, are left as they are.

    Raises:
        ValueError: its layers ask for no attention implementation, or it runs only other ones for flash attention.
    """
    if not isinstance(name, str) or not name.startswith(_OURS):
        return
    cls: Any = families.class_of(model)
    is_flash = "flash" in name
    is_run = asks_for_attention(cls) or (can_set_attention(cls) and cls.main_input_name != "input_ids")
    is_run = is_run and not (is_flash and model.config.model_type == "longt5")
    if cls.__module__.startswith("transformers.") and not is_run:  # LongT5 runs it in its decoder only
        raise ValueError(
            f"{cls.__name__} does not run an attention implementation by name, so {name!r} would do nothing, and rows "
            "packed by hand would be mixed: leave attn_implementation out, and call nt_attention.patch(model)."
        )
    listed = flash_implementations(model)
    if is_flash and listed and name not in listed:  # transformers would load one of these in its place
        raise ValueError(
            f"{cls.__name__} runs flash attention only by one of {', '.join(map(repr, listed))}, not by {name!r}: use "
            "attn_implementation=nt_attention.hf.register(), or call nt_attention.patch(model)."
        )


def running_call() -> RunningCall | None:
    """The innermost call of a Hugging Face model in this thread. None if there is none, or if the patch has packed it.

    If it got neither positions nor lengths, they are those of the next call around it that did: some heads do not pass
    them on. It looks at the frames of this thread, and of each model at the outermost one, which has the arguments as
    the caller passed them. The search ends at a patched model whose rows are known.
    """
    frame: FrameType | None = sys._getframe(1)
    innermost: PreTrainedModel | None = None
    model: PreTrainedModel | None = None
    variables: dict[str, Any] = {}
    while frame is not None:
        has_call = frame.f_code is _CALL or frame.f_code.co_name in _FRAMES
        if has_call and isinstance(owner := frame.f_locals.get("self"), PreTrainedModel):
            if owner is not model and model is not None:
                call = _call_of(cast(PreTrainedModel, innermost), model, variables)
                if call is None or call.names_sequences:
                    return call
            innermost = innermost or owner
            if has_known_rows(owner):
                return RunningCall(innermost, is_patched=True)
            model, variables = owner, frame.f_locals
        frame = frame.f_back
    return None if model is None else _call_of(cast(PreTrainedModel, innermost), model, variables)


# The functions whose frame has a model and the arguments of its call: that of torch, and by their names, the decorators
# of transformers and the forward.
_CALL: Any = cast(Any, nn.Module.__call__).__code__
_FRAMES = {"wrapper", "forward"}


def _call_of(innermost: PreTrainedModel, model: PreTrainedModel, variables: dict[str, Any]) -> RunningCall | None:
    """The call of a model, from the variables of its frame. None if the patch, or transformers, has packed it."""
    arguments = {**{name: variables[name] for name in _NAMED & variables.keys()}, **(variables.get("kwargs") or {})}
    if args := variables.get("args"):
        arguments |= dict(zip(_parameters(cast(Any, type(model))), args, strict=False))
    mask, position_ids = (x if isinstance(x := arguments.get(name), Tensor) else None for name in sorted(_NAMED))
    if isinstance(mask, PackedMask) or is_bypass_mask(mask) or "read_index" in arguments:  # continuous batching
        return None
    lengths = {name: x for name in _LENGTHS if isinstance(x := arguments.get(name), Tensor)}
    return RunningCall(
        innermost,
        position_ids,
        lengths if "cu_seq_lens_q" in lengths else {},
        mask if mask is not None and mask.dim() == 2 else None,
        mask is not None and mask.dim() == 4,
        isinstance(arguments.get("seq_idx"), Tensor),
    )


_NAMED, _LENGTHS = {"position_ids", "attention_mask"}, ("cu_seq_lens_q", "cu_seq_lens_k")


@functools.cache
def _parameters(cls: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def embeds_positions(model: nn.Module) -> bool:
    """Whether a model has a table of positions, so that a token's position in the row changes its values."""
    if model not in _has_table:
        _has_table[model] = any(map(_is_table_of_positions, model.named_modules())) or any(
            _POSITIONS.fullmatch(name) and name != "position_ids" and isinstance(x, Tensor)
            for module in model.modules()
            for name, x in [*vars(module).items(), *buffers_of(module).items(), *parameters_of(module).items()]
        )
    return _has_table[model]


def _is_table_of_positions(named: tuple[str, nn.Module]) -> bool:
    path, module = named
    is_named = _POSITIONS.fullmatch(path.rpartition(".")[2]) is not None
    return counts_positions(module) or (is_named and isinstance(module, nn.Embedding))


def has_scaled_rope(model: nn.Module) -> bool:
    """Whether the frequencies of a model depend on the sequence length."""
    if model not in _has_scaled_rope:
        _has_scaled_rope[model] = any(map(scales_by_length, model.modules()))
    return _has_scaled_rope[model]


_has_table: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_has_scaled_rope: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_POSITIONS = re.compile(r"wpe|(.*_)?(pos|position|positions|positional)(_.*)?")

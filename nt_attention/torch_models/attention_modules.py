"""Replaces an `nn.MultiheadAttention` by a `VarlenMultiheadAttention` with the same parameters, and puts it back."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from .._warnings import warn
from ..compiler import is_compiling
from ..modules.inputs import Inputs, Masks
from ..modules.multihead import NEEDS_WEIGHTS, STOCK_OPTIONS, VarlenMultiheadAttention
from ..patching.forwards import CALL_REMOVE_FIRST
from ..patching.handle import PatchHandle
from ..torch_private import SAME_DIMS, buffers_of, children_of, parameters_of

_PARAMETERS = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v"}


def attention_not_supported(attention: nn.Module) -> str | None:
    """Why an attention module can't be replaced by one with the same parameters, or None."""
    kind = type(attention).__name__
    if type(attention) is not nn.MultiheadAttention:
        return f"{kind} is not nn.MultiheadAttention."
    if "forward" in attention.__dict__:
        return f"{kind} overrides forward."
    if buffers_of(attention) or children_of(attention).keys() != {"out_proj"}:
        more = [*buffers_of(attention), *(children_of(attention).keys() - {"out_proj"})]
        return f"{kind} has {', '.join(more)}, which would be lost."
    if changed := parameters_of(attention).keys() - _PARAMETERS:
        return f"{kind} is parametrized or pruned: it has the parameters {', '.join(sorted(changed))}."
    return None


def as_varlen(attention: nn.Module, kind: type[VarlenMultiheadAttention] = VarlenMultiheadAttention) -> Any:
    """A `VarlenMultiheadAttention` with the attributes that an attention module has now. It takes 7 µs.

    Both have the same tables of parameters, modules and hooks. A `VarlenMultiheadAttention` is returned itself.
    """
    if isinstance(attention, VarlenMultiheadAttention):
        return attention
    varlen = kind.__new__(kind)
    varlen.__dict__.update(attention.__dict__, **STOCK_OPTIONS, num_kv_heads=attention.num_heads)
    return varlen


class PatchedMultiheadAttention(VarlenMultiheadAttention):
    """What `patch` puts in the place of an `nn.MultiheadAttention`.

    A padded batch that is not packed runs as `nn.MultiheadAttention` would run it. A `key_padding_mask` of 0 and −inf
    is packed too: PyTorch's layers convert boolean masks to such numbers.

    Attributes:
        returns_weights: what `need_weights=None` means for padded batches.
        padded_because: why it does not pack padded batches by itself, or None.
        report: called for each padded batch with a key_padding_mask: with the reason why it is not packed, or None.
    """

    returns_weights: bool
    padded_because: str | None
    report: Report | None
    _packs_float_masks = True

    def forward(  # type: ignore[override]
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        layout: Any = None,
        key_layout: Any = None,
        mask_mod: Any = None,
        score_mod: Any = None,
    ) -> tuple[Any, Tensor | None]:
        """As in `VarlenMultiheadAttention`."""
        if need_weights is None and not self.returns_weights:
            need_weights = False
        masks = Masks(is_causal, key_padding_mask, attn_mask, mask_mod, score_mod)
        inputs, reason = self.read(query, key, value, layout, key_layout, masks, need_weights)
        if key_padding_mask is not None and self.report is not None:
            self.report(reason)
        has_mask = attn_mask is not None or not is_causal  # nn.MultiheadAttention needs the mask beside is_causal
        if inputs.layouts is not None or not (has_mask and self._can_run_as_stock):
            return self.compute(inputs, reason, average_attn_weights)
        # On an nn.MultiheadAttention with the attributes of this module, in which SAME_DIMS has another meaning.
        stock = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        stock.__dict__.update(self.__dict__, **{SAME_DIMS: self.in_proj_weight is not None})
        options = key_padding_mask, need_weights is not False, attn_mask, average_attn_weights, is_causal
        return nn.MultiheadAttention.forward(stock, query, key, value, *options)

    _own_forward = forward

    @property
    def _can_run_as_stock(self) -> bool:
        return self.is_in_its_weights and "parametrizations" not in children_of(self)

    def _why_padded(self, inputs: Inputs) -> str | None:
        return (None if inputs.layouts is not None else self.padded_because) or super()._why_padded(inputs)


# Attention module → the handle of the patch that put it into a model.
_swapped_by: WeakKeyDictionary[nn.Module, ref[PatchHandle]] = WeakKeyDictionary()


def swap_attention(
    parent: nn.Module, name: str, handle: PatchHandle, *, padded_because: str | None = None, counts: bool = False
) -> str | None:
    """Replace the child `name` of `parent` by a `VarlenMultiheadAttention` with the same parameters and hooks.

    Args:
        parent: the module that has it.
        name: its name in `parent`.
        handle: the handle of the patch.
        padded_because: why it does not pack padded batches by itself, or None.
        counts: whether the handle counts the padded batches that it gets.

    Returns:
        The reason if this is not possible, else None.

    Raises:
        ValueError: another patch has already replaced it.
    """
    stock = cast(nn.MultiheadAttention, getattr(parent, name))
    if isinstance(stock, VarlenMultiheadAttention):
        reference = _swapped_by.get(stock)
        other = None if reference is None else reference()
        if other is not None and other is not handle and other.active:
            raise ValueError(f"{type(parent).__name__} is already patched: {CALL_REMOVE_FIRST}")
        return "it is already a VarlenMultiheadAttention."
    ragged, before = handle.replacements.get(stock, (None, {}))
    if ragged is None:
        if (reason := attention_not_supported(stock)) is not None:
            return reason
        ragged, before = as_varlen(stock, PatchedMultiheadAttention), _names(stock)
        handle.replacements[stock] = ragged, before
    settings = {"padded_because": padded_because, "report": Report(handle) if counts else None}
    ragged.__dict__.update(settings, returns_weights=handle.need_weights)
    _swapped_by[ragged] = ref(handle)
    parent.register_module(name, ragged)
    handle.on_remove(parent, _restore_attention, name, ragged, stock, before)
    return None


_ADVICE = (
    "If nobody reads the weights, pass need_weights=False: in the call, or to nt_attention.patch if calls leave it at "
    "its default."
)


class Report:
    """Counts the padded batches that a replaced attention module gets. A copy of the module has the same `Report`."""

    def __init__(self, handle: PatchHandle) -> None:
        self.handle = handle

    def __call__(self, reason: str | None) -> None:
        if not self.handle.active or is_compiling():
            return
        if reason is None:
            self.handle.count(None)
        else:
            advice = _ADVICE if reason == NEEDS_WEIGHTS else ""
            self.handle.fall_back(reason, "this call of an nn.MultiheadAttention", advice)

    def __deepcopy__(self, memo: dict[int, object]) -> Report:
        return self


# Both modules share the tables of parameters, modules and hooks: FSDP goes on writing to that of the module that it was
# applied to, and the handle of a hook removes it from both. What else may change:
_SETTINGS = ("dropout", "batch_first", *(x for x in vars(nn.Module()) if "_hook" in x and not x.endswith("hooks")))


def _names(module: nn.Module) -> dict[str, bool]:
    """The names in a module's table of parameters, and whether each has one."""
    return {name: x is not None for name, x in parameters_of(module).items()}


def _restore_attention(
    parent: nn.Module, name: str, ragged: VarlenMultiheadAttention, stock: nn.MultiheadAttention, names: dict[str, bool]
) -> None:
    """Put `stock` back, with the current parameters, if they have the `names` that they had before the patch."""
    if children_of(parent).get(name) is not ragged:
        return
    is_plain = type(ragged) is PatchedMultiheadAttention and children_of(ragged).keys() == {"out_proj"}
    has_same_names = all(names.get(name, False) == is_used for name, is_used in _names(ragged).items())
    if not is_plain or buffers_of(ragged) or not has_same_names:
        warn(
            f"{name} of {type(parent).__name__} was parametrized or extended while it was patched, so it remains a "
            "VarlenMultiheadAttention."
        )
        return
    stock.__dict__.update({name: ragged.__dict__[name] for name in _SETTINGS if name in ragged.__dict__})
    parent.register_module(name, stock.train(ragged.training))

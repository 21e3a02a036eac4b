"""The attention function that transformers calls for the `attn_implementation` of `register`.

It runs packed rows with `varlen_attention`; they have `cu_seq_lens_q`, or `position_ids` that restart. It also runs
rows without padding that need an option which the underlying implementation (sdpa or eager) does not support. All other
calls run on the underlying implementation. Padded batches are packed at the entry of a model (`nt_attention.patch`),
not in every layer.

Dimensions: B rows, T query and S key tokens of a row, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._warnings import warn
from ...compiler import is_traced
from ...functional import varlen_attention
from ...kernels.masks import Window, distances
from ...layouts.cache import owner_of
from ...layouts.protocol import Layout, Sharded
from ...layouts.sequence import SequenceLayout
from ...layouts.traced import TracedLayout
from ...patching.forwards import is_context_parallel
from ..transformers_private import supports_sdpa
from . import masks, positions
from .by_name import counts_positions
from .dropout import rate_of
from .packed_mask import CannotMaskError, PackedMask, is_bypass_mask
from .packed_row import SmallCall, current_row, small_call_of, why_no_row

Layouts = tuple[Layout, Layout]  # of the queries and of the keys, over all B rows concatenated

# transformers treats names with "flash", "sdpa", "/" or "|" in a special way.
NAME_OVER = {"sdpa": "nt_attention", "eager": "nt_attention_eager"}
NAMES = frozenset(NAME_OVER.values())


def register(over: str = "sdpa") -> str:
    """Register an attention implementation with transformers that supports packed rows.

    It works in all models that use transformers' attention interface. A query in a packed row only sees keys of its own
    sequence. Sequences are given by `cu_seq_lens_q` and `cu_seq_lens_k`, or by `position_ids` that restart in a row. A
    forward syncs with the device at most once for each of these tensors, not once for each layer. Padding is not
    removed; `nt_attention.patch` does that.

    Args:
        over: the implementation that runs calls without packed rows, "sdpa" or "eager".

    Returns:
        The name of the implementation, for `attn_implementation=` or `model.set_attn_implementation`.

    Raises:
        ValueError: `over` has another value.

    Example:
        >>> import nt_attention as nta
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
        >>> model = BertModel(config)
        >>> model.set_attn_implementation(nta.hf.register())
        >>> model.config._attn_implementation
        'nt_attention'
    """
    if over not in NAME_OVER:
        raise ValueError(f"over must be one of {', '.join(map(repr, NAME_OVER))}, got {over!r}.")
    name = NAME_OVER[over]
    AttentionInterface.register(name, functools.partial(attention, over=over))
    AttentionMaskInterface.register(name, functools.partial(masks.mask, over=over))
    return name


def is_stock(implementation: str | None) -> bool:
    """Whether this name is one of transformers' own attention implementations, or ours, and runs their code."""
    if implementation in (None, "eager", *NAME_OVER.values()):
        return True
    function = ALL_ATTENTION_FUNCTIONS.get(cast(str, implementation))
    return function is None or function.__module__.startswith(("transformers.", "nt_attention."))


_NOT_READ = (
    "a CUDA graph is captured, in which position_ids can't be read for the first time, so a dense mask of all pairs of "
    "positions keeps packed rows apart: run the call once with the same position_ids before the capture."
)


class OtherLengthError(ValueError):
    """A patched model has cut its packed row, or added tokens to it."""


class _AttentionCall(NamedTuple):
    """A call of `attention`. `options` are for the underlying implementation too."""

    over: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: Any
    sliding_window: int | None
    options: dict[str, Any]

    def with_defaults(self, is_causal: bool | None) -> _AttentionCall:
        """This call with `is_causal`, or the default of the module, and the window that goes with it."""
        module, window = self.module, self.sliding_window
        if is_causal is self.is_causal and is_causal is not None and not window:
            return self
        if is_causal is None:
            if hasattr(module, "is_causal"):  # no default in getattr: torch 2.11 can't compile what computes it
                is_causal = bool(module.is_causal)
            else:
                is_causal = self.over == "sdpa" and _has_sdpa(cast(Any, type(module)))
        if window and not is_causal and getattr(getattr(module, "config", None), "is_causal", True) is False:
            window += 1  # in a decoder that is called as not causal, transformers' masks include distance w
        return self._replace(is_causal=is_causal, sliding_window=window)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    over: str,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function, with the arguments that transformers passes.

    A query only sees keys of its own sequence, and only those that `attention_mask` allows. Syncs with the device at
    most once for each tensor of offsets or positions.

    Args:
        module: the attention module of the model.
        query, key, value: (B, H, T, D), (B, G, S, D) and (B, G, S, Dv).
        attention_mask: as for `scaled_dot_product_attention`, or None.
        over: "sdpa" or "eager", the underlying implementation.
        cu_seq_lens_q, cu_seq_lens_k: int32 offsets of the sequences, in all B rows concatenated.
        position_ids: (B, T) or (1, T). A position that is not the previous position plus 1 begins a sequence.
        is_causal: None uses `module.is_causal` or, if there is none, True over sdpa if the model supports sdpa.
        sliding_window: w: a query sees keys at a distance below w before it, and after it if attention is not causal.
        softcap: if not None, scores become softcap · tanh(scores / softcap).
        s_aux: (H,), the sinks of `varlen_attention`.
        position_bias: (1 or B, H, T, S), numbers to add to the scores.
        cache: a paged cache, which is not supported.
        options: `scaling` and `dropout`, which are `scale` and `dropout_p` of `scaled_dot_product_attention`, and
            others for the underlying implementation.

    Returns:
        The output (B, T, H, Dv), and the weights that the underlying implementation returns, or None.

    Raises:
        ValueError: the offsets do not cover all queries or keys, `cache` is given, or `indices` leave out keys.
    """
    if cache is not None:
        raise ValueError(
            "continuous batching (generate_batch) uses a paged cache, which nt_attention does not support: call "
            "generate, or call set_attn_implementation('sdpa'), after remove() if the model is patched."
        )
    if (chosen := options.get("indices")) is not None and chosen.shape[-1] < key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} passes the keys that each query sees as indices, which nt_attention does "
            f"not support: call set_attn_implementation({over!r}), after remove() if the model is patched."
        )
    for name, x in (("softcap", softcap), ("s_aux", s_aux), ("position_bias", position_bias)):
        if x is not None:
            options[name] = x
    call = _AttentionCall(over, module, query, key, value, is_causal, sliding_window, options)
    if cu_seq_lens_q is None and (small := small_call_of(module)) and _may_run_small(call, attention_mask):
        return _run_small(small, call, attention_mask), None
    layouts, mask = None, attention_mask
    if isinstance(mask, PackedMask):  # such a mask has no causality of its own
        row = current_row()
        if position_bias is not None and row is not None and row.of_layer:  # which would take T · T numbers
            raise CannotMaskError("adds a bias to each pair of tokens")
        call = call.with_defaults(mask.is_causal)
        layouts, mask = (mask.query_layout, mask.key_layout), None
    elif cu_seq_lens_q is not None and (cu_seq_lens_q.dim() == 0 or is_bypass_mask(mask)):  # the model is patched
        # accelerate's hook for context parallelism removes the mask, and passes is_causal=True for any model
        call = call.with_defaults(None if mask is None else is_causal)
        layouts, mask = _layouts_of_patch(call, mask, cu_seq_lens_q), None
    elif cu_seq_lens_q is None and (query.shape[2] == 1 or is_context_parallel()):
        if over == "sdpa" and softcap is None and s_aux is None:  # a hot path in generation
            return ALL_ATTENTION_FUNCTIONS[over](module, query, key, value, mask, is_causal=is_causal, **options)
        call = call.with_defaults(is_causal)
    else:
        call = call.with_defaults(is_causal)
        layouts, mask = _layouts_of_call(call, mask, cu_seq_lens_q, cu_seq_lens_k, position_ids)
    if layouts is not None and (mask is not None or position_bias is not None):
        if isinstance(layouts[0], Sharded):
            raise ValueError("a model with a mask or a position bias of its own can't run with mesh=: leave it out.")
        mask = _both(_causal_mask(call) if mask is None else mask, _same_layout(query, key, *layouts))
        layouts = None
    return _run_padded(call, mask) if layouts is None else (_run_packed(call, *layouts), None)


def _layouts_of_patch(call: _AttentionCall, mask: Tensor | None, offsets: Tensor) -> Layouts:
    """The layouts of a row that the patch has packed: the mask has it, or else the offsets do, as in a graph."""
    is_sharded = offsets.dim() == 0  # `ShardedLayout.handle`
    if is_traced(call.query):
        traced: Any = Sharded.in_graph(offsets) if is_sharded else TracedLayout(offsets)
        return traced, traced
    layout: Any = None if mask is None else owner_of(mask)
    if layout is None:  # the mask was copied
        layout = owner_of(offsets) if is_sharded else SequenceLayout.from_offsets(offsets)
    for what, tokens in (("the query", call.query), ("the key", call.key)):
        if layout.total != tokens.shape[0] * tokens.shape[2]:
            message = why_no_row(f"{what} of its attention", tokens.shape[0], tokens.shape[2], layout.total)
            raise OtherLengthError(message)
    return layout, layout


def _layouts_of_call(
    call: _AttentionCall,
    mask: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    ids: Tensor | None,
) -> tuple[Layouts | None, Tensor | None]:
    """The layouts to run a call of a registered model packed, or None; and the mask to run it padded."""
    query, key, options = call.query, call.key, call.options
    traced, layouts, forward_token = is_traced(query), None, None
    if positions.is_forward_token(mask):
        forward_token, mask = mask, None
    if cu_seq_lens_q is not None:
        layouts = _layouts_of_offsets(call, cu_seq_lens_q, cu_seq_lens_k, traced, forward_token)
        if not traced and counts_positions(getattr(call.module, "config", None)):
            _check_positions(call, ids, layouts[0])
    elif ids is not None and positions.may_show_sequences(ids, call.module, query, key):
        layouts, mask = _layouts_of_positions(call, mask, ids, forward_token)
    if layouts is None and mask is None and query.shape[2] == key.shape[2]:
        windowed = call.sliding_window is not None and call.sliding_window < query.shape[2]
        if call.over == "eager":
            mask = _causal_mask(call)
        elif windowed or "softcap" in options or "s_aux" in options:
            layout = positions.one_sequence_per_row(query.shape[0], query.shape[2], query.device)
            layouts = layout, layout
    return layouts, mask


def _check_positions(call: _AttentionCall, ids: Tensor | None, layout: Layout) -> None:
    """Check that the positions of a model that counts them begin again with each sequence of the offsets."""
    rows, layer = call.query.shape[0], getattr(call.module, "layer_idx", None)
    if layout.batch_size == rows or (ids is not None and not positions.can_read_layout(ids, rows, layer, None)):
        return
    read = None if ids is None or ids.dim() != 2 else positions.read_layout(ids, rows, layer, None)
    if read is None or not read.same_lengths(layout):
        raise ValueError(
            f"{type(call.module).__name__} got cu_seq_lens_q without position_ids that begin again with each sequence, "
            "and its model counts positions along the row: pass such position_ids, or call nt_attention.patch(model)."
        )


def _layouts_of_positions(
    call: _AttentionCall, mask: Tensor | None, ids: Tensor, forward_token: Tensor | None
) -> tuple[Layouts | None, Tensor | None]:
    """`_layouts_of_call` for `position_ids` that may restart in a row."""
    rows, traced = call.query.shape[0], is_traced(call.query)
    if traced and mask is None:
        layout = SequenceLayout.in_graph(ids, forward_token, rows=rows)
        return (layout, layout), None
    source = masks.source_of(mask)
    if source is None or not source.may_be_packed:  # a mask of the caller has its own packing
        return None, mask
    if not traced:
        layer = getattr(call.module, "layer_idx", None)
        if positions.can_read_layout(ids, rows, layer, source.token_mask):
            read = positions.read_layout(ids, rows, layer, source.token_mask)
            return None if read is None else (read, read), mask
        warn(_NOT_READ)
    together = positions.same_sequence(ids, rows, source.token_mask)
    return None, _both(_causal_mask(call) if mask is None else mask, together)


def _run_packed(call: _AttentionCall, layout: Layout, key_layout: Layout) -> Tensor:
    """Concatenate the rows and run `varlen_attention`. Views of (B, T, H, D) are not copied."""
    _, module, query, key, value, is_causal, sliding_window, options = call
    dropout = options.get("dropout", 0.0)
    if dropout and isinstance(layout, Sharded):
        raise ValueError(
            "attention dropout is not supported with mesh=: before the model is made, set attention_dropout, or "
            "attention_probs_dropout_prob in BERT, to 0 in its config."
        )
    rows = query.shape[0]
    # Views instead of einops, because this is a hot path.
    query, key = query.transpose(1, 2).flatten(0, 1), key.transpose(1, 2).flatten(0, 1)
    value = value.transpose(1, 2).flatten(0, 1)
    groups = vars(module).get("num_key_value_groups")  # getattr takes µs if a module does not have it
    if groups is not None and query.shape[1] != key.shape[1] * groups:
        raise ValueError(
            f"{type(module).__name__} has {groups} query heads for each key head, but its call has "
            f"{query.shape[1]} query heads and {key.shape[1]} key heads: with tensor parallelism, divide queries, keys "
            "and values over the same ranks."
        )
    window = sliding_window - 1 if sliding_window else -1
    out = varlen_attention(
        query,
        key,
        value,
        layout,
        key_layout,
        is_causal=is_causal,
        window_size=(window, 0 if is_causal and window >= 0 else window),
        scale=options.get("scaling"),
        softcap=options.get("softcap", 0.0),
        sinks=options.get("s_aux"),
        dropout_p=rate_of(dropout) if dropout else 0.0,
    )
    return out.unsqueeze(0) if rows == 1 else out.unflatten(0, (rows, -1))


def _may_run_small(call: _AttentionCall, mask: Tensor | None) -> bool:
    """Whether `_run_small` can run a call of a small batch: one that sdpa runs with this mask as it is."""
    has_mask = mask is not None and not isinstance(mask, PackedMask)
    options = call.options
    is_plain = "softcap" not in options and "s_aux" not in options and "position_bias" not in options
    return call.over == "sdpa" and is_plain and (has_mask or (mask is None and not call.sliding_window))


def _run_small(small: SmallCall, call: _AttentionCall, mask: Tensor | None) -> Tensor:
    """What transformers' sdpa computes, in less host time.

    A checkpoint runs the layer again outside of this call, by transformers' sdpa. Both save the same tensors.
    """
    _, module, query, key, value, is_causal, _, options = call
    groups = query.shape[1] // key.shape[1]
    if mask is None and (groups > 1 or query.shape[2] == 1):
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, is_causal=is_causal, **options)
        return cast(Tensor, out)
    if mask is None:
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    else:
        is_causal, mask = False, small.additive(mask, query.dtype)
    if groups > 1:
        key, value = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    return (
        F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)
        .transpose(1, 2)
        .contiguous()
    )


def _run_padded(call: _AttentionCall, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run the underlying implementation; with softcap or sinks, which sdpa does not support, the model's eager one."""
    over, module, query, key, value, is_causal, sliding_window, options = call
    options = {"sliding_window": sliding_window, **options}
    if over == "sdpa" and "softcap" not in options and "s_aux" not in options:
        return ALL_ATTENTION_FUNCTIONS[over](module, query, key, value, mask, is_causal=is_causal, **options)
    if mask is None and is_causal and 1 < query.shape[2] < key.shape[2]:  # the prefill of a static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        mask = _causal_mask(call._replace(key=key))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return _eager_of(cast(Any, type(module)))(module, query, key, value, mask, **options)


@functools.lru_cache(64)
def _eager_of(cls: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention function of the file that defines a class or, if there is none, its base class."""
    for base in cls.__mro__:
        eager = getattr(sys.modules[base.__module__], "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(f"no module that defines {cls.__name__} or a base class has eager_attention_forward.")


@functools.lru_cache(64)
def _has_sdpa(cls: Any) -> bool:
    """Whether the models in the file of an attention class support sdpa, whose default for is_causal is True."""
    classes = [x for x in list(vars(sys.modules[cls.__module__]).values()) if isinstance(x, type)]
    models: list[Any] = [x for x in classes if issubclass(x, PreTrainedModel) and x.__module__ == cls.__module__]
    return not models or any(supports_sdpa(x) for x in models)


def _layouts_of_offsets(
    call: _AttentionCall,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | None,
    traced: bool,
    forward_token: Tensor | None,
) -> Layouts:
    """The layouts of the offsets that a caller has passed. For `forward_token`, see `sequence.new_forward_token`."""

    def layout_of(offsets: Tensor) -> Layout:
        return SequenceLayout.in_graph(offsets, forward_token) if traced else SequenceLayout.from_offsets(offsets)

    layout = layout_of(cu_seq_lens_q)
    same = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
    key_layout = layout if same else layout_of(cast(Tensor, cu_seq_lens_k))
    for which, what, lengths, tokens in (("q", "queries", layout, call.query), ("k", "keys", key_layout, call.key)):
        expected = tokens.shape[0] * tokens.shape[2]
        if not traced and lengths.total != expected:  # in a graph, the operator checks this
            raise ValueError(
                f"cu_seq_lens_{which} ends at {lengths.total}, but there are {expected} {what}: pass the offsets of "
                f"all {what}{'; in cross-attention, these are those of the encoder' if which == 'k' else ''}."
            )
    return layout, layout if layout.same_lengths(key_layout) else key_layout  # collators make two equal tensors


def _causal_mask(call: _AttentionCall) -> Tensor:
    """(1, 1, T, S) bool, the mask for an `attention_mask` of None: causality and the window."""
    queries, keys, device = call.query.shape[2], call.key.shape[2], call.key.device
    window = Window.of(((call.sliding_window or 0) - 1,) * 2, call.is_causal)
    visible = window.visible(distances(queries, keys, 0, device))
    return (torch.ones(queries, keys, dtype=torch.bool, device=device) if visible is None else visible)[None, None]


def _same_layout(query: Tensor, key: Tensor, layout: Layout, key_layout: Layout) -> Tensor:
    """(B, 1, T, S) bool, True if query and key are in one sequence."""
    rows = query.shape[0]
    ids, _ = layout.locate_rows(rows * query.shape[2])
    key_ids, _ = key_layout.locate_rows(rows * key.shape[2])
    return rearrange(ids, "(b t) -> b 1 t 1", b=rows) == rearrange(key_ids, "(b s) -> b 1 1 s", b=rows)


def _both(mask: Tensor, other: Tensor) -> Tensor:
    """Combine a bool or additive mask with the bool mask `other`."""
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, torch.finfo(mask.dtype).min)

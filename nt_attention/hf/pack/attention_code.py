"""Adapters for attention modules whose code `deferred_scores` can't run: each computes the same on a packed row.

An adapter is called as the module is, after the module and the mask of the row: `adapter(module, mask, *args)`. It
returns what the module returns, with None for the attention weights.

Dimensions: T tokens of a packed row, H heads, D head dim, E embedding width.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...compiler import outside_of_graphs
from ...kernels.alibi import alibi_slopes
from ...kernels.relative import RelativeBias
from ...layouts.cache import creating_cached_tensors
from ...layouts.protocol import Layout
from ...layouts.sequence import SequenceLayout
from ...patching.forwards import Handle, WeakReference, override_forward
from ..route.packed_mask import PackedMask, packed_mask_in
from ..route.packed_row import current_row
from ..transformers_private import bucket_of_t5
from .deferred_scores import run_attention_module


class Adapter(NamedTuple):
    """An adapter of a class, and the tensor that it caches, if it does: `cached(module, device)`."""

    run: Callable[..., Any]
    cached: Callable[[Any, torch.device], Tensor] | None = None


def override_attention(module: Any, is_routed: bool, handle: Handle) -> None:
    """Make an attention module run packed rows: by its adapter if there is one, else with deferred scores.

    If attention is routed through transformers' interface, a module without an adapter needs no change.
    """
    adapter = _adapter_of(module)
    if adapter is None and is_routed:
        return
    forward = run_attention_module if adapter is None else functools.partial(_run_adapter, adapter.run)
    override_forward(module, forward, handle)


def has_adapter(model: nn.Module) -> bool:
    """Whether some module of a model has an adapter."""
    return any(_adapter_of(module) is not None for module in model.modules())


def _adapter_of(module: nn.Module) -> Adapter | None:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return _ADAPTERS.get(name.removeprefix("transformers.models."))


def make_cached_tensors(model: nn.Module, device: torch.device) -> None:
    """Make the tensors that the adapters of a model cache, so that no graph breaks to make them."""
    devices = _made_on.setdefault(model, set())
    if device not in devices:
        for module in model.modules():
            adapter = _adapter_of(module)
            if adapter and adapter.cached and getattr(module, "relative_attention", True):  # DeBERTa may have none
                adapter.cached(module, device)
        devices.add(device)


_made_on: weakref.WeakKeyDictionary[nn.Module, set[torch.device]] = weakref.WeakKeyDictionary()


def override_methods(model: nn.Module, handle: Handle) -> None:
    """Override methods that compute something for each pair of tokens, which adapters do not need."""
    for module in model.modules():
        for name, replacement in _METHODS.items():
            method = getattr(type(module), name, None)
            if method is not None and name not in vars(module):
                setattr(module, name, functools.partial(_run_method, replacement, method, WeakReference(module)))
                handle.on_remove(module, delattr, name)


def _run_method(
    replacement: Callable[[Any], Any], method: Callable[..., Any], reference: WeakReference, *args: Any, **kwargs: Any
) -> Any:
    module = reference()
    is_packed = current_row() is not None or packed_mask_in(args, kwargs) is not None
    return replacement(module) if is_packed else method(module, *args, **kwargs)


def is_override(value: Any) -> bool:
    """Whether an attribute is a method that `override_methods` has set."""
    return isinstance(value, functools.partial) and value.func is _run_method


# Method → what it returns in a packed row.
_METHODS: dict[str, Callable[[Any], Any]] = {
    "build_alibi_tensor": lambda model: None,  # BLOOM
    "compute_position_bias": lambda encoder: _bias_of(encoder, encoder.config.relative_attention_num_buckets),  # MPNet
    "get_rel_pos": lambda encoder: None,  # DeBERTa
}


def _run_adapter(
    adapter: Callable[..., Any], module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    mask = packed_mask_in(args, kwargs)
    return original(*args, **kwargs) if mask is None else adapter(module, mask, *args, **kwargs)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(1, T, H·D) to (1, H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged(out: Tensor) -> Tensor:
    """(H, T, D) to (1, T, H·D)."""
    return out.transpose(0, 1).flatten(1).unsqueeze(0)


def _bias_of(module: Any, buckets: int) -> Tensor:
    """(H, N), the learned bias of each bucket. The embedding is called, because PEFT may have wrapped it."""
    weight = module.relative_attention_bias.weight
    bias: Tensor = module.relative_attention_bias(torch.arange(buckets, device=weight.device))
    return bias.T


def _rate(dropout: nn.Module) -> float:
    """The rate of a dropout module now; 0 if another module took its place."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _openai_gpt(module: Any, mask: PackedMask, /, x: Tensor, *_: Any, **__: Any) -> list[Any]:
    query, key, value = (_heads(part, module.n_head) for part in module.c_attn(x).split(module.split_size, dim=2))
    scale = value.shape[-1] ** -0.5 if module.scale else 1.0
    dropout = _rate(module.attn_dropout)
    out = mask.attend(query, key, value, is_causal=True, scale=scale, dropout_p=dropout)
    return [module.resid_dropout(module.c_proj(_merged(out)))]


def _gpt_neo(module: Any, mask: PackedMask, /, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Scores are not scaled. Local layers see `window_size` keys."""
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (_heads(project(x), module.num_heads) for project in projections)
    before = module.config.window_size - 1 if module.attention_type == "local" else -1
    dropout = _rate(module.attn_dropout)
    out = mask.attend(query, key, value, window_size=(before, 0), scale=1.0, dropout_p=dropout)
    return module.resid_dropout(module.out_proj(_merged(out))), None


def _bloom(module: Any, mask: PackedMask, /, x: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    parts = module.query_key_value(x).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (part.transpose(1, 2) for part in parts.unbind(-2))
    out = mask.attend(
        query,
        key,
        value,
        is_causal=True,
        scale=module.inv_norm_factor,
        alibi_slopes=alibi_slopes(_all_heads(module, module.num_heads), x.device),
        dropout_p=_rate(module.attention_dropout),
    )
    merged = _merged(out)
    if module.pretraining_tp > 1 and module.slow_but_exact:  # this branch of BLOOM has no bias
        out = F.linear(merged, module.dense.weight)
    else:
        out = module.dense(merged)
    out = F.dropout(out, module.hidden_dropout, module.training)
    return residual + out, None


def _all_heads(module: Any, heads: int) -> int:
    """The number of heads of a module with ALiBi.

    Raises:
        ValueError: the module was changed to have only some of the heads. Their slopes are not known.
    """
    if heads * module.head_dim != module.hidden_size:
        raise ValueError(
            f"{type(module).__name__} has {heads} of {module.hidden_size // module.head_dim} heads, so the ALiBi "
            "slopes of its heads are not known: tensor parallelism is not supported for this model."
        )
    return heads


def _mpt(module: Any, mask: PackedMask, /, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    qkv = module.Wqkv(x)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_heads(part, module.n_heads) for part in qkv.chunk(3, dim=2))
    dropout = module.attn_dropout_p if module.training else 0.0
    slopes = _mpt_slopes(module, x.device)
    out = mask.attend(
        query, key, value, is_causal=True, scale=module.softmax_scale, alibi_slopes=slopes, dropout_p=dropout
    )
    return module.out_proj(_merged(out)), None


def _mpt_slopes(module: Any, device: torch.device) -> Tensor:
    """The slopes (H,) of MPT: for n heads, the next power of 2, the odd ones first if n is no power of 2."""
    heads = _all_heads(module, module.n_heads)
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    if power != heads:
        slopes = slopes[1::2] + slopes[::2]
    return _cached(("slopes of MPT", heads, device), lambda: torch.tensor(slopes[:heads], device=device))


def _mpnet(
    module: Any, mask: PackedMask, /, x: Tensor, attention_mask: Any, position_bias: Tensor, *_: Any, **__: Any
) -> tuple[Tensor]:
    """`position_bias` is (H, N), from `_METHODS`."""
    query, key, value = (_heads(project(x), module.num_attention_heads) for project in (module.q, module.k, module.v))
    relative = RelativeBias(_mpnet_buckets(module, x.device), bias=position_bias)
    out = mask.attend(query, key, value, relative=relative, dropout_p=_rate(module.dropout))
    return (module.o(_merged(out)),)


def _mpnet_buckets(module: Any, device: torch.device) -> Tensor:
    encoder: Any = sys.modules[type(module).__module__].MPNetEncoder
    return _buckets((encoder,), encoder.relative_position_bucket, 128, device)


def _t5(
    module: Any,
    mask: PackedMask,
    /,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """The bias of the first layer, (H, N), goes to the others as their `position_bias`. Scores are not scaled."""
    if module.has_relative_attention_bias:
        position_bias = _bias_of(module, module.relative_attention_num_buckets)
    return _t5_attention(module, mask, hidden_states, key_value_states, position_bias), position_bias, None


def _umt5(
    module: Any, mask: PackedMask, /, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Each layer has a bias of its own."""
    has_bias = module.has_relative_attention_bias
    bias = _bias_of(module, module.relative_attention_num_buckets) if has_bias else None
    return _t5_attention(module, mask, hidden_states, encoder_hidden_states, bias), None


def _t5_attention(module: Any, mask: PackedMask, /, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> Tensor:
    """(1, T, E). `memory` is the output of the encoder (1, S, E) in cross-attention, and `bias` is (H, N) or None."""
    source = x if memory is None else memory
    projected = module.q(x), module.k(source), module.v(source)
    query, key, value = (_heads(part, module.n_heads) for part in projected)
    relative = None
    if bias is not None:
        relative = RelativeBias(_t5_buckets(module, x.device), bias=bias)
    dropout = module.dropout if module.training else 0.0
    return module.o(_merged(mask.attend(query, key, value, scale=1.0, relative=relative, dropout_p=dropout)))


def _t5_buckets(module: Any, device: torch.device) -> Tensor:
    sizes = (not module.is_decoder, module.relative_attention_num_buckets, module.relative_attention_max_distance)
    return _buckets((type(module), *sizes), functools.partial(_t5_bucket, module, sizes), sizes[2], device)


def _t5_bucket(module: Any, sizes: tuple[bool, int, int], distance: Tensor) -> Tensor:
    """T5's bucket of each distance. `sizes`: whether both sides count, N, and the largest distance."""
    bucket_of = bucket_of_t5(module)
    if "bidirectional" in inspect.signature(bucket_of).parameters:  # a static method, in UMT5 it is not one
        return bucket_of(distance, **dict(zip(("bidirectional", "num_buckets", "max_distance"), sizes, strict=True)))
    return bucket_of(distance)


def _llama4(
    module: Any, mask: PackedMask, /, hidden_states: Tensor, position_embeddings: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Layers without RoPE scale queries by their positions. In other layers, a query sees keys of its chunk only."""
    shape = (*hidden_states.shape[:2], -1, module.head_dim)
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (project(hidden_states).view(shape) for project in projections)
    if module.use_rope:
        rotate = sys.modules[type(module).__module__].apply_rotary_emb
        query, key = rotate(query, key, position_embeddings.to(query.device))
    if hasattr(module, "qk_norm"):
        query, key = module.qk_norm(query), module.qk_norm(key)
    if module.attn_temperature_tuning and not module.use_rope:
        assert mask.packing is not None
        steps = torch.floor((mask.packing.own_positions.float() + 1.0) / module.floor_scale)
        scales = torch.log1p(steps) * module.attn_scale + 1.0
        query = (query * scales[:, None, None]).to(query.dtype)
    if module.config.layer_types[module.layer_idx] == "chunked_attention":
        mask = PackedMask.of(_in_chunks(mask.query_layout, module.config.attention_chunk_size), form="pairs")
    dropout = module.attention_dropout if module.training else 0.0
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = mask.attend(query, key, value, is_causal=True, scale=module.scaling, dropout_p=dropout)
    return module.o_proj(_merged(out)), None


def _in_chunks(layout: Layout, size: int) -> Layout:
    """The layout in which each chunk of up to `size` tokens of a sequence is a sequence."""
    if layout.max_seqlen <= size:
        return layout

    def build() -> Layout:
        lengths = layout.host.diff().tolist()
        chunks = [min(size, length - begin) for length in lengths for begin in range(0, length, size)]
        return SequenceLayout.from_lengths(chunks, device=layout.device)

    return layout.cached(("chunks", size), build)


def _deberta(
    module: Any, mask: PackedMask, /, x: Tensor, *_: Any, rel_embeddings: Tensor | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Queries and values have biases."""
    heads = module.num_attention_heads
    if module.talking_head:
        raise NotImplementedError("talking_head mixes the scores of all heads, which varlen_attention can't express")
    query, key, value = _heads(module.in_proj(x), heads).chunk(3, dim=-1)
    query = query + _heads(module.q_bias[None, None], heads)
    value = value + _heads(module.v_bias[None, None], heads)
    projections = getattr(module, "pos_proj", None), getattr(module, "pos_q_proj", None)
    buckets = _deberta_buckets(module, x.device)
    return _disentangled(module, mask, (query, key, value), module.pos_att_type, rel_embeddings, projections, buckets)


def _deberta_buckets(module: Any, device: torch.device) -> Tensor:
    span = getattr(module, "max_relative_positions", 0)
    return _buckets(("clamped", span), functools.partial(_clamped, span=span), span + 1, device)


def _deberta_v2(
    module: Any, mask: PackedMask, /, x: Tensor, *_: Any, rel_embeddings: Tensor | None = None, **__: Any
) -> tuple[Tensor, None]:
    """As in DeBERTa, with logarithmic buckets, and with keys and queries of positions that may share projections."""
    projected = module.query_proj(x), module.key_proj(x), module.value_proj(x)
    kinds = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]
    states = tuple(_heads(part, module.num_attention_heads) for part in projected)
    if not module.relative_attention or rel_embeddings is None:
        return _disentangled(module, mask, states, kinds, None, (None, None), None)
    projections = module.key_proj, module.query_proj
    if not module.share_att_key:
        projections = getattr(module, "pos_key_proj", None), getattr(module, "pos_query_proj", None)
    positions, buckets = rel_embeddings[: 2 * module.pos_ebd_size], _deberta_v2_buckets(module, x.device)
    return _disentangled(module, mask, states, kinds, positions, projections, buckets)


def _deberta_v2_buckets(module: Any, device: torch.device) -> Tensor:
    """The buckets of distances, `2 · pos_ebd_size` of them. They are logarithmic if there are `position_buckets`."""
    span = module.pos_ebd_size
    if module.position_buckets <= 0:
        return _buckets(("clamped", span), functools.partial(_clamped, span=span), span + 1, device)
    logarithmic = sys.modules[type(module).__module__].make_log_bucket_position
    sizes = module.position_buckets, module.max_relative_positions
    bucket_of = functools.partial(_clamped, span=span, function=logarithmic, sizes=sizes)
    return _buckets((logarithmic, span, *sizes), bucket_of, None, device)


def _clamped(
    distance: Tensor, span: int, function: Callable[..., Tensor] | None = None, sizes: tuple[int, ...] = ()
) -> Tensor:
    """DeBERTa's bucket of a distance, which it counts from the key to the query."""
    position = -distance if function is None else function(-distance, *sizes).long()
    return (position + span).clamp(0, 2 * span - 1)


def _disentangled(
    module: Any,
    mask: PackedMask,
    states: tuple[Tensor, ...],
    kinds: Collection[str],
    positions: Tensor | None,
    projections: tuple[Callable[..., Tensor] | None, ...],
    buckets: Tensor | None,
) -> tuple[Tensor, None]:
    """The attention of DeBERTa (He et al. 2021), with two terms: content to position, and position to content.

    Args:
        module, mask: as for an adapter.
        states: query, key and value (1, H, T, D).
        kinds: which terms the model has, "c2p" and "p2c". The scale counts them too.
        positions: the embeddings of the N buckets (N, E), or None if the model has no relative attention.
        projections: of positions to keys, and to queries (N, H·D).
        buckets: as in `RelativeBias`.
    """
    query, key, value = states
    scale = (query.shape[-1] * (1 + len(kinds))) ** -0.5

    def products(kind: str, x: Tensor, project: Any) -> Tensor | None:
        """(T, H, N), the product of each token with each position."""
        if kind not in kinds:
            return None
        return torch.einsum("htd,nhd->thn", scale * x[0], project(embeddings).unflatten(-1, (x.shape[1], -1)))

    relative = None
    if module.relative_attention and positions is not None and buckets is not None and kinds:
        embeddings = module.pos_dropout(positions)
        of_keys, of_queries = products("c2p", query, projections[0]), products("p2c", key, projections[1])
        relative = RelativeBias(buckets, query_bias=of_keys, key_bias=of_queries)
    out = mask.attend(query, key, value, scale=scale, relative=relative, dropout_p=_rate(module.dropout))
    return _merged(out), None


def _wavlm(
    module: Any,
    mask: PackedMask,
    /,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None, Tensor]:
    """A gate for each query scales the biases, which the first layer passes on as `position_bias` (H·N,)."""
    heads, x = module.num_heads, hidden_states
    if position_bias is None:
        embedding = module.rel_attn_embed
        position_bias = embedding(torch.arange(module.num_buckets, device=x.device)).T.flatten()
    gates = module.gru_rel_pos_linear(x[0].unflatten(-1, (heads, -1))).unflatten(-1, (2, 4)).sum(-1).sigmoid()
    first, second = gates.chunk(2, dim=-1)  # (T, H, 1)
    gate = first * (second * module.gru_rel_pos_const.view(-1, 1) - 1.0) + 2.0
    relative = RelativeBias(_wavlm_buckets(module, x.device), query_bias=gate * position_bias.view(heads, -1))
    # as in the module, which reads weights: adapters on its projections have no effect
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (_heads(F.linear(x, each.weight, each.bias), heads) for each in projections)
    out = mask.attend(query, key, value, relative=relative, dropout_p=module.dropout if module.training else 0.0)
    return F.linear(_merged(out), module.out_proj.weight, module.out_proj.bias), None, position_bias


def _wavlm_buckets(module: Any, device: torch.device) -> Tensor:
    """They are those of T5 with both sides."""
    from transformers.models.t5.modeling_t5 import T5Attention  # only models that need it wait for its import

    sizes = True, module.num_buckets, module.max_distance
    return _buckets((T5Attention, *sizes), functools.partial(_t5_bucket, T5Attention, sizes), sizes[2], device)


def _parakeet(
    module: Any,
    mask: PackedMask,
    /,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = _projected(hidden_states, (module.q_proj, module.k_proj, module.v_proj), module.head_dim)
    positions = module.relative_k_proj(position_embeddings).unflatten(-1, (-1, module.head_dim))
    biases, dropout = (module.bias_u, module.bias_v), module.attention_dropout if module.training else 0.0
    out = _transformer_xl(mask, (query, key, value), positions, biases, module.scaling, dropout)
    return module.o_proj(out), None


def _wav2vec2_conformer(
    module: Any,
    mask: PackedMask,
    /,
    hidden_states: Tensor,
    attention_mask: Any = None,
    relative_position_embeddings: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    size, kind = module.head_size, module.position_embeddings_type
    query, key, value = _projected(hidden_states, (module.linear_q, module.linear_k, module.linear_v), size)
    scale, dropout = size**-0.5, _rate(module.dropout)
    if kind == "relative" and relative_position_embeddings is not None:
        positions = module.linear_pos(relative_position_embeddings).unflatten(-1, (-1, size))
        biases = module.pos_bias_u, module.pos_bias_v
        return module.linear_out(_transformer_xl(mask, (query, key, value), positions, biases, scale, dropout)), None
    if kind not in (None, "relative_key"):
        raise NotImplementedError(f"its position_embeddings_type is {kind!r}")
    relative = None
    if kind is not None:
        before, after = module.left_max_position_embeddings, module.right_max_position_embeddings
        radius = max(before, after)
        buckets = torch.arange(-radius, radius + 1, device=query.device).clamp(-before, after) + before
        table = module.distance_embedding.weight.to(query.dtype)
        relative = RelativeBias(buckets, query_bias=scale * torch.einsum("htd,nd->thn", query[0], table))
    out = mask.attend(query, key, value, scale=scale, relative=relative, dropout_p=dropout)
    return module.linear_out(_merged(out)), None


def _projected(x: Tensor, projections: Iterable[Callable[..., Tensor]], size: int) -> list[Tensor]:
    """Queries, keys and values (1, H, T, D), for heads of this size."""
    return [project(x).unflatten(-1, (-1, size)).transpose(1, 2) for project in projections]


def _transformer_xl(
    mask: PackedMask,
    states: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    biases: tuple[Tensor, Tensor],
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The attention of Transformer-XL (Dai et al. 2019), (1, T, H·D).

    Args:
        mask: the mask of the row.
        states: query, key and value (1, H, T, D).
        positions: (1, 2L − 1, H, D), the keys of the distances L − 1 to −(L − 1), from the query to the key.
        biases: (H, D) each, which are added to queries that meet keys, and to those that meet positions.
        scale: of the scores.
        dropout_p: of the weights.
    """
    query, key, value = states
    radius, longest = positions.shape[1] // 2, mask.query_layout.max_seqlen - 1
    near = positions[0, radius - longest : radius + longest + 1]
    of_positions = torch.einsum("htd,nhd->thn", (query[0] + biases[1][:, None]) * scale, near)
    relative = RelativeBias(torch.arange(len(near), device=query.device), query_bias=of_positions)
    query = query + biases[0][None, :, None]
    return _merged(mask.attend(query, key, value, scale=scale, relative=relative, dropout_p=dropout_p))


def _buckets(
    key: tuple[Any, ...], bucket_of: Callable[[Tensor], Tensor], radius: int | None, device: torch.device
) -> Tensor:
    """(2 · radius + 1,) the bucket of each distance. Cached: `key` says which function `bucket_of` is.

    A radius of None is the smallest one after which the bucket does not change any more.
    """
    return _cached((*key, radius, device), lambda: _new_buckets(bucket_of, radius, device))


def _new_buckets(bucket_of: Callable[[Tensor], Tensor], radius: int | None, device: torch.device) -> Tensor:
    farthest = _FARTHEST if radius is None else radius
    buckets = bucket_of(torch.arange(-farthest, farthest + 1, device="cpu"))
    if radius is None:
        change = (buckets[1:] != buckets[:-1]).nonzero().flatten() - farthest
        radius = int(change.abs().max()) + 1
        buckets = buckets[farthest - radius : farthest + radius + 1]
    return buckets.to(device)


_FARTHEST = 2**17  # tokens


def _cached(key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """A tensor that all models share. A graph breaks to make one; see `make_cached_tensors`."""
    if key not in _cached_tensors:
        _cached_tensors[key] = _made(make)
    return _cached_tensors[key]


@outside_of_graphs
def _made(make: Callable[[], Tensor]) -> Tensor:
    with creating_cached_tensors():
        return make()


_cached_tensors: dict[tuple[Any, ...], Tensor] = {}


# The class, after "transformers.models." → its adapter.
_T5 = Adapter(_t5, _t5_buckets)
_ADAPTERS = {
    "openai.modeling_openai.Attention": Adapter(_openai_gpt),
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": Adapter(_gpt_neo),
    "bloom.modeling_bloom.BloomAttention": Adapter(_bloom),
    "mpt.modeling_mpt.MptAttention": Adapter(_mpt, _mpt_slopes),
    "llama4.modeling_llama4.Llama4TextAttention": Adapter(_llama4),
    "mpnet.modeling_mpnet.MPNetSelfAttention": Adapter(_mpnet, _mpnet_buckets),
    "t5.modeling_t5.T5Attention": _T5,
    "mt5.modeling_mt5.MT5Attention": _T5,
    "switch_transformers.modeling_switch_transformers.SwitchTransformersAttention": _T5,
    "umt5.modeling_umt5.UMT5Attention": Adapter(_umt5, _t5_buckets),
    "wavlm.modeling_wavlm.WavLMAttention": Adapter(_wavlm, _wavlm_buckets),
    "parakeet.modeling_parakeet.ParakeetEncoderAttention": Adapter(_parakeet),
    "wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention": Adapter(_wav2vec2_conformer),
    "wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": Adapter(_wav2vec2_conformer),
    "deberta.modeling_deberta.DisentangledSelfAttention": Adapter(_deberta, _deberta_buckets),
    "deberta_v2.modeling_deberta_v2.DisentangledSelfAttention": Adapter(_deberta_v2, _deberta_v2_buckets),
}

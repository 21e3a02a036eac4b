"""The functions of flash-attn 2.8, argument for argument, on the backends of this library.

`import nt_attention.compat.flash_attn as flash_attn` replaces `import flash_attn`. The functions run
`varlen_attention`, so they also run on a CPU and in float32. They differ from flash-attn in the following.

- A query that sees no key has the log-sum-exp −inf; flash-attn has +inf. The output is 0 in both.
- `softmax_lse` has a gradient. With `causal` and `alibi_slopes` it is that of the documented scores; flash-attn leaves
  out a term that is equal for all keys of a query.
- `S_dmask` is empty. With dropout, `return_attn_probs` raises an error.
- `max_seqlen_q` and `max_seqlen_k` below the longest sequence raise an error.
- The host reads `cu_seqlens` at the first use of the tensor, which syncs once on a GPU. Tensors that were made in
  inference mode are read in each call. While a CUDA graph is captured, `cu_seqlens` is not read, and may be changed
  between replays. See `SequenceLayout.from_offsets`.
- Calls with keys in a cache raise an error if a gradient is needed.

Errors may use the names of the arguments of `varlen_attention`.

Dimensions: B sequences (batch), L query tokens and S key tokens of each sequence (seqlen), T and K tokens of all
sequences (total), H query heads (nheads), G key heads (nheads_k), D head dim.
"""

from __future__ import annotations

import contextlib
from operator import index
from typing import Any, cast

import torch
from torch import Tensor

from ..functional import plan, varlen_attention
from ..kernels.call import OPTIONS, Options, check_shapes
from ..layouts.paged import PagedLayout
from ..layouts.protocol import Layout
from ._kv_cache import KVCache
from ._layouts import equal_lengths, layout_of_offsets
from ._new_keys import RotaryTables, check_new, check_nothing_new, check_shape, prepare

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]
_OUR_NAMES = {"softmax_scale": "scale", "causal": "is_causal"}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of a batch in which all sequences have L queries and S keys.

    Tensors are copied only if their first two dimensions can't be merged into one.

    Args:
        q: (B, L, H, D).
        k: (B, S, G, D). H must be a multiple of G.
        v: (B, S, G, Dv).
        dropout_p: the probability with which an attention weight is dropped.
        softmax_scale: the factor of q · k; None is D^−0.5.
        causal: mask the keys after the position of a query, which is i + S − L for query i (lower right).
        window_size: (left, right). A query sees the key at its position, `left` keys before it and `right` keys after
            it. A negative number means no limit. The host reads integer tensors.
        softcap: if above 0, scores become softcap · tanh(scores / softcap).
        alibi_slopes: (H,) or (B, H), float32; adds −slope · |distance| to the scores. Gets no gradient.
        deterministic: require that the same call always gives bitwise equal gradients.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        The output (B, L, H, Dv). With `return_attn_probs`, a tuple of the output, the log-sum-exp (B, H, L) and an
            empty tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not match, an option is invalid, or no backend supports the call; or
            `return_attn_probs` is passed with dropout.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 5, 4, 8).unbind()
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 5, 4, 8])
    """
    options = _options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    _check_probabilities(return_attn_probs, dropout_p)
    for name, x, shape in (("q", q, "(B, L, H, D)"), ("k", k, "(B, S, G, D)"), ("v", v, "(B, S, G, Dv)")):
        check_shape(name, x, shape)
    if not len(q) == len(k) == len(v) or k.shape[1] != v.shape[1]:
        raise ValueError(
            "q, k and v must have the same batch size, and k and v the same length, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    batch, length = q.shape[:2]
    layout = equal_lengths(batch, length, q)
    key_layout = None if k.shape[1] == length else equal_lengths(batch, k.shape[1], q)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out, lse = _attend(q, k, v, layout, key_layout, alibi_slopes, options)
    out = out.unflatten(0, (batch, length))
    return (out, _dense_lse(lse, batch, length), out.new_empty(0)) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with keys and values in one tensor.

    Args:
        q: (B, L, H, D).
        kv: (B, S, 2, G, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 1, 8)).shape
        torch.Size([2, 5, 4, 8])
    """
    k, v = _unpack("kv", kv, "(B, S, 2, G, D)", 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: (B, L, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 8)).shape
        torch.Size([2, 5, 4, 8])
    """
    q, k, v = _unpack("qkv", qkv, "(B, L, 3, H, D)", 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences. Sequences may have no queries or no keys.

    Args:
        q: (T, H, D).
        k: (K, G, D), or pages (num_blocks, page_block_size, G, D) with `block_table`.
        v: (K, G, Dv), or pages (num_blocks, page_block_size, G, Dv).
        cu_seqlens_q: (B+1,) int32 or int64, the first row of each sequence in q, then the end of the last sequence.
        cu_seqlens_k: the same for k. With `block_table`, only the lengths count.
        max_seqlen_q: the length of the longest sequence of queries, or a bound of it.
        max_seqlen_k: the same for keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in `flash_attn_func`.
        return_attn_probs: also return the log-sum-exp.
        block_table: (B, P) int32 or int64, the pages of each sequence. A page may have any size. No gradient may be
            needed.

    Returns:
        The output (T, H, Dv). With `return_attn_probs`, a tuple of the output, the log-sum-exp (H, T) and an empty
            tensor.

    Raises:
        TypeError: `cu_seqlens_q`, `cu_seqlens_k` or `block_table` is not a tensor.
        ValueError: as `flash_attn_func`; or a sequence is longer than `max_seqlen_q` or `max_seqlen_k` (with
            `block_table` on a GPU, its results are NaN); or a gradient is needed with `block_table`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 14, 4, 8).unbind()
        >>> cu_seqlens = torch.tensor([0, 5, 14], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 9, 9, causal=True).shape
        torch.Size([14, 4, 8])
    """
    options = _options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    _check_probabilities(return_attn_probs, dropout_p)
    layout = layout_of_offsets(cu_seqlens_q, max_seqlen_q, q.shape[0])
    if block_table is not None:
        key_layout: Layout | PagedLayout | None = _paged(k, cu_seqlens_k, max_seqlen_k, block_table)
    elif cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q and k.shape[0] == q.shape[0]:
        key_layout = None
    else:
        key_layout = layout_of_offsets(cu_seqlens_k, max_seqlen_k, k.shape[0])
    out, lse = _attend(q, k, v, layout, key_layout, alibi_slopes, options)
    return (out, lse.T, out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: (T, H, D).
        kv: (K, 2, G, D).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_attn_probs: as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        TypeError: as `flash_attn_varlen_func`.
        ValueError: as `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_varlen_kvpacked_func
        >>> cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 5, 14]), torch.tensor([0, 2, 5])
        >>> q, kv = torch.randn(14, 4, 8), torch.randn(5, 2, 1, 8)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 9, 3).shape
        torch.Size([14, 4, 8])
    """
    k, v = _unpack("kv", kv, "(K, 2, G, D)", 2)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal),
        *(window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: (B+1,) int32 or int64, the first row of each sequence, then the end of the last sequence.
        max_seqlen: the length of the longest sequence, or a bound of it.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        TypeError: as `flash_attn_varlen_func`.
        ValueError: as `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(14, 3, 4, 8), torch.tensor([0, 5, 14]), 9).shape
        torch.Size([14, 4, 8])
    """
    q, k, v = _unpack("qkv", qkv, "(T, 3, H, D)", 3)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal),
        *(window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of L queries of each sequence to keys in a cache. It writes new keys to the cache first, in place.

    On a GPU the host reads nothing, so the call can be captured in a CUDA graph after one call with the same shapes.
    The caches are not copied. On a CPU, keys that are in several pieces are gathered.

    Args:
        q: (B, L, H, D).
        k_cache: (batch_size_cache, seqlen_cache, G, D), or pages (num_blocks, page_block_size, G, D) with
            `block_table`. The last dimension must be contiguous.
        v_cache: the same for values, with head dim Dv.
        k: (B, N, G, D), new keys, which are written to the positions `cache_seqlens` to `cache_seqlens + N − 1`.
        v: (B, N, G, Dv), new values.
        rotary_cos: (seqlen_ro, R/2), the cosines for each position. The first R dims of new keys are rotated by their
            position. Queries are rotated by the positions from `cache_seqlens` on if `causal` or a window is set, else
            all by the position `cache_seqlens`. R is any even number up to D, and seqlen_ro at least the number of
            positions of a sequence in the cache.
        rotary_sin: (seqlen_ro, R/2), the sines.
        cache_seqlens: the number of positions of each sequence in the cache that are in use, as an integer or (B,)
            int32 or int64. None means the whole cache.
        cache_batch_idx: (B,) int32 or int64, the row of the cache of each sequence. None means 0, 1, … B − 1. If new
            keys are passed, rows should be distinct.
        cache_leftpad: (B,) int32 or int64, the position of the first key of each sequence. The first two dimensions of
            the cache must be mergeable without a copy.
        block_table: (B, P) int32 or int64, the pages of each sequence. A page may have any size. It can't be combined
            with `cache_batch_idx` or `cache_leftpad`.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: if True, the pairs that are rotated are the dims (2i, 2i + 1); if False, (i, i + R/2).
        num_splits: ignored. In flash-attn it only changes how the work is divided.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        The output (B, L, H, Dv). With `return_softmax_lse`, a tuple of the output and the log-sum-exp (B, H, L).

    Raises:
        ValueError: shapes, dtypes or devices do not match, or an argument is invalid; or a gradient is needed; or, on a
            CPU, a position or a page is outside of the cache. On a GPU, new keys outside of the cache are a failed
            assertion of the device, and the results of a sequence with such keys are NaN.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 16, 1, 8).unbind()
        >>> q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)
        >>> cache_seqlens = torch.tensor([3, 0], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=True).shape
        torch.Size([2, 1, 4, 8])
        >>> torch.equal(k_cache[0, 3], k[0, 0])
        True
    """
    options = _options(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
    check_shape("q", q, "(B, L, H, D)")
    batch, length = q.shape[:2]
    cache = KVCache.of(k_cache, v_cache, batch, block_table, cache_batch_idx, cache_leftpad)
    check_shapes(q.shape[1:], k_cache.shape[1:], v_cache.shape[1:])
    _check_no_gradient(q, k_cache, v_cache, k, v)
    if k is None or v is None:
        check_nothing_new(k, v, rotary_cos, rotary_sin)
        write = None
        query, pools = q.flatten(0, 1), cache.pools(cache.lengths(cache_seqlens, 0))
    else:
        check_new(k, v, cache, cache_seqlens)
        is_ordered = options["is_causal"] or options["window_size"] != (-1, -1)
        rotary = RotaryTables.of(rotary_cos, rotary_sin, q, cache.capacity, rotary_interleaved, is_ordered)
        query, pools, write = prepare(q, k, v, cache, cache_seqlens, rotary)
    keys, values, paged = pools
    layout = equal_lengths(batch, length, q)
    if write is not None:  # after all arguments were checked
        plan(query, keys, values, layout, paged, alibi_slopes=alibi_slopes, **options)
        write()
    out, lse = _attend(query, keys, values, layout, paged, alibi_slopes, options)
    out = out.unflatten(0, (batch, length))
    return (out, _dense_lse(lse, batch, length)) if return_softmax_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout | PagedLayout | None,
    alibi_slopes: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H) of packed queries."""
    return varlen_attention(q, k, v, layout, key_layout, alibi_slopes=alibi_slopes, return_lse=True, **options)


def _options(softcap: float, window_size: Any, **given: Any) -> Options:
    """The options of `varlen_attention`, checked. Errors have flash-attn's names."""
    if isinstance(window_size, (tuple, list, Tensor)):
        with contextlib.suppress(TypeError):  # what is no integer is refused below
            window_size = tuple([max(side if isinstance(side, int) else index(side), -1) for side in window_size])
    if isinstance(softcap, (int, float)) and softcap < 0:
        softcap = 0.0
    options = {}
    for name, value in {"window_size": window_size, "softcap": softcap, **given}.items():
        ours = _OUR_NAMES.get(name, name)
        options[ours] = OPTIONS[ours].parse(name, value)
    return cast(Options, options)


def _dense_lse(lse: Tensor, batch: int, length: int) -> Tensor:
    """(B·L, H) → (B, H, L)."""
    return lse.unflatten(0, (batch, length)).transpose(1, 2)


def _unpack(name: str, x: Tensor, shape: str, size: int) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, whose dimension before the last two must have this size."""
    check_shape(name, x, shape)
    if x.shape[-3] != size:
        raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}.")
    return x.unbind(-3)


def _paged(pool: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, block_table: Tensor) -> PagedLayout:
    """The layout of keys in pages. Their lengths stay on the device."""
    check_shape("k", pool, "(num_blocks, page_block_size, G, D)")
    if not isinstance(max_seqlen_k, int):
        raise TypeError(f"max_seqlen_k must be an integer, got {type(max_seqlen_k).__name__}.")
    if not isinstance(cu_seqlens_k, Tensor):
        raise TypeError(f"cu_seqlens_k must be a tensor (B+1,), got {type(cu_seqlens_k).__name__}.")
    return PagedLayout(block_table, cu_seqlens_k.diff(), pool.shape[1], max_seqlen_k)


def _check_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0:
        raise ValueError(
            f"return_attn_probs with dropout_p={dropout_p} would return which weights were dropped, and no backend "
            "keeps them: leave out one of them."
        )


def _check_no_gradient(*tensors: Tensor | None) -> None:
    """Check before new keys are written, because a cache that needs a gradient would keep the graph of all steps."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "flash_attn_with_kvcache is for inference, but an input needs a gradient: call it in torch.no_grad(), or "
            "use flash_attn_varlen_func without a cache."
        )

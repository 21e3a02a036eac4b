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
from typing import Any

import torch
from torch import Tensor

from ..functional import plan, varlen_attention
from ..kernels.call import OPTIONS, check_shapes
from ..layouts.paged import PagedLayout
from ..layouts.protocol import Layout
from ._kv_cache import KVCache, check_rotary, check_shape, positions_from, rotate
from ._layouts import equal_lengths, layout_of_offsets

# fmt: off
__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]
_OUR_NAMES = {"softmax_scale": "scale", "causal": "is_causal"}


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
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
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
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
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = varlen_attention(q, k, v, layout, key_layout, return_lse=True, **options)
    out, lse = _dense(out, lse, batch, length)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q (B, L, H, D) and kv (B, S, 2, G, D), keys and values in one tensor.

    The other arguments, results and errors are those of `flash_attn_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 1, 8)).shape
        torch.Size([2, 5, 4, 8])
    """
    k, v = check_shape("kv", kv, "(B, S, 2, G, D)").unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (B, L, 3, H, D): queries, keys and values in one tensor.

    The other arguments, results and errors are those of `flash_attn_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 8)).shape
        torch.Size([2, 5, 4, 8])
    """
    q, k, v = check_shape("qkv", qkv, "(B, L, 3, H, D)").unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
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
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    layout = layout_of_offsets(cu_seqlens_q, max_seqlen_q, q.shape[0])
    key_layout: Layout | PagedLayout | None = None
    if block_table is not None:
        key_layout = _paged(k, cu_seqlens_k, max_seqlen_k, block_table)
    elif cu_seqlens_k is not cu_seqlens_q or max_seqlen_k != max_seqlen_q or k.shape[0] != q.shape[0]:
        key_layout = layout_of_offsets(cu_seqlens_k, max_seqlen_k, k.shape[0])
    out, lse = varlen_attention(q, k, v, layout, key_layout, return_lse=True, **options)
    return (out, lse.T, out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q (T, H, D) and kv (K, 2, G, D), keys and values in one tensor.

    The other arguments, results and errors are those of `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_varlen_kvpacked_func
        >>> cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 5, 14]), torch.tensor([0, 2, 5])
        >>> q, kv = torch.randn(14, 4, 8), torch.randn(5, 2, 1, 8)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 9, 3).shape
        torch.Size([14, 4, 8])
    """
    k, v = check_shape("kv", kv, "(K, 2, G, D)").unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv (T, 3, H, D): queries, keys and values in one tensor.

    `cu_seqlens` and `max_seqlen` are those of queries and keys. The other arguments, results and errors are those of
    `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from nt_attention.compat.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(14, 3, 4, 8), torch.tensor([0, 5, 14]), 9).shape
        torch.Size([14, 4, 8])
    """
    q, k, v = check_shape("qkv", qkv, "(T, 3, H, D)").unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
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
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_shape("q", q, "(B, L, H, D)")
    batch, length = q.shape[:2]
    cache = KVCache.of(k_cache, v_cache, batch, block_table, cache_batch_idx, cache_leftpad)
    check_shapes(q.shape[1:], k_cache.shape[1:], v_cache.shape[1:])
    _check_no_gradient(q, k_cache, v_cache, k, v)
    _check_together(k, v, rotary_cos, rotary_sin, cache_seqlens)
    new = 0 if k is None or v is None else cache.check_new(k, v)
    starts = cache.lengths(cache_seqlens, new)
    keys, values, paged = cache.pools(starts + new if new else starts)
    positions = positions_from(starts, new)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        check_rotary(rotary_cos, rotary_sin, q, cache.capacity)
        is_ordered = options["is_causal"] or options["window_size"] != (-1, -1)
        of_queries = positions_from(starts, length if is_ordered else 1)
        q = rotate(q, rotary_cos, rotary_sin, of_queries, rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    query, layout = q.flatten(0, 1), equal_lengths(batch, length, q)
    if k is not None and v is not None:  # written after all arguments were checked
        plan(query, keys, values, layout, paged, **options)
        cache.append(k, v, positions)
    out, lse = varlen_attention(query, keys, values, layout, paged, return_lse=True, **options)
    out, lse = _dense(out, lse, batch, length)
    return (out, lse) if return_softmax_lse else out


def _options(
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool = False, return_attn_probs: bool = False,
) -> dict[str, Any]:
    """The keyword arguments of `varlen_attention`, checked. Errors have flash-attn's names."""
    if isinstance(window_size, (tuple, list, Tensor)):
        with contextlib.suppress(TypeError):  # what is no integer is refused below
            window_size = tuple([max(side if isinstance(side, int) else index(side), -1) for side in window_size])
    if isinstance(softcap, (int, float)) and softcap < 0:
        softcap = 0.0
    given = {"window_size": window_size, "softcap": softcap, "softmax_scale": softmax_scale, "causal": causal}
    given |= {"dropout_p": dropout_p, "deterministic": deterministic}
    ours = {name: _OUR_NAMES.get(name, name) for name in given}
    options = {ours[name]: OPTIONS[ours[name]].parse(name, value) for name, value in given.items()}
    if return_attn_probs and dropout_p > 0:
        raise ValueError(
            f"return_attn_probs with dropout_p={dropout_p} would return which weights were dropped, and no backend "
            "keeps them: leave out one of them."
        )
    return options | {"alibi_slopes": alibi_slopes}
# fmt: on


def _dense(out: Tensor, lse: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """out (B·L, H, Dv) → (B, L, H, Dv) and lse (B·L, H) → (B, H, L)."""
    return out.unflatten(0, (batch, length)), lse.unflatten(0, (batch, length)).transpose(1, 2)


def _check_together(k: object, v: object, cos: object, sin: object, cache_seqlens: object) -> None:
    if (k is None) != (v is None):
        raise ValueError("k and v must be passed together, got one of them.")
    if k is None and (cos is not None or sin is not None):
        raise ValueError("rotary_cos and rotary_sin need new keys: pass k and v, or rotate q before the call.")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is needed with k and v: pass the number of positions that are in use.")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must be passed together, got one of them.")


def _paged(pool: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, block_table: Tensor) -> PagedLayout:
    """The layout of keys in pages. Their lengths stay on the device."""
    check_shape("k", pool, "(num_blocks, page_block_size, G, D)")
    if not isinstance(max_seqlen_k, int):
        raise TypeError(f"max_seqlen_k must be an integer, got {type(max_seqlen_k).__name__}.")
    if not isinstance(cu_seqlens_k, Tensor):
        raise TypeError(f"cu_seqlens_k must be a tensor (B+1,), got {type(cu_seqlens_k).__name__}.")
    return PagedLayout(block_table, cu_seqlens_k.diff(), pool.shape[1], max_seqlen_k)


def _check_no_gradient(*tensors: Tensor | None) -> None:
    """Check before new keys are written, because a cache that needs a gradient would keep the graph of all steps."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "flash_attn_with_kvcache is for inference, but an input needs a gradient: call it in torch.no_grad(), or "
            "use flash_attn_varlen_func without a cache."
        )

"""`RelativeBias`: what a score gets for the distance between a query and a key.

T5 and MPNet learn a bias for each bucket of distances (Raffel et al. 2020). DeBERTa adds two products of contents and
positions (He et al. 2021). Each is a score for every token and bucket, which is computed before the call.

Dimensions: T query tokens, S key tokens, H query heads, N buckets, R the largest distance with a bucket of its own, Lq
queries and Lk keys of a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compiler import can_be_read

TERMS = ("bias", "query_bias", "key_bias")


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """Biases that are added to the scores, by the distance between a query and a key.

    Query i at key position p (see `causal_alignment`) and key j have the distance j − p. Its bucket is
    `b = buckets[clamp(j − p, −R, R) + R]`. The score of head h, scaled and capped, gets
    `bias[h, b] + query_bias[i, h, b] + key_bias[j, h, b]`. At least one of the three is needed. All three are
    differentiable. They may have any floating-point dtype, and are not cast under autocast: they are added in float32,
    or in float64 if the query is float64. Their gradients are summed in that precision, and returned in their own
    dtype.

    Attributes:
        buckets: (2R+1,) int32 or int64, the bucket of each distance from −R to R, in [0, N). On a CPU the values are
            checked. On a GPU that would need a sync in each call, so a value out of range counts as the nearest bucket.
        bias: (H, N), or None.
        query_bias: (T, H, N), or None. With NestedTensors it is packed as well: T counts the tokens of all sequences.
        key_bias: (S, H, N), or None. It has query heads, also with grouped heads.

    Example:
        >>> import torch, nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> query, key, value = torch.randn(3, layout.total, 4, 8).unbind()
        >>> buckets = torch.arange(-8, 9).abs().clamp(max=4)  # N = 5: the distances 0 to 3, and all others
        >>> relative = nta.RelativeBias(buckets, bias=torch.zeros(4, 5, requires_grad=True))
        >>> out = nta.varlen_attention(query, key, value, layout, relative=relative)
        >>> out.sum().backward()
        >>> relative.bias.grad.shape
        torch.Size([4, 5])
    """

    buckets: Tensor
    bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the biases that are given, in the order of `TERMS`."""
        return tuple([name for name in TERMS if getattr(self, name) is not None])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The biases that are given, in the order of `TERMS`."""
        return tuple([x for x in (self.bias, self.query_bias, self.key_bias) if x is not None])

    @property
    def num_buckets(self) -> int:
        """N."""
        return self.tensors[0].shape[-1]

    @property
    def requires_grad(self) -> bool:
        """Whether some bias requires a gradient."""
        return any(x.requires_grad for x in self.tensors)

    def with_tensors(self, tensors: Iterable[Tensor]) -> RelativeBias:
        """The same with other `tensors`."""
        return replace(self, **dict(zip(self.terms, tensors, strict=True)))

    def map_rows(self, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> RelativeBias:
        """The same with `of_queries(query_bias)` and `of_keys(key_bias)`."""
        return replace(
            self,
            query_bias=None if self.query_bias is None else of_queries(self.query_bias),
            key_bias=None if self.key_bias is None else of_keys(self.key_bias),
        )

    @property
    def valid_buckets(self) -> Tensor:
        """`buckets` in int64. Values out of range are the nearest bucket."""
        return self.buckets.long().clamp(0, self.num_buckets - 1)

    def bucket_of(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64, in [0, N)."""
        radius = self.buckets.shape[0] // 2
        return self.valid_buckets[distance.clamp(-radius, radius) + radius]

    def lowest(self, dtype: torch.dtype) -> Tensor:
        """() a lower bound of `scores` in this dtype."""
        return functools.reduce(torch.add, [x.detach().amin().to(dtype) for x in self.tensors])

    def scores(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of the biases of some queries and keys, for their buckets (Lq, Lk).

        Here heads come first: `query_bias` is (…, H, Lq, N), `key_bias` is (…, H, Lk, N) and the result (…, H, Lq, Lk).
        """
        parts = []
        if self.bias is not None:
            parts.append(self.bias.to(dtype)[:, bucket])
        if self.query_bias is not None:
            x = self.query_bias.to(dtype)
            parts.append(x.gather(-1, bucket.expand(*x.shape[:-1], -1)))
        if self.key_bias is not None:
            x = self.key_bias.to(dtype)
            parts.append(x.gather(-1, bucket.T.expand(*x.shape[:-1], -1)).transpose(-1, -2))
        return functools.reduce(torch.add, parts)

    def gradients(self, bucket: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of `tensors` from that of `scores`, (…, H, Lq, Lk), in its dtype."""
        found = []
        if self.bias is not None:
            of_heads = grad.flatten(0, -4).sum(0) if grad.dim() > 3 else grad
            found.append(grad.new_zeros(self.bias.shape).index_add_(1, bucket.flatten(), of_heads.flatten(1)))
        if self.query_bias is not None:
            index = bucket.expand(*self.query_bias.shape[:-1], -1)
            found.append(grad.new_zeros(self.query_bias.shape).scatter_add_(-1, index, grad))
        if self.key_bias is not None:
            index = bucket.T.expand(*self.key_bias.shape[:-1], -1)
            found.append(grad.new_zeros(self.key_bias.shape).scatter_add_(-1, index, grad.transpose(-1, -2)))
        return tuple(found)


def check_type(relative: object) -> None:
    """Check that `relative` is a `RelativeBias` of tensors, with at least one bias.

    Raises:
        TypeError: It is not.
        ValueError: All biases are None.
    """
    if not isinstance(relative, RelativeBias):
        raise TypeError(f"relative must be a nta.RelativeBias, got {type(relative).__name__}.")
    for name in ("buckets", *relative.terms):
        if not isinstance(getattr(relative, name), Tensor):
            raise TypeError(f"relative.{name} must be a torch.Tensor, got {type(getattr(relative, name)).__name__}.")
    if not relative.terms:
        raise ValueError("relative has no bias: pass bias (H, N), query_bias (T, H, N) or key_bias (S, H, N).")


def check_relative(relative: RelativeBias, query: Tensor, key: Tensor) -> None:
    """Check the shapes, dtypes and devices for query (T, H, D) and key (S, G, D), and on a CPU the buckets' values.

    Raises:
        ValueError: They do not fit.
    """
    buckets, heads = relative.buckets, query.shape[1]
    count = relative.num_buckets if relative.tensors[0].dim() else 0
    if buckets.dim() != 1 or buckets.shape[0] % 2 == 0 or buckets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "relative.buckets must be (2R+1,) int32 or int64, the bucket of each distance from −R to R, got "
            f"{tuple(buckets.shape)} {buckets.dtype}."
        )
    shapes = {"bias": (heads, count), "query_bias": (query.shape[0], heads, count)}
    shapes["key_bias"] = (key.shape[0], heads, count)
    for name, x in zip(relative.terms, relative.tensors, strict=True):
        if x.shape != shapes[name] or not x.is_floating_point():
            raise ValueError(
                f"relative.{name} must be floating-point numbers {shapes[name]} for {heads} query heads and {count} "
                f"buckets, got {tuple(x.shape)} {x.dtype}."
            )
    for name, x in (("buckets", buckets), *zip(relative.terms, relative.tensors, strict=True)):
        if x.device != query.device:
            raise ValueError(f"relative.{name} is on {x.device} and query on {query.device}: move it there.")
    if count == 0:
        raise ValueError("relative has no buckets: its biases must have at least one column.")
    if buckets.is_cpu and can_be_read(buckets):
        low, high = (int(x) for x in buckets.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"relative.buckets must be in [0, {count}), got values from {low} to {high}.")

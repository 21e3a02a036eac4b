"""What an attention call asks for, and what a backend is.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, G key heads (H a multiple of G), D the head dim of
queries and keys, Dv that of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .masks import Window

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CausalAlignment = Literal["lower_right", "upper_left"]


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of query, key and value


def check_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Refuse shapes other than (T, H, D), (S, G, D) and (S, G, Dv) with H a multiple of G.

    Raises:
        ValueError: other shapes.
    """
    problem = None
    if not len(query) == len(key) == len(value) == 3:
        problem = "query, key and value must be (tokens, heads, head dim)"
    elif key[2] != query[2]:
        problem = "query and key must have the same head dim"
    elif key[1] != value[1]:
        problem = "key and value must have the same heads"
    elif not key[1] or not query[1] or query[1] % key[1]:
        problem = "query's heads must be a multiple of key's"
    elif not query[2] or not value[2]:
        problem = "a head dim is 0"
    if problem is not None:
        raise ValueError(f"{problem}: query {tuple(query)}, key {tuple(key)}, value {tuple(value)}.")


def check_slopes(slopes: object, heads: int, batch: int, device: torch.device) -> None:
    """Refuse ALiBi slopes other than (H,) or (B, H) of float32 or float64 on ``device``, and those that want gradients.

    Raises:
        ValueError: any of these.
    """
    if not isinstance(slopes, Tensor) or slopes.shape not in ((heads,), (batch, heads)) or slopes.device != device:
        raise ValueError(
            f"alibi_slopes must be a tensor ({heads},) or ({batch}, {heads}) on {device}, got {describe(slopes)}."
        )
    if slopes.dtype != torch.float32 and slopes.dtype != torch.float64:
        raise ValueError(f"alibi_slopes must be float32 (flash kernels read nothing else), got {slopes.dtype}.")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes get no gradient: pass slopes.detach(), or learn the bias in a score_mod.")


def describe(x: object) -> str:
    """A tensor's shape and device, or what else ``x`` is, for an error message."""
    return f"{tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)


@dataclass(frozen=True)
class AttentionSpec:
    """One call, without its tensors: all that decides which backend can run it, and how.

    The meaning of each field is that of ``varlen_attention``'s argument of the same name.

    Attributes:
        device: where the tensors are.
        dtype: of query, key and value.
        num_heads, num_kv_heads, head_dim, value_dim: H, G, D, Dv.
        alibi: whether there are slopes.
        needs_grad: whether anything will ask for gradients of query, key or value.
        equal_lengths: whether every sequence has as many keys as queries, so that both alignments are one.
        keyless: whether some sequence has no key.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    is_causal: bool = False
    causal_alignment: CausalAlignment = "lower_right"
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    batch_invariant: bool = False
    needs_grad: bool = False
    equal_lengths: bool = True
    keyless: bool = True

    @property
    def window(self) -> Window:
        """What a query sees of its sequence, causality included."""
        return Window.of(self.window_size, self.is_causal)

    @property
    def has_positive_scale(self) -> bool:
        """Whether the scale is above 0 as a kernel sees it: below float64 they take it in float32, without subnormals.

        Kernels that mask before they scale turn −inf into NaN under a scale of 0.
        """
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.scale >= torch.finfo(dtype).tiny

    @property
    def sees_all(self) -> bool:
        return self.window.is_open

    @property
    def may_be_blind(self) -> bool:
        """Whether a query may see no key at all: never where lengths are equal, since each sees its own place."""
        return not self.equal_lengths and (self.keyless or not self.sees_all)

    @property
    def features(self) -> frozenset[str]:
        """What this call asks for, by the names in ``FEATURES``."""
        asked = {
            "causal": self.window == (math.inf, 0),
            "window": self.window not in ((math.inf, 0), (math.inf, math.inf)),
            "softcap": self.softcap != 0,
            "alibi": self.alibi,
            "score_mod": self.score_mod is not None,
            "mask_mod": self.mask_mod is not None,
            "dropout": self.dropout_p > 0,
            "deterministic": self.deterministic and self.needs_grad,
            "batch_invariant": self.batch_invariant,
            "grouped heads": self.num_heads != self.num_kv_heads,
            "cross": not self.equal_lengths,
            "upper_left": self.is_upper_left,
            "no keys": not self.equal_lengths and self.keyless,
            "scale ≤ 0": not self.has_positive_scale,
            "value dim": self.head_dim != self.value_dim,
        }
        return frozenset(name for name, wanted in asked.items() if wanted)

    @property
    def lower_right(self) -> bool:
        """Whether the diagonal ends at the lower right; where lengths are equal, both alignments are one."""
        return self.equal_lengths or self.causal_alignment == "lower_right"

    @property
    def is_upper_left(self) -> bool:
        """Whether it matters that the diagonal begins at the upper left."""
        return not self.lower_right and not self.sees_all

    def shift(self, queries: int, keys: int) -> int:
        """The key position that stands across from query 0: the diagonal runs through (i, i + shift)."""
        return keys - queries if self.causal_alignment == "lower_right" else 0


class Problem(NamedTuple):
    """A call but for query, key and value: what every kernel is told beside them.

    ``dims`` are the head dims that the chosen backend is called with, where that has been looked up already.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    alibi_slopes: Tensor | None
    spec: AttentionSpec
    dims: tuple[int, int] | None = None


# (query (T, H, D), key (S, G, D), value (S, G, Dv), problem) to out (T, H, Dv), lse (T, H) in at least float32 and, if
# weights are dropped, what the random numbers began from, as two integers (2,)
Forward = Callable[[Tensor, Tensor, Tensor, Problem], tuple[Tensor, ...]]


class Known(NamedTuple):
    """What a backward is told beside the forward's inputs.

    ``grad`` (T, H, Dv) and ``grad_lse`` (T, H) or None are the gradients of ``out`` and ``lse``, and ``rng_state`` what
    the forward gave third, if anything.
    """

    grad: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    rng_state: Tensor | None


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
Backward = Callable[[Known, Tensor, Tensor, Tensor, Problem], Gradients]

# What a call may ask for beyond plain attention, and what to change where a backend does not have it.
FEATURES = {
    "causal": "has no causality: leave is_causal at False.",
    "window": "has no windows: leave window_size at (-1, -1).",
    "softcap": "has no softcap: leave softcap at 0.",
    "alibi": "has no ALiBi: leave out alibi_slopes.",
    "score_mod": "takes no score_mod: use softcap and alibi_slopes where they say it.",
    "mask_mod": "takes no mask_mod: use is_causal and window_size where they say it.",
    "dropout": "has no dropout: leave dropout_p at 0.",
    "deterministic": "its backward adds in no fixed order: leave deterministic at False.",
    "batch_invariant": "does not promise batch invariance: leave batch_invariant at False.",
    "grouped heads": "has no grouped heads: repeat key and value.",
    "cross": "wants as many keys as queries in every sequence.",
    "upper_left": 'aligns causality and windows lower right only: pass causal_alignment="lower_right".',
    "no keys": "wants keys in every sequence that has queries.",
    "scale ≤ 0": "needs a scale above 0: negate query and pass -scale.",
    "value dim": "wants values with the head dim of the keys.",
}
# What every backend has, by itself or from ``kernels/adapters.py`` and ``rewrites.py``.
COMMON = frozenset({"causal", "grouped heads", "cross", "upper_left", "no keys", "value dim"})


@dataclass(frozen=True)
class Backend:
    """A kernel's name, what it has, and how to run it. ``kernels/adapters.py`` adds what it has not and can be given.

    Attributes:
        name: what ``backend=`` takes.
        about: the kernel in a line.
        missing: why it can't run on this machine at all, or None.
        forward: rows past the layout's total may be left unwritten. A row that sees no key gives 0 and −inf.
        backward: the gradients; rows past the totals may be left unwritten. None if ``forward`` is made of
            differentiable operations; else both are registered as operators (``kernels/custom_ops.py``).
        features: the names out of ``FEATURES`` that it has, by its own documentation.
        device_type: where its tensors are; None for anywhere.
        min_capability: the lowest compute capability of a CUDA device, (major, minor).
        dtypes: that it takes; None for all.
        max_head_dim: the largest head dim that it takes.
        head_dim_multiple: head dims are padded with zeros to a multiple of it.
        one_head_dim: whether values are padded to the head dim of the keys, or these to theirs.
        head_dims: the only head dims (D, Dv) that it takes, if there are but a few; others are padded to one of them.
        compiled_for: the head dims that its kernels are compiled for, if others run in the next wider one's.
        refuses: further reasons why it can't run a call, each a sentence that says what to change.
        lower_right_only: whether it has the lower right alignment alone; the other one is made of it.
        bears_blind_rows: whether it takes queries that see no key; where it does not, they are left out of its call.
        reads_past_end: whether rows past the last offset take part, times 0: then they are kept from it.
        lse_gradient: whether ``backward`` takes the gradient of lse; where it does not, it is brought in from above.
        rng_on_host: whether ``forward`` tells the state of its random numbers on the CPU.
        is_reference: whether it is what others are held against, and so claims everything everywhere.
    """

    name: str
    about: str
    missing: Callable[[], str | None]
    forward: Forward
    backward: Backward | None = None
    features: frozenset[str] = frozenset()
    device_type: str | None = None
    min_capability: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] | None = None
    max_head_dim: float = math.inf
    head_dim_multiple: int = 1
    one_head_dim: bool = False
    head_dims: tuple[tuple[int, int], ...] | None = None
    compiled_for: tuple[int, ...] | None = None
    refuses: Callable[[AttentionSpec], list[str]] = lambda spec: []
    lower_right_only: bool = False
    bears_blind_rows: bool = True
    reads_past_end: bool = False
    lse_gradient: bool = False
    rng_on_host: bool = False
    is_reference: bool = False

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """The reasons why it can't run a call by its own documentation; empty if it can."""
        reasons = []
        if self.device_type is not None and spec.device.type != self.device_type:
            wanted = "the CPU" if self.device_type == "cpu" else f"a {self.device_type.upper()} device"
            reasons.append(f"needs tensors on {wanted}, got {spec.device}: move them there.")
        elif spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < self.min_capability:
            needed = ".".join(map(str, self.min_capability))
            name = torch.cuda.get_device_name(spec.device)
            reasons.append(f"needs compute capability {needed} or more; {name} has less.")
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            *most, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(
                f"needs {', '.join(most)} or {last}, got {spec.dtype}: cast the inputs or use torch.autocast."
            )
        if max(spec.head_dim, spec.value_dim) > self.max_head_dim:
            reasons.append(f"head dims go up to {self.max_head_dim}, got {max(spec.head_dim, spec.value_dim)}.")
        reasons += [advice for feature, advice in FEATURES.items() if feature in spec.features - self.features]
        return reasons + self.refuses(spec)

    def padded(self, head_dim: int, value_dim: int, *, any_of_them: bool = False) -> tuple[int, int] | None:
        """The head dims that it is called with for these, whatever ``head_dims`` says if asked; None if too many."""
        if self.head_dims is not None and not any_of_them:
            enough = [(d, v) for d, v in self.head_dims if d >= head_dim and v >= value_dim]
            return min(enough, key=sum, default=None)
        step = self.head_dim_multiple
        d, v = (-(-dim // step) * step for dim in (head_dim, value_dim))
        if self.one_head_dim:
            d = v = max(d, v)
        return (d, v) if max(d, v) <= self.max_head_dim else None

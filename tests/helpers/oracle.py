"""The oracle: varlen attention in float64 over one dense (H, T, S) score matrix. Shares no code with the package.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims, N buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nt_attention import RelativeBias


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "lower_right",
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out (N, H, Dv) and lse (N, H), float64 and differentiable; 0 and −inf in the rows past the sequences.

    The mods get index tensors that broadcast over (H, T, S), and must take any pair of positions.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    past = query.shape[0] - sum(lengths)
    query, key, value = query[: sum(lengths)].double(), key[: sum(key_lengths)].double(), value.double()
    value = value[: sum(key_lengths)]
    group = query.shape[1] // key.shape[1]
    of_query, i = _positions(lengths)
    of_key, j = _positions(key_lengths)
    i, j = i[None, :, None], j[None, None, :]

    kv_head = [h // group for h in range(query.shape[1])]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    scores = torch.einsum("thd,shd->hts", query, key[:, kv_head]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)

    aligned = i
    if causal_alignment == "lower_right":
        surplus = torch.tensor([keys - queries for queries, keys in zip(lengths, key_lengths, strict=True)] + [0])
        aligned = i + surplus[of_query][None, :, None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.double()
        slopes = slopes[of_query].T if slopes.dim() == 2 else slopes[:, None].expand(-1, len(of_query))
        scores = scores - slopes[:, :, None] * (aligned - j).abs()
    b, h = of_query[None, :, None], torch.arange(query.shape[1])[:, None, None]
    if relative is not None:
        radius = len(relative.buckets) // 2
        bucket = relative.buckets[(j - aligned).clamp(-radius, radius) + radius]
        t, s = torch.arange(len(query))[None, :, None], torch.arange(len(key))[None, None, :]
        if relative.bias is not None:
            scores = scores + relative.bias.double()[h, bucket]
        if relative.query_bias is not None:
            scores = scores + relative.query_bias.double()[t, h, bucket]
        if relative.key_bias is not None:
            scores = scores + relative.key_bias.double()[s, h, bucket]
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)

    visible = of_query[None, :, None] == of_key[None, None, :]
    left, right = window_size
    if left >= 0:
        visible = visible & (aligned - j <= left)
    if right >= 0:
        visible = visible & (j - aligned <= right)
    if is_causal:
        visible = visible & (j <= aligned)
    if mask_mod is not None:
        visible = visible & mask_mod(b, h, i, j)
    scores = scores.masked_fill(~visible, -torch.inf)

    # one more key of value 0 for the sink; without sinks it is masked, and avoids a special case for no keys
    sink = scores.new_tensor([-torch.inf]) if sinks is None else sinks.double()
    scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:2], 1)], -1)
    value = torch.cat([value, value.new_zeros(1, *value.shape[1:])])
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    norm = weights.sum(-1, keepdim=True)
    has_keys = norm > 0
    norm = torch.where(has_keys, norm, 1.0)
    out = torch.einsum("hts,shd->thd", weights / norm, value[:, kv_head])
    lse = torch.where(has_keys, norm.log() + peak, -torch.inf).squeeze(-1).T
    out = torch.cat([out, out.new_zeros(past, *out.shape[1:])])
    return out, torch.cat([lse, lse.new_full((past, lse.shape[1]), -torch.inf)])


def _positions(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(T,) the sequence of each token, and its position there."""
    positions = [(b, position) for b, length in enumerate(lengths) for position in range(length)]
    table = torch.tensor(positions, dtype=torch.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def visible_pairs(lengths: Sequence[int], key_lengths: Sequence[int], **options: Any) -> int:
    """How many (query, key) pairs the attention mask leaves: the weights that are not 0."""
    total = 0
    for queries, keys in zip(lengths, key_lengths, strict=True):
        q, k, v = torch.ones(queries, 1, 1), torch.ones(keys, 1, 1), torch.eye(keys)[:, None]
        total += int((attention(q, k, v, [queries], [keys], **options)[0] > 0).sum())
    return total


@dataclass
class Problem:
    """Random inputs of an attention call with their options, and the gradients that come in from above.

    Every size is prime, or a prime times another one, and differs from all others, so that swapped dimensions fail.
    """

    lengths: Sequence[int]
    key_lengths: Sequence[int] | None = None
    heads: int = 5
    kv_heads: int = 5
    head_dim: int = 11
    value_dim: int = 11
    past: tuple[int, int] = (0, 0)  # rows past the last query, and past the last key
    sinks: bool = False
    alibi: str = ""  # "", "H" or "BH"
    relative: Sequence[str] = ()  # of "bias", "query_bias" and "key_bias"
    buckets: tuple[int, int] = (23, 19)  # the largest distance with a bucket of its own, and N
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        rows = sum(self.lengths) + self.past[0]
        keys = sum(self.lengths if self.key_lengths is None else self.key_lengths) + self.past[1]
        self.inputs = {
            "query": random(rows, self.heads, self.head_dim).to(self.dtype),
            "key": random(keys, self.kv_heads, self.head_dim).to(self.dtype),
            "value": random(keys, self.kv_heads, self.value_dim).to(self.dtype),
        }
        if self.sinks:
            self.inputs["sinks"] = random(self.heads).to(self.dtype)
        radius, count = self.buckets
        shapes = {"bias": (self.heads, count), "query_bias": (rows, self.heads, count)}
        shapes["key_bias"] = (keys, self.heads, count)
        self.inputs |= {name: random(*shapes[name]).to(self.dtype) for name in self.relative}
        self.bucket_table = torch.randint(count, (2 * radius + 1,), generator=draw)
        self.grads = (random(rows, self.heads, self.value_dim).to(self.dtype), random(rows, self.heads))
        self.options = dict(self.options)
        if self.alibi:
            shape = (self.heads,) if self.alibi == "H" else (len(self.lengths), self.heads)
            self.options["alibi_slopes"] = torch.rand(*shape, generator=draw) / 4

    def solve(self, function: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Outputs and gradients of ``function(query=, key=, value=, [sinks=, relative=,] **options)``, by name."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in self.inputs.items()}
        out, lse = function(**self.arguments(leaves), **self.options)
        incoming = (self.grads[0].to(out.dtype), self.grads[1].to(lse.dtype))
        found = torch.autograd.grad((out, lse), tuple(leaves.values()), incoming)
        return {"out": out, "lse": lse} | {f"d {name}": g for name, g in zip(leaves, found, strict=True)}

    def arguments(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of a call, from tensors with the names of ``inputs``."""
        arguments: dict[str, Any] = {name: x for name, x in tensors.items() if name not in self.relative}
        if self.relative:
            biases = {name: tensors[name] for name in self.relative}
            arguments["relative"] = RelativeBias(self.bucket_table.to(tensors["query"].device), **biases)
        return arguments

    def truth(self) -> dict[str, Tensor]:
        def function(**arguments: Any) -> tuple[Tensor, Tensor]:
            return attention(**arguments, lengths=self.lengths, key_lengths=self.key_lengths)

        return self.solve(function)


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name].detach().double(),
            want[name].detach().double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# Which keys are visible. With lengths that differ on both sides there are fully masked rows as well.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal-upper_left": {"is_causal": True, "causal_alignment": "upper_left"},
    "own-position-only": {"window_size": (0, 0)},
    "left-open": {"window_size": (-1, 3)},
    "right-open-upper_left": {"window_size": (2, -1), "causal_alignment": "upper_left"},
    "both-sides": {"window_size": (7, 3)},
    "both-sides-upper_left": {"window_size": (7, 3), "causal_alignment": "upper_left"},
    "causal-window": {"window_size": (5, 9), "is_causal": True},
    "causal-window-upper_left": {"window_size": (5, -1), "is_causal": True, "causal_alignment": "upper_left"},
}

# Other options of a call, one at a time and together.
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"heads": 6, "kv_heads": 3},
    "multi-query": {"heads": 3, "kv_heads": 1, "options": {"scale": 0.37}},
    "narrow-values": {"value_dim": 7},
    "wide-values-gqa": {"value_dim": 13, "heads": 6, "kv_heads": 2},
    "alibi": {"alibi": "H"},
    "alibi-each-gqa": {"alibi": "BH", "heads": 6, "kv_heads": 3},
    "sinks": {"sinks": True},
    "relative": {"relative": ("bias", "query_bias", "key_bias")},
    "relative-alibi-gqa": {"relative": ("bias", "query_bias", "key_bias"), "alibi": "BH", "heads": 6, "kv_heads": 3},
    "all": {"sinks": True, "alibi": "BH", "heads": 6, "kv_heads": 3, "value_dim": 7, "options": {"scale": 0.37}},
}

LENGTHS: dict[str, dict[str, Any]] = {
    "self": {"lengths": [5, 0, 1, 127, 65, 13]},
    "cross": {"lengths": [5, 0, 1, 127, 65, 13, 3], "key_lengths": [11, 3, 0, 65, 127, 13, 1], "past": (3, 2)},
}


def problem(lengths: str, geometry: str, extra: str, /, **more: Any) -> Problem:
    """The named case. `more` replaces fields of the names, and adds options to theirs."""
    fields = {**LENGTHS[lengths], **EXTRAS[extra], **more}
    fields["options"] = {**GEOMETRIES[geometry], **EXTRAS[extra].get("options", {}), **more.get("options", {})}
    return Problem(**fields)

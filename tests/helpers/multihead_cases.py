"""Ragged batches for VarlenMultiheadAttention in every form of input, and what the module must give on them.

Each sequence runs by itself: through ``nn.MultiheadAttention``, or through the oracle in ``expected``.

Dimensions: B sequences, T tokens, L and S (longest) lengths of queries and keys, E embed dim, H and G heads of queries
and of keys, D head dim.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import torch
from parameters import with_random_parameters
from rotary_reference import frequencies_of, rotated_by_complex_numbers
from torch import Tensor, nn
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.modules.rotary import Rotary

EMBED, HEADS = 35, 5
LENGTHS, KEY_LENGTHS = [5, 0, 1, 13, 3], [7, 2, 0, 11, 3]
PAST = 3  # rows past the layout's end, one fewer for keys
FORMS = ["jagged", "packed", "strided", "list"]
TOLERANCE = 1e-9

# Rows of the tables: options of the constructor. Those that nn.MultiheadAttention has come first.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "add_bias_kv": {"add_bias_kv": True},
    "both added, no bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "kdim, vdim": {"kdim": 22, "vdim": 26, "add_bias_kv": True},
    "length first": {"batch_first": False, "dropout": 0.0},
    "num_kv_heads": {"num_kv_heads": 1, "backend": "cpu"},
    "grouped heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 7},
    "head_dim": {"head_dim": 13},
    "window_size": {"window_size": (3, 1)},
    "window after": {"window_size": (-1, 0)},
    "softcap": {"softcap": 0.7},
    "scale": {"scale": 0.7, "cuda_graphs": True},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "norm of one's own": {"qk_norm": lambda dim: nn.Sequential(nn.Linear(dim, dim), nn.Tanh())},
    "rotary": {"rotary": Rotary(100.0, dims=6)},
    "interleaved": {"rotary": Rotary(100.0, interleaved=True), "head_dim": 6},
    "all": {
        **{"num_heads": 6, "num_kv_heads": 3, "head_dim": 11, "window_size": (4, 2), "softcap": 0.9, "scale": 0.6},
        **{"sinks": True, "alibi": True, "qk_norm": "rms", "rotary": Rotary(30.0, dims=4)},
    },
    "added keys": {
        **{"add_bias_kv": True, "add_zero_attn": True, "num_heads": 6, "num_kv_heads": 3, "head_dim": 7},
        **{"softcap": 0.9, "scale": 0.6, "sinks": True, "qk_norm": "layer", "rotary": Rotary(30.0, dims=4)},
    },
    "other widths": {"kdim": 22, "vdim": 26, "num_kv_heads": 1, "head_dim": 6, "rotary": Rotary()},
}
STOCK = [*OPTIONS][:5]


def random_sequences(lengths: Sequence[int], width: int = EMBED, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(length, width, dtype=dtype, requires_grad=True) for length in lengths]


def make(name: str, **more: Any) -> nta.VarlenMultiheadAttention:
    options = {"num_heads": HEADS, "batch_first": True, "dtype": torch.float64, **OPTIONS[name], **more}
    module = with_random_parameters(nta.VarlenMultiheadAttention(EMBED, **options))
    module.rotary = options.get("rotary")  # for `expected`
    return module


def inputs_of(module: nn.MultiheadAttention, cross: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values; in self-attention the same list."""
    queries = random_sequences(LENGTHS)
    if not cross and module.kdim == module.vdim == EMBED:
        return queries, queries, queries
    return queries, random_sequences(KEY_LENGTHS, module.kdim), random_sequences(KEY_LENGTHS, module.vdim)


def in_form(form: str, parts: list[Tensor], past: int) -> Any:
    if form == "packed":
        return torch.cat([*parts, torch.randn(past, parts[0].shape[1], dtype=parts[0].dtype)])
    layouts = {"jagged": torch.jagged, "strided": torch.strided}
    return parts if form == "list" else torch.nested.as_nested_tensor(parts, layout=layouts[form])


def call(form: str, module: nn.Module, parts: Sequence[list[Tensor]], **arguments: Any) -> tuple[Tensor, Any]:
    """The outputs of all tokens, concatenated, and the weights. A list that occurs twice in ``parts`` is one object."""
    queries, keys, values = parts
    once = {id(keys): in_form(form, keys, PAST - 1), id(values): in_form(form, values, PAST - 1)}
    once[id(queries)] = in_form(form, queries, PAST)
    if form == "packed":
        arguments["layout"] = nta.SequenceLayout.from_lengths([len(x) for x in queries])
        if keys is not queries:
            arguments["key_layout"] = nta.SequenceLayout.from_lengths([len(x) for x in keys])
    out, weights = module(*(once[id(x)] for x in parts), **arguments)
    lengths = [len(x) for x in queries]
    if form == "packed":
        assert not out[sum(lengths) :].any()
        assert len(out) == sum(lengths) + PAST
        return out[: sum(lengths)], weights
    if form == "jagged":
        assert out.offsets() is once[id(queries)].offsets()
        return out.values(), weights
    outs = out if form == "list" else out.unbind()
    assert [len(x) for x in outs] == lengths
    return torch.cat(list(outs)), weights


def results_of(found: tuple[Tensor, Tensor | None], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs, weights if there are any, and the gradients of all leaves through both, concatenated."""
    named = {"out": found[0]} | ({} if found[1] is None else {"weights": found[1]})
    draw = torch.Generator().manual_seed(7)
    above = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in named.values()]
    grads = torch.autograd.grad(list(named.values()), leaves, above, retain_graph=True, materialize_grads=True)
    return named | {"gradients": torch.cat([x.flatten() for x in grads])}


def assert_same_results(
    got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None], leaves: Sequence[Tensor], tolerance=TOLERANCE
) -> None:
    oracle.assert_same(results_of(got, leaves), results_of(want, leaves), tolerance)


def leaves_of(module: nn.Module, parts: Sequence[list[Tensor]]) -> list[Tensor]:
    inputs = {id(x): x for xs in parts for x in xs}
    return [*inputs.values(), *module.parameters()]


def added_keys(module: nn.MultiheadAttention) -> int:
    return (module.bias_k is not None) + module.add_zero_attn


def padded_weights(weights: Sequence[Tensor], added: int) -> Tensor:
    """(B, H, L, S and the added keys) of each sequence's (H, Li, Si and the added keys)."""
    queries, keys = (max(x.shape[dim] for x in weights) for dim in (1, 2))
    rows = []
    for x in weights:
        own, more = x.split([x.shape[2] - added, added], -1)
        columns = torch.cat([F.pad(own, (0, keys - x.shape[2])), more], -1)
        rows.append(F.pad(columns, (0, 0, 0, queries - x.shape[1])))
    return torch.stack(rows)


def one_at_a_time(
    module: nta.VarlenMultiheadAttention, parts: Sequence[list[Tensor]], masks: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs (T, E) and weights (B, H, L, S and the added keys) of nn.MultiheadAttention."""
    stock = module.to_torch()
    masks = [None] * len(parts[0]) if masks is None else masks
    found = [
        stock(q, k, v, attn_mask=mask, average_attn_weights=False) for q, k, v, mask in zip(*parts, masks, strict=True)
    ]
    return torch.cat([out for out, _ in found]), padded_weights([w for _, w in found], added_keys(stock))


def causal_masks(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """Causal masks (Li, Si), True where a key is hidden."""
    return [torch.ones(len(q), len(k), dtype=torch.bool).triu(1) for q, k, _ in zip(*parts, strict=True)]


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi slopes, with the recursion of the paper's code."""
    n = 1 << (heads.bit_length() - 1)
    plain = torch.tensor([2 ** (-8 * i / n) for i in range(1, n + 1)], dtype=torch.float64)
    if n == heads:
        return plain
    return torch.cat([plain, alibi_slopes(2 * n)[0::2][: heads - n]])


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """One sequence (L, H, D) at positions 0 to L − 1."""
    frequencies = frequencies_of(rotary, x.shape[-1])
    return rotated_by_complex_numbers(x, torch.arange(len(x)), frequencies, rotary.interleaved)


def projected(module: Any, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (L, H, D), keys (S, G, D) and values (S, G, D) of one sequence."""
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    widths = [h * module.head_dim for h in heads]
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = list(module.in_proj_weight.split(widths))
    biases = [0.0] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(widths)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (h, module.head_dim))
        for x, w, b, h in zip(parts, matrices, biases, heads, strict=True)
    )
    q, k = (x if norm is None else normalized(x, norm) for x, norm in ((q, module.q_norm), (k, module.k_norm)))
    if module.rotary is not None:
        q, k = rotated(q, module.rotary), rotated(k, module.rotary)
    return q, k, v


def normalized(x: Tensor, norm: nn.Module) -> Tensor:
    if not isinstance(norm, (nn.RMSNorm, nn.LayerNorm)):
        return norm(x)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * norm.weight
    return x + norm.bias if isinstance(norm, nn.LayerNorm) else x


def expected(
    module: Any,
    parts: Sequence[list[Tensor]],
    masks: Sequence[Tensor] | None = None,
    *,
    is_causal: bool = False,
    mask_mod: Callable[..., Tensor] | None = None,
    score_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and weights from the oracle, one sequence at a time. Unit vectors as values give the weights."""
    added = added_keys(module)
    outs, weights = [], []
    for b, (queries, keys, values) in enumerate(zip(*parts, strict=True)):
        q, k, v = projected(module, queries, keys, values)
        own = len(k)
        if module.bias_k is not None:
            k, v = (torch.cat([x, y.view(1, *x.shape[1:])]) for x, y in ((k, module.bias_k), (v, module.bias_v)))
        if module.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (k, v))
        mask = None if masks is None else F.pad(masks[b], (0, added))

        def score(s: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor, mask=mask, b=b) -> Tensor:
            s = s if mask is None or mask.dtype == torch.bool else s + mask
            return s if score_mod is None else score_mod(s, torch.tensor(b), h, i, j)

        def seen(_: Tensor, h: Tensor, i: Tensor, j: Tensor, mask=mask, b=b, own=own) -> Tensor:
            here = (j <= i) | (j >= own) | (not is_causal)
            here = here if mask is None or mask.dtype != torch.bool else here & ~mask
            return here if mask_mod is None else here & mask_mod(torch.tensor(b), h, i, j)

        which = torch.eye(len(k), dtype=torch.float64).unsqueeze(1).expand(-1, k.shape[1], -1)
        both, _ = oracle.attention(
            *(q, k, torch.cat([v, which], -1), [len(q)], [len(k)]),
            causal_alignment="upper_left",
            window_size=module.window_size,
            scale=module.scale,
            softcap=module.softcap,
            sinks=module.sinks,
            alibi_slopes=alibi_slopes(module.num_heads) if module.alibi else None,
            score_mod=score,
            mask_mod=seen,
        )
        out, weight = both.split([module.head_dim, len(k)], -1)
        outs.append(module.out_proj(out.flatten(1)))
        weights.append(weight.transpose(0, 1))
    return torch.cat(outs), padded_weights(weights, added)


def random_masks(parts: Sequence[list[Tensor]], heads: int | None, dtype: torch.dtype) -> list[Tensor]:
    """Masks (Li, Si) or (H, Li, Si). The first key is always visible; float masks also change scores."""
    masks = []
    for q, k, _ in zip(*parts, strict=True):
        mask = torch.rand(*([] if heads is None else [heads]), len(q), len(k)) < 0.4
        mask[..., :1] = False
        if dtype != torch.bool:
            mask = torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf).requires_grad_()
        masks.append(mask)
    return masks


def crop_mask(mask: Tensor, parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """The masks of each sequence in (L, S) or (B·H, L, S)."""
    each = [mask] * len(parts[0]) if mask.dim() == 2 else mask.unflatten(0, (len(parts[0]), -1))
    return [x[..., : len(q), : len(k)] for x, q, k in zip(each, parts[0], parts[1], strict=True)]


def masks_for(kind: str, parts: Sequence[list[Tensor]], heads: int, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    """The mask to pass, and the mask of each sequence. Those of floating-point numbers need gradients."""
    if "list" in kind:
        masks = random_masks(parts, heads if kind == "list by head" else None, dtype)
        if kind == "mixed list":
            masks[::2] = random_masks(parts, heads, dtype)[::2]
        return masks, masks
    more = 4 if "larger" in kind else 0
    size = [torch.empty(max(map(len, x)) + more, 0) for x in parts]
    (mask,) = random_masks([[x] for x in size], len(parts[0]) * heads if "each head" in kind else None, dtype)
    return mask, crop_mask(mask, parts)


def random_batches(count: int = 24) -> list[tuple[list[int], list[int]]]:
    """Lengths of queries and keys, in batches of various sizes. One of them has a sequence shorter than 2."""
    r = random.Random(0)
    lengths = [[r.randint(2, 23) for _ in range(r.choice([1, 2, 3, 5, 8]))] for _ in range(count)]
    lengths[count // 2][0] = 1
    return [(x, [r.randint(2, 19) for _ in x]) for x in lengths]


class Attend(nn.Module):
    """Attention of tokens with layouts or, to make them in a graph, offsets; without them, of NestedTensors."""

    def __init__(self, attention: nn.Module, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = attention, causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *places: Any) -> Tensor:
        layouts = [nta.SequenceLayout.from_offsets(x) if isinstance(x, Tensor) else x for x in places]
        named = dict(zip(("layout", "key_layout"), layouts, strict=False))
        return self.attention(query, key, value, is_causal=self.causal, need_weights=False, **named)[0]


def arguments_of(form: str, parts: Sequence[list[Tensor]]) -> list[Any]:
    """Query, key and value, of which equal ones are one object, and a layout or offsets for each form but "nested"."""
    layouts = [nta.SequenceLayout.from_lengths([*map(len, xs)]) for xs in parts[:2]]
    once = {id(xs): torch.cat(xs) for xs in parts}
    if form == "nested":
        once = {id(xs): torch.nested.as_nested_tensor(xs, layout=torch.jagged) for xs in parts}
    tensors = [once[id(xs)] for xs in parts]
    return tensors + {"nested": [], "layout": layouts, "offsets": [x.offsets.clone() for x in layouts]}[form]


def rows(out: Tensor) -> Tensor:
    return out.values() if out.is_nested else out


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The output and, with `backward`, which reentrant checkpoints need, the gradients."""
    for leaf in leaves:
        leaf.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]

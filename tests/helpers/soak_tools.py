"""What the programs of ``soak.py`` call: tensors with NaN around them, calls with their gradients, comparisons.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv the head dims of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nt_attention.kernels.relative import TERMS, RelativeBias
from nt_attention.layouts.paged import PagedLayout
from nt_attention.layouts.sequence import SequenceLayout
from nt_attention.layouts.tree import TreeLayout

# The largest error of an element, relative to the size of its row.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.008, torch.bfloat16: 0.05}
OF_QUERIES, OF_KEYS = ("query", "query_bias", "grad", "grad_lse"), ("key", "value", "key_bias")

# A tensor with the same numbers and other strides. All else in its memory is NaN.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "inside": lambda x: F.pad(x, (2, 1) * x.dim(), value=torch.nan)[(slice(2, -1),) * x.dim()],
    "one of three": lambda x: torch.stack([x * torch.nan, x, x * torch.nan], 1)[:, 1],
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: torch.stack([x, x * torch.nan], -1)[..., 0],
    "expanded": lambda x: x[:, :1].expand_as(x),  # all heads are the first one
}
Results = dict[str, Tensor]
Attend = Callable[..., Sequence[Tensor]]


def draw(arguments: Mapping[str, tuple[Any, ...]], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Standard normal numbers by name. The arguments are a form, the rows of NaN after the last one, and the shape."""
    drawn = {}
    for name, (form, past, *shape) in arguments.items():
        x = torch.randn(shape, device=device).to(dtype)
        drawn[name] = FORMS[form](torch.cat([x, x.new_full((past, *shape[1:]), torch.nan)]))
    return drawn


def exactly(x: Mapping[str, Tensor], layout: Any, keys: Any) -> dict[str, Tensor]:
    """The tensors in float64, without the rows past the last sequence."""
    rows = dict.fromkeys(OF_QUERIES, layout.total) | dict.fromkeys(OF_KEYS, keys.total)
    return {name: each[: rows.get(name)].double() for name, each in x.items()}


def results(attend: Attend, x: Mapping[str, Tensor], needs: Sequence[str] = ()) -> Results:
    """out, lse, and the gradients of the tensors that ``needs`` names."""
    x = {name: each.detach().requires_grad_(name in needs) for name, each in x.items()}
    more: dict[str, Any] = {"sinks": x["sinks"]} if "sinks" in x else {}
    if biases := {name: x[name] for name in TERMS if name in x}:
        most = next(iter(biases.values())).shape[-1] - 1
        more["relative"] = RelativeBias(torch.arange(-most, most + 1).abs().to(x["query"].device), **biases)
    outputs = attend(x["query"], x["key"], x["value"], **more)
    found = dict(zip(("out", "lse"), (y.detach() for y in outputs), strict=True))
    if needs:
        pairs = [(y, x[name].to(y.dtype)) for name, y in zip(("grad", "grad_lse"), outputs, strict=True) if name in x]
        pairs = [(y, grad) for y, grad in pairs if y.requires_grad]  # lse does not depend on value
        used, grads = zip(*pairs, strict=True)
        of_needs = torch.autograd.grad(used, [x[name] for name in needs], grads)
        found |= {f"gradient of {name}": grad for name, grad in zip(needs, of_needs, strict=True)}
    return found


def compare(got: Results, exact: Results, dtype: torch.dtype) -> float:
    """The largest error relative to the tolerance.

    Raises:
        AssertionError: it is above 1, or rows past the last sequence are not 0.
    """
    errors = {}
    for name, want in exact.items():
        rows, past = got[name][: len(want)].double(), got[name][len(want) :]
        assert (past == (-torch.inf if name == "lse" else 0)).all(), f"{name}: rows past the last sequence are not 0"
        squares = want.masked_fill(want.isinf(), 0).square()
        size = squares.mean(-1, keepdim=True).sqrt() + squares.mean().sqrt() / min(10, want.shape[-1]) + 0.01
        if name.startswith("gradient"):  # an element can be the small difference of large numbers
            terms = len(exact["out"]) if name in ("gradient of bias", "gradient of sinks") else 1
            if name in ("gradient of query_bias", "gradient of key_bias"):  # of the products of `out` and its gradient
                terms = max(1, exact["out"].shape[-1] // 16)
            if name == "gradient of key":  # a sum over the queries of a key
                terms = max(1, exact["out"][..., 0].numel() // max(1, want[..., 0].numel()))
            size = size + want.abs().amax() + terms**0.5 if want.numel() else size
        error = ((rows - want).abs() / size).masked_fill(rows == want, 0).nan_to_num(torch.inf)
        errors[name] = float(error.amax()) / TOLERANCES[dtype] if error.numel() else 0.0
    wrong = {name: float(f"{error:.3g}") for name, error in errors.items() if error > 1}
    assert not wrong, f"errors relative to the tolerance: {wrong}"
    return max(errors.values())


def compare_bits(first: Results, again: Results) -> None:
    different = [name for name in first if not torch.equal(first[name], again[name])]
    assert not different, f"the same call gave other bits: {', '.join(different)}"


def compare_alone(attend: Attend, got: Results, x: Mapping[str, Tensor], layout: Any, keys: Any) -> None:
    """Check that each sequence alone has the same bits. `attend` takes layouts after query, key and value."""
    offsets, of_keys = layout.host.tolist(), keys.host.tolist()
    for b in range(layout.batch_size):
        rows, key_rows = slice(*offsets[b : b + 2]), slice(*of_keys[b : b + 2])
        cut = dict.fromkeys(OF_QUERIES, rows) | dict.fromkeys(OF_KEYS, key_rows)
        only = {name: each[cut[name]].clone() if name in cut else each for name, each in x.items()}
        lengths = (len(only["query"]), len(only["key"]))
        layouts = [SequenceLayout.from_lengths([n], device=layout.device) for n in lengths]
        out = results(lambda *qkv, layouts=layouts, **more: attend(*qkv, *layouts, **more), only)["out"]
        assert torch.equal(out, got["out"][rows]), f"sequence {b} alone has other bits than in the batch"


def with_dropout(attend: Attend, exact: Attend, x: dict[str, Tensor], p: float, layout: Any, keys: Any) -> Attend:
    """``exact``, which has no dropout, with the weights that ``attend`` keeps. No sequence has more than Dv keys."""

    def one_hot(value: Tensor) -> Tensor:
        return F.one_hot(keys.position_ids, value.shape[-1]).to(value.dtype).unsqueeze(1).expand_as(value)

    kept = results(attend, x | {"value": one_hot(x["value"])})["out"] != 0

    def dropped(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        weights, lse = exact(query, key, one_hot(value), **more)  # (T, H, Dv), a weight of each key
        drawn = kept[weights > 1e-3].double()  # smaller ones may be 0 in 16 bits
        share, expected_error = float(drawn.sum()) / max(1, len(drawn)), (p * (1 - p) / max(1, len(drawn))) ** 0.5
        assert not len(drawn) or abs(share - (1 - p)) <= 5 * expected_error, f"a share of {share:.3f} weights is kept"
        values = keys.pad(value).repeat_interleave(query.shape[1] // key.shape[1], 2)[layout.sequence_ids]
        weights = (weights * kept / (1 - p))[..., : values.shape[1]]
        return torch.einsum("thj,tjhd->thd", weights, values), lse

    return dropped


def to_pages(keys: Any, page: int, *packed: Tensor) -> tuple[Any, ...]:
    """A `PagedLayout`, and pools with pages in a random order; with page 0, a slot for each sequence."""
    size, device = page or keys.max_seqlen + 3, keys.device
    count = 1 if not page else -(-keys.max_seqlen // size) + 1
    table = torch.randperm(keys.batch_size * count, device=device).view(-1, count)
    if page:
        unused = torch.arange(count, device=device) * page >= keys.lengths[:, None]
        paged = PagedLayout(table.masked_fill(unused, 2**30), keys.lengths, page)
    else:
        paged = PagedLayout.from_slots(table[:, 0] * size, keys.lengths, keys.max_seqlen)
    pools = [x.new_full((table.numel() * size, *x.shape[1:]), torch.nan) for x in packed]
    for pool, x in zip(pools, packed, strict=True):
        pool[paged.rows(keys.sequence_ids, keys.position_ids)] = x[: keys.total]
    return paged, *(pool.unflatten(0, (-1, page)) if page else pool for pool in pools)


def nest(x: Tensor, layout: Any, first: int, heads_first: bool) -> Tensor:
    """A NestedTensor with ``first`` rows of NaN before its sequences, and after them."""
    rows = F.pad(x, (0, 0, 0, 0, first, first), value=torch.nan)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(rows, layout.offsets + first)
    return nested.transpose(1, 2) if heads_first else nested


def unnest(attend: Attend, layout: Any, first: int, heads_first: bool) -> Attend:
    """`attend`, which returns NestedTensors as `nest` makes them, with packed results."""

    def unnested(*args: Tensor, **more: Any) -> list[Tensor]:
        out, lse = attend(*args, **more)
        nested = (out.transpose(1, 2) if heads_first else out, lse)
        return [y.values()[first : first + layout.total] for y in nested]

    return unnested


def on_tree(attend: Attend, tree: TreeLayout) -> Attend:
    """`attend`, which runs all sequences of a tree, on the rows of the tree."""

    def on_rows(*qkv: Tensor, relative: RelativeBias | None = None, **more: Any) -> list[Tensor]:
        relative = relative and relative.map_rows(tree.expand, tree.expand)
        return [tree.collapse(y) for y in attend(*map(tree.expand, qkv), relative=relative, **more)]

    return on_rows

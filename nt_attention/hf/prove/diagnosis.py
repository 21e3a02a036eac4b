"""Says why the packed run of a twin is wrong: which module mixes sequences, or depends on the packed row.

The packed row runs twice. In the second run, another sequence has other tokens, or another length. The first module
whose output changes for a sequence, though its inputs for this sequence do not, is the cause.

Dimensions: T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...torch_private import pytree
from ..route.packed_mask import PackedMask
from .twin import padding_of, vocabulary_of

_TOLERANCE = 1e-5
_LOWER_TOLERANCE = 1e-7  # for changes that later modules make larger
_WIDEST = 4  # tokens that a convolution reaches; a state that decays reaches more


class _Seen(NamedTuple):
    """The inputs and outputs of a module for the tokens of one sequence, in the order of the calls."""

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Cause(NamedTuple):
    name: str
    kind: str
    changed: list[bool]  # for each token of the sequence

    @property
    def part(self) -> str | None:
        """The class of the module, or None if it is the base model."""
        return self.kind if self.name else None


def diagnose(base: Any, islands: tuple[str, ...] = ()) -> tuple[str, str | None] | None:
    """Why the packed run of a patched base model is wrong, and the class of the module. None if this finds nothing.

    The class is None if the module is the base model.

    Args:
        base: the patched base model of a twin. Its call packs.
        islands: the classes of modules that run on padded rows.
    """
    generator = torch.Generator().manual_seed(3)
    first, second, third, other = (
        torch.randint(6, vocabulary_of(base), (n,), generator=generator) for n in (11, 9, 13, 13)
    )
    row = [first, second, third]
    if (cause := _changed(base, row, row)) is not None:
        return (
            f"{_describe(cause)} gives other values when the same row runs again: it keeps a state between calls, or "
            "is random",
            cause.part,
        )
    before = _changed(base, row, [other[:11], second, third])
    after = _changed(base, row, [first, second, other])
    if (cause := before or after) is not None:
        but_first = _changed(base, row, [torch.cat([first[:1], other[:10]]), second, other])
        depends = f"tokens of sequence 2 depend on sequence {1 if before else 3}: {_describe(cause)}"
        if cause.part in islands:
            return f"{depends} computes with all rows of a batch", cause.part
        if but_first is None:
            return f"{depends} uses the first token of the row for all tokens", cause.part
        if "Attention" in cause.kind:
            return f"{depends} does not keep the sequences of a packed row apart", cause.part
        if before and after:
            return f"{depends} mixes {'all' if all(cause.changed) else 'neighboring'} tokens of the row", cause.part
        if not before:
            return f"{depends} uses later tokens of the row, such as its last one", cause.part
        reach = max(place for place, changed in enumerate(cause.changed) if changed) + 1
        if reach <= _WIDEST:
            return (
                f"{depends} has a convolution along the row, which reaches {reach} tokens into the next sequence",
                cause.part,
            )
        return f"{depends} keeps a state along the row", cause.part
    before = _changed(base, row, [first[:6], second, third])
    after = _changed(base, row, [first, second, torch.cat([third, other])])
    if (cause := after or before) is not None:
        depends = f"values of sequence 2 depend on the lengths of other sequences: {_describe(cause)}"
        if after is None:
            return f"{depends} counts positions along the row", cause.part
        return f"{depends} uses the length of the row, or of its longest sequence", cause.part
    cause = _first_change(_run(base, row, 2), _run(base, [third], 0))
    if cause is None:
        return None
    if "Attention" in cause.kind:
        return (
            f"{_describe(cause)} has a window, chunks, or another restriction that only the attention mask contains",
            cause.part,
        )
    return f"{_describe(cause)} gives other values in a packed row than for each sequence alone", cause.part


def raised_in(base: nn.Module, error: Exception) -> tuple[str, str | None]:
    """The name of the innermost module that raised an error, from the traceback, and its class if it is a part."""
    names = {id(x): (f"{name} ({type(x).__name__})", type(x).__name__) for name, x in base.named_modules() if name}
    found: tuple[str, str | None] = f"the forward of {type(base).__name__}", None
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self", traceback.tb_frame.f_locals.get("module"))
        found = names.get(id(module), found)
        traceback = traceback.tb_next
    return found


def _describe(cause: _Cause) -> str:
    return f"{cause.name} ({cause.kind})" if cause.name else f"the forward of {cause.kind}"


def _changed(base: Any, one: list[Tensor], two: list[Tensor]) -> _Cause | None:
    """The first module that gives the second sequence other values in the second row, from the same inputs."""
    return _first_change(_run(base, one, 1), _run(base, two, 1))


def _first_change(one: list[_Seen], two: list[_Seen], tolerance: float = _TOLERANCE) -> _Cause | None:
    """The first module whose outputs change, though its inputs do not. If they change a little, the cause is before."""
    for index, (before, after) in enumerate(zip(one, two, strict=False)):
        if before.name != after.name:
            return None
        if _differ(before.inputs, after.inputs, tolerance):
            continue
        for x, y in zip(before.outputs, after.outputs, strict=False):
            if (changed := _by_token(x, y, tolerance)).any():
                grown = tolerance > _LOWER_TOLERANCE and _differ(before.inputs, after.inputs, _LOWER_TOLERANCE)
                cause = _first_change(one[:index], two[:index], _LOWER_TOLERANCE) if grown else None
                return cause or _Cause(before.name, before.kind, changed.tolist())
    return None


def _differ(some: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    return any(bool(_by_token(x, y, tolerance).any()) for x, y in zip(some, others, strict=False))


def _by_token(x: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """(n,) bool, whether the values of a token differ."""
    if x.shape != y.shape:
        return torch.ones(1, dtype=torch.bool)
    if not x.numel():
        return torch.zeros(1, dtype=torch.bool)
    x, y = x.double().reshape(len(x), -1), y.double().reshape(len(y), -1)
    return (x - y).abs().amax(1) > tolerance * max(1e-6, float(x.abs().max()))


def _run(base: Any, row: list[Tensor], which: int) -> list[_Seen]:
    """Run the sequences packed, and record all modules for the sequence `which`."""
    lengths = [len(tokens) for tokens in row]
    total, begin = sum(lengths), sum(lengths[:which])
    seen: list[_Seen] = []

    def of_sequence(values: Any) -> Iterator[Tensor]:
        for x in pytree.tree_leaves(values):
            if not isinstance(x, Tensor) or isinstance(x, PackedMask):
                continue
            if x.dim() > 1 and x.shape[:2] == (1, total):
                yield x[0, begin : begin + lengths[which]].detach()
            elif x.dim() and x.shape[0] == total:
                yield x[begin : begin + lengths[which]].detach()

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = list(of_sequence((args, kwargs))), list(of_sequence(output))
        if outputs:
            seen.append(_Seen(names[module], type(module).__name__, inputs, outputs))

    names = {module: name for name, module in base.named_modules()}
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in names if module is not base]
    length = max(lengths)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.full(mask.shape, padding_of(base)).masked_scatter(mask, torch.cat(row))
    try:
        with torch.no_grad():
            out = base(input_ids=ids.to(base.device), attention_mask=mask.long().to(base.device))
    finally:
        for hook in hooks:
            hook.remove()
    end = [x[mask][begin : begin + lengths[which]] for x in out.values() if _is_padded(x, mask)]
    return [*seen, _Seen("", type(base).__name__, [], end)]


def _is_padded(value: Any, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == mask.shape

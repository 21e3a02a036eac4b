"""Runs modules on packed tokens as CUDA graphs.

Dimensions: B sequences, T rows of packed values, E embed dim; in a graph B and T are those of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..graphs.cache import CapturedCalls, is_part_of_a_graph, reasons_of_call
from ..graphs.capture import Bucket, Computed, Form, Sizes, Work
from ..graphs.device import NotCapturedError, Reasons, check
from ..kernels.select import selection_key
from ..layouts.bounded import BoundedLayout, LengthsUnknownError
from ..layouts.protocol import Layout


class PackedValues(NamedTuple):
    """An input of a module: values (T, E) and their sequences."""

    values: Tensor
    layout: Layout


def run_as_graph(
    graphs: CapturedCalls,
    module: nn.Module,
    options: Hashable,
    inputs: Sequence[PackedValues],
    function: Callable[[list[PackedValues]], Tensor],
) -> Tensor | None:
    """Run a module on packed tokens as a CUDA graph, and count the call.

    Args:
        graphs: the graphs of the module, or of the handle of its patch.
        module: the module, on whose parameters the result depends.
        options: everything else on which the result depends.
        inputs: the inputs.
        function: computes the result for inputs with other layouts. It has the rows of the first input.

    Returns:
        The result; None if the call can't run as a graph, unless its time without one is asked for.
    """
    if is_part_of_a_graph():
        return None
    layouts = list({id(x.layout): x.layout for x in inputs}.values())

    def reasons() -> Reasons:
        yield from reasons_of_call(module, inputs[0].values, graphs.training)
        known = all(layout.knows_lengths and layout.batch_size for layout in layouts)
        yield not known, "its layouts know only bounds, or have no sequences"
        several = len({layout.batch_size for layout in layouts}) > 1
        yield several, "its layouts have different numbers of sequences"
        yield not all(len(x.values) for x in inputs), "the batch has no tokens"

    try:
        with graphs.counting():
            check(reasons())
            out: Tensor = graphs.run(_work(module, (options, *selection_key("auto")), inputs, layouts, function))
    except NotCapturedError as error:
        if error.begin is None or (span := error.begin()) is None:
            return None
        out = function(list(inputs))
        span.end()
    return out if len(out) == len(inputs[0].values) else out[: len(inputs[0].values)]


def _work(
    module: nn.Module,
    options: Hashable,
    inputs: Sequence[PackedValues],
    layouts: list[Layout],
    function: Callable[[list[PackedValues]], Tensor],
) -> Work:
    sides = [next(i for i, layout in enumerate(layouts) if x.layout is layout) for x in inputs]
    rows = [max(len(x.values) for x in inputs if x.layout is layout) for layout in layouts]

    def run(static: dict[str, Tensor], bucket: Bucket) -> Computed:
        bounded = [bounded_layout(static[f"lengths {j}"], its) for j, its in enumerate(bucket)]
        with without_lengths():
            out = function([PackedValues(static[f"values {i}"], bounded[side]) for i, side in enumerate(sides)])
        return Computed(out, [Form("tokens")], bounded)

    tensors = {f"values {i}": (x.values, Form("tokens", sides[i])) for i, x in enumerate(inputs)}
    tensors |= {f"lengths {j}": (x.cached_lengths, Form("rows", j)) for j, x in enumerate(layouts)}
    return Work(
        module=module,
        options=options,
        sizes=tuple([Sizes(x.batch_size, max(1, x.max_seqlen), n) for x, n in zip(layouts, rows, strict=True)]),
        inputs={name: x for name, (x, _) in tensors.items()},
        forms={name: form for name, (_, form) in tensors.items()},
        function=run,
    )


@contextmanager
def without_lengths() -> Iterator[None]:
    """A context in which an error says that what needs the lengths on the host can't be captured."""
    try:
        yield
    except LengthsUnknownError as error:
        raise NotCapturedError(f"it needs the lengths on the host ({str(error).splitlines()[0]})") from error


def bounded_layout(lengths: Tensor, bucket: Sizes) -> BoundedLayout:
    """The layout of sequences whose lengths (B,) int32 only the device knows."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return BoundedLayout(offsets, bucket.longest, bucket.tokens)

"""Runs modules on packed tokens as CUDA graphs.

Dimensions: B sequences, T rows of packed values, E embed dim; in a graph B and T are those of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..graphs.cache import CapturedCalls, is_part_of_a_graph, process_settings, why_not_a_graph
from ..graphs.capture import Bucket, Computed, Sizes, Work
from ..graphs.device import NotCapturedError
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
        The result; None if the call can't run as a graph.
    """
    if is_part_of_a_graph():
        return None
    layouts = list({id(x.layout): x.layout for x in inputs}.values())
    sides = [next(i for i, layout in enumerate(layouts) if x.layout is layout) for x in inputs]
    if (reason := _why_not(graphs, module, inputs, layouts)) is None:
        rows = [max(len(x.values) for x, i in zip(inputs, sides, strict=True) if i == j) for j in range(len(layouts))]
        sizes = [Sizes(x.batch_size, max(1, x.max_seqlen), count) for x, count in zip(layouts, rows, strict=True)]
        try:
            out: Tensor = graphs.run(_work(module, options, inputs, layouts, sides, function), tuple(sizes))
        except NotCapturedError as error:
            reason = str(error)
    graphs.count(reason)
    return out if reason is None else None


def _why_not(
    graphs: CapturedCalls, module: nn.Module, inputs: Sequence[PackedValues], layouts: list[Layout]
) -> str | None:
    if (reason := why_not_a_graph(module, inputs[0].values, graphs.training)) is not None:
        return reason
    if not all(layout.knows_lengths and layout.batch_size for layout in layouts):
        return "its layouts know only bounds, or have no sequences"
    if len({layout.batch_size for layout in layouts}) > 1:
        return "its layouts have different numbers of sequences"
    return None if all(len(x.values) for x in inputs) else "the batch has no tokens"


def _work(
    module: nn.Module,
    options: Hashable,
    inputs: Sequence[PackedValues],
    layouts: list[Layout],
    sides: list[int],
    function: Callable[[list[PackedValues]], Tensor],
) -> Work:
    values = {f"values {i}": x.values for i, x in enumerate(inputs)}
    lengths = {f"lengths {j}": x.cached_lengths for j, x in enumerate(layouts)}

    def shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
        of_values = {name: (bucket[i].tokens, *x.shape[1:]) for (name, x), i in zip(values.items(), sides, strict=True)}
        return of_values | {name: (its.sequences,) for name, its in zip(lengths, bucket, strict=True)}

    def run(static: dict[str, Tensor], bucket: Bucket) -> Computed:
        bounded = [_layout(static[name], its) for name, its in zip(lengths, bucket, strict=True)]
        with without_lengths():
            out = function([PackedValues(static[name], bounded[i]) for name, i in zip(values, sides, strict=True)])
        return Computed(out, (None,), bounded)

    form = tuple([(x.dtype, x.shape[1:], x.device, i) for x, i in zip(values.values(), sides, strict=True)])
    rows = len(inputs[0].values)
    return Work(
        module=module,
        key=(options, form, *process_settings(inputs[0].values.device), *selection_key("auto")),
        inputs=values | lengths,
        shapes=shapes,
        # rows past the last token would spread NaN to the gradients of weights, if they had NaN of another batch
        zeroed=frozenset(lengths | values if torch.is_grad_enabled() else lengths),
        function=run,
        part=lambda out, form: out[:rows],
    )


@contextmanager
def without_lengths() -> Iterator[None]:
    """A context in which an error says that what needs the lengths on the host can't be captured."""
    try:
        yield
    except LengthsUnknownError as error:
        raise NotCapturedError(f"it needs the lengths on the host ({str(error).splitlines()[0]})") from error


def _layout(lengths: Tensor, bucket: Sizes) -> BoundedLayout:
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return BoundedLayout(offsets, bucket.longest, bucket.tokens)

"""Runs modules on packed tokens as CUDA graphs.

Dimensions: B sequences, T rows of packed values, E embed dim; in a graph B and T are those of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..graphs.cache import CapturedCalls, check_call, is_part_of_a_graph, process_settings
from ..graphs.capture import Bucket, Computed, Sizes, Work
from ..graphs.device import NotCapturedError
from ..kernels.select import selection_key
from ..layouts.bounded import BoundedLayout, LengthsUnknownError
from ..layouts.protocol import Layout


class Packed(NamedTuple):
    """An input of a module: values (T, E) and their sequences."""

    values: Tensor
    layout: Layout


def run_as_graph(
    graphs: CapturedCalls,
    module: nn.Module,
    options: Hashable,
    inputs: Sequence[Packed],
    function: Callable[[list[Packed]], Tensor],
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
    try:
        out = _run(graphs, module, options, inputs, function)
    except NotCapturedError as error:
        graphs.count(str(error))
        return None
    graphs.count(None)
    return out


def _run(
    graphs: CapturedCalls,
    module: nn.Module,
    options: Hashable,
    inputs: Sequence[Packed],
    function: Callable[[list[Packed]], Tensor],
) -> Tensor:
    check_call(module, inputs[0].values, graphs.training)
    layouts = list({id(x.layout): x.layout for x in inputs}.values())
    side = [next(i for i, layout in enumerate(layouts) if x.layout is layout) for x in inputs]
    if not all(layout.knows_lengths and layout.batch_size for layout in layouts):
        raise NotCapturedError("its layouts know only bounds, or have no sequences")
    if len({layout.batch_size for layout in layouts}) > 1:
        raise NotCapturedError("its layouts have different numbers of sequences")
    rows = [max(len(x.values) for x, i in zip(inputs, side, strict=True) if i == j) for j in range(len(layouts))]
    if not all(rows):
        raise NotCapturedError("the batch has no tokens")
    sizes = tuple([Sizes(x.batch_size, max(1, x.max_seqlen), count) for x, count in zip(layouts, rows, strict=True)])
    values = {f"values {i}": x.values for i, x in enumerate(inputs)}
    lengths = {f"lengths {j}": x.cached_lengths for j, x in enumerate(layouts)}

    def shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
        of_values = {name: (bucket[i].tokens, *x.shape[1:]) for (name, x), i in zip(values.items(), side, strict=True)}
        return of_values | {name: (its.sequences,) for name, its in zip(lengths, bucket, strict=True)}

    def run(static: dict[str, Tensor], bucket: Bucket) -> Computed:
        bounded = [_layout(static[name], its) for name, its in zip(lengths, bucket, strict=True)]
        try:
            out = function([Packed(static[name], bounded[i]) for name, i in zip(values, side, strict=True)])
        except LengthsUnknownError as error:
            raise NotCapturedError(f"it needs the lengths on the host ({str(error).splitlines()[0]})") from error
        return Computed(out, (None,), bounded)

    kinds = tuple([(x.dtype, x.shape[1:], x.device, i) for x, i in zip(values.values(), side, strict=True)])
    own = len(inputs[0].values)
    work = Work(
        module=module,
        key=(id(module), options, kinds, *process_settings(inputs[0].values.device), *selection_key("auto")),
        inputs=values | lengths,
        shapes=shapes,
        # rows past the last token would spread NaN to the gradients of weights, if they had NaN of another batch
        zeroed=frozenset(lengths | values if torch.is_grad_enabled() else lengths),
        function=run,
        part=lambda out, form: out[:own],
        rebuild=lambda computed, results: results[0],
    )
    return cast(Tensor, graphs.run(work, sizes))


def _layout(lengths: Tensor, bucket: Sizes) -> BoundedLayout:
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return BoundedLayout(offsets, bucket.longest, bucket.tokens)

"""What a packed call gives, by design, that the padded one would not: each is said once.

Only what changes a loss or a pooled output is here. That outputs are 0 at padding, and that dropout draws other random
numbers, is in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import families
from ..route.rope import scales_differently

SPAN_LOSS = "the loss of question answering leaves out padding, which the padded run counts in its softmax"
LABELS = (
    "its loss leaves out labels at padding, or at a first token with padding before it, which the padded run counts "
    "unless they are -100"
)
POOLED = "it pools the first token of each row; the padded run pools the first position, which is padding in a row"
RESTARTS = (
    "position_ids that restart begin a new sequence; the padded run attends across them, because there is an "
    "attention_mask"
)
ROPE = "its rotary embedding is scaled by the length of each sequence; the padded run takes the longest row for all"
HEAD = "its head reads padding in the padded run; packed, it gives what each sequence gives alone"
PADDING = "a module that mixes tokens reads padding in the padded run; packed, it gives what each sequence gives alone"


def tell_differences(call: Any, padding: Any) -> None:
    """Tell the handle in what the result of a packed call differs from that of the padded one."""
    for difference, applies in _DIFFERENCES.items():
        if applies(call, padding):
            call.entry.handle.differ(difference)


def _has_span_loss(call: Any, padding: Any) -> bool:
    return call.entry.head == "span" and {"start_positions", "end_positions"} <= call.arguments.keys()


def _ignores_labels(call: Any, padding: Any) -> bool:
    return bool(padding.ignores_labels)


def _pools_other_tokens(call: Any, padding: Any) -> bool:
    pools = call.entry.pool is not None or (call.entry.head == "sequence" and not call.entry.is_causal)
    return pools and bool(padding.begins_padded)


def _restarts_beside_a_mask(call: Any, padding: Any) -> bool:
    arguments = call.arguments
    return padding.shares_rows and "attention_mask" in arguments and not families.ROW_INPUTS & arguments.keys()


def _reads_padding(call: Any, padding: Any) -> bool:
    return bool(call.entry.plan.reads_padding)


def _scales_differently(call: Any, padding: Any) -> bool:
    if not call.entry.scales_by_length:
        return False
    shortest = padding.layout.min_seqlen
    return any(scales_differently(module, shortest, padding.length) for module in call.base.modules())


_DIFFERENCES: dict[str, Callable[[Any, Any], bool]] = {
    SPAN_LOSS: _has_span_loss,
    LABELS: _ignores_labels,
    POOLED: _pools_other_tokens,
    RESTARTS: _restarts_beside_a_mask,
    ROPE: _scales_differently,
    PADDING: _reads_padding,
}

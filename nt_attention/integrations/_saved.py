"""What the plugins share: a patched model, and what its calls saved since the last log."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._patch import patch
from ..patching.forwards import active_handles


class Saved:
    """The patch of a model, which may be made already, and the counts of its handles.

    Attributes:
        options: those of `patch`.
        handles: the handles of the model's patches; empty before `start`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.handles, self._before = options, list[Any](), (0, 0)

    def start(self, model: nn.Module) -> None:
        """Patch the model, if neither it nor a part of it is patched."""
        handles = list(dict.fromkeys(active_handles(model))) or [patch(model, **self.options)]
        if handles != self.handles:
            self.handles = handles
            self._before = self._totals()  # what ran before, for example in another trainer, is not of this one

    def metrics(self) -> dict[str, float]:
        """The number of tokens in packed calls, and of positions of padding that were not computed. Needs no sync."""
        tokens, positions = self._totals()
        new_tokens, new_positions = tokens - self._before[0], positions - self._before[1]
        self._before = tokens, positions
        return {"packed_tokens": new_tokens, "padding_saved": new_positions - new_tokens}

    def _totals(self) -> tuple[int, int]:
        return sum(x.counts.tokens for x in self.handles), sum(x.counts.positions for x in self.handles)

"""What the plugins share: a patched model, and what its calls saved since the last log."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..patch import patch
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
        self.handles = list(dict.fromkeys(active_handles(model))) or [patch(model, **self.options)]

    def metrics(self) -> dict[str, float]:
        """The number of tokens in packed calls, and of positions of padding that were not computed. Needs no sync."""
        tokens, positions = (sum(getattr(x.counts, name) for x in self.handles) for name in ("tokens", "positions"))
        new_tokens, new_positions = tokens - self._before[0], positions - self._before[1]
        self._before = tokens, positions
        return {"packed_tokens": new_tokens, "padding_saved": new_positions - new_tokens}

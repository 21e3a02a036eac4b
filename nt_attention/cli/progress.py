"""What is being done, for those who wait: one line that is written anew on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
from typing import TextIO


class Progress:
    """Lines on ``stream``; on a terminal each takes the place of the one before."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()

    def say(self, text: str) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Leave an empty line to what is printed next."""
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

"""Warnings that point at the user's program, not at this library or at a package that called it for the user."""

from __future__ import annotations

import sys
import warnings

from .compiler import is_compiling

# Packages that call models and attention for the user.
_CALLERS = {"accelerate", "lightning", "nt_attention", "peft", "sentence_transformers", "torch", "transformers", "trl"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called into one of `_CALLERS`."""
    warnings.warn(message, category, stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """The `stacklevel` for `warn` of the first frame that is not in `_CALLERS`.

    Not `skip_file_prefixes` of Python 3.12: code that a compiler made, such as that of torch.fx, has no file.
    """
    if is_compiling():  # it can't trace frames
        return 2
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "torch")).partition(".")[0] in _CALLERS:
        frame, level = frame.f_back, level + 1
    return level

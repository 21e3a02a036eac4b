"""The installed transformers, after a check of its version: other files import what older versions do not have."""

from __future__ import annotations

import re

__all__ = ["check_version", "transformers"]

OLDEST = "5.17"  # as in pyproject.toml


def check_version(version: str) -> None:
    """Raise an ImportError for a version of transformers that is too old."""
    given, oldest = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, OLDEST))
    if given < oldest:
        raise ImportError(
            f"nt_attention needs transformers {OLDEST} or later, and {version} is installed: "
            f"pip install -U 'transformers>={OLDEST}'",
            name="transformers",
        )


try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = "nt_attention.hf needs transformers, which is not installed: pip install 'nt-attention[hf]'"
    raise ImportError(message, name="transformers") from None

check_version(transformers.__version__)

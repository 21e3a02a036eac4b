"""token_tiled: our own varlen kernels, which tile over packed tokens. See docs/token_tiled.md."""

from .backend import BACKEND as BACKEND

"""The `token_tiled` backend: Triton kernels whose tiles are ranges of packed tokens (docs/internals/token_tiled.md)."""

from .backend import BACKEND as BACKEND

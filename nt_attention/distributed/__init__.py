"""Ragged batches over several GPUs."""

from . import custom_op  # noqa: F401 (its operators)
from .sharded_layout import ShardedLayout

__all__ = ["ShardedLayout"]

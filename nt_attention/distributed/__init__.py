"""Ragged batches over several GPUs."""

from . import custom_op  # noqa: F401 (its operators)
from .attention import ExchangeChoice, explain_exchange
from .sharded_layout import ShardedLayout

__all__ = ["ExchangeChoice", "ShardedLayout", "explain_exchange"]

"""Ragged batches over several GPUs."""

from .attention import ExchangeChoice, explain_exchange
from .sharded_layout import ShardedLayout
from .tensor_parallel import HeadParallel

__all__ = ["ExchangeChoice", "HeadParallel", "ShardedLayout", "explain_exchange"]

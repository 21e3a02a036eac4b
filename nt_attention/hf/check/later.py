"""Models that can't run yet when they are patched, so that they are checked at their first call."""

from __future__ import annotations

from torch import nn
from transformers.integrations.fsdp import is_fsdp_enabled

from ..pack.tensor_parallel import is_distributed


def why_later(model: nn.Module) -> str | None:
    """Why a model can't be checked now, or None.

    On each rank of a process group the reason must be the same: the check of sharded parameters is a collective.
    """
    if any(x.is_meta for x in model.parameters()):
        return "its weights are on the meta device, or offloaded"
    if are_sharded(model):
        return "its parameters are sharded"
    return "rank 0 alone has its weights" if is_fsdp_enabled() else None


def are_sharded(model: nn.Module) -> bool:
    """Whether each rank has a part of the parameters: FSDP, ZeRO-3 and tensor parallelism."""
    if any(hasattr(x, "ds_id") or is_distributed(x) for x in model.parameters()):
        return True
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())

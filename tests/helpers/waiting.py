"""Counts host syncs: calls that wait for the device."""

import warnings

import torch


def syncs(function):
    """How often ``function()`` makes the host wait for the GPU, by ``torch.cuda.set_sync_debug_mode``."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)

"""A GPU that is not there, for tests of the backend selection."""

import dataclasses

import pytest
import torch

from nt_attention.kernels import support
from nt_attention.kernels.select import BACKENDS


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU of compute capability 9.0, whatever this machine has, on which all backends are installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an NVIDIA H199")
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(backend, missing=lambda: None))


@pytest.fixture
def not_verified(fake_gpu, monkeypatch):
    """This GPU has no verified support."""
    monkeypatch.setattr(support, "verified_on", lambda _: None)

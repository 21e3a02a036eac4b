"""Fixtures for tests of graphs and operators: an empty compile cache, and variants of the CPU backend."""

import pytest
import torch

from nt_attention.kernels.backends import cpu


@pytest.fixture(autouse=True)
def _fresh_compiler(fresh_compiler):
    """For every test here."""


@pytest.fixture
def fake(registered_variant):
    """Registers a variant of the CPU backend under a name. Returns which of its two functions ran, in order."""

    def make(listed="fake", **changes):
        ran = []

        def forward(*args):
            ran.append("forward")
            return cpu.forward(*args)

        def backward(*args):
            ran.append("backward")
            return cpu.backward(*args)

        registered_variant(cpu.BACKEND, listed, forward=forward, backward=backward, **changes)
        return ran

    return make


@pytest.fixture(autouse=True)
def _enable_saved_tensor_hooks():
    """In torch 2.11 a compiled torch.func.grad leaves them disabled, which breaks checkpointing in later tests."""
    yield
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        torch._C._autograd._saved_tensors_hooks_enable()

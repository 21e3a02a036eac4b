"""CUDA graphs on a machine without a GPU: what is captured is computed again in each replay.

Triton's interpreter runs attention, because only `token_tiled` supports layouts that know bounds on a CPU.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils import _pytree as pytree

import nt_attention as nta
from nt_attention import _cuda_graphs

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


class FakeDevice:
    """Has the methods of `_cuda_graphs.Device`."""

    def __init__(self, device):
        self.device = device

    @contextmanager
    def in_order(self):
        yield

    on_stream = in_order

    def capture(self, function):
        outputs = function()

        def replay():
            _cuda_graphs._thread.is_capturing = True
            try:
                again = function()
            finally:
                _cuda_graphs._thread.is_capturing = False
            for old, new in zip(leaves(outputs), leaves(again), strict=True):
                old.copy_(new)

        return replay, outputs


@pytest.fixture
def cuda_graphs(monkeypatch):
    """Calls can run as CUDA graphs: real ones on a GPU, else fake ones."""
    if GPU:
        yield
        return
    monkeypatch.setattr(_cuda_graphs, "Device", FakeDevice)
    monkeypatch.setattr(_cuda_graphs, "supports", lambda tensor: True)
    with nta.use_backend("token_tiled"):
        yield


def leaves(outputs):
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


def assert_same(got, want, tolerance=1e-5):
    got, want = leaves(got), leaves(want)
    assert len(got) == len(want) > 0
    for one, two in zip(got, want, strict=True):
        assert one.shape == two.shape
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)

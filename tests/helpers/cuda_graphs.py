"""CUDA graphs on a machine without a GPU: what is captured is computed again in each replay.

No CPU backend supports layouts that know only bounds. So attention reads the lengths, and runs as with known ones.
tests/token_tiled/test_token_tiled_bounds.py tests the kernels.
"""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from torch.utils import _pytree as pytree

import nt_attention as nta
from nt_attention import _cuda_graphs
from nt_attention.kernels import adapters, select

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

    def wait(self):
        """Nothing runs."""

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


def forward(query, key, value, call):
    """The forward of a backend for layouts that know only bounds, whose offsets are valid."""
    layouts = [nta.SequenceLayout.from_offsets(x.operator_offsets.clone()) for x in (call.layout, call.key_layout)]
    same = call.key_layout is call.layout
    keyless = layouts[1].min_seqlen == 0
    spec = dataclasses.replace(call.spec, bounded=False, equal_lengths=same, keyless=keyless, needs_grad=False)
    call = call._replace(layout=layouts[0], key_layout=layouts[0] if same else layouts[1], spec=spec, prepared=None)
    with select.automatic_choice():
        backend, dims = select.choose_for(call, "auto")
    return adapters.forward(backend, adapters.Inputs(query, key, value), call._replace(head_dims=dims))[:2]


@pytest.fixture
def cuda_graphs(monkeypatch):
    """Calls can run as CUDA graphs: real ones on a GPU, else fake ones."""
    if GPU:
        yield
        return
    monkeypatch.setattr(_cuda_graphs, "Device", FakeDevice)
    monkeypatch.setattr(_cuda_graphs, "supports", lambda tensor: True)
    known = select.BACKENDS["token_tiled"]
    fake = dataclasses.replace(known, forward=forward, prepare_forward=None, dtypes=None, refuses=lambda spec: [])
    monkeypatch.setitem(select.BACKENDS, "token_tiled", fake)
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

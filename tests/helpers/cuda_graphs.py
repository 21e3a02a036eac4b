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
            write(again, outputs)

        return replay, outputs

    def capture_both(self, forward, backward):
        """A replay of the forward makes new outputs, whose backward the other replay runs."""
        kept, capturing = [], self._capturing

        def replay():
            with capturing(), torch.enable_grad():
                kept[:] = [forward()]
            write(kept[0], outputs)

        def replay_backward():
            with capturing():
                write(backward(kept.pop()), gradients)

        outputs = forward()
        gradients = backward(outputs)
        return replay, outputs, replay_backward, gradients

    @staticmethod
    @contextmanager
    def _capturing():
        _cuda_graphs._thread.is_capturing = True
        try:
            yield
        finally:
            _cuda_graphs._thread.is_capturing = False


def write(new, old):
    """Write tensors to the memory of others, as a replay does."""
    for target, x in zip(leaves(old), leaves(new), strict=True):
        target.detach().copy_(x.detach())


def with_known_lengths(call):
    """A call with layouts that know only bounds, whose offsets are valid: the same with layouts that know the lengths.

    Returns it with the backend that runs it.
    """
    layouts = [nta.SequenceLayout.from_offsets(x.operator_offsets.clone()) for x in (call.layout, call.key_layout)]
    same = call.key_layout is call.layout
    keyless = layouts[1].min_seqlen == 0
    spec = dataclasses.replace(call.spec, bounded=False, equal_lengths=same, keyless=keyless)
    call = call._replace(layout=layouts[0], key_layout=layouts[0] if same else layouts[1], spec=spec, prepared=None)
    with select.automatic_choice():
        backend, dims = select.choose_for(call, "auto")
    return backend, call._replace(head_dims=dims)


def forward(query, key, value, call):
    """The forward of a backend for layouts that know only bounds."""
    backend, call = with_known_lengths(call)
    out, lse, state = adapters.forward(backend, adapters.Inputs(query, key, value), call)
    return (out, lse) if state is None else (out, lse, state)


def backward(saved, query, key, value, call):
    backend, call = with_known_lengths(call)
    inputs = adapters.Inputs(query, key, value)
    return adapters.backward(backend, saved, inputs, call)


@pytest.fixture
def cuda_graphs(monkeypatch):
    """Calls can run as CUDA graphs: real ones on a GPU, else fake ones."""
    if GPU:
        yield
        return
    monkeypatch.setattr(_cuda_graphs, "Device", FakeDevice)
    monkeypatch.setattr(_cuda_graphs, "supports", lambda tensor: True)
    known = select.BACKENDS["token_tiled"]
    given = {"forward": forward, "backward": backward, "prepare_forward": None, "prepare_backward": None}
    fake = dataclasses.replace(known, **given, dtypes=None, refuses=lambda spec: [])
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

"""The pair of models that a law compares."""

import pytest
import torch
from cuda_graphs import GPU, FakeEvent, cuda_graphs  # noqa: F401
from graph_entries import OWN_MASKS, Pair

from nt_attention.graphs import capture, policy


@pytest.fixture
def fake_times(monkeypatch):
    """`cuda_graphs="auto"` captures what comes often: the device waits for the host, and graphs gain."""
    monkeypatch.setattr(policy, "new_event", FakeEvent)
    monkeypatch.setattr(policy, "GAIN", float("inf"))


@pytest.fixture
def pair(request, cuda_graphs, fake_times, uncompared, monkeypatch):  # noqa: F811
    name, mode = request.param
    if name.split(",")[0] in OWN_MASKS and not GPU:  # the scalars of a `PackedMask` are on the CPU, and it reads them
        monkeypatch.setattr(capture, "READ_TAGS", ())
    if "compiled" in name:
        torch._dynamo.reset()
    return Pair(name, mode)

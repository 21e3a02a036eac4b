"""Shared by all tests: fixed seeds, buffers that show what was not written, and no GPU tests without a GPU."""

import dataclasses
import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

# Small operations on many threads wait for each other longer than they compute, the more so on a shared machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


VARIANTS = itertools.count()


@pytest.fixture
def enlist(monkeypatch: pytest.MonkeyPatch):
    """Puts a variant of a backend on the list for a test: ``enlist(backend, listed, **changes)``."""
    from nt_attention.kernels import custom_ops
    from nt_attention.kernels.select import BACKENDS

    def put(backend, listed, **changes):
        variant = dataclasses.replace(backend, **changes)
        if variant.backward is not None:  # its operator runs what it was made from, and its name is taken for good
            variant = dataclasses.replace(variant, name=f"{listed}_{next(VARIANTS)}")
            custom_ops.register(variant)
        monkeypatch.setitem(BACKENDS, listed, variant)

    return put


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that is made without being filled holds NaN."""

    def poison(make):
        def made(*args, **kwargs):
            buffer = make(*args, **kwargs)
            return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    assert torch.empty(1).isnan()
    assert torch.ones(1).new_empty(1).isnan()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

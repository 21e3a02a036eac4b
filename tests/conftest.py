"""Fixtures for all tests: a fixed seed, variants of backends, NaN in uninitialized memory, cases of sweeps."""

import dataclasses
import getpass
import logging
import os
import subprocess
import sys
import tempfile

import pytest
import torch
from interpreter import make_faster
from seeds import seed
from sweeps import not_drawn
from torch.utils._device import _device_constructors

# torch keeps a list of the functions that `torch.device("meta")` applies to, made at its first use. A fixture below
# replaces torch.empty; a list made then would lack it, and models on the meta device would take real memory.
_device_constructors()

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    make_faster()

# What is measured of a GPU is not kept in the user's cache.
os.environ.setdefault(
    "NT_ATTENTION_CACHE", os.path.join(tempfile.gettempdir(), f"nt_attention_tests_{getpass.getuser()}")
)

# pytest adds its handler to loggers that do not propagate. With a handler, torch.compile prints all graphs to this one.
logging.getLogger("torch.__trace").propagate = True

# With small tensors, threads wait for each other longer than they compute.
torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    if (processes := sys.modules.get("processes")) is not None:
        processes.end_all()


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed(0)


@pytest.fixture(autouse=True)
def _small_layers_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of encoders of audio and images pack, though the models of tests are too small to gain on a CPU."""
    if "transformers" in sys.modules:
        monkeypatch.setattr("nt_attention.hf.pack.small_batches.LEAST_SAVED", 0)


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No first batch of a patched model is compared: for tests that count calls, or look at those of modules."""
    from nt_attention.hf.check.first_batches import FirstBatches

    monkeypatch.setattr(FirstBatches, "_is_due", lambda *args: False)


@pytest.fixture
def fresh_compiler() -> None:
    """Empties the cache of torch.compile."""
    torch._dynamo.reset()


@pytest.fixture
def registered_variant(monkeypatch: pytest.MonkeyPatch):
    """``registered_variant(backend, name, **changes)`` registers a changed backend under ``name`` during the test."""
    from nt_attention.kernels.select import BACKENDS

    def register(backend, name, **changes):
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(backend, name=name, **changes))

    return register


@pytest.fixture
def attention_inputs():
    """The tensors and the layout of a call that every backend supports on a CPU."""
    from nt_attention import SequenceLayout

    return {name: torch.randn(7, 3, 5) for name in ("query", "key", "value")} | {
        "layout": SequenceLayout.from_lengths([4, 0, 3])
    }


@pytest.fixture
def backends_that_ran(registered_variant):
    """The names of the backends that ran, in order."""
    from nt_attention.kernels.backends import cpu, reference

    names = []
    for backend in (cpu.BACKEND, reference.BACKEND):

        def forward(*args, backend=backend):
            names.append(backend.name)
            return backend.forward(*args)

        registered_variant(backend, backend.name, forward=forward)
    return names


@pytest.fixture
def like_a_gpu(monkeypatch):
    """The state of a tensor is its version, not its content, as on a GPU. Returns the tensors that are read."""
    from nt_attention.layouts import cache

    reads, read = [], cache._read

    def counting(offsets):
        reads.append(offsets)
        return read(offsets)

    monkeypatch.setattr(cache, "state_of", lambda x: None if x.is_inference() else (x._version, x.data_ptr()))
    monkeypatch.setattr(cache, "_read", counting)
    return reads


@pytest.fixture
def uninitialized_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty``, ``empty_like`` and ``new_empty`` give tensors full of NaN."""

    def with_nan(allocate):
        def allocate_with_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate_with_nan

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, with_nan(getattr(owner, name)))
    assert torch.empty(1).isnan()
    assert torch.ones(1).new_empty(1).isnan()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `fresh_process` in a pytest of its own.

    In a long process, guards of PyTorch 2.13 fail at times that hold when it looks for the reason.
    """
    if "fresh_process" not in pyfuncitem.keywords or "NT_ATTENTION_FRESH" in os.environ or torch.cuda.is_available():
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=environment | {"NT_ATTENTION_FRESH": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole-sweeps") and not any("::" in argument for argument in config.args):
        left_out = not_drawn(items, least=config.getoption("--least-sweeps"))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]

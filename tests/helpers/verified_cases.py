"""Cases of `tools/verify_backends.py` for tests."""

import pytest
import torch
import verify_backends
from verify_backends import Case

from nt_attention.cli.calls import CAUSAL, Workload
from nt_attention.kernels.call import FEATURES

FEW, FEW_KEYS = (1, 17, 0, 5, 31), (4, 13, 3, 0, 19)


@pytest.fixture
def few_runs(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the tool sets it
    monkeypatch.setattr(verify_backends, "DETERMINISTIC_RUNS", 3)


def case(which="64", backend="fake", dtype=torch.float32, head_dim=16, value_dim=16, lengths=FEW, **fields):
    kind = "features" if which in FEATURES else "head dims"
    fields = {"kv_heads": 4, "options": CAUSAL} | fields
    return Case(backend, dtype, kind, Workload(which, "", lengths, 4, head_dim=head_dim, value_dim=value_dim, **fields))

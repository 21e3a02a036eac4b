"""Calls that the token_tiled backend supports, and why it does not support others."""

import dataclasses

import pytest
import torch

from nt_attention.kernels import triton_support
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.token_tiled import backend

SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 4, 4, 64, 64, 0.125)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 20, "value_dim": 12, "num_kv_heads": 2}, None),
        ({"head_dim": 256, "dtype": torch.float32}, None),
        ({"causal_alignment": "upper_left", "is_causal": True, "equal_lengths": False}, None),
        ({"softcap": 2.0, "alibi": True, "window_size": (3, 5), "dropout_p": 0.1}, None),
        ({"deterministic": True, "batch_invariant": True, "needs_grad": True}, None),
        ({"batch_invariant": True, "dropout_p": 0.1}, "leave dropout_p at 0"),
        ({"dtype": torch.float64}, "torch.autocast"),
        ({"head_dim": 576, "value_dim": 512}, None),
        ({"head_dim": 577}, "got 577"),
        ({"value_dim": 257, "dtype": torch.float32}, "in float32, got 257"),
        ({"score_mod": lambda score, *_: score}, "score_mod"),
        ({"mask_mod": lambda *_: True}, "mask_mod"),
        ({"device": torch.device("cpu")}, "got cpu: move them"),
    ],
)
def test_token_tiled_support(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    reasons = backend.BACKEND.unsupported(dataclasses.replace(SPEC, **change))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_old_gpu_is_not_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a T4")
    assert ["a T4" in reason for reason in backend.BACKEND.unsupported(SPEC)] == [True]


def test_interpreter_supports_cpu_tensors(monkeypatch):
    monkeypatch.setattr(triton_support, "interpreted", lambda: True)
    assert backend.BACKEND.unsupported(dataclasses.replace(SPEC, device=torch.device("cpu"))) == []

"""Calls that the torch_flash backend supports, and why it does not support others. No GPU is needed."""

import dataclasses

import pytest
import torch

from nt_attention.kernels.backends import torch_flash
from nt_attention.kernels.call import AttentionSpec

SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 4, 4, 64, 64, 0.125)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 20, "value_dim": 12}, None),
        ({"causal_alignment": "upper_left", "is_causal": True}, None),  # equal lengths: one and the same
        (
            {"causal_alignment": "upper_left", "is_causal": True, "equal_lengths": False},
            None,
        ),  # rewritten as lower right
        ({"dtype": torch.float32}, "torch.autocast"),
        ({"head_dim": 320}, "got 320"),
        ({"softcap": 2.0}, "softcap at 0"),
        ({"alibi": True}, "alibi_slopes"),
        ({"mask_mod": lambda *_: True}, "mask_mod"),
        ({"deterministic": True}, None),
        ({"deterministic": True, "needs_grad": True}, "deterministic at False"),
        ({"device": torch.device("cpu")}, "got cpu: move them"),
    ],
)
def test_torch_flash_support(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reasons = torch_flash.BACKEND.unsupported(dataclasses.replace(SPEC, **change))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]

"""Calls that our kernels for GPUs support according to their documentation, and why they do not support others."""

import dataclasses

import pytest
import torch

from nt_attention.kernels import triton_support
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.select import BACKENDS

SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 4, 4, 64, 64, 0.125)
UPPER_LEFT = {"causal_alignment": "upper_left", "is_causal": True}
MODS = {"score_mod": lambda score, *_: score, "mask_mod": lambda *_: True}
CALLS = [
    *[(name, {}, None) for name in ("token_tiled", "torch_flash", "split_kv", "torch_efficient")],
    ("token_tiled", {"head_dim": 20, "value_dim": 12, "num_kv_heads": 2}, None),
    ("token_tiled", {"head_dim": 256, "dtype": torch.float32}, None),
    ("token_tiled", UPPER_LEFT | {"equal_lengths": False}, None),
    ("token_tiled", {"softcap": 2.0, "alibi": True, "window_size": (3, 5), "dropout_p": 0.1}, None),
    ("token_tiled", {"deterministic": True, "batch_invariant": True, "needs_grad": True}, None),
    ("token_tiled", {"batch_invariant": True, "dropout_p": 0.1}, "leave dropout_p at 0"),
    ("token_tiled", {"dtype": torch.float64}, "torch.autocast"),
    ("token_tiled", {"head_dim": 576, "value_dim": 512}, None),
    ("token_tiled", {"head_dim": 577}, "got 577"),
    ("token_tiled", {"value_dim": 257, "dtype": torch.float32}, "in float32, got 257"),
    *[("token_tiled", {name: mod}, name) for name, mod in MODS.items()],
    ("token_tiled", {"device": torch.device("cpu")}, "got cpu: move them"),
    ("torch_flash", {"head_dim": 20, "value_dim": 12}, None),
    ("torch_flash", UPPER_LEFT, None),  # equal lengths: one and the same
    ("torch_flash", UPPER_LEFT | {"equal_lengths": False}, None),  # rewritten as lower right
    ("torch_flash", {"dtype": torch.float32}, "torch.autocast"),
    ("torch_flash", {"head_dim": 320}, "got 320"),
    ("torch_flash", {"softcap": 2.0}, "softcap at 0"),
    ("torch_flash", {"alibi": True}, "alibi_slopes"),
    ("torch_flash", {"mask_mod": MODS["mask_mod"]}, "mask_mod"),
    ("torch_flash", {"deterministic": True}, None),
    ("torch_flash", {"deterministic": True, "needs_grad": True}, "deterministic at False"),
    ("torch_flash", {"device": torch.device("cpu")}, "got cpu: move them"),
    *[
        (name, {"relative": ("bias",)}, "relative biases are not supported")
        for name in ("flex", "torch_flash", "torch_efficient", "flash_attn_2", "flash_attn_4")
    ],
]


@pytest.mark.parametrize(("name", "change", "reason"), CALLS)
def test_documented_support(name, change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    reasons = BACKENDS[name].unsupported(dataclasses.replace(SPEC, **change))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_old_gpus_and_the_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a T4")
    backend = BACKENDS["token_tiled"]
    assert ["a T4" in reason for reason in backend.unsupported(SPEC)] == [True]
    monkeypatch.setattr(triton_support, "interpreted", lambda: True)
    assert backend.unsupported(dataclasses.replace(SPEC, device=torch.device("cpu"))) == []

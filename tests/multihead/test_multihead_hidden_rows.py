"""Dense rows that see no key: they give out_proj's bias and change no other row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import nt_attention as nta

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("kind", ["weights", "weights of each head", "mask", "float mask", "float padding", "cross"])
def test_row_without_a_visible_key_gives_the_bias_and_changes_no_other_row(kind, mode):
    torch.manual_seed(3)
    module = nta.VarlenMultiheadAttention(12, 4, batch_first=True, dtype=torch.float64).train(mode == "grad")
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=mode == "grad")
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    blind = torch.zeros(3, 5, dtype=torch.bool)
    if "mask" in kind:
        blind[:, 2] = True
    else:
        blind[1] = True
    cases: dict[str, dict[str, Any]] = {
        "weights": {"key_padding_mask": padding},
        "weights of each head": {"key_padding_mask": padding, "average_attn_weights": False},
        "mask": {"attn_mask": mask, "need_weights": False},
        "float mask": {"attn_mask": torch.zeros(5, 5).double().masked_fill(mask, -torch.inf)},
        "float padding": {"key_padding_mask": torch.zeros(3, 5).double().masked_fill(padding, -torch.inf)},
        "cross": {"key_padding_mask": padding, "need_weights": False},
    }
    arguments = cases[kind]
    key = x.clone() if kind == "cross" else x
    with MODES[mode]():
        out, weights = module(x, key, key, **arguments)
        sighted, _ = module(x, key, key, need_weights=False)
    torch.testing.assert_close(out[blind], module.out_proj.bias.expand_as(out[blind]))
    torch.testing.assert_close(out[~blind], sighted[~blind])
    if weights is not None:
        rows = weights if weights.dim() == 3 else weights.transpose(1, 2)
        assert not rows[blind].any()
        assert rows[~blind].all()
    if mode == "grad":
        parameters = [x, *module.parameters()]
        found = torch.autograd.grad(out.square().sum(), parameters)
        want = torch.autograd.grad(sighted[~blind].square().sum(), parameters)
        bias = module.out_proj.bias
        for name, a, b in zip(["input", *dict(module.named_parameters())], found, want, strict=True):
            more = 2 * blind.sum() * bias if name == "out_proj.bias" else 0.0
            torch.testing.assert_close(a, b + more, msg=lambda text, name=name: f"{name}: {text}")

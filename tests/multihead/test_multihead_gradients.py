"""Gradients of VarlenMultiheadAttention on ragged inputs: gradcheck and torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multihead_ragged import (
    EXTRA_OPTIONS,
    KEY_LENGTHS,
    LENGTHS,
    TOLERANCE,
    added_keys,
    inputs_of,
    make_with_options,
    random_masks,
    random_sequences,
)
from parameters import with_random_parameters
from sweeps import covering
from torch import Tensor

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


@pytest.mark.parametrize(
    "options", [{}, EXTRA_OPTIONS["all"], EXTRA_OPTIONS["added keys"]], ids=["stock", "all", "added keys"]
)
@pytest.mark.parametrize("way", ["packed", "weights", "masks"])
def test_ragged_gradcheck(options, way):
    options = {"num_heads": 2, **options, "head_dim": 4}
    options |= {"num_heads": 2, "num_kv_heads": 1} if "num_kv_heads" in options else {}
    module = with_random_parameters(nta.VarlenMultiheadAttention(3, dtype=torch.float64, **options))
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in ([2, 0, 3, 1], [3, 1, 2, 0]))
    q, k = (torch.randn(x.total + 1, 3, dtype=torch.float64, requires_grad=True) for x in (layout, key_layout))
    masks = random_masks(
        [random_sequences([2, 0, 3, 1], 1), *[random_sequences([3, 1, 2, 0], 1)] * 2], 2, torch.float64
    )
    names = [name for name, _ in module.named_parameters()]

    def run(q: Tensor, k: Tensor, *rest: Tensor) -> list[Tensor]:
        arguments: dict[str, Any] = {"layout": layout, "key_layout": key_layout, "is_causal": way != "masks"}
        arguments["need_weights"] = way == "weights"
        if way == "masks":
            arguments["attn_mask"] = [x.where(x.detach().isfinite(), -torch.inf) for x in rest[len(names) :]]
        parameters = dict(zip(names, rest, strict=False))
        return [x for x in torch.func.functional_call(module, parameters, (q, k, k), arguments) if x is not None]

    learned = [x.detach().masked_fill(x == -torch.inf, 0.0).requires_grad_() for x in masks] if way == "masks" else []
    assert torch.autograd.gradcheck(run, (q, k, *module.parameters(), *learned), fast_mode=True)


@covering(
    {
        "name": ["grouped heads", "sinks", "layer", "rotary", "all", "added keys"],
        "way": ["packed", "weights", "masks", "mods"],
    }
)
def test_torch_func_grad_gives_autograd_s_gradients(name, way):
    module = make_with_options(name)
    queries, keys, values = (torch.cat(x) for x in inputs_of(module, cross=True))
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in (LENGTHS, KEY_LENGTHS))
    arguments: dict[str, Any] = {"layout": layout, "key_layout": key_layout}
    arguments |= {
        "packed": {},
        "weights": {"need_weights": True},
        "masks": {"attn_mask": torch.rand(13, 13) < 0.3},
        "mods": {"mask_mod": lambda b, h, q, k: (q + k) % 3 != 0},
    }[way]
    if way == "mods" and added_keys(module):
        arguments["mask_mod"] = None
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        found = torch.func.functional_call(module, parameters, (query, keys, values), arguments)
        return sum(x.square().sum() for x in found if x is not None)

    plain = {key: x.detach() for key, x in parameters.items()}
    (grads, grad), value = torch.func.grad_and_value(loss, argnums=(0, 1))(plain, queries.detach())
    torch.testing.assert_close(value, loss(parameters, queries))
    want = torch.autograd.grad(loss(parameters, queries), [*parameters.values(), queries], materialize_grads=True)
    for x, y in zip([*grads.values(), grad], want, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["rotary", "added keys"])
def test_torch_func_grad_over_lists_of_tensors(name, need_weights):
    module = make_with_options(name)
    queries, keys, _ = inputs_of(module, cross=True)

    def loss(queries: list[Tensor], keys: list[Tensor]) -> Tensor:
        outs, weights = module(queries, keys, keys, need_weights=need_weights)
        return sum(x.square().sum() for x in outs) + (weights.square().sum() if need_weights else 0.0)

    got = torch.func.grad(loss, argnums=(0, 1))(*([x.detach() for x in xs] for xs in (queries, keys)))
    want = torch.autograd.grad(loss(queries, keys), [*queries, *keys])
    torch.testing.assert_close([*got[0], *got[1]], list(want), rtol=TOLERANCE, atol=TOLERANCE)

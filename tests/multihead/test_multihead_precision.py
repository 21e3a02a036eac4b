"""VarlenMultiheadAttention in bfloat16 and under autocast on ragged inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from multihead_ragged import EMBED, EXTRA_OPTIONS, HEADS, LENGTHS, as_jagged, call, make_with_options, random_sequences
from sweeps import covering
from torch import Tensor, nn

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


@covering({"name": EXTRA_OPTIONS, "way": ["packed", "weights", "mask", "float mask", "dense", "dense weights"]})
def test_bfloat16_and_autocast_are_close_to_float32(name, way):
    module = make_with_options(name, dtype=torch.float32)
    narrow = copy.deepcopy(module).bfloat16()
    queries, keys, values = (random_sequences([5, 7], w, torch.float32) for w in (EMBED, module.kdim, module.vdim))
    parts = [queries, keys, values] if module.kdim != EMBED else [queries] * 3
    arguments: dict[str, Any] = {
        "weights": {"need_weights": True},
        "mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(2)},
        "float mask": {"attn_mask": torch.randn(7, 7)},
        "dense": {"need_weights": False, "key_padding_mask": (torch.arange(7) > 4)[None]},
    }.get(way, {})

    def run(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        once = {id(xs): [x.to(dtype) for x in xs] for xs in parts}
        given = [once[id(xs)] for xs in parts]
        more = {k: x.to(dtype) if way == "float mask" else x for k, x in arguments.items()}
        if "dense" in way:
            dense = {id(xs): xs[1][None] for xs in given}
            out, _ = module(*(dense[id(xs)] for xs in given), **more)
        else:
            out, _ = call("packed", module, given, **more)
        loss = out.float().square().sum()
        return out, torch.autograd.grad(loss, [*module.parameters()], materialize_grads=True)

    want, wanted = run(module, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(module, torch.float32)
    assert {x.dtype for x in cast[1]} == {torch.float32}
    for out, grads in (cast, run(narrow, torch.bfloat16)):
        assert out.dtype == torch.bfloat16
        assert (out.float() - want).norm() < 0.03 * want.norm()
        off, size = (torch.cat([x.flatten() for x in xs]).norm() for xs in (map(torch.sub, grads, wanted), wanted))
        assert off < 0.1 * size


def test_autocast_on_nested_tensors_keeps_float32_gradients():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True)
    parts = random_sequences(LENGTHS, EMBED, torch.float32)
    nested = as_jagged(parts)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(nested, nested, nested)
    assert out.dtype == torch.bfloat16
    out.values().float().sum().backward()
    assert module.in_proj_weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.values().float(), module(nested, nested, nested)[0].values(), rtol=0.05, atol=0.05)


@covering(
    {
        "dtypes": [(torch.float32, torch.float64), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
        "inputs": ["self", "key is value", "kdim"],
        "autocast": [False, True],
    }
)
def test_bias_of_another_dtype_than_the_weight(dtypes, inputs, autocast):
    dtype, of_bias = dtypes
    widths = (EMBED, 22, 26) if inputs == "kdim" else (EMBED,) * 3
    stock = nn.MultiheadAttention(EMBED, HEADS, kdim=widths[1], vdim=widths[2], batch_first=True, dtype=dtype)
    stock.in_proj_bias = nn.Parameter(torch.randn_like(stock.in_proj_bias).to(of_bias))
    ours = nta.VarlenMultiheadAttention.from_torch(stock)
    query, key, value = (torch.randn(2, 7, width).to(dtype).requires_grad_() for width in widths)
    tensors = {"self": (query,) * 3, "key is value": (query, key, key), "kdim": (query, key, value)}[inputs]
    padding = torch.arange(7) >= torch.tensor([[5], [7]])
    results = []
    for module in (stock, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, _ = module(*tensors, key_padding_mask=padding, need_weights=False)
        tokens = out[~padding]
        results.append(
            [
                tokens,
                *torch.autograd.grad(tokens.float().square().sum(), [*dict.fromkeys(tensors), *stock.parameters()]),
            ]
        )
    narrow = autocast or torch.bfloat16 in dtypes
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() < (0.03 if narrow else 1e-5) * want.norm()

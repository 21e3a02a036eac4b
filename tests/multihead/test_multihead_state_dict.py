"""State dicts and copies of VarlenMultiheadAttention, alone and inside of PyTorch's Transformer layers."""

import io
import warnings

import pytest
import torch
from parameters import with_random_parameters
from torch import nn
from transformer_layers import (
    EMBED,
    HEADS,
    close,
    pair,
    with_our_attention,
)

import nt_attention as nta
from nt_attention import VarlenMultiheadAttention


def test_state_dicts_load_both_ways():
    for options in ({}, {"bias": False}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}):
        stock, ours = pair(**options)
        assert list(stock.state_dict()) == list(ours.state_dict())
        for assign in (False, True):
            for to, of in ((stock, ours), (ours, stock)):
                with_random_parameters(of)
                to.load_state_dict(of.state_dict(), assign=assign)
                close(dict(to.state_dict()), dict(of.state_dict()))
    stock = nn.Transformer(EMBED, HEADS, 1, 1, 8)
    ours, buffer = with_our_attention(stock), io.BytesIO()
    assert list(ours.state_dict()) == list(stock.state_dict())
    torch.save(with_random_parameters(ours).state_dict(), buffer)
    buffer.seek(0)
    stock.load_state_dict(torch.load(buffer, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict({k: v for k, v in stock.state_dict().items() if "in_proj_weight" not in k})


def test_quantizable_multihead_attention_reads_our_module():
    quantizable = pytest.importorskip("torch.ao.nn.quantizable")

    class FromOurs(quantizable.MultiheadAttention):
        _FLOAT_MODULE = VarlenMultiheadAttention

    for options in ({}, {"bias": False}, {"kdim": 6, "vdim": 9, "add_bias_kv": True}, {"batch_first": True}):
        stock, ours = pair(dtype=torch.float32, **options)
        assert type(ours.out_proj) is type(stock.out_proj)  # which dynamic quantization knows to leave alone
        x = torch.randn(4, 4, EMBED)
        key, value = torch.randn(4, 4, stock.kdim), torch.randn(4, 4, stock.vdim)
        outs = []
        for module, kind in ((stock, quantizable.MultiheadAttention), (ours, FromOurs)):
            module.qconfig = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nothing is to be quantized
                outs.append(kind.from_float(module)(x, key, value))
        close(*outs)


def test_module_has_all_attributes_of_nn_multihead_attention():
    _, ours = pair(kdim=3, add_bias_kv=True)
    stock = nn.MultiheadAttention(EMBED, HEADS, kdim=3, add_bias_kv=True, dtype=torch.float64)
    assert isinstance(ours, nn.MultiheadAttention)
    for name, value in vars(stock).items():
        if not name.startswith("_") or name == "_qkv_same_embed_dim":
            assert getattr(ours, name) == value or isinstance(value, torch.Tensor), name
    assert {n: p.shape for n, p in stock._parameters.items() if p is not None} == {
        n: p.shape for n, p in ours._parameters.items() if p is not None
    }
    state = torch.get_rng_state()
    nta.VarlenMultiheadAttention.from_torch(stock)
    assert torch.equal(torch.get_rng_state(), state)

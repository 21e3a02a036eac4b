"""Calls on the meta device give the shapes and dtypes of the same calls on a CPU, without a warning."""

import warnings

import pytest
import torch

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

LENGTHS, TOKENS, E = [5, 0, 7], 12, 12


def both(function, *shapes):
    """The results of `function(layout, *tensors)` on a CPU and on the meta device, with the gradient of each tensor."""
    found = []
    for device in ("cpu", "meta"):
        tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        with warnings.catch_warnings():
            warnings.simplefilter("error" if device == "meta" else "ignore")
            out = function(SequenceLayout.from_lengths(LENGTHS, device=device), *tensors)
            out.sum().backward()
        found.append([(x.shape, x.dtype, x.device.type) for x in (out, *[x.grad for x in tensors])])
    return [(*x, "meta") for *x, _ in found[0]], found[1]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", [{"rotary": nta.Rotary(dims=4)}, {"add_bias_kv": True, "dropout": 0.5}])
def test_module(options, need_weights):
    def run(layout, x):
        module = nta.VarlenMultiheadAttention(E, 3, device=x.device, backend="reference", **options)
        return module(x, x, x, layout=layout, need_weights=need_weights)[need_weights]

    want, got = both(run, (TOKENS, E))
    assert got == want


def test_nested_tensors_and_padded_batches():
    want, got = both(lambda layout, x: varlen_attention(*[layout.to_nested(x)] * 3).values(), (TOKENS, 2, 5))
    assert got == want
    want, got = both(lambda layout, x: layout.pack(layout.pad(x)), (TOKENS, 2))
    assert got == want


def test_compiled():
    torch._dynamo.reset()
    run = torch.compile(lambda x, layout: varlen_attention(x, x, x, layout), backend="eager", fullgraph=True)
    x = torch.randn(TOKENS, 3, 5, device="meta")
    assert run(x, SequenceLayout.from_lengths(LENGTHS, device="meta")).shape == x.shape


def test_offsets_have_no_values_to_read():
    x = torch.nested.nested_tensor_from_jagged(
        torch.randn(5, 2, 3, device="meta"), torch.tensor([0, 2, 5], device="meta")
    )
    with pytest.raises(ValueError, match=r"on the meta device and has no values to read: .* device='meta'\)"):
        varlen_attention(x, x, x)

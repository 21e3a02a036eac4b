"""Gradients for each sample of a batch, as Opacus computes them: a packed row would be one sample.

Opacus itself runs if it is installed. A stand-in that does what its hooks do always runs.
"""

import sys
import types

import pytest
import torch
from patched_models import loss_of, make, make_batch
from small_models import build_small
from torch import nn

import nt_attention as nta


class GradSampleModule(nn.Module):
    """What Opacus' class of this name does to the linear layers of a model: hooks whose first dimension is samples."""

    def __init__(self, model):
        super().__init__()
        self._module = model
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self.capture)
                layer.register_full_backward_hook(self.multiply)
        for parameter in model.parameters():
            parameter.grad_sample = None

    def forward(self, *args, **kwargs):
        return self._module(*args, **kwargs)

    @staticmethod
    def capture(layer, inputs, output):
        layer.activations = inputs[0].detach()

    @staticmethod
    def multiply(layer, grad_input, grad_output):
        layer.weight.grad_sample = torch.einsum("n...i,n...j->nij", grad_output[0], layer.activations)


@pytest.fixture(params=["stand-in", "opacus"])
def per_sample(request, monkeypatch):
    if request.param == "opacus":
        return pytest.importorskip("opacus").GradSampleModule
    if "opacus" not in sys.modules:
        monkeypatch.setitem(sys.modules, "opacus", types.ModuleType("opacus"))
    return GradSampleModule


def weight_of(model):
    return model.bert.encoder.layer[0].intermediate.dense.weight


def samples(wrapped, model, batch):
    loss_of(wrapped, batch).backward()
    return weight_of(model).grad_sample


def test_calls_run_padded_and_say_so(per_sample):
    batch, plain, model = make_batch("sequence"), make("sequence").train(), make("sequence").train()
    want = samples(per_sample(plain), plain, batch)
    handle = nta.patch(model)
    wrapped = per_sample(model)
    with pytest.warns(nta.NotPackedWarning, match="Opacus computes gradients for each sample"):
        got = samples(wrapped, model, batch)
    assert got.shape == (len(batch["labels"]), *weight_of(model).shape)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # without gradients nothing is computed for samples
        wrapped(**batch)
    assert handle.calls[None] == 1
    handle.on_fallback = "raise"
    with pytest.raises(nta.NotPackedError, match="would take a packed row for one sample"):
        wrapped(**batch)


@pytest.mark.parametrize("in_transformer", [False, True], ids=["encoder", "transformer"])
def test_modules_of_torch_run_padded_too(in_transformer, per_sample):
    """Opacus does not know `nn.MultiheadAttention`, so it is frozen here."""
    if in_transformer:
        model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        encoder, names = model.encoder, ("src_key_padding_mask", "memory_key_padding_mask")
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        names = ("src_key_padding_mask",)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.requires_grad_(False)
    x, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [3], [5]])
    inputs, masks = (x, torch.randn(3, 4, 16)) if in_transformer else (x,), dict.fromkeys(names, padding)
    with nta.patch(model) as handle, pytest.warns(nta.NotPackedWarning, match="Opacus"):
        per_sample(model, **({} if per_sample is GradSampleModule else {"strict": False}))(
            *inputs, **masks
        ).sum().backward()
    assert encoder.layers[0].linear1.weight.grad_sample.shape == (3, 32, 16)
    assert None not in handle.calls


@pytest.mark.parametrize("which", ["model", "wrapper"])
def test_wrapped_models_are_refused(which, per_sample):
    model = make("sequence").train()
    wrapped = per_sample(model)
    with pytest.raises(ValueError, match="Opacus computes gradients for each sample"):
        nta.patch(wrapped if which == "wrapper" else model)


def test_encoder_decoders_run_padded_too(per_sample):
    model = build_small("t5", "T5ForConditionalGeneration")
    batch = make_batch("causal")
    wrapped = per_sample(model)
    with nta.patch(model) as handle, pytest.warns(nta.NotPackedWarning, match="Opacus"):
        wrapped(**batch)
    assert None not in handle.calls


def test_vmap_of_grad_is_refused():
    batch, model = make_batch("sequence"), make("sequence").eval()
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (), {name: x[None] for name, x in row.items()}).loss

    with nta.patch(model), pytest.raises(ValueError, match=r"other values in each sample of torch\.vmap.*remove\(\)"):
        torch.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)

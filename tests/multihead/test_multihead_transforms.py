"""VarlenMultiheadAttention under torch.func, torch.jit.trace, meta tensors, export and checkpoints, on dense inputs."""

import copy

import pytest
import torch
from parameters import with_random_parameters
from torch import nn
from transformer_layers import (
    BATCH,
    EMBED,
    IGNORED_WARNINGS,
    LENGTH,
    LENGTHS,
    SOME_PADDED,
    as_nested,
    close,
    decoder_layer,
    double,
    encoder_layer,
    random_sequences,
    with_our_attention,
)

pytestmark = IGNORED_WARNINGS


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_functional_call_grad_and_vmap():
    stock = encoder_layer()
    ours = with_our_attention(stock)
    x = double(BATCH, LENGTH, EMBED)
    params = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    call = torch.func.functional_call
    jagged = as_nested(random_sequences(LENGTHS), "jagged")
    close(call(ours, params, (x,)), call(stock, params, (x,)))
    with_random_parameters(stock).load_state_dict(params)
    close(torch.cat(call(ours, params, (jagged,)).unbind()), torch.cat([stock(one) for one in jagged.unbind()]))

    def loss(params, model, x, hidden):
        return call(model, params, (x,), {"src_key_padding_mask": hidden}).square().sum()

    got, want = (torch.func.grad(loss)(params, model, x, SOME_PADDED) for model in (ours, stock))
    close(got, want)
    each = torch.func.vmap(torch.func.grad(loss), (None, None, 0, 0))  # gradients of each example
    close(each(params, ours, x, SOME_PADDED), each(params, stock, x, SOME_PADDED))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    ensemble = torch.func.vmap(lambda p: call(ours, p, (x,)))(stacked)
    close(ensemble, torch.stack([call(stock, {k: v[i] for k, v in stacked.items()}, (x,)) for i in (0, 1)]))


def on_meta(layer, x, hidden):
    with torch.no_grad():
        return layer.to("meta")(*[t.to("meta") for t in (x, x, hidden)]).shape


def compiled(layer, x, hidden):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="eager")(x, x, hidden)


def exported(layer, x, hidden):
    return torch.export.export(layer, (x, x, hidden)).module()(x, x, hidden)


def traced(layer, x, hidden):
    return torch.jit.trace(layer, (x, x, hidden.flip(0)), check_trace=False)(x, x, hidden)


def mapped(layer, x, hidden):
    return torch.func.vmap(layer)(x, x, hidden)


class PaddedDecoderLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, memory, hidden):
        return self.layer(x, memory, memory_key_padding_mask=hidden)


@pytest.mark.parametrize("where", [on_meta, compiled, exported, traced, mapped], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_padded_decoder_layers_run_where_values_can_not_be_read(where):
    stock = PaddedDecoderLayer(decoder_layer())
    x = double(BATCH, LENGTH, EMBED)
    want = where(copy.deepcopy(stock), x, SOME_PADDED)
    if where is on_meta:
        assert where(with_our_attention(stock), x, SOME_PADDED) == want == x.shape
    else:
        close(want, stock(x, x, SOME_PADDED))
        close(where(with_our_attention(stock), x, SOME_PADDED), want)

"""Parametrized and pruned weights of VarlenMultiheadAttention count as in nn.MultiheadAttention."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformer_layers import (
    BATCH,
    EMBED,
    KEYS,
    KEYS_PADDED,
    LENGTH,
    LENGTHS,
    MODES,
    SOME_PADDED,
    as_nested,
    close,
    double,
    encoder_layer,
    in_mode,
    pair,
    random_sequences,
    with_our_attention,
)

from nt_attention import VarlenMultiheadAttention


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class LowRank(nn.Module):
    """A fixed weight plus the product of two thin matrices, which are trained."""

    def __init__(self, weight):
        super().__init__()
        rows, columns = weight.shape
        self.up, self.down = (nn.Parameter(torch.randn(n, 2).to(weight)) for n in (rows, columns))

    def forward(self, weight):
        return weight.detach() + self.up @ self.down.T


def low_rank(module):
    torch.manual_seed(11)
    parametrize.register_parametrization(module, "in_proj_weight", LowRank(module.in_proj_weight))
    parametrize.register_parametrization(module.out_proj, "weight", LowRank(module.out_proj.weight))


PARAMETER_CHANGES = {
    "twice": lambda m: parametrize.register_parametrization(m, "in_proj_weight", Twice()),
    "twice-out": lambda m: parametrize.register_parametrization(m.out_proj, "weight", Twice()),
    "low-rank": low_rank,
    "weight-norm": lambda m: parametrizations.weight_norm(m, "in_proj_weight"),
    "spectral-norm": lambda m: (torch.manual_seed(7), parametrizations.spectral_norm(m, "in_proj_weight"), m.eval()),
    "orthogonal": lambda m: parametrizations.orthogonal(m.out_proj, "weight"),
    "prune": lambda m: prune.l1_unstructured(m, "in_proj_weight", 0.5),
    "prune-rows-out": lambda m: prune.ln_structured(m.out_proj, "weight", 0.5, 2, 0),
    "prune-bias": lambda m: prune.l1_unstructured(m, "in_proj_bias", 4),
}


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_parametrized_and_pruned_weights_give_what_nn_multihead_attention_gives(how):
    stock, ours = pair(batch_first=True)
    x, key = double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)
    for module in (stock, ours):
        before = module(x, x, x)[0].detach()
        PARAMETER_CHANGES[how](module)
        assert not torch.equal(module(x, x, x)[0], before) or how == "weight-norm"
    assert list(stock.state_dict()) == list(ours.state_dict())
    for arguments in ({}, {"need_weights": False}, {"need_weights": False, "key_padding_mask": KEYS_PADDED}):
        results = []
        for module in (stock, ours):
            out = module(x, key, key, **arguments)[0]
            # retain_graph: stock does not call out_proj, so the hook that masks its weight does not run again
            grads = torch.autograd.grad(
                out.square().sum(), [*module.parameters()], allow_unused=True, retain_graph=True
            )
            results.append([out, *[g for g in grads if g is not None]])
        close(*results)
    queries = random_sequences(LENGTHS)
    nested = as_nested(queries, "jagged")
    with torch.no_grad():
        close(ours(nested, nested, nested)[0].values(), torch.cat([stock(q, q, q)[0] for q in queries]))


@pytest.mark.parametrize("how", ["twice", "low-rank", "weight-norm"])
def test_parametrizations_in_encoder_layers_and_their_removal(how):
    stock = encoder_layer()
    ours = with_our_attention(stock)
    x = double(BATCH, LENGTH, EMBED)
    for model in (stock, ours):
        PARAMETER_CHANGES[how](model.self_attn)
    assert isinstance(ours.self_attn, VarlenMultiheadAttention)
    for mode in MODES:
        with in_mode(mode, stock, ours):
            close(ours(x, src_key_padding_mask=SOME_PADDED), stock(x, src_key_padding_mask=SOME_PADDED))
            close(copy.deepcopy(ours)(x), stock(x))
    want = ours(x)
    parametrize.remove_parametrizations(ours.self_attn, "in_proj_weight")
    assert type(ours.self_attn) is VarlenMultiheadAttention
    close(ours(x), want)

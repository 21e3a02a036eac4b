"""NestedTensors through PyTorch's encoders and decoders with our module, against one sequence at a time."""

import itertools

import torch
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from torch.nn import functional as F
from transformer_layers import (
    EMBED,
    IGNORED_WARNINGS,
    LENGTHS,
    MEMORY_LENGTHS,
    MODES,
    as_nested,
    causal,
    close,
    decoder_layer,
    encoder_layer,
    in_mode,
    random_sequences,
    with_our_attention,
)

pytestmark = IGNORED_WARNINGS


def without_masks(*lengths):
    return {}


def assert_same_as_one_at_a_time(ours, stock, *inputs, how, mode, masks=without_masks, **options):
    """``masks`` gives the arguments of the stock module for the lengths of one sequence."""
    stock.train(mode == "train")
    with in_mode(mode, ours), torch.inference_mode(mode == "inference"):
        nested = [as_nested(x, how) for x in inputs]
        got = torch.cat(ours(*nested, **options).unbind())
        each = [stock(*one, **masks(*map(len, one))) for one in zip(*inputs, strict=True)]
        want = torch.cat(each)
        close(got, want)
        if mode in ("train", "eval"):
            leaves = [*itertools.chain(*inputs)]
            incoming = torch.randn_like(want)
            got = torch.autograd.grad(got, [*leaves, *ours.parameters()], incoming)
            close(got, torch.autograd.grad(want, [*leaves, *stock.parameters()], incoming))


@covering(
    {
        "how": ["jagged", "from-jagged", "strided"],
        "mode": [*MODES, "inference"],
        "norm_first": [True, False],
        "activation": ["relu", "gelu", F.silu],
    }
)
def test_encoder_layers_take_nested_tensors(activation, norm_first, how, mode):
    stock = encoder_layer(norm_first=norm_first, activation=activation)
    assert_same_as_one_at_a_time(with_our_attention(stock), stock, random_sequences(LENGTHS), how=how, mode=mode)


@covering(
    {
        "mode": [*MODES, "inference"],
        "how": ["jagged", "strided"],
        "seen": ["full", "causal", "causal"],
        "norm_first": [True, False, False],
    }
)
def test_decoders_take_nested_tensors(norm_first, seen, how, mode):
    layer = decoder_layer(norm_first=norm_first)
    stack = with_random_parameters(nn.TransformerDecoder(layer, 2, nn.LayerNorm(EMBED, dtype=torch.float64)))
    masks = without_masks if seen == "full" else lambda n, _: {"tgt_mask": causal(n)}
    options = {} if seen == "full" else {"tgt_is_causal": True}
    for stock in (layer, stack):
        inputs = random_sequences(LENGTHS), random_sequences(MEMORY_LENGTHS)
        assert_same_as_one_at_a_time(
            with_our_attention(stock), stock, *inputs, how=how, mode=mode, masks=masks, **options
        )

"""VarlenMultiheadAttention inside of PyTorch's decoder layers, decoders and nn.Transformer."""

import functools
import logging
import warnings

import pytest
import torch
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from transformer_layers import (
    BATCH,
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    KEYS,
    LENGTH,
    MEMORY_PADDED,
    MODES,
    SOME_PADDED,
    additive,
    causal,
    close,
    decoder_layer,
    double,
    encoder,
    in_mode,
    output_and_gradients,
    padding,
    with_our_attention,
)

pytestmark = IGNORED_WARNINGS

DECODER_MASKS = {
    "none": {},
    "causal": {"tgt_mask": causal(LENGTH)},
    "causal-hint": {"tgt_mask": causal(LENGTH), "tgt_is_causal": True},
    "memory-mask": {"memory_mask": torch.linspace(-2, 2, LENGTH * KEYS, dtype=torch.float64).view(LENGTH, KEYS)},
    "target-padding": {"tgt_key_padding_mask": SOME_PADDED},
    "memory-padding": {"memory_key_padding_mask": MEMORY_PADDED},
    "nothing-padded": {"memory_key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.bool)},
    "float-padding": {
        "tgt_key_padding_mask": additive(SOME_PADDED),
        "memory_key_padding_mask": additive(MEMORY_PADDED),
    },
    "all": {
        "tgt_mask": causal(LENGTH),
        "memory_mask": torch.arange(LENGTH)[:, None] + 2 < torch.arange(KEYS),
        "tgt_key_padding_mask": SOME_PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    },
}


def compared_rows(masks):
    """All rows. Without a tgt_mask, only real targets: our self-attention gives 0 at padded ones."""
    padded = masks.get("tgt_key_padding_mask")
    skipped = padded is not None and padded.dtype == torch.bool and "tgt_mask" not in masks
    return ~padded if skipped else ...


@covering(
    {"masks": DECODER_MASKS, "mode": MODES, "batch_first": [True, False], "norm_first": [True, True, False, False]}
)
def test_decoder_layers_give_what_stock_layers_give(norm_first, batch_first, masks, mode):
    stock = decoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = with_our_attention(stock)
    inputs = [double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)]
    inputs = inputs if batch_first else [x.transpose(0, 1).contiguous() for x in inputs]
    masks = DECODER_MASKS[masks]
    with in_mode(mode, stock, ours):
        got, want = (
            output_and_gradients(model, *inputs, rows=compared_rows(masks), length_first=not batch_first, **masks)
            for model in (ours, stock)
        )
    close(got, want)


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_training_encoders_and_decoders_warns_of_nothing(model, caplog):
    """With dropout, as in PyTorch's test: stock gives no warning, so ours gives none."""
    masks = {"mask": causal(3), "src_key_padding_mask": padding([3, 2], 3)}
    x = torch.randn(2, 3, EMBED)
    if model == "encoder":
        made = with_our_attention(encoder(2, True, dropout=0.1, dtype=None)).float()
    else:
        layer = decoder_layer(dropout=0.1, dtype=None)
        made = with_our_attention(nn.TransformerDecoder(layer, 2, nn.LayerNorm(EMBED)))
        names = ("tgt_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
        masks = dict(zip(names, (causal(3), padding([3, 2], 3), padding([3, 2], 3)), strict=True))
        made = functools.partial(made, memory=torch.randn(2, 3, EMBED))
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x, **masks)
    assert not caplog.records


@covering({"mode": MODES, "batch_first": [True, False], "norm_first": [False, True, True]})
def test_nn_transformer_gives_what_the_stock_one_gives(norm_first, batch_first, mode):
    options = {"batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64}
    stock = with_random_parameters(nn.Transformer(EMBED, HEADS, 2, 2, 16, 0.0, **options))
    ours = with_our_attention(stock)
    source, target = double(BATCH, KEYS, EMBED), double(BATCH, LENGTH, EMBED)
    if not batch_first:
        source, target = (x.transpose(0, 1).contiguous() for x in (source, target))
    square = nn.Transformer.generate_square_subsequent_mask
    dense = {
        "src_mask": square(KEYS, dtype=torch.float64),
        "tgt_mask": square(LENGTH, dtype=torch.float64),
        "memory_mask": double(LENGTH, KEYS),
    }
    padded = {
        "src_key_padding_mask": MEMORY_PADDED,
        "tgt_key_padding_mask": SOME_PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    }
    hinted = {
        "src_mask": dense["src_mask"],
        "tgt_mask": dense["tgt_mask"],
        "src_is_causal": True,
        "tgt_is_causal": True,
    }
    with in_mode(mode, stock, ours):
        for masks in ({}, dense, padded, dense | padded, hinted):
            got, want = (
                output_and_gradients(
                    model, source, target, rows=compared_rows(masks), length_first=not batch_first, **masks
                )
                for model in (ours, stock)
            )
            close(got, want)


def test_nn_transformer_raises_what_the_stock_one_raises():
    stock = nn.Transformer(EMBED, HEADS, 1, 1, 8, 0.0)
    ours = with_our_attention(stock)
    right = {
        "src": (KEYS, BATCH, EMBED),
        "tgt": (LENGTH, BATCH, EMBED),
        "src_mask": (KEYS, KEYS),
        "tgt_mask": (LENGTH, LENGTH),
        "memory_mask": (LENGTH, KEYS),
        "src_key_padding_mask": (BATCH, KEYS),
        "tgt_key_padding_mask": (BATCH, LENGTH),
        "memory_key_padding_mask": (BATCH, KEYS),
    }
    for name, (*rest, last) in right.items():
        inputs = {key: torch.zeros(shape) for key, shape in right.items()} | {name: torch.zeros(*rest, last + 2)}
        errors = []
        for model in (stock, ours):
            with pytest.raises((RuntimeError, AssertionError)) as raised:
                model(**inputs)
            errors.append(raised.type)
        assert issubclass(errors[1], errors[0])
    with pytest.raises(RuntimeError, match="batch number"):
        ours(torch.zeros(KEYS, BATCH, EMBED), torch.zeros(LENGTH, BATCH + 1, EMBED))

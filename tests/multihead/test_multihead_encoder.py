"""VarlenMultiheadAttention inside of nn.TransformerEncoderLayer and nn.TransformerEncoder."""

import itertools

import pytest
import torch
from sweeps import covering
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.transformer import _detect_is_causal_mask
from transformer_layers import (
    BATCH,
    BATCH_FIRST,
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    KEYS,
    LENGTH,
    MODES,
    SOME_PADDED,
    additive,
    causal,
    close,
    decoder_layer,
    double,
    encoder,
    encoder_layer,
    in_mode,
    output_and_gradients,
    padding,
    with_our_attention,
)

pytestmark = IGNORED_WARNINGS

ENCODER_MASKS = {
    "none": {},
    "all-seen": {"src_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.bool)},
    "causal": {"src_mask": causal(LENGTH)},
    "causal-hint": {"src_mask": causal(LENGTH), "is_causal": True},
    "per-head": {"src_mask": causal(LENGTH).expand(BATCH * HEADS, LENGTH, LENGTH)},
    "nothing-padded": {"src_key_padding_mask": torch.zeros(BATCH, LENGTH, dtype=torch.bool)},
    "padding": {"src_key_padding_mask": SOME_PADDED},
    "holes": {"src_key_padding_mask": torch.tensor([[False, True, False, False, True]]).expand(BATCH, LENGTH)},
    "float-padding": {"src_key_padding_mask": additive(SOME_PADDED)},
    "both": {"src_mask": causal(LENGTH), "src_key_padding_mask": SOME_PADDED},
}


@covering(
    {"masks": ENCODER_MASKS, "mode": MODES, "batch_first": [True, False], "norm_first": [True, True, False, False]}
)
def test_encoder_layers_give_what_stock_layers_give(norm_first, batch_first, masks, mode):
    stock = encoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = with_our_attention(stock)
    x = double(BATCH, LENGTH, EMBED) if batch_first else double(LENGTH, BATCH, EMBED)
    with in_mode(mode, stock, ours):
        close(
            output_and_gradients(ours, x, **ENCODER_MASKS[masks]),
            output_and_gradients(stock, x, **ENCODER_MASKS[masks]),
        )


@BATCH_FIRST
@pytest.mark.parametrize("mode", MODES)
def test_encoder_layer_on_padding_alone_is_nan_where_the_stock_layer_is(mode, batch_first):
    stock = encoder_layer(batch_first=batch_first)
    ours = with_our_attention(stock)
    x, hidden = double(1, 1, EMBED), torch.tensor([[True]])
    with in_mode(mode, stock, ours):
        got = ours(x, src_key_padding_mask=hidden)
        assert got.isnan().all() == (batch_first and mode == "no-grad")
        close(got, stock(x, src_key_padding_mask=hidden))


def test_encoder_detects_a_causal_mask_and_passes_is_causal():
    x = double(1, LENGTH, EMBED)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    assert mask.dtype == torch.float64
    assert torch.equal(mask == -torch.inf, causal(LENGTH))
    assert _detect_is_causal_mask(mask, None, LENGTH)
    assert not any(_detect_is_causal_mask(m, None, LENGTH) for m in (torch.zeros_like(mask), None))
    layer = with_our_attention(encoder_layer()).eval()
    close(layer(x, src_mask=mask, is_causal=True), layer(x, src_mask=mask))
    model = with_our_attention(encoder(2, enable_nested_tensor=False)).train()
    out = model(x, mask=mask, is_causal=True)
    close(out, model(x, mask=mask == -torch.inf))
    out.square().mean().backward()
    hints = []
    for made in model.layers:
        made.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: hints.append(kwargs["is_causal"]), with_kwargs=True
        )
    for given in (mask, mask == -torch.inf, torch.rand(LENGTH, LENGTH) > 2, None):
        model(x, mask=given)
    assert hints == [True, True, True, True, False, False, False, False]


@BATCH_FIRST
def test_encoder_trains_with_padding_and_refuses_integer_masks(batch_first):
    model = with_our_attention(encoder(2, activation="gelu", dtype=None, batch_first=batch_first)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x = torch.randn(2, 4, EMBED) if batch_first else torch.randn(4, 2, EMBED)
    hidden = padding([2, 3], 4)
    losses = []
    for _ in range(8):
        out = model(x, src_key_padding_mask=hidden)
        loss = F.mse_loss(*((y if batch_first else y.transpose(0, 1))[~hidden] for y in (out, x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for mode in MODES:
        with in_mode(mode, model):
            for wrong in (torch.uint8, torch.int64):
                with pytest.raises(AssertionError, match="only bool and floating types"):
                    model(x, src_key_padding_mask=hidden.to(wrong))
    outs = []
    for mode in MODES:
        with in_mode(mode, model):
            out = model(x, src_key_padding_mask=hidden)
            outs.append((out if batch_first else out.transpose(0, 1))[~hidden])
    torch.testing.assert_close(outs[1:], outs[:1] * 2, rtol=1e-4, atol=1e-4)


def test_encoder_keeps_columns_of_padding():
    for batch_first, mode in itertools.product([True, False], MODES):
        model = with_our_attention(encoder(3, activation="gelu", batch_first=batch_first))
        hidden = padding([5, 5, 5, 2, 5, 1], 10)
        x = double(6, 10, EMBED) if batch_first else double(10, 6, EMBED)
        with in_mode(mode, model):
            assert model(x, src_key_padding_mask=hidden).shape == x.shape


@pytest.mark.parametrize("model", ["encoder layer", "encoder", "decoder layer"])
def test_encoder_and_decoder_dropout_draw_what_stock_layers_draw(model):
    """Length first: stock's output has this memory layout in both cases, and the next dropout draws in its order."""
    stock = {
        "encoder layer": lambda: encoder_layer(dropout=0.3, batch_first=False),
        "encoder": lambda: encoder(2, dropout=0.3, batch_first=False),
        "decoder layer": lambda: decoder_layer(dropout=0.3, batch_first=False),
    }[model]()
    x = double(LENGTH, BATCH, EMBED)
    inputs = (x, double(KEYS, BATCH, EMBED)) if model == "decoder layer" else (x,)
    masks = {} if model == "decoder layer" else {"src_key_padding_mask": SOME_PADDED}
    results = []
    for made in (stock, with_our_attention(stock)):
        torch.manual_seed(5)
        results.append(output_and_gradients(made.train(), *inputs, **masks))
    close(*results)

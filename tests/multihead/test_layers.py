"""VarlenMultiheadAttention inside of PyTorch's encoders, decoders and nn.Transformer, and their fast path."""

import functools
import itertools
import logging
import warnings

import peft
import pytest
import torch
from parameters import with_random_parameters
from sweeps import covering
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformer_layers import (
    BATCH,
    BATCH_FIRST,
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    KEYS,
    LENGTH,
    LENGTHS,
    MEMORY_LENGTHS,
    MEMORY_PADDED,
    MODES,
    SOME_PADDED,
    additive,
    as_nested,
    causal,
    close,
    decoder_layer,
    double,
    encoder,
    encoder_layer,
    in_mode,
    output_and_gradients,
    padding,
    random_sequences,
    with_our_attention,
)

import nt_attention as nta

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

CASES = [("encoder", name) for name in ENCODER_MASKS] + [("decoder", name) for name in DECODER_MASKS]
CASES += [("transformer", name) for name in ("none", "dense", "padded", "both", "hinted")]


def compared_rows(masks):
    """All rows. Without a tgt_mask, only real targets: our self-attention gives 0 at padded ones."""
    padded = masks.get("tgt_key_padding_mask")
    skipped = padded is not None and padded.dtype == torch.bool and "tgt_mask" not in masks
    return ~padded if skipped else ...


def transformer_masks(name):
    square = functools.partial(nn.Transformer.generate_square_subsequent_mask, dtype=torch.float64)
    dense = {"src_mask": square(KEYS), "tgt_mask": square(LENGTH), "memory_mask": double(LENGTH, KEYS)}
    padded = {
        "src_key_padding_mask": MEMORY_PADDED,
        "tgt_key_padding_mask": SOME_PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    }
    hinted = {"src_mask": square(KEYS), "tgt_mask": square(LENGTH), "src_is_causal": True, "tgt_is_causal": True}
    return {"none": {}, "dense": dense, "padded": padded, "both": dense | padded, "hinted": hinted}[name]


@covering({"kind, name": CASES, "mode": MODES, "batch_first": [True, False], "norm_first": [True, True, False, False]})
def test_layers_give_what_stock_layers_give(kind, name, norm_first, batch_first, mode):
    options = {"batch_first": batch_first, "norm_first": norm_first}
    inputs = [double(BATCH, LENGTH, EMBED), double(BATCH, KEYS, EMBED)]
    if kind == "transformer":
        inputs = inputs[::-1]
        stock = nn.Transformer(EMBED, HEADS, 2, 2, 16, 0.0, dtype=torch.float64, **options)
        stock, masks = with_random_parameters(stock), transformer_masks(name)
    elif kind == "encoder":
        stock, masks, inputs = encoder_layer(**options), ENCODER_MASKS[name], inputs[:1]
    else:
        stock, masks = decoder_layer(**options), DECODER_MASKS[name]
    ours = with_our_attention(stock)
    inputs = inputs if batch_first else [x.transpose(0, 1).contiguous() for x in inputs]
    how = {"rows": compared_rows(masks), "length_first": not batch_first}
    if kind == "encoder":
        how = {}
    with in_mode(mode, stock, ours):
        got, want = (output_and_gradients(model, *inputs, **how, **masks) for model in (ours, stock))
    close(got, want)


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


def without_masks(*lengths):
    return {}


NESTED = {
    "encoder layer": (encoder_layer, without_masks, {}),
    "encoder layer, gelu": (functools.partial(encoder_layer, activation="gelu"), without_masks, {}),
    "encoder layer, silu": (functools.partial(encoder_layer, activation=F.silu), without_masks, {}),
    "decoder layer": (decoder_layer, without_masks, {}),
    "causal decoder layer": (decoder_layer, lambda n, _: {"tgt_mask": causal(n)}, {"tgt_is_causal": True}),
}


@covering(
    {
        "kind": NESTED,
        "mode": [*MODES, "inference"],
        "how": ["jagged", "from-jagged", "strided"],
        "norm_first": [True, False],
        "in_stack": [False, False, True],
    }
)
def test_layers_take_nested_tensors(kind, mode, how, norm_first, in_stack):
    """`masks` gives the arguments of the stock module for the lengths of one sequence."""
    make, masks, options = NESTED[kind]
    stock = make(norm_first=norm_first)
    inputs = [random_sequences(LENGTHS)]
    if "decoder" in kind:
        inputs.append(random_sequences(MEMORY_LENGTHS))
        if in_stack:
            stock = with_random_parameters(nn.TransformerDecoder(stock, 2, nn.LayerNorm(EMBED, dtype=torch.float64)))
    ours = with_our_attention(stock)
    stock.train(mode == "train")
    with in_mode(mode, ours), torch.inference_mode(mode == "inference"):
        got = torch.cat(ours(*[as_nested(x, how) for x in inputs], **options).unbind())
        want = torch.cat([stock(*one, **masks(*map(len, one))) for one in zip(*inputs, strict=True)])
        close(got, want)
        if mode in ("train", "eval"):
            leaves, incoming = [*itertools.chain(*inputs)], torch.randn_like(want)
            got = torch.autograd.grad(got, [*leaves, *ours.parameters()], incoming)
            close(got, torch.autograd.grad(want, [*leaves, *stock.parameters()], incoming))


@pytest.mark.parametrize("hidden", [None, SOME_PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("heads", [3, 4])
@torch.no_grad()
def test_encoder_fast_path_is_not_taken_past_a_hook(heads, hidden):
    """With padding, the encoder converts its input to a strided NestedTensor before."""
    layer = nn.TransformerEncoderLayer(EMBED, heads, 16, 0.0, batch_first=True, dtype=torch.float64)
    stock = with_random_parameters(nn.TransformerEncoder(layer, 2)).eval()
    x, results = double(BATCH, LENGTH, EMBED), []
    for model in (stock, with_our_attention(stock)):
        seen = []
        for made in model.layers:
            made.self_attn.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[0]))
        out = model(x, src_key_padding_mask=hidden)
        results.append([out, *[x.to_padded_tensor(0) if x.is_nested else x for x in seen]])
    assert len(results[1]) == 3
    close(results[1], results[0])


def test_encoder_names_the_reason_against_nested_tensors():
    layer = with_our_attention(encoder_layer(bias=False)).eval()
    x = double(2, 3, EMBED)
    layer(x)
    with pytest.warns(UserWarning, match=r"encoder_layer\.self_attn was passed bias=False"):
        nn.TransformerEncoder(layer, 1).eval()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nn.TransformerEncoder(with_our_attention(encoder_layer()), 1).use_nested_tensor


class Doubled(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return 2 * self.base_layer(x)


def lora(layer):
    config = peft.LoraConfig(target_modules=["out_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, layer)


def wrapped(layer):
    layer.self_attn.out_proj = Doubled(layer.self_attn.out_proj)


def with_options(**options):
    def change(layer):
        for name, value in options.items():
            setattr(layer.self_attn, name, value)

    return change


def parametrized(layer):
    parametrizations.weight_norm(layer.self_attn.out_proj, "weight")
    parametrizations.weight_norm(layer.self_attn, "in_proj_weight")


def with_forward_of_its_own(layer):
    original = layer.self_attn.out_proj.forward
    layer.self_attn.out_proj.forward = lambda x: 2 * original(x)


def with_attention_forward_of_its_own(layer):
    original = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **kwargs: (2 * original(*args, **kwargs)[0], None)


class Scaled(nta.VarlenMultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def of_a_subclass(layer):
    layer.self_attn = Scaled(16, 2, batch_first=True)


NOT_IN_THE_WEIGHTS = {
    "add_zero_attn": ({"add_zero_attn": True}, None),
    "add_bias_kv": ({"add_bias_kv": True}, None),
    "window": ({"window_size": (1, 1)}, None),
    "window_size later": ({}, with_options(window_size=(1, 1))),
    "softcap": ({}, with_options(softcap=2.0)),
    "scale": ({}, with_options(scale=0.7)),
    "lora": ({}, lora),
    "wrapped": ({}, wrapped),
    "parametrized": ({}, parametrized),
    "forward of out_proj": ({}, with_forward_of_its_own),
    "forward": ({}, with_attention_forward_of_its_own),
    "subclass": ({}, of_a_subclass),
}


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("case", NOT_IN_THE_WEIGHTS)
def test_encoder_layer_fast_path_is_not_taken_if_weights_do_not_say_what_forward_computes(case):
    """In evaluation, it computes stock attention from the parameters."""
    options, change = NOT_IN_THE_WEIGHTS[case]
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn = with_random_parameters(nta.VarlenMultiheadAttention(16, 2, batch_first=True, **options))
    if change is not None:
        change(layer)
    x = torch.randn(2, 7, 16)
    want = layer.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), want)


def test_encoder_layer_fast_path_is_not_taken_past_a_named_backend():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn, backend="flash_attn_4")
    with torch.no_grad(), pytest.raises(ValueError, match="flash_attn_4"):
        layer(torch.randn(2, 7, 16))

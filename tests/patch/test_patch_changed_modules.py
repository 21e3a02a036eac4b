"""Modules of PyTorch that were changed after the patch: the result is that of the changed module, or a clear error."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import nt_attention as nta
from nt_attention import NotPackedWarning

E, HEADS, LENGTH = 12, 2, 7
PADDING = torch.arange(LENGTH) >= torch.tensor([[7], [3]])
OPTIONS = {"dim_feedforward": 18, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
STACKS = {
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(E, HEADS, **OPTIONS), 2),
    "layer": lambda: nn.ModuleDict({"layers": nn.ModuleList([encoder_layer()])}),
    "transformer": lambda: nn.Transformer(E, HEADS, 2, 2, **OPTIONS),
}


def encoder_layer():
    return nn.TransformerEncoderLayer(E, HEADS, **OPTIONS)


class MixingLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(-2, keepdim=True))


class MixingNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-2, keepdim=True))


def wrap_block(layers):
    original = layers[0]._sa_block
    layers[0]._sa_block = lambda x, *args, **kwargs: original(x, *args, **kwargs) - x.mean(1, keepdim=True)


def replace_forward(layers):
    original = layers[0].forward
    layers[0].forward = lambda x, *args, **kwargs: original(x - x.mean(1, keepdim=True), *args, **kwargs)


def append_layer(layers):
    layers.append(layers[0].__class__(E, HEADS, **OPTIONS))


def append_patched_layer(layers):
    append_layer(layers)
    nta.patch(layers[-1])  # it packs by itself


def replace_attention(layers):
    layers[0].self_attn = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)


def replace_linear(layers):
    layers[-1].linear1 = MixingLinear(E, 18, dtype=torch.float64)


def replace_norm(layers):
    layers[-1].norm1 = MixingNorm(E, dtype=torch.float64)


def replace_activation(layers):
    layers[-1].activation = lambda x: x.softmax(-2)


CHANGES = {
    wrap_block: "_sa_block may need padded rows",
    replace_forward: "replaces TransformerEncoderLayer.forward|replaces TransformerDecoderLayer.forward",
    append_layer: "it is not patched",
    append_patched_layer: "it is not patched",
    replace_attention: "its self_attn is no VarlenMultiheadAttention",
    replace_linear: "its linear1 is a MixingLinear",
    replace_norm: "its norm1 is a MixingNorm",
    replace_activation: "its activation may mix tokens",
}


def layers_of(model):
    return (model.encoder if isinstance(model, nn.Transformer) else model).layers


def call(model, x):
    if isinstance(model, nn.TransformerDecoder):
        return model(x, x.flip(2), tgt_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)
    if isinstance(model, nn.Transformer):
        return model(x.flip(2), x, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)
    if isinstance(model, nn.ModuleDict):
        for layer in model["layers"]:
            x = layer(x, src_key_padding_mask=PADDING)
        return x
    return model(x, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_after_the_patch_is_honoured(kind, change):
    if kind == "layer" and change in (append_layer, append_patched_layer):
        pytest.skip("its layers are in no stack")
    model, x = STACKS[kind](), torch.randn(2, LENGTH, E, dtype=torch.float64)
    handle = nta.patch(model)
    call(model, x)
    packed = handle.calls[None]
    torch.manual_seed(0)
    change(layers_of(model))
    if kind == "layer" and change is replace_forward:
        handle.active = False  # the forward of a layer is its entry
    else:
        with pytest.warns(NotPackedWarning, match=CHANGES[change]):
            call(model, x)
    out = call(model, x)
    assert handle.calls[None] <= 2 * packed + (kind == "transformer")
    handle.active = False
    torch.testing.assert_close(out[~PADDING], call(model, x)[~PADDING])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nested_tensors_after_a_change_raise_an_error(change):
    model = STACKS["encoder"]()
    nta.patch(model)
    change(layers_of(model))
    x = nta.SequenceLayout.from_lengths([5, 3]).to_nested(torch.randn(8, E, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"NestedTensors can only run packed, but layers\.\d.*patch the model again"):
        model(x)


def test_changes_that_keep_tokens_apart_stay_packed():
    model, x = STACKS["encoder"](), torch.randn(2, LENGTH, E, dtype=torch.float64)
    handle = nta.patch(model, on_fallback="raise")
    model.layers[0].linear1 = nn.Linear(E, 18, dtype=torch.float64)
    model.layers[1].activation = nn.SiLU()
    model.layers.append(copy.deepcopy(model.layers[0]))
    model.norm = nn.LayerNorm(E, dtype=torch.float64)
    out = call(model, x)
    assert handle.calls == {None: 1}
    handle.active = False
    torch.testing.assert_close(out[~PADDING], call(model, x)[~PADDING])


def test_model_is_freed():
    model = STACKS["encoder"]()
    nta.patch(model)
    call(model, torch.randn(2, LENGTH, E, dtype=torch.float64))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Shifted(nn.TransformerEncoderLayer):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) + 1


def change_class(model):
    model.layers[0].__class__ = Shifted


def replace_forward_of_activation(model):
    model.layers[0].activation = nn.GELU()
    model.layers[0].activation.forward = lambda x: x.softmax(-2)


@pytest.mark.parametrize("change", [change_class, replace_forward_of_activation])
def test_changed_class_or_activation_falls_back(change):
    model = STACKS["encoder"]()
    stock = copy.deepcopy(model)
    nta.patch(model)
    for each in (model, stock):
        change(each)
    x = torch.randn(2, LENGTH, E, dtype=torch.float64)
    with pytest.warns(NotPackedWarning, match=r"layers\.0 was changed or added after the patch"):
        got = model(x, src_key_padding_mask=PADDING)
    want = stock(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(got[~PADDING], want[~PADDING])


def test_layers_that_are_compiled_after_the_patch_stay_packed(fresh_compiler):
    model = STACKS["encoder"]()
    handle = nta.patch(model)
    x = torch.randn(2, LENGTH, E, dtype=torch.float64)
    want = model(x, src_key_padding_mask=PADDING)
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), want)
    assert handle.calls == {None: 2}


@pytest.mark.parametrize(
    "activation",
    [nn.functional.silu, torch.tanh, functools.partial(nn.functional.gelu, approximate="tanh")],
    ids=["silu", "tanh", "partial"],
)
def test_pointwise_activations_are_packed(activation):
    layer = nn.TransformerDecoderLayer(E, HEADS, activation=activation, **OPTIONS)
    stock, x = copy.deepcopy(layer), torch.randn(2, LENGTH, E, dtype=torch.float64)
    masks = {"tgt_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    handle = nta.patch(layer)
    torch.testing.assert_close(layer(x, x, **masks)[~PADDING], stock(x, x, **masks)[~PADDING])
    assert handle.calls == {None: 1}

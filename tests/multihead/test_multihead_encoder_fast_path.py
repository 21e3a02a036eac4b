"""The fused fast path of nn.TransformerEncoder over layers with VarlenMultiheadAttention: taken where it is right."""

import itertools
import warnings
from unittest import mock

import peft
import pytest
import torch
from parameters import with_random_parameters
from torch import nn
from torch.nn.utils import parametrizations
from transformer_layers import (
    BATCH,
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    LENGTH,
    SOME_PADDED,
    close,
    double,
    encoder,
    encoder_layer,
    padding,
    with_our_attention,
)

import nt_attention as nta

pytestmark = IGNORED_WARNINGS


@pytest.mark.parametrize(
    ("lengths", "nested", "autocast"),
    [
        *itertools.product([(1, 1, 0), (98, 90)], [True, False], [False]),
        ((98, 90), False, True),
        ((1025, 1031), True, False),
    ],
)
def test_encoder_fast_path_agrees_with_its_slow_path(lengths, nested, autocast):
    longest = max(lengths) + 9 if min(lengths) else 2
    model = with_our_attention(encoder(2, enable_nested_tensor=nested, dtype=None)).eval()
    x, hidden = torch.rand(len(lengths), longest, EMBED), padding(lengths, longest)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            fast = model(x, src_key_padding_mask=hidden)
        slow = model(x, src_key_padding_mask=hidden)
    seen = ~hidden[:, : fast.shape[1]]
    tolerance = {"rtol": 0.05, "atol": 0.1} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(fast[seen].float(), slow[:, : fast.shape[1]][seen].float(), **tolerance)


@pytest.mark.parametrize(
    ("enabled", "checked", "padded", "mask", "nested"),
    [
        (True, True, [[0, 0, 1]], None, True),
        (True, True, [[1, 0, 1]], None, False),
        (False, True, [[0, 0, 1]], None, False),
        (False, True, [[1, 0, 1]], None, False),
        (False, True, [[0, 0, 1]], [[0, 1, 0], [0, 0, 0], [1, 0, 0]], False),
        (True, False, [[0, 0, 1]], None, True),
        (True, False, [[1, 0, 1]], None, True),
    ],
)
@torch.no_grad()
def test_encoder_fast_path_takes_nested_tensors_where_stock_encoders_do(enabled, checked, padded, mask, nested):
    model = with_our_attention(encoder(2, enable_nested_tensor=enabled, mask_check=checked)).eval()
    arguments = {"src_key_padding_mask": torch.tensor(padded).bool()}
    arguments["mask"] = None if mask is None else torch.tensor(mask).bool()
    with mock.patch("torch._transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd) as fused:
        model(double(1, 3, EMBED), **arguments)
    assert [call.args[0].is_nested for call in fused.call_args_list] == [nested] * 2


@pytest.mark.parametrize("enabled", [True, False])
@torch.no_grad()
def test_fast_path_switch_reaches_encoders_and_transformers(enabled):
    layers = with_our_attention(encoder(2)).eval()
    whole = with_our_attention(nn.Transformer(EMBED, HEADS, 1, 1, 8, batch_first=True)).double().eval()
    x, y = double(1, 3, EMBED), double(1, 4, EMBED)
    fused = mock.Mock(wraps=torch._transformer_encoder_layer_fwd)
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with mock.patch("torch._transformer_encoder_layer_fwd", fused):
            for run in (
                lambda: layers(x, src_key_padding_mask=torch.tensor([[True, False, True]])),
                lambda: whole(x, y),
            ):
                fused.reset_mock()
                run()
                assert fused.called == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


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


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_encoder_layer_fast_path_is_not_taken_with_window_size(training):
    layer = nn.TransformerEncoderLayer(36, 4, 50, 0.0, batch_first=True).train(training)
    layer.self_attn = nta.VarlenMultiheadAttention(36, 4, batch_first=True, window_size=(1, 1))
    layer.self_attn.train(training)
    calls = []
    layer.self_attn.out_proj.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 9, 36)
    with torch.no_grad():
        wide = layer(x)
        x[:, 8] = 0.0
        assert torch.equal(layer(x)[:, :7], wide[:, :7])  # out of the window's reach
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("option", [{"window_size": (1, 1)}, {"softcap": 2.0}, {"scale": 0.7}])
def test_encoder_layer_fast_path_is_not_taken_with_options_set_later(option):
    """The fast path in evaluation computes stock attention from the parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    for name, value in option.items():
        setattr(layer.self_attn, name, value)
    x = torch.randn(2, 7, 16)
    want = layer.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), want)


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


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"add_zero_attn": True}, None),
        ({"add_bias_kv": True}, None),
        ({}, lora),
        ({}, wrapped),
        ({}, parametrized),
        ({}, with_forward_of_its_own),
        ({}, with_attention_forward_of_its_own),
        ({}, of_a_subclass),
    ],
    ids=lambda x: getattr(x, "__name__", None) or "".join(x or "as it is"),
)
def test_encoder_layer_fast_path_is_not_taken_if_weights_do_not_say_what_forward_computes(options, change):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn = nta.VarlenMultiheadAttention(16, 2, batch_first=True, **options)
    with_random_parameters(layer.self_attn)
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

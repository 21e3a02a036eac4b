"""`patch` on single layers, single attention modules, and models that can't be packed: what runs packed is counted."""

import warnings

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning

E, LENGTH = 22, 7
PADDING = torch.arange(LENGTH) >= torch.tensor([[7], [3], [1]])
ADDITIVE = torch.zeros(3, LENGTH, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class LayersInALoop(nn.Module):
    def __init__(self, layer=nn.TransformerEncoderLayer, **options):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
        self.layers = nn.ModuleList(layer(E, 2, 26, **options) for _ in range(3))

    def forward(self, x, **masks):
        for layer in self.layers:
            x = layer(x, **masks)
        return x


class OneAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True, dtype=torch.float64, **options)

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)[0]


def rows():
    return torch.randn(3, LENGTH, E, dtype=torch.float64)


class OverRows(nn.Module):
    """Differs between (B, L, E) and (T, E), as stochastic depth does."""

    def forward(self, x):
        return x / (1 + x.abs().sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("dropout", OverRows()),
        ("activation", OverRows()),
        ("activation", nn.Softmax(1)),
        ("norm1", nn.LayerNorm((LENGTH, E), dtype=torch.float64)),
    ],
)
def test_encoder_layer_whose_part_was_replaced_by_one_that_may_mix_tokens(name, part):
    model, x = LayersInALoop(), rows()
    for layer in model.layers:
        setattr(layer, name, part)
    want = model(x, src_key_padding_mask=PADDING)
    handle = nta.patch(model)
    with pytest.warns(NotPackedWarning, match=r"a layer around it may mix tokens \(its "):
        torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), want)
    assert list(handle.calls.values()) == [3]


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), torch.nn.functional.gelu])
def test_encoder_layer_runs_its_replaced_activation(activation):
    model, x = LayersInALoop(), rows()
    for layer in model.layers:
        layer.activation = activation
    want = model(x, src_key_padding_mask=PADDING)
    nta.patch(model, on_fallback="raise")
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING)[~PADDING], want[~PADDING])


class ScaledLayer(nn.TransformerEncoderLayer):
    """A layer with a forward of its own, which calls the stock one."""

    def forward(self, src, **masks):
        return 2 * super().forward(src, **masks)


def test_attention_of_an_overridden_encoder_layer_packs():
    # The stock forward, which it calls, converts a boolean mask to 0 and −inf.
    model, x = LayersInALoop(ScaledLayer), rows()
    want = model(x, src_key_padding_mask=PADDING)
    handle = nta.patch(model)
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING)[~PADDING], want[~PADDING])
    assert handle.calls == {None: 3}


@pytest.mark.parametrize("mask", [PADDING, ADDITIVE], ids=["boolean", "additive"])
def test_attention_module_counts_packed_calls(mask):
    model, x = OneAttention(), rows()
    want = model(x, key_padding_mask=mask, need_weights=False)
    handle = nta.patch(model, on_fallback="raise")
    out = model(x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(out[~PADDING], want[~PADDING])
    assert not out[PADDING].any()
    assert handle.calls == {None: 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key_padding_mask": PADDING}, "need_weights is not False"),
        ({"key_padding_mask": PADDING, "need_weights": False, "attn_mask": CAUSAL}, "it has an attn_mask"),
        (
            {"key_padding_mask": ADDITIVE.clamp(min=-1), "need_weights": False},
            "key_padding_mask has values other than 0 and −inf",
        ),
        (
            {"key_padding_mask": ADDITIVE.clone().requires_grad_(), "need_weights": False},
            "key_padding_mask needs a gradient",
        ),
    ],
    ids=["need_weights", "attn_mask", "other values", "gradient"],
)
def test_attention_module_says_why_padding_is_computed(options, reason):
    model, x = OneAttention(), rows()
    want = model(x, **options)
    handle = nta.patch(model)
    with pytest.warns(NotPackedWarning, match=reason):
        torch.testing.assert_close(model(x, **options), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        model(x, **options)  # once for each reason
    assert handle.calls == {reason: 2}
    handle.remove()
    handle = nta.patch(model, on_fallback="raise")
    with pytest.raises(NotPackedError, match=reason):
        model(x, **options)
    model(x, need_weights=True)  # no padding mask: nothing could be skipped
    handle.remove()
    torch.testing.assert_close(model(x, **options), want)


def test_attention_module_without_padding_free_counts_nothing():
    model = OneAttention()
    handle = nta.patch(model, padding_free=False, on_fallback="raise")
    model(rows(), key_padding_mask=PADDING)
    assert not handle.calls


def test_module_of_ones_own_gives_no_warning(recwarn):
    attention = nta.VarlenMultiheadAttention(E, 2, batch_first=True, dtype=torch.float64)
    x = rows()
    attention(x, x, x, key_padding_mask=PADDING)
    assert not [w for w in recwarn if issubclass(w.category, NotPackedWarning)]


def test_model_that_is_not_packed_counts_batches_with_padding():
    sizes = {"hidden_size": 24, "intermediate_size": 26, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = CLIPTextModel(CLIPTextConfig(vocab_size=99, max_position_embeddings=32, eos_token_id=98, **sizes)).eval()
    ids, mask = torch.randint(5, 99, (3, LENGTH)), (~PADDING).long()
    want = model(ids, attention_mask=mask).last_hidden_state
    handle = nta.patch(model)
    with pytest.warns(NotPackedWarning, match="runs padded"):
        out = model(ids, mask).last_hidden_state  # as a positional argument
    torch.testing.assert_close(out, want)
    model(ids)
    model(ids, attention_mask=torch.ones_like(mask))
    assert sum(handle.calls.values()) == 1
    handle.remove()
    nta.patch(model, on_fallback="raise")
    with pytest.raises(NotPackedError, match="can't run packed"):
        model(ids, attention_mask=mask)
    model(ids, attention_mask=torch.ones_like(mask))


def test_pad_of_a_nested_tensor_names_values():
    layout = nta.SequenceLayout.from_lengths([2, 3])
    nested = layout.to_nested(torch.randn(5, 4))
    with pytest.raises(TypeError, match=r"values must be a plain tensor, got a NestedTensor: pass its \.values\(\)"):
        layout.pad(nested)


def test_layers_with_a_varlen_attention_of_ones_own_run_packed():
    model, x = LayersInALoop(), rows()
    want = model(x, src_key_padding_mask=PADDING)
    for layer in model.layers:
        layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    with nta.patch(model, on_fallback="raise") as handle:
        out = model(x, src_key_padding_mask=PADDING)
    assert handle.calls == {None: 3}
    torch.testing.assert_close(out[~PADDING], want[~PADDING])

"""patch on nn.TransformerEncoder: what happens to it under the patch, and what is not packed."""

import functools

import pytest
import torch
import torch_models
from torch import nn
from torch_models import EMBED, IGNORED_WARNINGS

import nt_attention as nta

pytestmark = IGNORED_WARNINGS
make_encoder = functools.partial(torch_models.make, "encoder")
PADDING, LENGTH = torch_models.PADDINGS["source"], 17


def test_encoder_on_meta_tensors():
    x = torch.empty(5, LENGTH, EMBED, device="meta")
    with nta.patch(encoder := make_encoder()):
        assert encoder.to("meta")(x, src_key_padding_mask=PADDING.to("meta")).shape == x.shape


def test_encoder_training_and_loading_under_the_patch_stay_after_remove():
    encoder = make_encoder()
    with nta.patch(encoder):
        encoder.load_state_dict({k: torch.full_like(v, 0.5) for k, v in encoder.state_dict().items()}, assign=True)
        encoder.eval()
    attention = encoder.layers[0].self_attn
    assert type(attention) is nn.MultiheadAttention
    assert not attention.training
    assert torch.equal(attention.in_proj_weight, torch.full_like(attention.in_proj_weight, 0.5))


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, src, *args, **kwargs):
        return src


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(2, 3), "has no nn.MultiheadAttention"),
        (nn.MultiheadAttention(4, 2), "model: it is the attention module itself"),
    ],
    ids=["nothing", "attention"],
)
def test_model_without_attention_to_patch_is_refused(model, reason):
    with pytest.raises(ValueError, match=reason):
        nta.patch(model)


@pytest.mark.parametrize("kind", ["forward", "layers"])
def test_encoder_with_its_own_forward_is_patched_layer_by_layer(kind):
    class Louder(nn.TransformerEncoder):
        def forward(self, src, *args, **kwargs):
            return super().forward(2 * src, *args, **kwargs)

    encoder = make_encoder()
    if kind == "forward":
        encoder = Louder(encoder.layers[0], 2, enable_nested_tensor=False)
    else:
        encoder.layers[1].__class__ = OwnForward
    x = torch.randn(5, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)
    with nta.patch(encoder) as handle:
        torch.testing.assert_close(encoder(x, src_key_padding_mask=PADDING)[~PADDING], want[~PADDING])
        assert handle.calls == {None: 2 if kind == "forward" else 1}  # OwnForward does not call its attention
        assert "overrides forward" in str(handle)
        assert not handle.changed
        assert list(handle.layers) == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize(
    ("change", "reason", "packed"),
    [
        (
            lambda layer: setattr(layer, "forward", lambda *a, **k: type(layer).forward(layer, *a, **k) * 2),
            "forward",
            2,
        ),
        (lambda layer: setattr(layer, "_ff_block", lambda x: 2 * x), "overrides forward", 2),
        (lambda layer: layer.self_attn.register_forward_hook(lambda *_: None), "has hooks", 2),
        (lambda layer: setattr(layer, "linear2", nn.Sequential(layer.linear2, nn.Softmax(1))), "its linear2 is a", 0),
        (lambda layer: setattr(layer, "norm1", nn.Sequential(nn.Softmax(1))), "its norm1 is a", 0),
        (
            lambda layer: vars(layer).update(activation=lambda t: t.softmax(1), activation_relu_or_gelu=0),
            "activation",
            0,
        ),
        (lambda layer: layer.self_attn.register_parameter("gate", nn.Parameter(torch.ones(1))), "gate", 1),
    ],
    ids=["forward", "block", "hook", "linear", "norm", "activation", "parameter"],
)
def test_encoder_layers_that_may_mix_tokens_are_not_packed(change, reason, packed):
    """The attention of their encoder then packs by itself, if nothing that is known mixes tokens."""
    encoder = make_encoder()
    change(encoder.layers[1])
    x = torch.randn(5, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)
    with nta.patch(encoder) as handle:
        assert not handle.changed
        assert reason in handle.left["layers.1"]
        torch.testing.assert_close(encoder(x, src_key_padding_mask=PADDING)[~PADDING], want[~PADDING])
        assert handle.calls[None] == packed


def test_encoder_with_a_bias_of_another_dtype():
    encoder = make_encoder().float()
    attention = encoder.layers[0].self_attn
    attention.in_proj_bias = nn.Parameter(attention.in_proj_bias.double())
    x = torch.randn(5, LENGTH, EMBED)
    want = encoder(x, src_key_padding_mask=PADDING)
    with nta.patch(encoder) as handle:
        got = encoder(x, src_key_padding_mask=PADDING)
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got[~PADDING], want[~PADDING])

"""patch on nn.TransformerEncoder: the same results from real tokens only, and the original model restored."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from sweeps import covering
from torch import nn

import nt_attention as nta
from nt_attention.patch import NotPackedWarning

EMBED, LENGTHS, LENGTH = 36, [7, 1, 13, 19], 19


PADDING = torch.arange(LENGTH) >= torch.tensor(LENGTHS)[:, None]


def make_encoder(batch_first=True, norm_first=False, layers=2):
    layer = nn.TransformerEncoderLayer(
        EMBED, 4, 50, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    encoder = nn.TransformerEncoder(
        layer, layers, norm=nn.LayerNorm(EMBED, dtype=torch.float64), enable_nested_tensor=False
    )
    for parameter in encoder.parameters():  # the layers are copies of one, and must not be
        nn.init.normal_(parameter, std=0.2)
    return encoder


def causal_mask(kind):
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return {"none": None, "float": mask, "bool": mask == -torch.inf}[kind]


def run(encoder, x, **options):
    """Real tokens (T, E) and the gradients of x and the parameters."""
    leaf = x.clone().requires_grad_()
    batch_first = encoder.layers[0].self_attn.batch_first
    out = encoder(leaf if batch_first else leaf.transpose(0, 1), src_key_padding_mask=PADDING, **options)
    tokens = (out if batch_first else out.transpose(0, 1))[~PADDING]
    grads = torch.autograd.grad(tokens.square().sum(), [leaf, *encoder.parameters()])
    return tokens, grads


@covering(
    {
        "batch_first, norm_first": list(itertools.product([True, False], repeat=2)),
        "mask": ["none", "float", "bool"],
        "training": [True, False],
    }
)
def test_encoder_padded_batches_give_what_they_gave(batch_first, norm_first, mask, training):
    encoder = make_encoder(batch_first, norm_first).train(training)
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = run(encoder, x, mask=causal_mask(mask))
    with nta.patch(encoder):
        got = run(encoder, x, mask=causal_mask(mask))
    again = run(encoder, x, mask=causal_mask(mask))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(again[0], want[0])


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_encoder_fast_path_is_not_taken(grad):
    """In eval without gradients, the stock encoder would use a fused kernel that does not call its layers."""
    encoder = make_encoder().eval()
    seen = []
    with nta.patch(encoder):
        for module in encoder.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1]))
        with torch.set_grad_enabled(grad):
            out = encoder(torch.randn(4, LENGTH, EMBED, dtype=torch.float64), src_key_padding_mask=PADDING)
    assert len(seen) == 6  # out_proj and the two of the feed-forward, in each layer
    assert set(seen) == {(sum(LENGTHS),)}
    assert torch.equal(out[PADDING], torch.zeros_like(out[PADDING]))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_takes_and_returns_nested_tensors(causal, training):
    encoder = make_encoder().train(training)
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = run(encoder, x, mask=causal_mask("bool" if causal else "none"))[0]
    parts = [row[:length] for row, length in zip(x, LENGTHS, strict=True)]
    with nta.patch(encoder):
        for layout in (torch.jagged, torch.strided):
            nested = torch.nested.as_nested_tensor(parts, layout=layout)
            out = encoder(nested, is_causal=causal)
            torch.testing.assert_close(torch.cat(out.unbind()), want)
            (nested + out).unbind()
        with pytest.raises(ValueError, match="leave out src_key_padding_mask"):
            encoder(nested, src_key_padding_mask=PADDING)


def test_encoder_remove_restores_the_original_modules():
    model = nn.Sequential(nn.Linear(EMBED, EMBED), make_encoder(), nn.Linear(EMBED, 3)).double()
    before = dict(model.named_modules())
    keys = list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in before.items()}
    with pytest.raises(RuntimeError, match="on purpose"), nta.patch(model) as handle:
        assert list(model.state_dict()) == keys
        assert {id(p) for p in model.parameters()} == {id(p) for m in before.values() for p in m.parameters()}
        raise RuntimeError("on purpose")
    after = dict(model.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert {name: set(vars(module)) for name, module in after.items()} == attributes
    assert "(removed)" in str(handle)
    handle.remove()


def test_encoder_training_and_loading_under_the_patch_stay_after_remove():
    encoder = make_encoder()
    with nta.patch(encoder):
        encoder.load_state_dict({k: torch.full_like(v, 0.5) for k, v in encoder.state_dict().items()}, assign=True)
        encoder.eval()
    attention = encoder.layers[0].self_attn
    assert type(attention) is nn.MultiheadAttention
    assert not attention.training
    assert torch.equal(attention.in_proj_weight, torch.full_like(attention.in_proj_weight, 0.5))


def test_encoder_second_patch_is_refused():
    encoder = make_encoder()
    with nta.patch(encoder):
        with pytest.raises(ValueError, match="already patched"):
            nta.patch(encoder)
        out = encoder(torch.randn(4, LENGTH, EMBED, dtype=torch.float64), src_key_padding_mask=PADDING)
        assert torch.equal(out[PADDING], torch.zeros_like(out[PADDING]))
    assert "forward" not in vars(encoder)


def test_encoder_later_wrapper_of_forward_stays_after_remove():
    encoder = make_encoder()
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)
    handle = nta.patch(encoder)
    inner = encoder.forward
    encoder.forward = lambda *args, **kwargs: inner(*args, **kwargs) + 1
    handle.remove()
    torch.testing.assert_close(encoder(x, src_key_padding_mask=PADDING), want + 1)


def test_encoder_falls_back_with_one_warning_under_another_mask():
    encoder = make_encoder()
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    band = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() > 3
    want = encoder(x, mask=band)
    with nta.patch(encoder):
        torch.testing.assert_close(encoder(x, mask=band), want)  # no padding: nothing to say
        with pytest.warns(NotPackedWarning, match="neither None nor causal") as said:
            for _ in range(2):
                encoder(x, mask=band, src_key_padding_mask=PADDING)
        assert len(said) == 1


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
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)
    with nta.patch(encoder) as handle:
        torch.testing.assert_close(encoder(x, src_key_padding_mask=PADDING), want)
        assert "overrides forward" in str(handle)
        assert not handle.changed
        assert list(handle.layers) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_encoder_deepcopy_runs_its_own_weights():
    model = nn.Sequential(make_encoder())
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    handle = nta.patch(model)
    copied = copy.deepcopy(model)
    want = model[0](x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(copied[0](x, src_key_padding_mask=PADDING), want)
    copied[0](x, src_key_padding_mask=PADDING).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())
    handle.remove()  # the copy outlives the patch, unpatched
    torch.testing.assert_close(copied[0](x, src_key_padding_mask=PADDING)[~PADDING], want[~PADDING])
    with nta.patch(copied):
        torch.testing.assert_close(copied[0](x, src_key_padding_mask=PADDING), want)


def test_encoder_pickle_is_patched_with_its_own_handle():
    encoder = make_encoder()
    x = torch.randn(4, LENGTH, EMBED).double()
    handle = nta.patch(encoder)
    loaded = pickle.loads(pickle.dumps(encoder))
    want = encoder(x, src_key_padding_mask=PADDING)
    handle.remove()
    torch.testing.assert_close(loaded(x, src_key_padding_mask=PADDING), want)
    loaded.forward.handle.remove()
    assert "forward" not in vars(loaded)
    assert type(loaded.layers[0].self_attn) is nn.MultiheadAttention


def test_encoder_refuses_integer_masks():
    encoder = make_encoder()
    with nta.patch(encoder), pytest.raises(Exception, match="only bool and floating types"):
        encoder(torch.randn(4, LENGTH, EMBED).double(), src_key_padding_mask=PADDING.long())


def test_encoder_is_freed_after_remove():
    encoder = make_encoder()
    nta.patch(encoder).remove()
    gone = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert gone() is None


def test_encoder_padding_free_false_changes_only_the_attention():
    encoder = make_encoder()
    nested = torch.nested.as_nested_tensor([torch.randn(n, EMBED).double() for n in LENGTHS], layout=torch.jagged)
    with nta.patch(copy.deepcopy(encoder), padding_free=False) as handle:
        assert "takes NestedTensors" in str(handle)
    with nta.patch(encoder):
        want = encoder(nested)
    layer = encoder.layers[0]
    with nta.patch(encoder, padding_free=False):
        x = layer(nested)
        for other in encoder.layers[1:]:
            x = other(x)
        torch.testing.assert_close(encoder.norm(x).values(), want.values())


def test_encoder_warning_shows_the_line_of_the_caller():
    encoder = make_encoder()
    x, mask = torch.randn(4, LENGTH, EMBED).double(), torch.zeros(LENGTH, LENGTH).double()
    mask[0, 3] = 1.0
    with nta.patch(encoder) as handle, pytest.warns(NotPackedWarning) as said:
        encoder(x, mask, PADDING)
    assert [w.filename for w in said if w.category is NotPackedWarning] == [__file__]
    assert "1 call did not run packed: mask is neither None nor causal" in str(handle)


def test_encoder_with_swapped_attention_is_refused():
    encoder = make_encoder()
    with nta.patch(encoder, padding_free=False):
        for padding_free in (True, False):
            with pytest.raises(ValueError, match="already"):
                nta.patch(encoder, padding_free=padding_free)
    with nta.patch(encoder):
        encoder(torch.randn(4, LENGTH, EMBED).double(), src_key_padding_mask=PADDING)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "forward", lambda *a, **k: type(layer).forward(layer, *a, **k) * 2), "forward"),
        (lambda layer: setattr(layer, "_ff_block", lambda x: 2 * x), "overrides forward"),
        (lambda layer: setattr(layer, "linear2", nn.Sequential(layer.linear2, nn.Softmax(1))), "its linear2 is a"),
        (lambda layer: setattr(layer, "norm1", nn.Sequential(nn.Softmax(1))), "its norm1 is a"),
        (lambda layer: vars(layer).update(activation=lambda t: t.softmax(1), activation_relu_or_gelu=0), "activation"),
        (lambda layer: layer.self_attn.register_parameter("gate", nn.Parameter(torch.ones(1))), "gate"),
    ],
    ids=["forward", "block", "linear", "norm", "activation", "parameter"],
)
def test_encoder_layers_that_may_mix_tokens_are_not_packed(change, reason):
    encoder = make_encoder()
    change(encoder.layers[1])
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)
    with nta.patch(encoder) as handle:
        assert not handle.changed
        assert reason in handle.left["layers.1"]
        torch.testing.assert_close(encoder(x, src_key_padding_mask=PADDING), want)


def test_encoder_under_vmap_and_on_meta_tensors():
    encoder = make_encoder()
    x = torch.randn(4, LENGTH, EMBED, dtype=torch.float64)
    want = encoder(x, src_key_padding_mask=PADDING)

    def one(x, padding):
        return encoder(x[None], src_key_padding_mask=padding[None])[0]

    with nta.patch(encoder):
        got = torch.vmap(one)(x, PADDING)
        torch.testing.assert_close(got[~PADDING], want[~PADDING])
        assert encoder.to("meta")(x.to("meta"), src_key_padding_mask=PADDING.to("meta")).shape == x.shape

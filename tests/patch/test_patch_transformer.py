"""patch on nn.Transformer and nn.TransformerDecoder: how an encoder and a decoder work together."""

import functools
import random

import pytest
import torch
import torch_models
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_models import IGNORED_WARNINGS, LENGTHS, PADDINGS, additive, causal_mask, close, padding_of

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning
from nt_attention.layouts import cache
from nt_attention.layouts.sequence import SequenceLayout

pytestmark = IGNORED_WARNINGS
make = functools.partial(torch_models.make, "transformer")
SOURCE_LENGTHS, TARGET_LENGTHS = LENGTHS["source"], LENGTHS["target"]
SOURCE_PADDING, PADDING = PADDINGS["source"], PADDINGS["target"]
SOURCE_LENGTH, LENGTH = SOURCE_PADDING.shape[1], PADDING.shape[1]


def masks(source=SOURCE_PADDING, target=PADDING):
    return torch_models.masks_of("transformer", {"source": source, "target": target})


def draw(source=SOURCE_PADDING, target=PADDING):
    return list(torch_models.draw({"source": source, "target": target}).values())


def run(model, source, target, **options):
    return torch_models.run("transformer", model, {"source": source, "target": target}, **options)


def tokens_and_gradients(model, source, target, **options):
    return torch_models.tokens_and_gradients("transformer", model, {"source": source, "target": target}, **options)


def alone(model, source, target, **options):
    return torch_models.alone("transformer", model, {"source": source, "target": target}, **options)


def test_input_without_padding_is_not_copied(monkeypatch):
    model, moves = torch_models.make("decoder"), []
    for name in ("pack", "pad"):
        method = getattr(SequenceLayout, name)
        monkeypatch.setattr(SequenceLayout, name, lambda *a, f=method, n=name: (moves.append(n), f(*a))[1])
    source, target = draw()
    nta.patch(model)
    model(target, source, memory_key_padding_mask=SOURCE_PADDING)
    assert moves == ["pack"]
    model(target, source, tgt_key_padding_mask=PADDING)
    assert moves == ["pack", "pack", "pad"]


def test_call_of_pytorchs_translation_tutorial():
    """Positional arguments, (L, B, E), a source mask that hides nothing, and a float mask with boolean padding."""
    model = make(batch_first=False)
    source, target = draw()
    source_mask = torch.zeros(SOURCE_LENGTH, SOURCE_LENGTH).bool()
    target_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    want = alone(model, source, target, causal=True)[0]
    with nta.patch(model, on_fallback="raise") as handle:
        arguments = source_mask, target_mask, None, SOURCE_PADDING, PADDING, SOURCE_PADDING
        out = model(source.transpose(0, 1), target.transpose(0, 1), *arguments)
    close(out.transpose(0, 1)[~PADDING], want)
    assert handle.calls == {None: 1}


def test_rows_without_tokens():
    paddings = padding_of([13, 0, 3, 17, 0]), padding_of([4, 0, 9, 0, 2])
    model, (source, target) = make(), draw(*paddings)
    want = run(model, source, target, **masks(*paddings))
    with nta.patch(model, on_fallback="raise"):
        out = run(model, source, target, **masks(*paddings))
    rows = [0, 2, 4]  # row 4 has a target, and a memory without tokens, which gives 0
    close(out[rows][~paddings[1][rows]], want[rows][~paddings[1][rows]])


class OwnDecoder(nn.TransformerDecoder):
    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


SOME_VISIBLE = SOURCE_PADDING & (torch.arange(SOURCE_LENGTH) > 9)
MORE_HIDDEN = SOURCE_PADDING | (torch.arange(SOURCE_LENGTH) == 0) & (torch.tensor(SOURCE_LENGTHS) > 1)[:, None]


@pytest.mark.parametrize("memory_padding", [None, SOME_VISIBLE, additive(SOME_VISIBLE)], ids=["none", "some", "float"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("decoder", ["patched", "not patched"])
def test_encoder_runs_padded_if_the_decoder_sees_the_padding_of_the_source(decoder, memory_padding, mode):
    model, (source, target) = make().train(mode == "train"), draw()
    options = masks() | {"memory_key_padding_mask": memory_padding}
    reason = "memory_key_padding_mask does not hide the padding of src"
    if decoder == "not patched":
        model.decoder.__class__ = OwnDecoder
    with torch.set_grad_enabled(mode != "no_grad"):
        want = run(model, source, target, **options)
        with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match=reason):
            out = run(model, source, target, **options)
        close(out[~PADDING], want[~PADDING])
        assert handle.calls[reason] == 1
        assert handle.calls[None] >= 1  # the decoder, or its attention
        with nta.patch(model, on_fallback="raise"), pytest.raises(NotPackedError, match=reason):
            run(model, source, target, **options)


def test_memory_with_other_padding_is_packed_again():
    model, (source, target) = make(), draw()
    for source_padding, memory_padding, packed in [
        (SOURCE_PADDING, MORE_HIDDEN, 2),
        (SOURCE_PADDING, additive(MORE_HIDDEN), 2),
        (None, SOURCE_PADDING, 1),  # the encoder has no padding
        (torch.zeros_like(SOURCE_PADDING), None, 2),
        (SOURCE_PADDING, SOURCE_PADDING.clone(), 1),  # equal masks: packed once
        (SOURCE_PADDING, additive(SOURCE_PADDING), 1),
    ]:
        options = masks() | {"src_key_padding_mask": source_padding, "memory_key_padding_mask": memory_padding}
        want = tokens_and_gradients(model, source, target, **options)
        with nta.patch(model, on_fallback="raise") as handle:
            close(tokens_and_gradients(model, source, target, **options), want)
        assert handle.calls == {None: packed}


def test_shapes_that_do_not_fit_raise_errors():
    model, (source, target) = make(), draw()
    calls = [
        (source[:3], target, masks(SOURCE_PADDING[:3])),
        (source[..., :-1], target, masks()),
        (source, target, masks(SOURCE_PADDING[:, :-1])),
        (source, target, masks(target=PADDING[:, :-1])),
        (source, target, masks(target=PADDING.long())),
        (source, target, masks(SOURCE_PADDING.long())),
    ]
    for *inputs, options in calls:
        for patched in (False, True):
            handle = nta.patch(model) if patched else None
            with pytest.raises((ValueError, RuntimeError, AssertionError)):
                run(model, *inputs, **options)
            if handle:
                handle.remove()


class OwnBlock(nn.TransformerDecoderLayer):
    def _mha_block(self, *args, **options):
        return 2 * super()._mha_block(*args, **options)


class OverRows(nn.Module):
    """Differs between (B, L, E) and (T, E), as stochastic depth does."""

    def forward(self, x):
        return x / (1 + x.abs().sum(1, keepdim=True))


def hooked(layer):
    layer.multihead_attn.register_forward_hook(lambda *_: None)


CHANGES = {
    "block": (lambda layer: setattr(layer, "__class__", OwnBlock), "OwnBlock overrides forward, _sa_block, _mha_bl"),
    "encoder layer": (lambda layer: setattr(layer, "__class__", nn.Module), "is not an nn.TransformerDecoderLayer"),
    "instance": (lambda layer: setattr(layer, "_mha_block", layer._mha_block), "overrides forward"),
    "norm": (lambda layer: setattr(layer, "norm3", OverRows()), "its norm3 is a OverRows, which may mix tokens"),
    "dropout": (lambda layer: setattr(layer, "dropout3", OverRows()), "its dropout3 is a OverRows"),
    "activation": (lambda layer: setattr(layer, "activation", OverRows()), "its activation may mix tokens"),
    "hook": (hooked, "its multihead_attn has hooks"),
    "attention": (lambda layer: setattr(layer, "multihead_attn", OverRows()), "OverRows is not nn.MultiheadAttention"),
    "batch_first": (lambda layer: setattr(layer.multihead_attn, "batch_first", False), "differ in batch_first"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_decoder_whose_layer_was_changed_is_not_packed(change):
    apply, reason = CHANGES[change]
    model = make()
    apply(model.decoder.layers[1])
    with nta.patch(model) as handle:
        assert list(handle.changed) == ["encoder"]
        assert reason in handle.left["decoder.layers.1"]


def test_decoder_with_a_final_norm_that_may_mix_tokens_is_not_packed():
    model = make()
    model.decoder.norm = OverRows()
    with nta.patch(model) as handle:
        assert list(handle.changed) == ["encoder"]
        assert handle.left == {"decoder": "its norm is a OverRows, which may mix tokens."}


@pytest.mark.parametrize("where", ["encoder", "decoder"])
def test_hooks_on_the_encoder_and_the_decoder_get_padded_batches(where):
    model, (source, target), seen = make(), draw(), []
    want = tokens_and_gradients(model, source, target, **masks())
    with nta.patch(model, on_fallback="raise") as handle:
        hook = model.get_submodule(where).register_forward_hook(lambda *given: seen.append(given[2].shape))
        close(tokens_and_gradients(model, source, target, **masks()), want)
        assert handle.calls == {None: 2}
        hook.remove()
        run(model, source, target, **masks())
        assert handle.calls == {None: 3}
    assert seen == [(source if where == "encoder" else target).shape]


@pytest.mark.parametrize("is_late", [False, True])
def test_with_hooks_on_parts_of_them_they_run_padded(is_late):
    """A hook may compute with the rows of a batch. Here it takes the mean of each row away."""
    model, (source, target) = make(), draw()
    parts = [model.encoder.layers[0], model.decoder.layers[1].linear1]

    def add_hooks():
        return [part.register_forward_hook(lambda _, args, out: out - out.mean(-2, keepdim=True)) for part in parts]

    hooks = add_hooks()
    want = tokens_and_gradients(model, source, target, **masks())
    if is_late:
        for hook in hooks:
            hook.remove()
    with nta.patch(model) as handle:
        hooks = add_hooks() if is_late else hooks
        with pytest.warns(nta.NotPackedWarning, match="hooks of modules in it get padded batches"):
            close(tokens_and_gradients(model, source, target, **masks()), want)
        assert handle.calls[None] == 0
        for hook in hooks:
            hook.remove()
        run(model, source, target, **masks())
        assert handle.calls[None] == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, (source, target) = make(), draw()
    want = alone(model, source, target, causal=True)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, target, source):
            call = functools.partial(model, **masks(), tgt_mask=causal_mask(LENGTH))
            return checkpoint(call, source, target, use_reentrant=reentrant)

    leaves = [x.requires_grad_() for x in (source, target)]
    with nta.patch(model, on_fallback="raise"):
        tokens = Checkpointed()(*leaves[::-1])[~PADDING]
        tokens.square().sum().backward()  # reentrant checkpoints do not support torch.autograd.grad
    grads = [source.grad[~SOURCE_PADDING], target.grad[~PADDING], *(p.grad for p in model.parameters())]
    close([tokens, *grads], want)


def test_autocast_keeps_dtypes():
    model, (source, target) = make(dtype=torch.float32), [x.float() for x in draw()]
    with torch.autocast("cpu", torch.bfloat16):
        want = run(model, source, target, **masks())
        with nta.patch(model, on_fallback="raise"):
            out = run(model, source, target, **masks())
    assert out.dtype == want.dtype
    torch.testing.assert_close(out[~PADDING], want[~PADDING], rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_dropout_has_the_same_mean():
    """Only the mean can be compared: packed tokens get other random numbers than padded ones."""
    count, model = 300, make(layers=1, dropout=0.2)
    paddings = torch.tensor([[False] * 3 + [True]] * count), torch.tensor([[False] * 2 + [True]] * count)
    source, target = (x[:1].expand_as(x) for x in draw(*paddings))

    def tokens():
        with torch.no_grad():
            return run(model.train(), source, target, **masks(*paddings))[:, :2]

    want = tokens()
    with nta.patch(model, on_fallback="raise"):
        got = tokens()
    error = (want.var(0) / count + got.var(0) / count).sqrt()
    assert (error > 0).all()
    assert ((want.mean(0) - got.mean(0)).abs() < 5 * error).all()


def test_handle_lists_the_parts():
    model = make(layers=1)
    with nta.patch(model, padding_free=False) as handle:
        assert handle.changed["decoder"] == "nn.TransformerDecoder of 1 layer, takes NestedTensors"
        assert list(handle.changed) == ["encoder", "decoder"]
    with nta.patch(model) as handle:
        assert handle.changed == {
            "encoder": "nn.TransformerEncoder of 1 layer, packed at the entry, padded at the exit",
            "decoder": "nn.TransformerDecoder of 1 layer, packed at the entry, padded at the exit",
            "model": "nn.Transformer, passes packed tokens from its encoder to its decoder",
        }
        assert not handle.layers


def test_subclass_with_its_own_forward_packs_in_its_encoder_and_decoder():
    class Scaled(nn.Transformer):
        def forward(self, src, tgt, **options):
            return super().forward(2 * src, tgt, **options)

    model, (source, target) = make(), draw()
    model.__class__ = Scaled
    want = tokens_and_gradients(model, source, target, **masks())
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, **masks()), want)
    assert handle.calls == {None: 2}


def test_encoder_that_is_replaced_after_the_patch_is_called():
    model, (source, target) = make(), draw()
    nta.patch(model, on_fallback="raise")
    model.encoder = nn.Sequential()
    model.encoder.forward = lambda src, **options: torch.zeros_like(src)
    out = run(model, source, target, **masks())
    close(out, run(model, source + 1, target, **masks()))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["transformer", "decoder"])
def test_compiled_model_is_one_graph_between_packing_and_padding(kind, monkeypatch):
    """Offsets are read in the forward: the layout no longer exists in the backward. On a GPU, each layer would wait."""
    read, reads = cache._read, []
    monkeypatch.setattr(cache, "_read", lambda offsets: reads.append(offsets) or read(offsets))
    model = torch_models.make(kind, layers=1)
    counter, r, graphs = CompileCounterWithBackend("aot_eager"), random.Random(0), []
    with nta.patch(model) as handle:
        compiled = torch.compile(model, backend=counter)
        for _ in range(5):
            rows = r.randint(2, 6)
            paddings = [padding_of([r.randint(1, 13) for _ in range(rows)] + [14]) for _ in range(2)]
            inputs = [x.requires_grad_() for x in draw(*paddings)]
            options = masks(*paddings) | {"tgt_mask": causal_mask(14)}
            if kind == "decoder":
                inputs = inputs[::-1]
                del options["src_key_padding_mask"]
            outs = [function(*inputs, **options) for function in (model, compiled)]
            reads.clear()
            grads = [torch.autograd.grad(out.square().sum(), [*inputs, *model.parameters()]) for out in outs]
            assert not reads
            close(*([out, *its_grads] for out, its_grads in zip(outs, grads, strict=True)))
            graphs.append(counter.frame_count)
        assert handle.calls == {None: 10}
    assert graphs[-1] == graphs[2] <= 3, graphs

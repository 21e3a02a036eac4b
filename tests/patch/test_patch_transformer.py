"""patch on nn.Transformer and nn.TransformerDecoder: each sequence alone, from real tokens only."""

import copy
import functools
import pickle
import random

import pytest
import torch
from parameters import with_random_parameters
from sweeps import covering, sweep_except
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention.layouts.known import SequenceLayout
from nt_attention.patch import NotPackedError, NotPackedWarning

EMBED, HEADS = 20, 2
SOURCE_LENGTHS, LENGTHS = [13, 7, 3, 17, 1], [4, 1, 9, 6, 2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def padding_of(lengths, side="right"):
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    if side == "mixed":  # every other row has its padding on the left
        padding[::2] = padding[::2].flip(1)
    return padding


SOURCE_PADDING, PADDING = padding_of(SOURCE_LENGTHS), padding_of(LENGTHS)
SOURCE_LENGTH, LENGTH = SOURCE_PADDING.shape[1], PADDING.shape[1]


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def causal_mask(length=LENGTH):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# Masks of the target, and whether they make it causal.
TARGET_MASKS = {
    "none": ({}, False),
    "bool": ({"tgt_mask": causal_mask()}, True),
    "float": ({"tgt_mask": additive(causal_mask())}, True),
    "hint": ({"tgt_mask": causal_mask(), "tgt_is_causal": True}, True),
    "empty": ({"tgt_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.bool)}, False),
}


def make(layers=2, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, "batch_first": True} | options
    return with_random_parameters(nn.Transformer(EMBED, HEADS, layers, layers, 26, **options))


def make_decoder(layers=2, kind=nn.TransformerDecoderLayer, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, "batch_first": True} | options
    layer = kind(EMBED, HEADS, 26, **options)
    return with_random_parameters(nn.TransformerDecoder(layer, layers, nn.LayerNorm(EMBED, dtype=torch.float64)))


def draw(*paddings):
    return [torch.randn(*padding.shape, EMBED, dtype=torch.float64) for padding in paddings]


def masks(source=SOURCE_PADDING, target=PADDING):
    """The padding masks of an nn.Transformer, as most programs pass them."""
    return {"src_key_padding_mask": source, "tgt_key_padding_mask": target, "memory_key_padding_mask": source}


def run(model, source, target, **options):
    """Call an nn.Transformer or a decoder with padded batches (B, L, E) or sequences (L, E), and return such."""
    attention = next(module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    swap = not attention.batch_first and source.dim() == 3
    source, target = (x.transpose(0, 1) if swap else x for x in (source, target))
    out = model(source, target, **options) if isinstance(model, nn.Transformer) else model(target, source, **options)
    return out.transpose(0, 1) if swap else out


def tokens_and_gradients(model, source, target, source_padding=SOURCE_PADDING, padding=PADDING, **options):
    """The real tokens of the output, and the gradients of the tokens of both inputs and of the parameters."""
    leaves = [x.clone().requires_grad_() for x in (source, target)]
    tokens = run(model, *leaves, **options)[~padding]
    of_source, of_target, *others = torch.autograd.grad(tokens.square().sum(), [*leaves, *model.parameters()])
    return [tokens, of_source[~source_padding], of_target[~padding], *others]


def alone(model, source, target, source_padding=SOURCE_PADDING, padding=PADDING, causal=False):
    """The same of each sequence by itself, without padding, concatenated or summed up."""
    found = []
    for rows in zip(source, target, source_padding, padding, strict=True):
        one, its_target = (row[~its_padding] for row, its_padding in zip(rows[:2], rows[2:], strict=True))
        everywhere = [torch.zeros(len(x), dtype=torch.bool) for x in (one, its_target)]
        mask = causal_mask(len(its_target)) if causal else None
        found.append(tokens_and_gradients(model, one, its_target, *everywhere, tgt_mask=mask))
    tokens, others = [x[:3] for x in found], [x[3:] for x in found]
    return [*map(torch.cat, zip(*tokens, strict=True)), *map(sum, zip(*others, strict=True))]


@covering(
    {
        "batch_first, norm_first": [(True, False), (False, True), (True, True), (False, False)],
        "mask": TARGET_MASKS,
        "training": [True, False],
        "side": ["right", "mixed"],
        "additive_padding": [False, True],
        "activation": ["relu", "gelu"],
    }
)
def test_transformer_gives_each_sequence_alone(
    batch_first, norm_first, mask, training, side, additive_padding, activation
):
    model = make(batch_first=batch_first, norm_first=norm_first, activation=activation).train(training)
    paddings = padding_of(SOURCE_LENGTHS, side), padding_of(LENGTHS, side)
    source, target = draw(*paddings)
    options, causal = TARGET_MASKS[mask]
    given = masks(*map(additive, paddings)) if additive_padding else masks(*paddings)
    want = alone(model, source, target, *paddings, causal)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, *paddings, **given, **options), want)
        assert not run(model, source, target, **given, **options)[paddings[1]].any()
    assert handle.calls == {None: 2}


@covering(
    {
        "batch_first": [True, False],
        "padded": ["target", "memory", "both"],
        "mask": TARGET_MASKS,
        "training": [True, False],
    }
)
def test_decoder_gives_each_sequence_alone(batch_first, padded, mask, training):
    model = make_decoder(batch_first=batch_first).train(training)
    paddings = [
        padding if padded in (name, "both") else torch.zeros_like(padding)
        for name, padding in (("memory", SOURCE_PADDING), ("target", PADDING))
    ]
    source, target = draw(*paddings)
    names = "memory_key_padding_mask", "tgt_key_padding_mask"
    given = {name: padding for name, padding in zip(names, paddings, strict=True) if padding.any()}
    options, causal = TARGET_MASKS[mask]
    want = alone(model, source, target, *paddings, causal)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, *paddings, **given, **options), want)
    assert handle.calls == {None: 1}


@pytest.mark.parametrize("seed", sweep_except(range(40), *range(6)))
def test_random_transformers(seed):
    """Lengths from 0, padding anywhere in a row, and any options."""
    torch.manual_seed(seed)
    r = random.Random(seed)
    rows = r.randint(1, 6)
    paddings = [torch.rand(rows, r.randint(1, 15)) < r.random() for _ in range(2)]
    paddings[0][:, r.randrange(paddings[0].shape[1])] = False  # an empty memory has no result to compare with
    options = {name: r.random() < 0.5 for name in ("batch_first", "norm_first", "bias")}
    model = make(r.randint(1, 2), activation=r.choice(["relu", "gelu"]), **options).train(r.random() < 0.5)
    source, target = draw(*paddings)
    causal = causal_mask(paddings[1].shape[1]) if r.random() < 0.5 else None
    given = {name: additive(x) if r.random() < 0.3 else x for name, x in masks(*paddings).items()}
    given["memory_key_padding_mask"] = r.choice([given["memory_key_padding_mask"], given["src_key_padding_mask"]])
    want = tokens_and_gradients(model, source, target, *paddings, **given, tgt_mask=causal)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, *paddings, **given, tgt_mask=causal), want)
    assert handle.calls == {None: 1}


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_packs_source_and_target_once_and_pads_once(batch_first, monkeypatch):
    model, sizes, moves = make(batch_first=batch_first), [], []
    for name in ("pack", "pad"):
        method = getattr(SequenceLayout, name)
        monkeypatch.setattr(SequenceLayout, name, lambda *a, f=method, n=name: (moves.append(n), f(*a))[1])
    nta.patch(model)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:-1]))
    run(model, *draw(SOURCE_PADDING, PADDING), **masks())
    assert sorted(moves) == ["pack", "pack", "pad"]
    assert set(sizes) == {(sum(SOURCE_LENGTHS),), (sum(LENGTHS),)}


def test_input_without_padding_is_not_copied(monkeypatch):
    model, moves = make_decoder(), []
    for name in ("pack", "pad"):
        method = getattr(SequenceLayout, name)
        monkeypatch.setattr(SequenceLayout, name, lambda *a, f=method, n=name: (moves.append(n), f(*a))[1])
    source, target = draw(SOURCE_PADDING, PADDING)
    nta.patch(model)
    run(model, source, target, memory_key_padding_mask=SOURCE_PADDING)
    assert moves == ["pack"]
    run(model, source, target, tgt_key_padding_mask=PADDING)
    assert moves == ["pack", "pack", "pad"]


def test_call_of_pytorchs_translation_tutorial():
    """Positional arguments, (L, B, E), a source mask that hides nothing, and a float mask with boolean padding."""
    model = make(batch_first=False)
    source, target = draw(SOURCE_PADDING, PADDING)
    source_mask = torch.zeros(SOURCE_LENGTH, SOURCE_LENGTH).bool()
    target_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    want = alone(model, source, target, causal=True)[0]
    with nta.patch(model, on_fallback="raise") as handle:
        arguments = source_mask, target_mask, None, SOURCE_PADDING, PADDING, SOURCE_PADDING
        out = model(source.transpose(0, 1), target.transpose(0, 1), *arguments)
    close(out.transpose(0, 1)[~PADDING], want)
    assert handle.calls == {None: 1}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("additive_padding", [False, True])
def test_sequences_without_batch_dimension_run_packed(batch_first, additive_padding):
    model, (source, target) = make(batch_first=batch_first), draw(SOURCE_PADDING[0], PADDING[0])
    paddings = SOURCE_PADDING[0], PADDING[0]
    given = masks(*(additive(x) if additive_padding else x for x in paddings))
    want = tokens_and_gradients(model, source, target, *paddings, **given, tgt_mask=causal_mask())
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, *paddings, **given, tgt_mask=causal_mask()), want)
        assert run(model, source, target, **given).shape == target.shape
    assert handle.calls == {None: 2}


def test_rows_without_tokens():
    paddings = padding_of([13, 0, 3, 17, 0]), padding_of([4, 0, 9, 0, 2])
    model, (source, target) = make(), draw(*paddings)
    want = run(model, source, target, **masks(*paddings))
    with nta.patch(model, on_fallback="raise"):
        out = run(model, source, target, **masks(*paddings))
    rows = [0, 2, 4]  # row 4 has a target, and a memory without tokens, which gives 0
    close(out[rows][~paddings[1][rows]], want[rows][~paddings[1][rows]])


def test_transformer_without_padding_is_not_counted():
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    want = run(model, source, target, tgt_mask=causal_mask())
    with nta.patch(model, on_fallback="raise") as handle:
        close(run(model, source, target, tgt_mask=causal_mask()), want)  # on some CPUs not the same bits
    assert not handle.calls


BAND = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() > 2
SOURCE_BAND = (torch.arange(SOURCE_LENGTH)[:, None] - torch.arange(SOURCE_LENGTH)).abs() > 4
MEMORY_BAND = torch.arange(SOURCE_LENGTH).expand(LENGTH, -1) > 2
FINITE = torch.rand(PADDING.shape, dtype=torch.float64)
# Arguments beside the padding masks, and how the calls are counted. The encoder and the decoder count one by one.
FALLBACKS = {
    "tgt_mask": ({"tgt_mask": BAND}, {None: 1, "tgt_mask is neither None nor causal": 1}),
    "src_mask": ({"src_mask": SOURCE_BAND}, {None: 1, "mask is neither None nor causal": 1}),
    "memory_mask": ({"memory_mask": MEMORY_BAND}, {None: 1, "it has a memory_mask or memory_is_causal": 1}),
    "finite padding": (
        {"tgt_key_padding_mask": FINITE},
        {None: 1, "tgt_key_padding_mask has values other than 0 and −inf": 1},
    ),
    "masks of each head": (
        {"tgt_mask": BAND.expand(len(LENGTHS) * HEADS, -1, -1)},
        {None: 1, "tgt_mask is neither None nor causal": 1},
    ),
}


@pytest.mark.parametrize("kind", FALLBACKS)
@pytest.mark.parametrize("training", [True, False])
def test_transformer_falls_back_in_one_part(kind, training):
    options, calls = FALLBACKS[kind]
    model, (source, target) = make().train(training), draw(SOURCE_PADDING, PADDING)
    options = masks() | options
    want = tokens_and_gradients(model, source, target, **options)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match=[*calls][-1]):
        close(tokens_and_gradients(model, source, target, **options), want)
    assert handle.calls == calls
    with nta.patch(model, on_fallback="raise"), pytest.raises(NotPackedError, match=[*calls][-1]):
        run(model, source, target, **options)


class OwnDecoder(nn.TransformerDecoder):
    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


SOME_VISIBLE = SOURCE_PADDING & (torch.arange(SOURCE_LENGTH) > 9)
MORE_HIDDEN = SOURCE_PADDING | (torch.arange(SOURCE_LENGTH) == 0) & (torch.tensor(SOURCE_LENGTHS) > 1)[:, None]


@pytest.mark.parametrize("memory_padding", [None, SOME_VISIBLE, additive(SOME_VISIBLE)], ids=["none", "some", "float"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("decoder", ["patched", "not patched"])
def test_encoder_runs_padded_if_the_decoder_sees_the_padding_of_the_source(decoder, memory_padding, mode):
    model, (source, target) = make().train(mode == "train"), draw(SOURCE_PADDING, PADDING)
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
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
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
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
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


@pytest.mark.parametrize("kind", ["block", "decoder"])
def test_changed_decoder_gives_what_it_gave(kind):
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    if kind == "decoder":
        model.decoder.__class__ = OwnDecoder
    else:
        model.decoder.layers[1].__class__ = OwnBlock
    want = run(model, source, target, **masks())
    with nta.patch(model) as handle:
        close(run(model, source, target, **masks())[~PADDING], want[~PADDING])
        assert list(handle.changed) == ["encoder"]
        assert handle.left
        assert "decoder.layers.0.multihead_attn" in handle.layers


@pytest.mark.parametrize("where", ["encoder", "decoder"])
def test_hooks_on_the_encoder_and_the_decoder_get_padded_batches(where):
    model, (source, target), seen = make(), draw(SOURCE_PADDING, PADDING), []
    want = tokens_and_gradients(model, source, target, **masks())
    with nta.patch(model, on_fallback="raise") as handle:
        hook = model.get_submodule(where).register_forward_hook(lambda *given: seen.append(given[2].shape))
        close(tokens_and_gradients(model, source, target, **masks()), want)
        assert handle.calls == {None: 2}
        hook.remove()
        run(model, source, target, **masks())
        assert handle.calls == {None: 3}
    assert seen == [(source if where == "encoder" else target).shape]


def test_hooks_on_layers_get_packed_tokens():
    model, (source, target), seen = make(), draw(SOURCE_PADDING, PADDING), []
    for stack in (model.encoder, model.decoder):
        stack.layers[0].register_forward_hook(lambda *given: seen.append(given[2].shape))
    nta.patch(model, on_fallback="raise")
    run(model, source, target, **masks())
    assert seen == [(sum(SOURCE_LENGTHS), EMBED), (sum(LENGTHS), EMBED)]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(layout, causal):
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    want = alone(model, source, target, causal=causal)[0]
    given = [
        torch.nested.as_nested_tensor([x[~p] for x, p in zip(rows, padding, strict=True)], layout=layout)
        for rows, padding in ((source, SOURCE_PADDING), (target, PADDING))
    ]
    with nta.patch(model):
        out = model(*given, tgt_is_causal=causal)
        close(torch.cat(out.unbind()), want)
        with pytest.raises(ValueError, match="no padding"):
            model.decoder(given[1], given[0], tgt_key_padding_mask=PADDING)
        with pytest.raises(ValueError, match="must all be NestedTensors"):
            model.decoder(given[1], source)


@pytest.mark.parametrize("padding_free", [True, False])
def test_nested_tensors_of_a_transformer_that_is_not_batch_first(padding_free):
    model, (source, target) = make(batch_first=False), draw(SOURCE_PADDING, PADDING)
    parts = [
        [x[~p] for x, p in zip(rows, padding, strict=True)]
        for rows, padding in ((source, SOURCE_PADDING), (target, PADDING))
    ]
    want = torch.cat([model(x[:, None], y[:, None])[:, 0] for x, y in zip(*parts, strict=True)])
    given = [torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in parts]
    with nta.patch(model, padding_free):
        close(torch.cat(model(*given).unbind()), want)
        fewer = torch.nested.as_nested_tensor(parts[1][:2], layout=torch.jagged)
        with pytest.raises(ValueError, match="same number of sequences, got 5 and 2"):
            model(given[0], fewer)
        with pytest.raises(ValueError, match="must both be NestedTensors: src is one, and tgt is not"):
            model(given[0], target)


def test_nested_tensors_with_other_masks_run_as_before():
    decoder, (source, target) = make_decoder(), draw(SOURCE_PADDING, PADDING)
    want = run(decoder, source, target, tgt_mask=BAND, memory_mask=MEMORY_BAND)
    given = [torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for x in (target, source)]
    with nta.patch(decoder):
        out = decoder(*given, tgt_mask=BAND, memory_mask=MEMORY_BAND)
    close(torch.stack(out.unbind()), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    want = alone(model, source, target, causal=True)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, target, source):
            call = functools.partial(model, **masks(), tgt_mask=causal_mask())
            return checkpoint(call, source, target, use_reentrant=reentrant)

    leaves = [x.requires_grad_() for x in (source, target)]
    with nta.patch(model, on_fallback="raise"):
        tokens = Checkpointed()(*leaves[::-1])[~PADDING]
        tokens.square().sum().backward()  # reentrant checkpoints do not support torch.autograd.grad
    grads = [source.grad[~SOURCE_PADDING], target.grad[~PADDING], *(p.grad for p in model.parameters())]
    close([tokens, *grads], want)


def test_autocast_keeps_dtypes():
    model, (source, target) = make(dtype=torch.float32), [x.float() for x in draw(SOURCE_PADDING, PADDING)]
    with torch.autocast("cpu", torch.bfloat16):
        want = run(model, source, target, **masks())
        with nta.patch(model, on_fallback="raise"):
            out = run(model, source, target, **masks())
    assert out.dtype == want.dtype
    torch.testing.assert_close(out[~PADDING], want[~PADDING], rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_dropout_has_the_same_mean():
    """Only the mean can be compared: packed tokens get other random numbers than padded ones."""
    count, model = 300, make(1, dropout=0.2)
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_their_own_weights(copied):
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    want = alone(model, source, target)
    handle = nta.patch(model, on_fallback="raise")
    other = copied(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    close(tokens_and_gradients(other, source, target, **masks()), want)
    assert other.forward.handle.calls == {None: 1}
    handle.remove()
    close(tokens_and_gradients(other, source, target, **masks()), want)


def test_remove_restores_the_original_modules():
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    before = dict(model.named_modules())
    attributes = {name: set(vars(module)) for name, module in before.items()}
    want = run(model, source, target, **masks())
    with nta.patch(model):
        with pytest.raises(ValueError, match="already patched"):
            nta.patch(model)
        run(model, source, target, **masks())
    after = dict(model.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert {name: set(vars(module)) for name, module in after.items()} == attributes
    assert torch.equal(run(model, source, target, **masks()), want)


def test_handle_lists_the_parts():
    model = make(1)
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

    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    model.__class__ = Scaled
    want = tokens_and_gradients(model, source, target, **masks())
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(model, source, target, **masks()), want)
    assert handle.calls == {None: 2}


def test_encoder_that_is_replaced_after_the_patch_is_called():
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    nta.patch(model, on_fallback="raise")
    model.encoder = nn.Sequential()
    model.encoder.forward = lambda src, **options: torch.zeros_like(src)
    out = run(model, source, target, **masks())
    close(out, run(model, source + 1, target, **masks()))


def test_data_parallel_replica_runs_its_own_parameters():
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    scaled = copy.deepcopy(model)
    for parameter in scaled.parameters():
        parameter.data *= 1.5
    want = run(scaled, source, target, **masks())[~PADDING]
    handle = nta.patch(model, on_fallback="raise")
    modules = list(model.modules())  # what torch.nn.parallel.replicate does, which wants a GPU
    replicas = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        replica = replicas[id(module)]
        replica._modules.update({name: replicas[id(child)] for name, child in module.named_children()})
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach() * 1.5)
    close(run(replicas[id(model)], source, target, **masks())[~PADDING], want)
    assert handle.calls == {None: 1}


def test_under_vmap():
    model, (source, target) = make(), draw(SOURCE_PADDING, PADDING)
    want = run(model, source, target, **masks())

    def one(source, target, source_padding, padding):
        return run(model, source[None], target[None], **masks(source_padding[None], padding[None]))[0]

    handle = nta.patch(model)
    with pytest.warns(NotPackedWarning, match="its values can't be read here"):
        out = torch.vmap(one)(source, target, SOURCE_PADDING, PADDING)
    close(out[~PADDING], want[~PADDING])
    assert handle.calls == {"its values can't be read here": 2}


class LayersInALoop(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(make_decoder(3, **options).layers)

    def forward(self, target, memory, **masks):
        for layer in self.layers:
            target = layer(target, memory, **masks)
        return target


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", TARGET_MASKS)
def test_decoder_layers_in_a_loop_run_packed(batch_first, mask):
    model, (source, target) = LayersInALoop(batch_first=batch_first), draw(SOURCE_PADDING, PADDING)
    options, causal = TARGET_MASKS[mask]
    given = {"tgt_key_padding_mask": PADDING, "memory_key_padding_mask": SOURCE_PADDING, **options}
    want = alone(model, source, target, causal=causal)
    with nta.patch(model, on_fallback="raise") as handle:
        assert "layers.0" in handle.layers
        close(tokens_and_gradients(model, source, target, **given), want)
    assert handle.calls == {None: 3}


def test_decoder_layers_in_a_loop_take_nested_tensors():
    model, (source, target) = LayersInALoop(), draw(SOURCE_PADDING, PADDING)
    want = alone(model, source, target)[0]
    nested = [
        torch.nested.as_nested_tensor([x[~p] for x, p in zip(rows, padding, strict=True)], layout=torch.jagged)
        for rows, padding in ((target, PADDING), (source, SOURCE_PADDING))
    ]
    with nta.patch(model, on_fallback="raise"):
        close(model(*nested).values(), want)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["transformer", "decoder"])
def test_compiled_model_is_one_graph_between_packing_and_padding(kind):
    model = make(1) if kind == "transformer" else make_decoder(1)
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
            grads = [torch.autograd.grad(out.square().sum(), [*inputs, *model.parameters()]) for out in outs]
            close(*([out, *its_grads] for out, its_grads in zip(outs, grads, strict=True)))
            graphs.append(counter.frame_count)
        assert handle.calls == {None: 10}
    assert graphs[-1] == graphs[2] <= 3, graphs

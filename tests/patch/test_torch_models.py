"""patch on PyTorch's stacks and layers: each sequence alone, from real tokens only, and the original model restored."""

import copy
import pickle
import random
import warnings

import pytest
import torch
import torch_models
from sweeps import covering, sweep_except
from torch import nn
from torch_models import (
    EMBED,
    HEADS,
    IGNORED_WARNINGS,
    KINDS,
    LENGTHS,
    MASKS,
    PADDINGS,
    additive,
    alone,
    band,
    close,
    draw,
    every_kind,
    make,
    masks_of,
    nested_of,
    padding_of,
    run,
    tokens_and_gradients,
)  # fmt: skip

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning
from nt_attention.layouts.sequence import SequenceLayout

pytestmark = IGNORED_WARNINGS


@covering(
    {
        "kind": KINDS,
        "batch_first, norm_first": [(True, False), (False, True), (True, True), (False, False)],
        "mask": MASKS,
        "training": [True, False],
        "side": ["right", "mixed"],
        "additive_padding": [False, True, True],
        "activation": ["relu", "gelu"],
    }
)
def test_each_sequence_alone(kind, batch_first, norm_first, mask, training, side, additive_padding, activation):
    model = make(kind, batch_first=batch_first, norm_first=norm_first, activation=activation).train(training)
    paddings = {name: padding_of(lengths, side) for name, lengths in LENGTHS.items()}
    rows = draw(paddings)
    given = masks_of(kind, paddings, mask)
    if additive_padding:
        given |= {name: additive(given[name]) for name in KINDS[kind].paddings}
    want, before = alone(kind, model, rows, paddings, MASKS[mask][2]), run(kind, model, rows, **given)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(kind, model, rows, paddings, **given), want)
        assert handle.calls == {None: KINDS[kind].packed}
        assert not run(kind, model, rows, **given)[paddings[KINDS[kind].side]].any()
    assert torch.equal(run(kind, model, rows, **given), before)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padded", ["target", "source"])
def test_decoder_with_padding_on_one_side(padded, mask):
    paddings = {side: x if side == padded else torch.zeros_like(x) for side, x in PADDINGS.items()}
    model, rows = make("decoder"), draw(paddings)
    given = {name: x for name, x in masks_of("decoder", paddings, mask).items() if "padding" not in name or x.any()}
    want = alone("decoder", model, rows, paddings, MASKS[mask][2])
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients("decoder", model, rows, paddings, **given), want)
    assert handle.calls == {None: 1}


@pytest.mark.parametrize("seed", sweep_except(range(40), *range(6)))
def test_random_transformers(seed):
    """Lengths from 0, padding anywhere in a row, and any options."""
    torch.manual_seed(seed)
    r = random.Random(seed)
    batch = r.randint(1, 6)
    paddings = {side: torch.rand(batch, r.randint(1, 15)) < r.random() for side in LENGTHS}
    paddings["source"][:, 0] = False  # an empty memory has no result to compare with
    options = {name: r.random() < 0.5 for name in ("batch_first", "norm_first", "bias")}
    model = make("transformer", activation=r.choice(["relu", "gelu"]), **options).train(r.random() < 0.5)
    rows, given = draw(paddings), masks_of("transformer", paddings, r.choice(["none", "bool"]))
    given |= {name: additive(x) for name, x in given.items() if "padding" in name and r.random() < 0.3}
    given["memory_key_padding_mask"] = r.choice([given["memory_key_padding_mask"], given["src_key_padding_mask"]])
    want = tokens_and_gradients("transformer", model, rows, paddings, **given)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients("transformer", model, rows, paddings, **given), want)
    assert handle.calls == {None: 1}


@every_kind
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_only_tokens_are_computed_and_each_side_is_packed_once(kind, grad, monkeypatch):
    """In eval without gradients, the stock encoder would use a fused kernel that does not call its layers."""
    model, sizes, moves = make(kind).eval(), [], []
    for name in ("pack", "pad"):
        method = getattr(SequenceLayout, name)
        monkeypatch.setattr(SequenceLayout, name, lambda *a, f=method, n=name: (moves.append(n), f(*a))[1])
    nta.patch(model)

    def note(module, inputs):
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            sizes.append(inputs[0].shape[:-1])

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    with torch.set_grad_enabled(grad):
        run(kind, model, draw(), **masks_of(kind))
    hook.remove()
    assert set(sizes) == {(sum(LENGTHS[side]),) for side in (LENGTHS if kind == "transformer" else [KINDS[kind].side])}
    if "layers" not in kind:
        assert sorted(moves) == [*["pack"] * len(KINDS[kind].inputs), "pad"]


@covering({"kind": KINDS, "batch_first": [True, False], "additive_padding": [False, True], "mask": ["none", "bool"]})
def test_sequences_without_batch_dimension(kind, batch_first, additive_padding, mask):
    model, paddings = make(kind, batch_first=batch_first), {side: x[1] for side, x in PADDINGS.items()}
    rows, given = draw(paddings), masks_of(kind, paddings, mask)
    if additive_padding:
        given |= {name: additive(given[name]) for name in KINDS[kind].paddings}
    want = tokens_and_gradients(kind, model, rows, paddings, **given)
    with nta.patch(model, on_fallback="raise") as handle:
        close(tokens_and_gradients(kind, model, rows, paddings, **given), want)
        out = run(kind, model, rows, **given)
    assert out.shape == rows[KINDS[kind].side].shape
    assert not out[paddings[KINDS[kind].side]].any()
    assert handle.calls == {None: 2 * KINDS[kind].packed}


@every_kind
def test_a_call_without_padding_is_not_counted(kind):
    model, rows = make(kind), draw()
    want = run(kind, model, rows)
    with nta.patch(model, on_fallback="raise") as handle:
        close(run(kind, model, rows), want)  # on some CPUs not the same bits
    assert not handle.calls


FINITE = torch.rand(PADDINGS["target"].shape, dtype=torch.float64)
MEMORY_BAND = torch.arange(17).expand(9, -1) > 2
# Arguments beside the padding masks, and the reason that is counted.
FALLBACKS = [
    *[(kind, {KINDS[kind].mask: band(KINDS[kind].side)}, "mask is neither None nor causal") for kind in KINDS],
    ("transformer", {"src_mask": band("source", 4)}, "mask is neither None nor causal"),
    ("transformer", {"memory_mask": MEMORY_BAND}, "it has a memory_mask or memory_is_causal"),
    ("transformer", {"tgt_key_padding_mask": FINITE}, "tgt_key_padding_mask has values other than 0 and −inf"),
    (
        "encoder",
        {"src_key_padding_mask": additive(PADDINGS["source"]).requires_grad_()},
        "src_key_padding_mask needs a gradient",
    ),
    ("transformer", {"tgt_mask": band("target").expand(5 * HEADS, -1, -1)}, "tgt_mask is neither None nor causal"),
]


@pytest.mark.parametrize(("kind", "options", "reason"), FALLBACKS)
@pytest.mark.parametrize("training", [True, False])
def test_fallbacks_are_counted_and_warn_once(kind, options, reason, training):
    """The encoder and the decoder of a transformer count one by one."""
    model, rows = make(kind).train(training), draw()
    options = masks_of(kind) | options
    want = tokens_and_gradients(kind, model, rows, **options)
    with nta.patch(model) as handle:
        with pytest.warns(NotPackedWarning, match=reason) as said:
            close(tokens_and_gradients(kind, model, rows, **options), want)
        assert [x.filename for x in said if x.category is NotPackedWarning] == [torch_models.__file__]
        calls = {why: count for why, count in handle.calls.items() if why is not None}
        assert handle.calls.total() == (2 if kind == "transformer" else KINDS[kind].packed)
        assert list(calls.values()) == [KINDS[kind].packed]
        assert next(iter(calls)).endswith(reason)
        assert f"did not run packed: {next(iter(calls))}" in str(handle)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotPackedWarning)
            run(kind, model, rows, **options)
    with nta.patch(model, on_fallback="raise"), pytest.raises(NotPackedError, match=reason):
        run(kind, model, rows, **options)


@covering(
    {"kind": KINDS, "layout": [torch.jagged, torch.strided], "causal": [False, True], "norm_first": [True, False]}
)
def test_nested_tensors(kind, layout, causal, norm_first):
    model, rows = make(kind, norm_first=norm_first), draw()
    want, nested = alone(kind, model, rows, causal=causal)[0], nested_of(rows, layout=layout)
    with nta.patch(model, on_fallback="raise") as handle:
        out = run(kind, model, nested, **({KINDS[kind].hint: True} if causal else {}))
        close(torch.cat(out.unbind()), want)
        (out + nested[KINDS[kind].side]).unbind()
        assert out.layout == layout
        for name, side in KINDS[kind].paddings.items():
            if kind in ("encoder", "decoder"):
                with pytest.raises(ValueError, match=r"no padding|leave out"):
                    run(kind, model, nested, **{name: PADDINGS[side]})
    with nta.patch(model, padding_free=False) as handle:
        if "layer" not in kind:
            assert "takes NestedTensors" in str(handle)
        close(torch.cat(run(kind, model, nested, **({KINDS[kind].hint: True} if causal else {})).unbind()), want)


@pytest.mark.parametrize("padding_free", [True, False])
def test_nested_tensors_of_a_transformer_that_is_not_batch_first(padding_free):
    model, rows = make("transformer", batch_first=False), draw()
    want, nested = alone("transformer", model, rows)[0], nested_of(rows)
    with nta.patch(model, padding_free):
        close(torch.cat(model(nested["source"], nested["target"]).unbind()), want)
        with pytest.raises(ValueError, match="same number of sequences, got 5 and 2"):
            model(
                nested["source"],
                nested_of({"target": rows["target"][:2]}, {"target": PADDINGS["target"][:2]})["target"],
            )
        with pytest.raises(ValueError, match="must both be NestedTensors: src is one, and tgt is not"):
            model(nested["source"], rows["target"])
        with pytest.raises(ValueError, match="must all be NestedTensors"):
            model.decoder(nested["target"], rows["source"])


def test_nested_tensors_with_other_masks_run_as_before():
    decoder, rows = make("decoder"), draw()
    want = run("decoder", decoder, rows, tgt_mask=band("target"), memory_mask=MEMORY_BAND)
    given = {side: torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for side, x in rows.items()}
    with nta.patch(decoder):
        out = run("decoder", decoder, given, tgt_mask=band("target"), memory_mask=MEMORY_BAND)
    close(torch.stack(out.unbind()), want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_kind
def test_copies_run_their_own_weights(kind, copied):
    model, rows = make(kind), draw()
    want, masks = alone(kind, model, rows), masks_of(kind)
    handle = nta.patch(model, on_fallback="raise")
    other = copied(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    close(tokens_and_gradients(kind, other, rows, **masks), want)
    assert all(parameter.grad is None for parameter in model.parameters())
    if "layers" not in kind:
        assert other.forward.handle.calls == {None: 1}
    handle.remove()
    close(tokens_and_gradients(kind, other, rows, **masks), want)
    if copied is not copy.deepcopy:
        next(x.forward for x in other.modules() if "forward" in vars(x)).handle.remove()
        assert not any("forward" in vars(x) for x in other.modules())
    with nta.patch(other, on_fallback="raise") as again:
        close(tokens_and_gradients(kind, other, rows, **masks), want)
    assert again.calls == {None: KINDS[kind].packed}


@every_kind
def test_remove_restores_the_original_modules(kind):
    model = nn.Sequential(nn.Linear(EMBED, EMBED), make(kind), nn.Linear(EMBED, 3)).double()
    before, keys = dict(model.named_modules()), list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in before.items()}
    with pytest.raises(RuntimeError, match="on purpose"), nta.patch(model) as handle:
        assert nta.patch(model) is handle
        with pytest.raises(ValueError, match="already"):
            nta.patch(model, padding_free=False)
        run(kind, model[1], draw(), **masks_of(kind))
        assert list(model.state_dict()) == keys
        assert {id(p) for p in model.parameters()} == {id(p) for m in before.values() for p in m.parameters()}
        raise RuntimeError("on purpose")
    after = dict(model.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert {name: set(vars(module)) for name, module in after.items()} == attributes
    assert "(removed)" in str(handle)
    handle.remove()


@every_kind
def test_function_transforms_fall_back(kind):
    model, rows, masks = make(kind), draw(), masks_of(kind)
    real, names = ~PADDINGS[KINDS[kind].side], list(KINDS[kind].paddings)
    want = run(kind, model, rows, **masks)

    def one(rows, paddings):
        given = {side: x[None] for side, x in rows.items()}
        return run(kind, model, given, **{name: x[None] for name, x in zip(names, paddings, strict=True)})[0]

    def loss(rows):
        return run(kind, model, rows, **masks)[real].sin().sum()

    want_grads = torch.func.grad(loss)(rows)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="its values can't be read here"):
        out = torch.vmap(one)({side: rows[side] for side in KINDS[kind].inputs}, [masks[name] for name in names])
        close(torch.func.grad(loss)(rows), want_grads)
    close(out[real], want[real])
    assert handle.calls == {"its values can't be read here": 4 if kind == "transformer" else 2 * KINDS[kind].packed}

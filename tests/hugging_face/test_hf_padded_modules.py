"""Models whose layers keep a state along the row, which run on padded rows, or have a convolution along it."""

from __future__ import annotations

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sweeps import sweep_except
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import nt_attention as nta
from nt_attention.hf.check import plans
from nt_attention.hf.pack.padded_modules import ON_CPU, ON_GPU, group_by_length
from nt_attention.hf.route.packed_row import PackedRow, running
from nt_attention.patching.handle import NotPackedWarning

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
    "n_groups": 2, "chunk_size": 8, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "qwen3_5_text": {**SMALL, **DELTA},
    "lfm2": {**SMALL, "full_attn_idxs": [1, 3], "conv_L_cache": 3},
    "mamba2": MAMBA2,
}
LENGTHS = (7, 1, 23, 12)


def new(name):
    torch.manual_seed(0)
    fields = MODELS[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).double().train()


def batch_of(lengths=LENGTHS, begin=0):
    """Rows of random ids, padded on the right. The first `begin` tokens of all rows are equal."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 97, mask.shape, generator=generator)
    ids[:, :begin] = ids[0, :begin]
    ids *= mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def alone(model, batch, lengths=LENGTHS):
    """The mean loss, and the logits of each sequence, without padding."""
    losses, logits, count = [], [], 0
    for row, n in enumerate(lengths):
        ids = batch["input_ids"][row : row + 1, :n]
        out = model(input_ids=ids, labels=ids, use_cache=False)
        logits.append(out.logits[0])
        losses += [out.loss * (n - 1)] if n > 1 else []
        count += n - 1
    return sum(losses) / count, logits


def check_same(patched, model, batch, lengths=LENGTHS):
    got = patched(**batch)
    got.loss.backward()
    loss, logits = alone(model, batch, lengths)
    loss.backward()
    torch.testing.assert_close(got.loss, loss, rtol=0, atol=1e-6)  # transformers computes losses in float32
    for row, want in enumerate(logits):
        torch.testing.assert_close(got.logits[row, : len(want)], want, rtol=0, atol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, p in patched.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_shared_prefixes_run_whole_sequences_in_modules_with_a_state(name):
    model, lengths = new(name), (50, 41, 60, 45)
    patched = copy.deepcopy(model)
    handle = nta.patch(patched, packing="always", shared_prefixes=True)
    check_same(patched, model, batch_of(lengths, begin=40), lengths)
    assert handle.prefixes.calls == {None: 1}
    assert handle.prefixes.computed == sum(lengths) - 3 * 40


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_only_the_modules_with_a_state_see_padding(name):
    model = new(name)
    shapes = {}
    nta.patch(model, packing="always")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, path=path: shapes.setdefault(path, []).append(args[0].shape)
            )
    lengths = (46, 45, 44, 3, 3, 2)
    model(**batch_of(lengths))
    rows = {path: sum(shape[:2].numel() for shape in seen) for path, seen in shapes.items()}
    assert {n for path, n in rows.items() if ".linear_attn." not in path} == {sum(lengths)}
    states = [n for path, n in rows.items() if ".linear_attn." in path]
    assert bool(states) == (name != "lfm2"), "convolutions need no padded rows"
    assert all(sum(lengths) < n < 1.2 * sum(lengths) for n in states)


def test_with_a_kernel_for_states_that_knows_sequences_nothing_is_padded(monkeypatch):
    """As with flash-linear-attention, whose kernel takes `cu_seqlens`. The convolution is PyTorch's."""
    module = transformers.models.qwen3_5.modeling_qwen3_5
    stock = module.torch_chunk_gated_delta_rule

    def by_sequence(query, key, value, g, beta, cu_seqlens=None, **options):
        ends = [query.shape[1]] if cu_seqlens is None else cu_seqlens[1:].tolist()
        cuts = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
        outs = [
            stock(*(x[:, cut] for x in (query, key, value)), g=g[:, cut], beta=beta[:, cut], **options)[0]
            for cut in cuts
        ]
        return torch.cat(outs, 1), None

    by_sequence.__module__ = module.__name__
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", by_sequence)
    monkeypatch.setattr(plans, "_kept", {})  # the function of a Python module is no part of a model
    model = new("qwen3_5_text")
    patched = copy.deepcopy(model)
    handle = nta.patch(patched, packing="always", on_fallback="raise")
    assert "GatedDeltaNet, zeros between sequences" in str(handle.layers)
    assert "padded" not in str(handle.layers)
    check_same(patched, model, batch_of())


def convolve_threefold(hidden_states, weight, bias=None, activation=None, **_):
    """Another convolution, as users set it into the file of a model."""
    width = weight.shape[-1]
    return 3 * F.conv1d(hidden_states, weight[:, None], bias, 1, width - 1, groups=len(weight))[..., : 1 - width]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_convolution_that_was_replaced_before_the_patch(monkeypatch, is_wrapped):
    module = transformers.models.lfm2.modeling_lfm2
    model = new("lfm2")
    mine = functools.wraps(module.causal_conv1d_fn)(convolve_threefold) if is_wrapped else convolve_threefold
    monkeypatch.setattr(module, "causal_conv1d_fn", mine)
    stock = copy.deepcopy(model)
    nta.patch(model, packing="always")
    check_same(model, stock, batch_of())


def test_convolution_that_was_replaced_after_the_patch(monkeypatch):
    module = transformers.models.lfm2.modeling_lfm2
    model = new("lfm2")
    stock = copy.deepcopy(model)
    nta.patch(model, packing="always")
    monkeypatch.setattr(module, "causal_conv1d_fn", convolve_threefold)
    with pytest.warns(NotPackedWarning, match="causal_conv1d_fn of .*lfm2 was replaced after the patch"):
        check_same(model, stock, batch_of())


def test_convolutions_of_other_models_stay_as_they_are():
    model = new("lfm2")
    stock, batch = copy.deepcopy(model), batch_of()
    want = stock(**batch).logits
    model.requires_grad_(False)
    nta.patch(model, packing="always")
    assert torch.equal(stock(**batch).logits, want)
    alone = {name: x[:1] for name, x in batch.items()}
    seen = []
    stock.register_forward_hook(lambda *_: seen.append(model(**batch).logits))  # a patched model runs in between
    assert torch.equal(stock(**alone).logits, stock(**alone).logits)
    assert seen


@given(st.lists(st.integers(0, 3000), max_size=60), st.booleans())
def test_groups(lengths, on_gpu):
    """All sequences but empty ones, in groups that cost at most 4 % more than the best ones of all."""
    lengths = np.array(lengths, np.int64)
    groups = group_by_length(lengths, on_gpu)
    assert sorted(np.concatenate(groups)) == np.flatnonzero(lengths).tolist() if groups else not lengths.any()
    step, start = ON_GPU if on_gpu else ON_CPU

    def cost(rows, longest):
        return (rows + step) * longest + start

    falling, best = sorted(lengths[lengths > 0], reverse=True), [0.0]
    for end in range(1, len(falling) + 1):
        best.append(min(best[begin] + cost(end - begin, falling[begin]) for begin in range(end)))
    assert sum(cost(len(group), int(lengths[group].max())) for group in groups) <= 1.04 * best[-1] + 1e-6


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_a_checkpoint_of_transformers_may_copy_its_inputs(name):
    model = new(name)
    patched = copy.deepcopy(model)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        nta.patch(patched, packing="always", on_fallback="raise"),
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    ):
        check_same(patched, model, batch_of())


def test_a_copy_of_the_input_of_a_checkpoint_around_a_layer_is_an_error():
    model = new("lfm2")
    nta.patch(model, packing="always")
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss = model(**batch_of()).loss
        with pytest.raises(RuntimeError, match="lengths of its sequences are not known"):
            loss.backward()


@pytest.mark.parametrize("path", ["model.layers.0.conv", "model.layers.0", "model.layers.1.self_attn.out_proj"])
def test_a_module_that_mixes_tokens_and_was_put_in_after_the_patch_is_noticed(path):
    model, batch = new("lfm2").eval(), batch_of()
    other, unpatched = copy.deepcopy(model.get_submodule(path)), copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(next(name for name, _ in other.named_parameters())).mul_(0.5)
        with nta.patch(model) as handle:
            model(**batch)
            for each in (model, unpatched):
                each.set_submodule(path, copy.deepcopy(other))
            got = model(**batch).logits
    for row, want in enumerate(alone(unpatched, batch)[1]):
        torch.testing.assert_close(got[row, : len(want)], want, rtol=0, atol=1e-6)
    assert handle.calls[None] == (2 if "self_attn" in path else 1)
    assert ("self_attn" in path) != any("first batch gave other values" in str(reason) for reason in handle.calls)


def test_a_copy_and_a_wrapped_module_stay_packed():
    model, batch = new("lfm2").eval(), batch_of()
    with nta.patch(model, on_fallback="raise") as handle, torch.no_grad():
        want = model(**batch).loss
        layers = model.model.layers
        layers[0] = nn.ModuleDict({"inner": layers[0]})  # as wrappers of other packages do
        layers[0].forward = layers[0]["inner"].__call__
        torch.testing.assert_close(model(**batch).loss, want)
        torch.testing.assert_close(copy.deepcopy(model)(**batch).loss, want)
    assert handle.calls == {None: 3}


def test_gradients_by_torch_func():
    model, batch = new("lfm2"), batch_of()
    unpatched, parameters = copy.deepcopy(model), dict(model.named_parameters())
    unpatched(**batch).loss.backward()
    with nta.patch(model, on_fallback="raise"):
        got = torch.func.grad(lambda x: torch.func.functional_call(model, x, (), batch).loss)(parameters)
    for name, parameter in unpatched.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("lengths", "reentrant"), [((7,), False), ((7, 4), True)])
def test_a_checkpoint_of_the_whole_model(lengths, reentrant):
    """In the backward, a call of one row without padding is known to be padded."""
    model, batch = new("lfm2"), batch_of(lengths)
    unpatched, one = copy.deepcopy(model), torch.ones(1, requires_grad=True)
    alone(unpatched, batch, lengths)[0].backward()
    with nta.patch(model):
        checkpoint(lambda x: model(**batch).loss * x.sum(), one, use_reentrant=reentrant).backward()
    for (name, parameter), theirs in zip(model.named_parameters(), unpatched.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "mixer", "lengths"),
    sweep_except(
        [(*x, n) for x in (("lfm2", "Lfm2ShortConv"), ("mamba2", "Mamba2Mixer")) for n in ((7,), (7, 4))],
        ("lfm2", "Lfm2ShortConv", (7,)),
        ("mamba2", "Mamba2Mixer", (7, 4)),
    ),
)
@pytest.mark.filterwarnings("ignore::nt_attention.patching.handle.NotPackedWarning")
def test_a_checkpoint_around_a_mixer_alone(name, mixer, lengths, reentrant):
    model, batch = new(name), batch_of(lengths)
    unpatched = copy.deepcopy(model)
    alone(unpatched, batch, lengths)[0].backward()
    with nta.patch(model):
        for module in [x for x in model.modules() if type(x).__name__ == mixer]:
            run = module.forward  # a reentrant checkpoint takes no keyword arguments
            module.forward = lambda x=None, run=run, hidden_states=None, **more: checkpoint(
                functools.partial(run, **more), hidden_states if x is None else x, use_reentrant=reentrant
            )
        model(**batch, use_cache=False).loss.backward()
    for (name, parameter), theirs in zip(model.named_parameters(), unpatched.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=0, atol=1e-6, msg=name)


def test_a_checkpoint_around_a_mixer_whose_input_two_calls_share_is_an_error():
    model, hidden = new("lfm2"), torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    row = PackedRow(layout := nta.SequenceLayout.from_lengths([2, 3]), layout.position_ids[None], 3)
    with nta.patch(model):
        mixer = model.model.layers[0].conv
        with running(padded=True):
            out = checkpoint(mixer, hidden, use_reentrant=False)
        with running(row=row):
            mixer(hidden)
        with pytest.raises(RuntimeError, match="lengths of its sequences are not known"):
            out.sum().backward()


def test_heads_that_pass_no_lengths_compute_the_loss_of_each_sequence():
    """With padding on the left and a label on the first token, this token is not predicted."""
    model, batch = new("mamba2"), batch_of()
    unpatched = copy.deepcopy(model)
    want = alone(unpatched, batch)[0]
    left = {name: torch.full_like(x, -100 if name == "labels" else 0) for name, x in batch.items()}
    for row, n in enumerate(LENGTHS):
        for name, x in left.items():
            x[row, -n:] = batch[name][row, :n]
    with nta.patch(model), pytest.warns(NotPackedWarning, match="leaves out labels at padding, or at a first token"):
        torch.testing.assert_close(model(**left).loss, want, rtol=0, atol=1e-6)


def test_the_cache_of_mamba_is_named():
    model, batch = new("mamba2").eval(), batch_of((9, 4))
    with nta.patch(model) as handle, torch.no_grad():
        cache = model(batch["input_ids"][:, :4], use_cache=True).cache_params
        model(batch["input_ids"][:, 4:5], cache_params=cache)
    assert set(handle.calls) == {"it asks for a cache", "it continues from a cache"}


@pytest.mark.parametrize("how", ["patch", "register"])
def test_rows_packed_by_hand_are_refused_beside_convolutions(how):
    model = new("lfm2").eval()
    with pytest.raises(ValueError, match="does not tell all of its layers where sequences begin"):
        if how == "patch":
            nta.patch(model, padding_free=False)
        else:
            model.set_attn_implementation(nta.hf.register())

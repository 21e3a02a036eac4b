"""Every family and head: padded, packed and trained, against each sequence by itself under eager attention."""

import functools
import inspect

import pytest
import tiny
import torch
from family_models import (
    BY_ID,
    LAYOUT,
    NO_SDPA,
    WITHOUT_POSITION_IDS,
    check_outputs,
    check_padding,
    close,
    families,
    heads_ending_in,
    labels_for,
    run,
)
from sweeps import covering, sweep_except
from tiny import EVERY, PAD
from torch import nn
from transformers.pytorch_utils import Conv1D

import nt_attention as nta
from nt_attention.hf.families import CACHE
from nt_attention.hf.route.by_name import MIX_ROWS

HEADS = heads_ending_in(*tiny.ENDINGS[2:])
TOKEN_HEADS = heads_ending_in("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
FAMILIES_AND_IMPLEMENTATIONS = [
    (*family, implementation)
    for family in EVERY
    for implementation in ("eager", "sdpa")
    if implementation == "eager" or family[0] not in NO_SDPA
]


@covering({"model_type, name, implementation": FAMILIES_AND_IMPLEMENTATIONS, "side": ["right", "left"]})
def test_patched_padded_batch(model_type, name, implementation, side):
    model = tiny.make(model_type, name, implementation)
    with nta.patch(model) as handle:
        out = run(model, **tiny.batch_of(model_type, side), output_hidden_states=True)
    assert handle.calls == {None: 1}
    assert out.keys() == tiny.alone(model_type, name).keys()
    check_outputs(out, tiny.alone(model_type, name), side)
    check_padding(out, name, side)


def refuses_the_name(model):
    """It does not pass on where sequences begin, so its attention alone can't keep them apart."""
    for refused in (
        lambda: nta.patch(model, padding_free=False),
        lambda: model.set_attn_implementation(nta.hf.register()),
    ):
        with pytest.raises(ValueError, match="would mix the sequences of rows"):
            refused()


@covering({"model_type, name": EVERY, "side": ["left", "right"]})
def test_registered_attention_on_a_padded_batch(model_type, name, side):
    want = dict(tiny.alone(model_type, name))
    if (
        side == "left" and model_type in tiny.ENCODERS
    ):  # stock heads read the first position of a row, even if it is padding
        want = {key: value for key, value in want.items() if key != "pooler_output" and not tiny.per_sequence(name)}
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    if model_type in MIX_ROWS:
        refuses_the_name(model)
        return
    with nta.patch(model, padding_free=False):
        check_outputs(run(model, **batch, output_hidden_states=True), want, side)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        check_outputs(run(model, **batch, output_hidden_states=True), want, side)


def packed(model_type, by):
    """The sequences in one row, with position_ids, or with cu_seq_lens too."""
    first = PAD + 1 if model_type in BY_ID else 0
    row = {"input_ids": torch.cat(tiny.sequences())[None], "position_ids": LAYOUT.position_ids[None] + first}
    if by == "cu_seq_lens":
        row |= {"cu_seq_lens_q": LAYOUT.cu_seqlens, "cu_seq_lens_k": LAYOUT.cu_seqlens}
        row |= {"max_length_q": LAYOUT.max_seqlen, "max_length_k": LAYOUT.max_seqlen}
    return row


PACKABLE = [(model_type, name) for model_type, name in EVERY if not tiny.per_sequence(name)]
MASKS = {"no mask": {}, "a mask of ones": {"attention_mask": torch.ones(1, LAYOUT.total, dtype=torch.int64)}}


def expected_outputs(model_type, name):
    return {key: value for key, value in tiny.alone(model_type, name).items() if key != "pooler_output"}


@covering(
    {
        "model_type, name": PACKABLE,
        "by": ["position_ids", "cu_seq_lens"],
        "mask": ["a mask of ones", "no mask", "a mask of ones"],
    }
)
@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
def test_packed_row(model_type, name, by, mask):
    model, row = tiny.make(model_type, name), {**packed(model_type, by), **MASKS[mask], "output_hidden_states": True}
    want = expected_outputs(model_type, name)
    with nta.patch(model):
        check_outputs(run(model, **row), want)
    if model_type in MIX_ROWS:
        refuses_the_name(model)
        return
    with nta.patch(model, padding_free=False):
        if by == "cu_seq_lens" or model_type not in WITHOUT_POSITION_IDS:
            check_outputs(run(model, **row), want)
    model.set_attn_implementation(nta.hf.register())
    if by == "cu_seq_lens" or model_type not in WITHOUT_POSITION_IDS:
        check_outputs(run(model, **row), want)
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            check_outputs(run(model, **row, use_cache=False), want)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@families(*[model_type for model_type in tiny.CONFIGS if model_type not in WITHOUT_POSITION_IDS])
def test_packed_row_with_padding(model_type, name, by):
    model, row = tiny.make(model_type, name), packed(model_type, by)
    places = row["position_ids"][:, :3]
    ends = LAYOUT.cu_seqlens.tolist()
    row["attention_mask"] = torch.tensor([[1] * LAYOUT.total + [0] * 3])
    row["input_ids"] = nn.functional.pad(row["input_ids"], (0, 3), value=PAD)
    row["position_ids"] = torch.cat([row["position_ids"], places], 1)
    if by == "cu_seq_lens":
        row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = torch.tensor([*ends, ends[-1] + 3], dtype=torch.int32)
    want = tiny.alone(model_type, name)["last_hidden_state"]
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        close(run(model, **row).last_hidden_state[0, : LAYOUT.total], want)
    if by == "position_ids":
        model.set_attn_implementation("eager")
        with nta.patch(model):
            close(run(model, **row).last_hidden_state[0, : LAYOUT.total], want)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@functools.cache
def padded_loss_and_gradients(model_type, name):
    """The loss and the gradients of the padded batch under eager attention, padded on the right."""
    model, labels = tiny.make(model_type, name).train(), labels_for(name, "right")
    out = model(**tiny.batch_of(model_type, "right"), **labels)
    loss = out.loss
    if name.endswith("ForQuestionAnswering"):  # the stock loss includes padding in its softmax
        hidden = ~tiny.mask_of("right")
        starts, ends = (logits.masked_fill(hidden, -torch.inf) for logits in (out.start_logits, out.end_logits))
        entropy = nn.functional.cross_entropy
        loss = (entropy(starts, labels["start_positions"]) + entropy(ends, labels["end_positions"])) / 2
    return loss.detach(), gradients(model, loss)


@covering({"model_type, name": HEADS, "side": ["right", "left"]})
def test_losses_and_gradients(model_type, name, side):
    model = tiny.make(model_type, name).train()
    batch = {**tiny.batch_of(model_type, side), **labels_for(name, side)}
    want, want_gradients = padded_loss_and_gradients(model_type, name)
    with nta.patch(model):
        out = model(**batch)
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    close(out.loss, want, 2e-5)
    for (path, _), mine, theirs in zip(
        model.named_parameters(), gradients(model, out.loss), want_gradients, strict=True
    ):
        assert (mine is None) == (theirs is None) or theirs.abs().max() < 1e-12, path
        if mine is not None:
            close(mine, theirs, 2e-4)


@pytest.mark.parametrize(("model_type", "name"), sweep_except(TOKEN_HEADS, *TOKEN_HEADS[::3]))
def test_logits_in_training_with_labels(model_type, name):
    model = tiny.make(model_type, name).train()
    batch = {**tiny.batch_of(model_type, "right"), **labels_for(name, "right")}
    want = tiny.alone(model_type, name)["logits"]
    with nta.patch(model):
        out = run(model, **batch)
    values, layout = nta.hf.packed(out.logits)
    close(values, want)
    close(layout.pack(out.logits), want)
    check_padding(out, name, "right")


def state_of(model):
    modules = {path: set(vars(module)) for path, module in model.named_modules()}
    return modules, dict(vars(model.config)), list(model.state_dict())


@pytest.mark.parametrize(("model_type", "name"), sweep_except(EVERY, *EVERY[::2]))
def test_remove_restores_the_original_model(model_type, name):
    implementation = "eager" if model_type in NO_SDPA else "sdpa"
    model, batch = tiny.make(model_type, name, implementation), tiny.batch_of(model_type, "right")
    before, state = run(model, **batch), state_of(model)
    with nta.patch(model):
        run(model, **batch)
        assert list(model.state_dict()) == state[2]
    assert state_of(model) == state
    after = run(model, **batch)
    assert all(torch.equal(after[key], before[key]) for key in before.keys() - CACHE)
    assert after.keys() == before.keys()


@covering({"model_type, name": EVERY, "side": ["right", "left"]})
def test_every_linear_sees_real_tokens_only(model_type, name, side):
    model = tiny.make(model_type, name)
    base, seen = model.base_model if tiny.per_sequence(name) else model, {}
    for path, module in base.named_modules():
        # an expert sees the tokens that are sent to it, a pooler the first of each sequence
        if isinstance(module, nn.Linear | Conv1D) and "pooler" not in path and ".experts." not in path:
            module.register_forward_pre_hook(
                lambda _, inputs, path=path: seen.update({path: inputs[0].shape[:-1].numel()})
            )
    with nta.patch(model):
        run(model, **tiny.batch_of(model_type, side))
    assert set(seen.values()) == {LAYOUT.total}, seen
    assert "lm_head" in seen or not name.endswith(("ForCausalLM", "LMHeadModel"))

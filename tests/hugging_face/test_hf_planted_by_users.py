"""Models as users write them: those that mix sequences are refused or right, and the others are packed and right."""

import copy
import itertools
import warnings

import pytest
import torch
from planted_by_users import RANDOM, RIGHT, RIGHT_BUT_REFUSED, RIGHT_IN_EVALUATION, WRONG
from sweeps import sweep_except
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import nt_attention as nta
from nt_attention import NotPackedWarning

MODES = ("training", "evaluation", "without gradients")
PER_ROW = ("row", "rows")
BY_HAND = "packed_by_hand"
OFFSETS = []  # of the row that is packed by hand


def attend_by_hand(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """(1, heads, T, D): each sequence by itself, by the offsets above."""
    parts = []
    for start, stop in itertools.pairwise(OFFSETS):
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        if module.is_causal:
            visible = visible.tril().triu(1 - (sliding_window or stop))
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(BY_HAND, attend_by_hand)
AttentionMaskInterface.register(BY_HAND, lambda *args, **kwargs: None)


def run(model, batch, mode):
    """Outputs and loss by name, and gradients of the loss."""
    model.train(mode == "training").zero_grad()
    with torch.set_grad_enabled(mode != "without gradients"):
        out = model(**batch, output_hidden_states=True)
    values = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    if getattr(out, "hidden_states", None) is not None:
        values["last_hidden_state"] = out.hidden_states[-1].detach()
    if mode == "without gradients":
        return values, {}
    out.loss.backward()
    return values, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def in_all_modes(model, batch, labels):
    """By mode. Training is first: what it writes into buffers is then read in evaluation."""
    results = {mode: run(model, batch, mode) for mode in MODES}
    return {mode: (tokens_of(values, batch, labels), gradients) for mode, (values, gradients) in results.items()}


def tokens_of(values, batch, labels):
    """The values at tokens, (T, …), of what has some for each position, and the others as they are."""
    # The states of a decoder count up to the last label.
    is_token = batch["labels"] != -100 if labels == "target" else batch["attention_mask"].bool()
    tokens = {}
    for name, x in values.items():
        if name == "loss" or (name == "logits" and labels in PER_ROW):
            tokens[name] = x
        elif x.shape[:2] == is_token.shape:
            tokens[name] = x[is_token]
        else:
            tokens[name] = x[0]  # packed logits, (1, T, V)
    return tokens


def error(values, expected):
    """The largest error over the largest value, of all tensors together."""
    largest = max(float(x.abs().max()) for x in expected.values())
    return max(float((values[name] - x).abs().max()) for name, x in expected.items()) / largest


def compare(results, expected, skipped=()):
    """Errors of each value and of all gradients together, by mode."""
    errors = {}
    for mode, (values, gradients) in expected.items():
        for name in values.keys() - set(skipped):
            errors[f"{name}, {mode}"] = error({name: results[mode][0][name]}, {name: values[name]})
        if gradients and "gradients" not in skipped:
            errors[f"gradients, {mode}"] = error(results[mode][1], gradients)
    return errors


def pack_by_hand(batch, labels):
    """One row of all tokens. The first label of each sequence is not predicted."""
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    OFFSETS[:] = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    row = {
        "input_ids": batch["input_ids"][mask][None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.long),
    }
    if "token_type_ids" in batch:
        row["token_type_ids"] = batch["token_type_ids"][mask][None]
    if labels in PER_ROW:
        row["labels"] = batch["labels"][:1]
    else:
        row["labels"] = batch["labels"][mask][None].clone()
        if labels == "next":
            row["labels"][0, OFFSETS[:-1]] = -100
    return row


def errors_by_hand(planted):
    """Errors of one row that is packed by hand, without this library, against the padded batch."""
    model, batch = planted.build(), planted.batch()
    padded = in_all_modes(copy.deepcopy(model), batch, planted.labels)
    model.set_attn_implementation(BY_HAND)
    row = pack_by_hand(batch, planted.labels)
    packed = in_all_modes(model, row, planted.labels)
    return compare(packed, padded, ("logits", "loss", "gradients") if planted.labels in PER_ROW else ())


def patched(model):
    """The handle, or the text of the refusal. Another error is raised."""
    try:
        return nta.patch(model)
    except ValueError as refusal:
        if "can't be packed" not in str(refusal):
            raise
        return str(refusal)


def errors_of_patch(planted):
    """Errors against the padded batch, and the handle; or the refusal."""
    model, batch = planted.build(), planted.batch()
    before = in_all_modes(copy.deepcopy(model), batch, planted.labels)
    if isinstance(handle := patched(model), str):
        return {}, handle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPackedWarning)
        after = in_all_modes(model, batch, planted.labels)
    return compare(after, before), handle


def seen_by_hand(cases):
    return pytest.mark.parametrize("name", [name for name, planted in cases.items() if planted.seen_by_hand])


@pytest.mark.sweep  # of the models above, without this library
@seen_by_hand(WRONG)
def test_wrong_models_are_wrong_by_hand(name):
    if WRONG[name].raises_by_hand:
        with pytest.raises(ValueError, match=r"590 tokens|target batch_size \(590\)"):
            errors_by_hand(WRONG[name])
    else:
        assert max(errors_by_hand(WRONG[name]).values()) > 5 * WRONG[name].tolerance


@pytest.mark.sweep
@seen_by_hand(RIGHT)
def test_right_models_are_right_by_hand(name):
    assert max(errors_by_hand(RIGHT[name]).values()) < RIGHT[name].tolerance


@pytest.mark.parametrize("name", sweep_except(WRONG, "late_window", "sorted", "flag_buffer", "answer_weight", "half"))
def test_models_that_mix_sequences_are_refused_or_right(name, cache):
    errors, _ = errors_of_patch(WRONG[name])
    assert all(x < WRONG[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RIGHT_BUT_REFUSED)
def test_right_models_that_look_wrong_are_refused_or_right(name, cache):
    errors, _ = errors_of_patch(RIGHT_BUT_REFUSED[name])
    assert all(x < RIGHT_BUT_REFUSED[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RANDOM)
def test_rows_drawn_together_are_refused_or_not_packed_in_training(name, cache):
    planted = RANDOM[name]
    model = planted.build().train()
    if not isinstance(handle := patched(model), str):
        with pytest.warns(NotPackedWarning):
            model(**planted.batch())
        assert handle.calls[None] == 0


@pytest.mark.parametrize("name", sweep_except(RIGHT, "adapter", "hash", "few_positions", "gate_off"))
def test_right_models_are_packed(name, cache):
    errors, handle = errors_of_patch(RIGHT[name])
    assert not isinstance(handle, str), handle
    assert handle.calls == {None: len(MODES)}
    assert all(x < RIGHT[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RIGHT_IN_EVALUATION)
def test_models_with_dropout_are_packed(name, cache):
    planted = RIGHT_IN_EVALUATION[name]
    model, batch = planted.build(), planted.batch()
    before, _ = run(copy.deepcopy(model), batch, "evaluation")
    handle = patched(model)
    assert not isinstance(handle, str), handle
    model.train()(**batch)
    after, _ = run(model, batch, "evaluation")
    assert handle.calls == {None: 2}
    for name, values in tokens_of(before, batch, planted.labels).items():
        assert error({name: tokens_of(after, batch, planted.labels)[name]}, {name: values}) < planted.tolerance


def test_the_proof_of_one_config_does_not_serve_another(cache):
    """A field of the config that turns mixing on is part of what was tried."""
    assert not isinstance(patched(RIGHT["gate_off"].build()), str)
    errors, _ = errors_of_patch(WRONG["channel_roll"])
    assert all(x < WRONG["channel_roll"].tolerance for x in errors.values()), errors

"""Models as users write them: those that mix sequences are refused or right, and the others are packed and right."""

import copy
import warnings

import pytest
import torch
from planted_by_users import (
    NUM_LABELS,
    RANDOM,
    RIGHT,
    RIGHT_BUT_REFUSED,
    RIGHT_IN_EVALUATION,
    WRONG,
    Planted,
    config_of,
    mlps,
    neighbors,
)
from sweeps import sweep_except
from torch import nn
from transformers import BertForTokenClassification, BertModel, LlamaForCausalLM
from transformers.models.bert.modeling_bert import BertPooler

import nt_attention as nta
from nt_attention import NotPackedWarning

MODES = ("training", "evaluation", "without gradients")


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
        if name == "loss" or (name == "logits" and labels == "row"):
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


def errors_of(results, expected):
    """Errors of each value and of all gradients together, by mode."""
    errors = {}
    for mode, (values, gradients) in expected.items():
        errors |= {f"{name}, {mode}": error({name: results[mode][0][name]}, {name: x}) for name, x in values.items()}
        if gradients:
            errors[f"gradients, {mode}"] = error(results[mode][1], gradients)
    return errors


def tokens_alone(model, batch):
    """The logits of each sequence alone, (T, V)."""
    model.eval()
    masks = batch["attention_mask"].bool()
    rows = [
        {k: x[row][mask][None] for k, x in batch.items() if x.shape == masks.shape} for row, mask in enumerate(masks)
    ]
    with torch.no_grad():
        return torch.cat([model(**row).logits[0] for row in rows])


def patched(model):
    """The handle, or the text of the refusal. Another error is raised."""
    try:
        return nta.patch(model)
    except ValueError as refusal:
        if "can't be packed" not in str(refusal):
            raise
        return str(refusal)


def errors_of_patch(planted):
    """Errors against the padded batch, or against each sequence alone, and the handle; or the refusal."""
    model, batch = planted.build(), planted.batch()
    stock = copy.deepcopy(model)
    before = in_all_modes(copy.deepcopy(model), batch, planted.labels)
    if isinstance(handle := patched(model), str):
        return {}, handle
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        after = in_all_modes(model, batch, planted.labels)
    errors = errors_of(after, before)
    if any("reads padding" in str(each.message) for each in told):  # a module runs on padded rows, and this was said
        stock.load_state_dict(model.state_dict())
        alone = tokens_alone(stock, batch)
        errors = {"alone": error({"logits": after["evaluation"][0]["logits"]}, {"logits": alone})}
    return errors, handle


@pytest.mark.parametrize(
    "name",
    sweep_except(WRONG, "late_window", "sorted", "flag", "half", "from before", "by batch"),
)
def test_models_that_mix_sequences_are_refused_or_right(name):
    errors, _ = errors_of_patch(WRONG[name])
    assert all(x < WRONG[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RIGHT_BUT_REFUSED)
def test_right_models_that_look_wrong_are_refused_or_right(name):
    errors, _ = errors_of_patch(RIGHT_BUT_REFUSED[name])
    assert all(x < RIGHT_BUT_REFUSED[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RANDOM)
def test_rows_drawn_together_are_refused_or_not_packed_in_training(name):
    planted = RANDOM[name]
    model = planted.build().train()
    if not isinstance(handle := patched(model), str):
        with pytest.warns(NotPackedWarning):
            model(**planted.batch())
        assert handle.calls[None] == 0


@pytest.mark.parametrize("name", sweep_except(RIGHT, "adapter", "hash", "few_positions"))
def test_right_models_are_packed(name):
    errors, handle = errors_of_patch(RIGHT[name])
    assert not isinstance(handle, str), handle
    assert handle.calls == {None: len(MODES)}
    assert all(x < RIGHT[name].tolerance for x in errors.values()), errors


@pytest.mark.parametrize("name", RIGHT_IN_EVALUATION)
def test_models_with_dropout_are_packed(name):
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


class LossOfPairs(BertForTokenClassification):
    """Its loss has a term for each pair of neighboring labels, as that of a CRF."""

    def __init__(self, config):
        super().__init__(config)
        self.transitions = nn.Parameter(torch.randn(NUM_LABELS, NUM_LABELS))

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            pairs = labels[:, :-1], labels[:, 1:]
            are_labels = (pairs[0] != -100) & (pairs[1] != -100)
            scores = self.transitions.log_softmax(-1)[pairs[0].clamp(min=0), pairs[1].clamp(min=0)]
            out.loss = out.loss - 0.1 * (scores * are_labels).sum() / are_labels.sum()
        return out


class NumberOfRows(LlamaForCausalLM):
    """It also returns one number, for all rows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out["spread"] = out.logits[:, 0].softmax(-1).sub(out.logits[:1, 0].softmax(-1)).square().sum()
        return out


class PoolerOfLongRows(BertPooler):
    def forward(self, hidden_states):
        is_long = hidden_states.shape[1] > 20
        return super().forward(hidden_states[:, :20].mean(1, keepdim=True) if is_long else hidden_states)


def with_pooler(config):
    model = BertModel(config)
    model.pooler = PoolerOfLongRows(config)
    return model


@pytest.mark.parametrize(
    ("build", "labels"),
    [
        (lambda: LossOfPairs(config_of("Bert")), "token"),
        (lambda: NumberOfRows(config_of("Llama")), "next"),
        (lambda: with_pooler(config_of("Bert")), None),
    ],
    ids=["loss of pairs", "a number", "pooler"],
)
def test_values_beside_those_of_tokens(build, labels):
    torch.manual_seed(0)
    model, batch = build().eval(), Planted("", labels=labels).batch()
    stock = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPackedWarning)
        nta.patch(model)
        got, want = model(**batch), stock(**batch)
    for name in {"loss", "spread", "pooler_output"} & want.keys():
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_another_mode_is_compared_again():
    planted = WRONG["long rows in evaluation"]
    model, batch = planted.build(), planted.batch()
    tokens, want = batch["attention_mask"].bool(), copy.deepcopy(model).eval()(**batch).logits
    with nta.patch(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPackedWarning)
        model.train()(**batch)
        torch.testing.assert_close(model.eval()(**batch).logits[tokens], want[tokens], rtol=1e-4, atol=1e-5)


def test_a_module_that_mixes_in_training_without_a_gradient_runs_padded():
    """Only bits of a row beside other neighbors show it."""
    mix = mlps(lambda module, x: x + x.roll(1, 1).detach() if module.training else x)
    assert "mlp: Around, padded" in " ".join(str(nta.patch(Planted("LlamaForCausalLM", mix).build())).split())


class LongRow(nn.Embedding):
    """It adds the token before it, if the row is longer than each sequence ever is."""

    def forward(self, input_ids):
        states = super().forward(input_ids)
        return neighbors(states) if states.shape[1] > 128 else states


def test_a_packed_row_that_is_twice_as_long_is_compared_again():
    model = LlamaForCausalLM(config_of("Llama")).eval()
    model.model.embed_tokens = LongRow.from_pretrained(model.model.embed_tokens.weight)
    with nta.patch(model) as handle, torch.no_grad():
        for rows in (2, 16):
            mask = torch.arange(20) < torch.tensor([20, 10]).repeat(rows // 2)[:, None]
            got = model(input_ids=torch.arange(5, 25) * mask, attention_mask=mask.long()).logits
    assert handle.calls[None] == 1
    assert sum(handle.calls.values()) == 2
    with torch.no_grad():
        want = model(input_ids=torch.arange(5, 25) * mask, attention_mask=mask.long()).logits
    torch.testing.assert_close(got[mask], want[mask])

"""Outputs of the model families in ``tiny``: padded, or packed, against each sequence by itself."""

import pytest
import tiny
import torch
from tiny import EVERY, LENGTH, LENGTHS

import nt_attention as nta

LAYOUT = nta.SequenceLayout.from_lengths(LENGTHS)
LOWEST = torch.finfo(torch.float32).min
NO_SDPA = ("gemma2", "gpt_oss")
BY_ID = ("roberta", "xlm-roberta")
WITHOUT_POSITION_IDS = ("distilbert", "esm", "modernbert")  # their attention is passed none
every = pytest.mark.parametrize(("model_type", "name"), EVERY, ids=[name for _, name in EVERY])
sides = pytest.mark.parametrize("side", ["right", "left"])


def heads_ending_in(*endings):
    return [(model_type, name) for model_type, name in EVERY if name.endswith(endings)]


def families(*which):
    some = {model_type: name for model_type, name in reversed(EVERY) if model_type in which}
    return pytest.mark.parametrize(("model_type", "name"), some.items(), ids=some)


def close(got, want, tolerance=5e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check_outputs(out, want, side=None):
    """Compare the real tokens of ``out``, of a padded batch, or of a packed row if ``side`` is None."""
    assert want.keys() <= out.keys()
    for key, theirs in want.items():
        pairs = zip(out[key], theirs, strict=True) if key == "hidden_states" else [(out[key], theirs)]
        for mine, there in pairs:
            if there.shape[0] == LAYOUT.total:
                mine = mine[0] if side is None else mine[tiny.mask_of(side)]
            close(mine, there)


def check_padding(out, name, side):
    for key in ("last_hidden_state", "hidden_states", "logits", "start_logits", "end_logits"):
        if key not in out or (key == "logits" and tiny.per_sequence(name)):
            continue
        for part in out[key] if key == "hidden_states" else [out[key]]:
            assert part.shape[:2] == (4, LENGTH)
            assert (part[~tiny.mask_of(side)] == (LOWEST if key.startswith(("start", "end")) else 0)).all()


@torch.no_grad()
def run(model, **inputs):
    return model(**inputs)


def labels_for(name, side):
    """Labels of a padded batch: none at padding, and none where a causal model would predict from padding."""
    generator = torch.Generator().manual_seed(5)
    if tiny.per_sequence(name):
        return {"labels": torch.tensor([0, 2, 1, 1])}
    if name.endswith("ForQuestionAnswering"):
        first = tiny.mask_of(side).int().argmax(1)
        return {
            "start_positions": torch.tensor([2, 0, 11, 0]) + first,
            "end_positions": first + torch.tensor([6, 0, 12, 9]),
        }
    kinds = 3 if name.endswith("ForTokenClassification") else tiny.VOCABULARY
    labels = torch.randint(kinds, (LAYOUT.total,), generator=generator)
    if side == "left" and name.endswith(("ForCausalLM", "LMHeadModel")):
        labels = labels.masked_fill(LAYOUT.position_ids == 0, -100)
    return {"labels": tiny.pad(labels, side, -100)}

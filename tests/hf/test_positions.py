"""Positions beside a mask: what tells of packed rows, and what does not."""

import pytest
import tiny
import torch
from transformers import DynamicCache

import nt_attention as nta


@pytest.fixture(params=["LlamaForCausalLM", "GPT2LMHeadModel"])
def model(request):
    return tiny.make("llama" if "Llama" in request.param else "gpt2", request.param, "sdpa")


def both(model, **call):
    want = model(**call).logits
    with nta.patch(model):
        patched = model(**call).logits
    model.set_attn_implementation(nta.hf.register())
    registered = model(**call).logits
    return want, patched, registered


def test_a_gap_in_the_mask_under_positions_that_count_it_cuts_nothing(model):
    mask = torch.ones(2, 7).long()
    mask[0, 3] = 0
    call = {"input_ids": torch.randint(5, 97, (2, 7)), "attention_mask": mask}
    for positions in (torch.arange(7)[None], (mask.cumsum(1) - 1).clamp(min=0)):
        for got in both(model, **call, position_ids=positions)[1:]:
            want = model(**call, position_ids=positions).logits
            torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=5e-5)


@pytest.mark.parametrize("filled", ["last", 0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_padding_tell_of_nothing(model, side, filled):
    mask = torch.arange(11) < torch.tensor([[11], [4], [7]])
    mask = mask if side == "right" else mask.flip(1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    positions = positions if filled == "last" else positions.masked_fill(~mask, filled)
    ids = torch.randint(5, 97, (3, 11))
    call = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
    want = model(**call, past_key_values=DynamicCache(config=model.config)).logits
    for register in (False, True):
        handle = None if register else nta.patch(model)
        if register:
            model.set_attn_implementation(nta.hf.register())
        with torch.no_grad():
            got = model(**call, past_key_values=DynamicCache(config=model.config)).logits
        if handle is not None:
            handle.remove()
        assert torch.equal(got, want)


def test_right_padded_prompts_generate_as_before(model):
    mask = torch.arange(7) < torch.tensor([[4], [7], [2]])
    call = {"input_ids": torch.randint(5, 97, (3, 7)), "attention_mask": mask.long()}
    ask = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    want = model.generate(**call, **ask)
    with nta.patch(model):
        assert torch.equal(model.generate(**call, **ask), want)


def test_positions_that_are_all_alike_tell_of_nothing_beside_a_mask(model):
    mask = torch.arange(11) < torch.tensor([[11], [4]])
    call = {"input_ids": torch.randint(5, 97, (2, 11)), "attention_mask": mask.long()}
    want, patched, registered = both(model, **call, position_ids=torch.zeros(2, 11, dtype=torch.int64))
    for got in (patched, registered):
        torch.testing.assert_close(got[mask], want[mask], rtol=0, atol=5e-5)


def test_labels_over_a_gap_are_shifted_as_before(model):
    mask = torch.ones(2, 9).long()
    mask[0, 3:5] = 0
    ids = torch.randint(5, 97, (2, 9))
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    want = model(**call).loss
    with nta.patch(model), pytest.warns(UserWarning, match="over which labels are shifted"):
        assert torch.equal(model(**call).loss, want)

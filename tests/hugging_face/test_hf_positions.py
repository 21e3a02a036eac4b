"""position_ids beside an attention mask: when they show packed rows, and when they do not."""

from concurrent.futures import ThreadPoolExecutor

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


def test_hole_in_the_mask_does_not_split_a_sequence(model):
    mask = torch.ones(2, 7).long()
    mask[0, 3] = 0
    call = {"input_ids": torch.randint(5, 97, (2, 7)), "attention_mask": mask}
    for positions in (torch.arange(7)[None], (mask.cumsum(1) - 1).clamp(min=0)):
        model.set_attn_implementation("sdpa")
        want, *found = both(model, **call, position_ids=positions)
        for got in found:
            torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=5e-5)


@pytest.mark.parametrize("filled", ["last", 0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_padding_show_no_packed_rows(model, side, filled):
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


def test_constant_positions_beside_a_mask(model):
    mask = torch.arange(11) < torch.tensor([[11], [4]])
    call = {"input_ids": torch.randint(5, 97, (2, 11)), "attention_mask": mask.long()}
    want, patched, registered = both(model, **call, position_ids=torch.zeros(2, 11, dtype=torch.int64))
    for got in (patched, registered):
        torch.testing.assert_close(got[mask], want[mask], rtol=0, atol=5e-5)


@pytest.mark.parametrize("additive", [False, True])
def test_positions_beside_a_mask_of_the_caller(additive):
    """Two branches with a common prefix: the positions of the second begin again where the first began."""
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa")
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    mask[..., 5:, 3:5] = False
    mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    call = {"input_ids": torch.randint(5, 97, (1, 7)), "attention_mask": mask}
    for got in both(model, **call, position_ids=torch.tensor([[0, 1, 2, 3, 4, 3, 4]]))[1:]:
        model.set_attn_implementation("sdpa")
        want = model(**call, position_ids=torch.tensor([[0, 1, 2, 3, 4, 3, 4]])).logits
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("keys", [6, 7])
def test_cross_attention_ignores_positions(keys):
    model = tiny.make("bert", "BertModel", "sdpa", is_decoder=True, add_cross_attention=True)
    call = {
        "input_ids": torch.randint(5, 97, (1, 6)), "encoder_hidden_states": torch.randn(1, keys, 48),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]), "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3]]),
        "use_cache": False,
    }  # fmt: skip
    want = model(**call).last_hidden_state[:, 2:]
    model.set_attn_implementation(nta.hf.register())
    torch.testing.assert_close(model(**call).last_hidden_state[:, 2:], want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_reentrant_checkpoints_with_positions_beside_a_mask(kind):
    model = tiny.make(kind, {"bert": "BertModel", "gpt2": "GPT2LMHeadModel"}[kind], "sdpa")
    call = {
        "input_ids": torch.randint(5, 97, (1, 8)), "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 1, 1, 3, 4, 5]]), "use_cache": False,
    }  # fmt: skip
    here = call["attention_mask"][0].bool()

    def gradients():
        return torch.autograd.grad(
            model(**call)[0][:, here].square().sum(), list(model.parameters()), allow_unused=True
        )

    want = gradients()
    model.set_attn_implementation(nta.hf.register())
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model(**call)[0][:, here].square().sum().backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_encoder_without_is_causal_is_not_causal(over):
    from transformers import SplinterConfig, SplinterModel

    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 53}
    config = SplinterConfig(**sizes, vocab_size=97)
    model = SplinterModel._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(5, 97, (2, 9))
    want = model(ids).last_hidden_state
    model.set_attn_implementation(nta.hf.register(over))
    torch.testing.assert_close(model(ids).last_hidden_state, want, rtol=0, atol=5e-5)


def test_positions_are_read_once_for_all_kinds_of_masks(monkeypatch):
    from nt_attention.hf.route import positions

    model = tiny.make("gemma2", "Gemma2Model", nta.hf.register(), num_hidden_layers=6)
    reads, starts = [], positions.starts
    monkeypatch.setattr(positions, "starts", lambda *given: reads.append(1) or starts(*given))
    mask = (torch.arange(11) < torch.tensor([[11], [4]])).long()
    model(torch.randint(5, 97, (2, 11)), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert len(reads) <= 2  # of full and of sliding layers


def test_a_graph_made_without_a_packed_row_is_not_used_for_one(fresh_compiler):
    """In a new thread, in which there was no row before."""
    from nt_attention.hf.route.packed_row import PackedRow, current_row, running

    def add_positions(x):
        row = current_row()
        return x if row is None else x + row.position_ids

    def compiled_twice():
        compiled = torch.compile(add_positions, backend="eager", fullgraph=True)
        before = compiled(torch.zeros(1, 3))
        with running(row=PackedRow(None, torch.arange(3)[None], 3)):
            return before, compiled(torch.zeros(1, 3))

    with ThreadPoolExecutor(1) as pool:
        before, packed = pool.submit(compiled_twice).result()
    assert before.tolist() == [[0, 0, 0]]
    assert packed.tolist() == [[0, 1, 2]]

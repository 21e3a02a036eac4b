"""Rotary embeddings that are scaled by the length (dynamic NTK, LongRoPE): per packed sequence."""

import pytest
import tiny
import torch

import nt_attention as nta
from nt_attention.hf.route.packed_row import PackedRow, running
from nt_attention.hf.route.rope import rotate_per_sequence
from nt_attention.layouts.sequence import SequenceLayout

LENGTHS, LENGTH, TRAINED = [7, 23, 13, 2, 19, 11], 29, 11
MASK = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
GROUPED = tiny.GROUPED["head_dim"] // 2
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": TRAINED, "factor": 3.0,
    "short_factor": [1.0 + 0.1 * i for i in range(GROUPED)], "long_factor": [1.5 + 0.3 * i for i in range(GROUPED)],
}  # fmt: skip

KINDS = {
    "llama dynamic": ("llama", "LlamaForCausalLM", TRAINED, DYNAMIC),
    "qwen2 dynamic": ("qwen2", "Qwen2ForCausalLM", TRAINED, DYNAMIC),
    "phi3 longrope": ("phi3", "Phi3ForCausalLM", 64, LONGROPE),
    "llama longrope": ("llama", "LlamaForCausalLM", 64, LONGROPE),
    "gemma3 both": (
        "gemma3_text", "Gemma3ForCausalLM", TRAINED,
        {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
}  # fmt: skip


def make(kind):
    model_type, name, places, rope = KINDS[kind]
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in rope.items()}
    more = {"original_max_position_embeddings": TRAINED, "head_dim": 8} if "phi3" in kind else {}
    if more:  # half as many, since its check goes by the hidden size
        copied |= {key: copied[key][: GROUPED // 2] for key in ("short_factor", "long_factor")}
    return tiny.make(model_type, name, "sdpa", max_position_embeddings=places, rope_parameters=copied, **more)


def make_batch(side):
    ids = torch.randint(5, tiny.VOCABULARY, MASK.shape)
    here = MASK if side == "right" else MASK.flip(1)
    return {"input_ids": ids.masked_fill(~here, tiny.PAD), "attention_mask": here.long()}


def one_at_a_time(kind, batch):
    """Every sequence by itself in a new model, because "dynamic" remembers the longest length."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    with torch.no_grad():
        return torch.cat([make(kind)(ids[here][None]).logits[0] for ids, here in rows])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_rope_is_scaled_per_sequence(kind, side):
    batch = make_batch(side)
    want, model = one_at_a_time(kind, batch), make(kind)
    here = batch["attention_mask"].bool()
    with torch.no_grad():
        padded = model(**batch).logits[here]
        with nta.patch(model) as handle:
            for _ in range(2):  # the frequencies of one call don't reach the next
                torch.testing.assert_close(model(**batch).logits[here], want, rtol=1e-4, atol=2e-5)
                hidden = model.base_model(**batch).last_hidden_state
                torch.testing.assert_close(model.lm_head(hidden)[here], want, rtol=1e-4, atol=2e-5)
        assert torch.equal(model(**batch).logits[here], padded)
    assert set(handle.calls) == {None}
    assert (padded - want).abs().max() > 1e-3  # which scales all by the padded length


@pytest.mark.parametrize("kind", ["llama dynamic", "llama longrope"])
def test_gradients_with_rope_scaled_per_sequence(kind):
    batch, model = make_batch("right"), make(kind)
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    weights = torch.randn(tiny.VOCABULARY)
    fresh = [make(kind) for _ in LENGTHS]
    for other, (ids, here) in zip(fresh, rows, strict=True):
        (other(ids[here][None]).logits * weights).sum().backward()
    with nta.patch(model):
        (model(**batch).logits * weights).sum().backward()
    for parameter, *others in zip(model.parameters(), *(other.parameters() for other in fresh), strict=True):
        torch.testing.assert_close(parameter.grad, sum(o.grad for o in others), rtol=1e-3, atol=1e-3)


def test_rotate_per_sequence_runs_neighbours_of_unscaled_lengths_together(monkeypatch):
    rotary = make("llama dynamic").model.rotary_emb
    asked, forward = [], type(rotary).forward

    def counted(self, x, positions):
        asked.append(positions.shape[1])
        return forward(self, x, positions)

    monkeypatch.setattr(type(rotary), "forward", counted)
    layout = SequenceLayout.from_lengths([7, 11, 2, 19, 19, 3])
    with running(row=PackedRow(layout, layout.position_ids[None], 19)):
        cosines, sines = rotate_per_sequence(rotary, rotary.forward, torch.zeros(1), layout.position_ids[None])
    assert asked == [20, 38, 3]
    assert cosines.shape == sines.shape == (1, layout.total, 16)

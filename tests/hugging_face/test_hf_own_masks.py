"""Models whose attention mask has more than causality and padding: windows, chunks, and blocks."""

import pytest
import torch
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    BigBirdForSequenceClassification,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import nt_attention as nta

LENGTHS = (9, 1, 40, 23)
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED_WIDTHS = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
GROUPED = {**GROUPED_WIDTHS, "num_local_experts": 2, "num_experts_per_tok": 1}


def phimoe(window):
    config = PhimoeConfig(**GROUPED, sliding_window=window)
    return PhimoeForCausalLM(config).eval()


def llama4(**changed):
    layers = {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 4, "attn_scale": 0.9, "attention_chunk_size": 8}
    sizes = {"head_dim": 8, "intermediate_size_mlp": 48}
    torch.manual_seed(0)
    return Llama4ForCausalLM(Llama4TextConfig(**{**GROUPED, **sizes, **layers, **changed})).eval()


def big_bird(kind, head=BigBirdForMaskedLM):
    config = BigBirdConfig(**SIZES, intermediate_size=48, attention_type=kind, block_size=4, num_random_blocks=1)
    return head(config).double().eval()


def batch_of(side="right"):
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(6, 90, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def logits_alone(model, batch):
    masks = batch["attention_mask"].bool()
    return torch.cat([model(ids[mask][None]).logits[0] for ids, mask in zip(batch["input_ids"], masks, strict=True)])


def check(model, batch, want, tolerance=1e-9):
    """Check outputs and gradients of a patched call against those in `want`, (T, V)."""
    parameters = list(model.parameters())
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    want_gradients = torch.autograd.grad((want * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    with nta.patch(model) as handle:
        got = model(**batch).logits[batch["attention_mask"].bool()]
        gradients = torch.autograd.grad((got * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
        assert handle.calls == {None: 1}
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for x, y in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.abs().max())))


def test_window_that_only_the_mask_has_is_refused():
    with pytest.raises(ValueError, match="differs between a packed row and each sequence alone"):
        nta.patch(phimoe(5))
    assert nta.patch(phimoe(100)).calls is not None  # no row of the check is as long


@pytest.mark.parametrize(
    "changed", [{}, {"use_qk_norm": False}, {"attn_temperature_tuning": False}, {"floor_scale": 64}]
)
def test_llama4_with_chunks_and_scales(changed):
    model, batch = llama4(**changed), batch_of()
    check(model, batch, logits_alone(model, batch), tolerance=2e-5)


def test_llama4_with_padding_on_the_left_gives_what_the_padded_batch_gives():
    model, batch = llama4(), batch_of("left")
    check(model, batch, model(**batch).logits[batch["attention_mask"].bool()], tolerance=2e-5)


def test_llama4_with_gradient_checkpointing():
    model, batch = llama4(), batch_of()
    want = logits_alone(model, batch)
    model.gradient_checkpointing_enable()
    check(model.train(), batch, want, tolerance=2e-5)


def test_llama4_with_several_sequences_in_a_row():
    """Each counts its own positions, also beside a row without tokens."""
    model = llama4()
    ids = torch.randint(6, 90, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1] = 0
    positions = torch.cat([torch.arange(17), torch.arange(13)]).expand(2, 30)
    want = torch.cat([model(part).logits[0] for part in (ids[:1, :17], ids[:1, 17:])])
    batch = {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}
    check(model, batch, want, tolerance=2e-5)


@pytest.mark.parametrize("window", [2, 4, None])
@pytest.mark.parametrize("layer", [0, 3])
def test_window_of_one_layer_that_was_changed(layer, window):
    config = Qwen2Config(**GROUPED_WIDTHS, use_sliding_window=True, sliding_window=3, max_window_layers=2)
    model = Qwen2ForCausalLM(config)
    before = model.model.layers[layer].self_attn.sliding_window
    model.model.layers[layer].self_attn.sliding_window = window
    if before == window:
        nta.patch(model)
    else:
        with pytest.raises(
            ValueError, match="its last_hidden_state differs between a packed row and each sequence alone"
        ):
            nta.patch(model)


def test_window_of_the_config_that_was_changed():
    config = Qwen2Config(**GROUPED_WIDTHS, use_sliding_window=True, sliding_window=3, max_window_layers=2)
    model = Qwen2ForCausalLM(config)
    model.config.sliding_window = 2
    with pytest.raises(ValueError, match="its last_hidden_state differs between a packed row and each sequence alone"):
        nta.patch(model)


def test_block_sparse_attention_is_refused():
    with pytest.raises(ValueError, match=r"its attention is block sparse.* call set_attention_type\('original_full'\)"):
        nta.patch(big_bird("block_sparse"))


@pytest.mark.parametrize("switched", [False, True])
def test_big_bird_with_full_attention(switched):
    model, batch = big_bird("block_sparse" if switched else "original_full"), batch_of()
    if switched:
        model.bert.set_attention_type("original_full")
    check(model, batch, logits_alone(model, batch))


def test_pooled_output_of_big_bird():
    model, batch = big_bird("original_full", BigBirdForSequenceClassification).bert, batch_of()
    masks = batch["attention_mask"].bool()
    rows = [ids[mask][None] for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    want = torch.cat([model(row).pooler_output for row in rows])
    with nta.patch(model, on_fallback="raise"):
        torch.testing.assert_close(model(**batch).pooler_output, want, rtol=1e-9, atol=1e-9)


def test_window_of_a_layer_that_had_none():
    """Llama 4 does not read it, and neither does the packed run."""
    model, batch = Llama4ForCausalLM(llama4().config).eval(), batch_of()
    model.model.layers[1].self_attn.sliding_window = 5
    check(model, batch, logits_alone(model, batch), tolerance=2e-5)

"""The name "nt_attention/flash" alone, without a patch: libraries pack by themselves, with the results of sdpa."""

import functools

import pytest
import torch
from test_transformers import causal, make_trainer
from training import assert_same, run
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    GenerationConfig,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5EncoderModel,
)
from transformers.integrations import hub_kernels
from transformers.integrations.flash_paged import paged_attention_forward
from transformers.masking_utils import create_causal_mask

import nt_attention.hf
from nt_attention.compat import flash_attn

NAME = "nt_attention/flash"


@pytest.fixture
def packed(monkeypatch):
    """The number of sequences and of tokens in each call of attention, without repeats."""
    calls = {}

    def attend(query, key, value, layout, *args, **options):
        assert query.shape[0] == layout.total
        calls[layout.batch_size, layout.total] = None
        return function(query, key, value, layout, *args, **options)

    function = flash_attn.varlen_attention
    monkeypatch.setattr(flash_attn, "varlen_attention", attend)
    return calls


def by_name():
    model = causal()
    model.set_attn_implementation(NAME)
    return model


def flattened(folder, model):
    trainer, collate = make_trainer(folder, model), DataCollatorWithFlattening()
    trainer.data_collator = lambda rows: collate([{"input_ids": row["input_ids"]} for row in rows])
    return trainer


@pytest.mark.parametrize("trainer", [flattened, make_trainer])
def test_trainer(trainer, packed, tmp_path):
    want = run(causal, functools.partial(make_trainer, tmp_path / "want"), None)
    got = run(by_name, functools.partial(trainer, tmp_path / "got"), None)
    assert_same(got, want)
    assert [sequences for sequences, _ in packed] == [4, 4, 4]


PROMPTS = [[5, 6, 7, 8, 9], [5, 6], [11, 12, 13]]


def test_generation(packed):
    model, greedy = causal().eval(), GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=256)
    ids = torch.tensor([[256] * (5 - len(row)) + row for row in PROMPTS])
    want = model.generate(ids, greedy, attention_mask=ids != 256)[:, 5:].tolist()
    model.set_attn_implementation(NAME)
    assert model.generate(ids, greedy, attention_mask=ids != 256)[:, 5:].tolist() == want
    few = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)  # by default, most of the machine's memory
    batches = model.generate_batch(PROMPTS, greedy, few)
    assert [each.generated_tokens for each in batches.values()] == want
    assert (3, 10) in packed


def test_the_name_of_continuous_batching_in_older_versions():
    """Up to 5.17 at least, it sets "paged|" before the name, and loads the functions with its own wrapper."""
    paged = f"paged|{NAME}"
    assert hub_kernels.load_and_register_attn_kernel(paged, paged_attention_forward) is flash_attn
    assert AttentionInterface()[paged] is paged_attention_forward


def test_attention_without_nn_linear():
    model = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2)).eval()
    ids, mask = torch.randint(99, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    want = model(ids, attention_mask=mask).last_hidden_state[mask == 1]
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state[mask == 1], want)


def test_what_flash_attention_would_leave_out_is_refused():
    biased = T5EncoderModel(T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))
    biased.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="T5Attention passes position_bias"):
        biased(input_ids=torch.ones(2, 3, dtype=torch.long))
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    crossing = BertModel(BertConfig(**sizes, intermediate_size=48, is_decoder=True, add_cross_attention=True))
    crossing.set_attn_implementation(NAME)
    states = {"encoder_hidden_states": torch.randn(2, 3, 32)}
    with pytest.raises(ValueError, match="BertCrossAttention may be cross-attention"):
        crossing(torch.full((2, 3), 7), **states, encoder_attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    model, ids = by_name(), torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"takes an attention mask \(B, S\), but got \(2, 1, 3, 3\)"):
        model(input_ids=ids, attention_mask=torch.ones(2, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="can't compute the attention mask of llama"):
        create_causal_mask(model.config, torch.zeros(2, 3, 32), None, None, or_mask_function=lambda b, h, q, k: k == 0)
    attention, x = model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="LlamaAttention passes s_aux"):
        nt_attention.hf.route.flash.attention(attention, x, x, x, None, s_aux=torch.zeros(4))

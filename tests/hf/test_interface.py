"""The attention function under transformers: packed rows isolated, everything else as it was."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import nt_attention as nta

LENGTHS = [5, 1, 12, 3]
SMALL = {
    "num_hidden_layers": 2,
    "intermediate_size": 41,
    "vocab_size": 101,
    "num_attention_heads": 6,
    "hidden_size": 48,
}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
}


def make(name):
    return MODELS[name]().double().eval()


def first(out):
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("over", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_gives_what_each_sequence_gives_alone(name, over):
    model = make(name)
    ids = [torch.randint(101, (1, length)) for length in LENGTHS]
    want = torch.cat([first(model(x)) for x in ids], 1)
    model.set_attn_implementation(nta.hf.register(over))
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    got = model(
        torch.cat(ids, 1),
        position_ids=layout.position_ids.unsqueeze(0),
        cu_seq_lens_q=layout.cu_seqlens,
        cu_seq_lens_k=layout.cu_seqlens,
        max_length_q=12,
        max_length_k=12,
        use_cache=False,
    )
    torch.testing.assert_close(first(got), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("over", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_are_what_they_were(name, over):
    model = make(name)
    model.set_attn_implementation(over)
    ids = torch.randint(101, (4, 12))
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    want = first(model(ids, attention_mask=mask))
    model.set_attn_implementation(nta.hf.register(over))
    assert torch.equal(first(model(ids, attention_mask=mask)), want)


def test_windows_sinks_softcap_and_scale_arrive():
    from nt_attention.hf.interface import attention

    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    q, k, v = (torch.randn(1, h, layout.total, 7, dtype=torch.float64) for h in (6, 2, 2))
    sinks = torch.randn(6, dtype=torch.float64)
    for causal, window in ((True, (2, 0)), (False, (2, 2))):
        got, weights = attention(
            torch.nn.Identity(), q, k, v, None, over="sdpa", cu_seq_lens_q=layout.cu_seqlens, scaling=0.3,
            is_causal=causal, sliding_window=3, s_aux=sinks, dropout=0.0, use_cache=False,
        )  # fmt: skip
        want = nta.varlen_attention(
            *(x[0].transpose(0, 1) for x in (q, k, v)), layout, is_causal=causal, window_size=window, scale=0.3,
            sinks=sinks,
        )  # fmt: skip
        assert weights is None
        torch.testing.assert_close(got[0], want)


def test_refuses_what_would_be_wrong():
    from nt_attention.hf.interface import attention

    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    q = torch.randn(1, 3, layout.total, 7)
    packed = {"over": "sdpa", "cu_seq_lens_q": layout.cu_seqlens}
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="cu_seq_lens_k ends at 21, but there are 8 keys"):
        attention(module, q, q[:, :, :8], q[:, :, :8], None, **packed)
    with pytest.raises(ValueError, match="cu_seq_lens_q ends at 21, but there are 42 queries"):
        attention(module, *[q.expand(2, -1, -1, -1)] * 3, None, **packed)
    with pytest.raises(ValueError, match="got 'flash_attention_2'"):
        nta.hf.register("flash_attention_2")

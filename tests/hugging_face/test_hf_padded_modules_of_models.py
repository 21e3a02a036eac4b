"""Models whose padded modules read masks, tuples or padding: packed, they are as each sequence alone."""

import copy

import pytest
import torch
from small_models import build_small
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM

import nt_attention as nta
from nt_attention.hf.pack.padded_modules import equal_lengths, one_group

LENGTHS = (9, 1, 17, 9, 16, 4)
MODELS = {
    "bamba": "BambaForCausalLM",
    "convbert": "ConvBertForMaskedLM",
    "doge": "DogeForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "mobilebert": "MobileBertForMaskedLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
}


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_is_as_each_sequence_alone(model_type):
    model = build_small(model_type, MODELS[model_type])
    right = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    unpatched = copy.deepcopy(model)
    tolerance = 1e-9 if model_type in ("convbert", "mobilebert") else 1e-5  # others compute norms or states in float32

    def gradients(values, model):
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(5), dtype=values.dtype)
        return torch.autograd.grad((values * weights).sum(), list(model.parameters()), allow_unused=True)

    with nta.patch(model) as handle:
        for calls, mask in enumerate((right, right.flip(1)), 1):
            ids = torch.randint(6, 90, mask.shape, generator=torch.Generator().manual_seed(7))
            ids = ids.masked_fill(~mask, model.config.pad_token_id or 0)
            got = model(input_ids=ids, attention_mask=mask.long()).logits[mask]
            got_gradients = gradients(got, model)
            assert handle.calls == {None: calls}
            rows = zip(ids, mask, strict=True)
            want = torch.cat([unpatched(input_ids=row[kept][None]).logits[0] for row, kept in rows])
            want_gradients = gradients(want, unpatched)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max()))
            largest = max(float(x.abs().max()) for x in want_gradients if x is not None and x.numel())
            for x, y in zip(got_gradients, want_gradients, strict=True):
                assert (x is None) == (y is None)
                if x is not None and x.numel():
                    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * largest)


def test_a_model_that_does_not_run_unpatched_is_refused_with_its_error():
    config = DeepseekV2Config(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                              num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, intermediate_size=64)  # fmt: skip
    with pytest.raises(ValueError, match="it does not run on rows of token ids: RuntimeError"):
        nta.patch(DeepseekV2ForCausalLM(config))


def test_attention_whose_keys_are_chosen_is_an_error():
    config = AutoConfig.for_model(
        "deepseek_v32", vocab_size=97, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, index_topk=4, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(6, 26).view(2, 10)
    with nta.patch(model, padding_free=False), pytest.raises(ValueError, match="the keys that each query sees"):
        model(input_ids=ids)


def test_groups_of_sequences():
    lengths = torch.tensor([3, 0, 5, 3]).numpy()
    assert [group.tolist() for group in equal_lengths(lengths)] == [[0, 3], [2]]
    assert [group.tolist() for group in one_group(lengths)] == [[0, 2, 3]]

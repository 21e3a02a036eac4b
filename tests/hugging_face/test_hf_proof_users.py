"""Classes of users' own: what a proof tries because their code may compare with anything."""

import time
import types

import planted_users
import pytest
import torch
import transformers
from planted_users import PLANTED, RIGHT
from proof_cases import BATCH, MASK, SIZES
from sweeps import sweep_except
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import nt_attention as nta
from nt_attention.hf.prove import store
from nt_attention.hf.prove.user_code import user_code_of

pytestmark = pytest.mark.usefixtures("cache")


def check(model, tolerance=2e-4):
    with torch.no_grad():
        want = model(**BATCH)[0]
        with nta.patch(model, on_fallback="raise") as handle:
            got = model(**BATCH)[0]
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got[MASK], want[MASK], rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("kind", sweep_except(PLANTED, *list(PLANTED)[::4]), ids=lambda kind: kind.__name__)
def test_planted_in_classes_of_users(kind):
    with pytest.raises(ValueError, match="can't be packed"):
        nta.patch(planted_users.make(kind, **PLANTED[kind]))


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_right_classes_of_users_are_packed(kind):
    check(planted_users.make(kind, **RIGHT[kind]))


# What the code of a class reads

ITSELF = {"options": []}
ITSELF["options"].append(ITSELF)
WORDS = ["word"] * 2_000_000


class ReadsTables(LlamaModel):
    def forward(self, *args, **kwargs):
        assert "options" in ITSELF and len(WORDS)  # noqa: PT018
        assert transformers.MODEL_MAPPING is not None
        return super().forward(*args, **kwargs)


def test_large_and_recursive_values_in_the_file_of_a_class():
    model = ReadsTables(LlamaConfig(**SIZES)).eval()
    begin = time.process_time()
    assert user_code_of(model).exists
    assert time.process_time() - begin < 1
    check(model)


def test_mapping_of_transformers_is_not_read(monkeypatch):
    """Reading `MODEL_MAPPING` imports all models of transformers."""
    monkeypatch.setattr(planted_users, "MODEL_MAPPING", transformers.MODEL_MAPPING, raising=False)
    monkeypatch.setattr(type(transformers.MODEL_MAPPING), "items", None)
    user_code_of(planted_users.make(planted_users.Before))


# Layers that replace others


def test_quantized_layers_of_torch():
    model = BertModel(BertConfig(**SIZES)).eval()
    check(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8), tolerance=0.1)


def test_layers_with_another_extra_repr():
    """As torchao sets it."""
    model = BertModel(BertConfig(**SIZES)).eval()
    dense = model.encoder.layer[0].output.dense
    dense.extra_repr = types.MethodType(lambda self: "int8", dense)
    check(model)


@pytest.mark.parametrize("name", ["lora", "lily"])
def test_layers_of_peft(name):
    peft = pytest.importorskip("peft")
    configs = {"lora": "LoraConfig", "lily": "LilyConfig"}
    if not hasattr(peft, configs[name]):
        pytest.skip("this version of PEFT does not have it")
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    peft.get_peft_model(model, getattr(peft, configs[name])(target_modules=["q_proj"], r=4))
    if name == "lora":
        check(model)
    else:
        with pytest.raises(ValueError, match=r"is a peft\.tuners\.lily\.layer\.Linear, which a new model"):
            nta.patch(model)


# Configs


def test_another_number_of_key_heads_than_tried():
    """Unpatched, the model raises an error for fewer key heads than query heads."""
    pytest.importorskip("transformers.models.deepseek_v2")
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    config = transformers.DeepseekV2Config(**{**SIZES, **sizes, **experts, "topk_group": 1, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match="no small model of its class can be built and run"):
        nta.patch(transformers.DeepseekV2ForCausalLM(config))


def test_fields_that_older_versions_wrote_do_not_change_the_key():
    old = {"position_embedding_type": "absolute", "gradient_checkpointing": False}
    assert store.key_of(BertModel(BertConfig(**SIZES))) == store.key_of(BertModel(BertConfig(**SIZES, **old)))


def test_token_types_that_the_small_model_does_not_take_are_not_packed():
    """TAPAS takes seven types for each token, and counts positions in cells of a table."""
    small = {"num_hidden_layers": 1, "vocab_size": 97, "hidden_size": 48, "num_attention_heads": 6}
    model = transformers.TapasModel(transformers.TapasConfig(**small, intermediate_size=53)).eval()
    types_of_tokens = torch.randint(0, 2, (*MASK.shape, 7))
    with torch.no_grad():
        want = model(**BATCH, token_type_ids=types_of_tokens).last_hidden_state
        with nta.patch(model), pytest.warns(UserWarning, match="token_type_ids give other values"):
            got = model(**BATCH, token_type_ids=types_of_tokens).last_hidden_state
    torch.testing.assert_close(got[MASK], want[MASK], rtol=2e-4, atol=2e-5)

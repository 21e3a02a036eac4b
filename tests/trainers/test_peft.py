"""PEFT's methods, put on a model before it is patched and after: outputs and adapters' gradients as unpatched."""

from __future__ import annotations

import warnings

import peft
import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    CPTConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    ShadowConfig,
    VeraConfig,
    get_peft_model,
)
from shared_data import llama_config, padded_batch, paragraphs
from sweeps import covering
from transformers import BertConfig, BertForTokenClassification, LlamaForCausalLM, set_seed

import nt_attention as nta
from nt_attention import NotPackedWarning

LIBRARY = f"PEFT {peft.__version__}"
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 8))]
PROJECTIONS = ["q_proj", "v_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
TOKENS = {"task_type": "TOKEN_CLS"}
METHODS = {
    "LoRA": LoraConfig(**CAUSAL, r=4, target_modules=PROJECTIONS, init_lora_weights=False),
    "DoRA": LoraConfig(**CAUSAL, r=4, target_modules=PROJECTIONS, init_lora_weights=False, use_dora=True),
    "VeRA": VeraConfig(**CAUSAL, r=4, target_modules=["q_proj"], init_weights=False),
    "IA3": IA3Config(**CAUSAL, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "layer norm tuning": LNTuningConfig(**CAUSAL),
    "prompt tuning": PromptTuningConfig(**CAUSAL, num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(**CAUSAL, num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": PrefixTuningConfig(**CAUSAL, num_virtual_tokens=3),
    "prefix tuning, token classification": PrefixTuningConfig(**TOKENS, num_virtual_tokens=3),
    "adaption prompt": AdaptionPromptConfig(**CAUSAL, adapter_len=3, adapter_layers=1),
}
FALLS_BACK = {
    "prefix tuning": "it continues from a cache",
    "prefix tuning, token classification": "it continues from a cache",
}


def make(name):
    set_seed(0)
    if "classification" in name:
        config = BertConfig(
            vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, is_decoder=True,
        )  # fmt: skip
        return BertForTokenClassification(config)
    return LlamaForCausalLM(llama_config(32))


def adapted(name, model):
    set_seed(1)
    found = get_peft_model(model, METHODS[name])
    with torch.no_grad():  # those that begin with 0 would change nothing
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return found


def batch_for(name):
    batch = padded_batch(TEXTS)
    if "classification" in name:
        batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 3)
    return batch


def step(model, batch):
    loss = model(**batch).loss
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return loss, torch.autograd.grad(loss, wanted)


@covering({"name": METHODS, "when": ["before", "after"]})
def test_peft_loss_and_adapter_gradients(name, when, record):
    batch = batch_for(name)
    want = step(adapted(name, make(name)).train(), batch)
    model = make(name)
    handle = nta.patch(model) if when == "before" else None
    model = adapted(name, model).train()
    handle = handle or nta.patch(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", NotPackedWarning)
        for _ in range(2):
            got = step(model, batch)
    record(LIBRARY, name, when, handle)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    reason = FALLS_BACK.get(name)
    assert handle.calls == {reason: 2}
    assert len([w for w in said if w.category is NotPackedWarning]) == (reason is not None)


@pytest.mark.parametrize("when", ["before", "after"])
def test_peft_disable_and_merge_adapters(when, record):
    batch = batch_for("LoRA")
    want = adapted("LoRA", make("LoRA")).eval()
    plain, merged = want.unload, want.merge_and_unload
    with torch.no_grad():
        expected = merged()(**batch).loss
        del plain
        model = make("LoRA")
        handle = nta.patch(model) if when == "before" else None
        model = adapted("LoRA", model).eval()
        handle = handle or nta.patch(model)
        model(**batch)
        with model.disable_adapter():
            torch.testing.assert_close(model(**batch).loss, make("LoRA").eval()(**batch).loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.merge_and_unload()(**batch).loss, expected, rtol=1e-5, atol=1e-5)
    record(LIBRARY, "LoRA, merged under the patch", when, handle)
    assert handle.calls == {None: 3}


def test_peft_over_int8_weights(record):
    torchao = pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    batch = batch_for("LoRA")

    def quantized():
        model = make("LoRA")
        quantize_(model.model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, torch.nn.Linear))
        return model

    want = step(adapted("LoRA", quantized()).train(), batch)
    model = adapted("LoRA", quantized()).train()
    with nta.patch(model) as handle:
        got = step(model, batch)
    record(f"{LIBRARY}, torchao {torchao.__version__}", "LoRA over int8 weights", "after", handle)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert handle.calls == {None: 1}


def test_peft_qlora(record, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    make("LoRA").save_pretrained(tmp_path)
    batch, four = batch_for("LoRA"), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def quantized():
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=four, device_map="cpu")
        return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    want = step(adapted("LoRA", quantized()).train(), batch)
    model = adapted("LoRA", quantized()).train()
    with nta.patch(model) as handle:
        got = step(model, batch)
    record(f"{LIBRARY}, bitsandbytes {bitsandbytes.__version__}", "QLoRA, NF4", "after", handle)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert handle.calls == {None: 1}


OF_ROWS = {
    "poly": (PolyConfig(**CAUSAL, target_modules=["q_proj"], r=2, n_tasks=2, n_skills=2), {"task_ids": [0, 1] * 4}),
    "shadow": (ShadowConfig(**CAUSAL), {}),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_adapters_that_compute_with_rows_run_padded(name):
    config, more = OF_ROWS[name]
    more = {key: torch.tensor(value) for key, value in more.items()}
    batch = padded_batch(TEXTS)
    batch.pop("labels", None)
    model = make(name).eval()
    with torch.no_grad(), nta.patch(model) as handle:
        adapted = get_peft_model(model, config).eval()
        with pytest.warns(NotPackedWarning, match="its first batch gave other values packed than padded: it raises"):
            got = adapted(**batch, **more).logits
    assert None not in handle.calls
    with torch.no_grad():
        want = adapted(**batch, **more).logits
    tokens = batch["attention_mask"].bool()
    torch.testing.assert_close(got[tokens], want[tokens], rtol=1e-4, atol=1e-5)


def test_adapter_that_computes_with_rows_is_refused():
    model = get_peft_model(make("poly"), OF_ROWS["poly"][0])
    with pytest.raises(
        ValueError, match="it does not run on rows of token ids: ValueError: task_ids should not be None"
    ):
        nta.patch(model)


def test_cpt_with_labels_needs_padded_logits():
    """CPT computes a loss of its own from the logits."""
    ids = [5, 6, 7, 8]
    config = CPTConfig(**CAUSAL, cpt_token_ids=ids, cpt_mask=[1, 2, 3, 4], cpt_tokens_type_mask=[1, 2, 3, 4])
    model, batch = get_peft_model(make("CPT"), config), padded_batch(TEXTS)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    inputs["input_type_mask"] = torch.full_like(inputs["input_ids"], 4)
    want = model.train()(**inputs).loss
    with nta.patch(model) as handle:
        torch.testing.assert_close(model(**inputs).loss, want)
    assert handle.calls == {None: 1}

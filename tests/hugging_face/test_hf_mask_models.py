"""Models whose mask pattern is in their mask function do as under eager attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from padding_masks import LENGTH, PADDINGS
from sweeps import covering
from tiny import TEXT, make

import nt_attention as nta

# a CPU has no kernel with gemma2's softcap
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
WINDOWED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5}

VISION = {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip

ALTERNATING = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}

MULTIMODAL = {
    "gemma3": {"text_config": ALTERNATING, "vision_config": VISION, "image_token_id": 5, "mm_tokens_per_image": 4},
    "paligemma": {
        "text_config": {**WINDOWED, "model_type": "gemma", "sliding_window": None},
        "vision_config": {**VISION, "projection_dim": 48},
        "image_token_index": 5, "projection_dim": 48,
    },
    "paligemma with windows": {
        "text_config": {**ALTERNATING, "model_type": "gemma2"}, "vision_config": {**VISION, "projection_dim": 48},
        "image_token_index": 5, "projection_dim": 48,
    },
}  # fmt: skip

CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "paligemma with windows": "PaliGemmaForConditionalGeneration",
}


def build(kind, config):
    torch.manual_seed(7)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def make_multimodal(name):
    config = transformers.CONFIG_MAPPING[name.split()[0]](**MULTIMODAL[name])
    return build(CLASSES[name], config)


def run(model, padding=None, **inputs):
    """The first output; only the real tokens if there is padding."""
    out = model(**inputs, attention_mask=padding)[0]
    return out if padding is None else out[padding.bool()]


def assert_what_eager_gives(model, padding=None, tolerance=3e-6, **inputs):
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = run(model, padding, **inputs)
        for over in ("sdpa", "eager"):
            model.set_attn_implementation(nta.hf.register(over))
            torch.testing.assert_close(run(model, padding, **inputs), want, rtol=tolerance, atol=tolerance)
    return want


def token_types(name):
    """A row with two images, one with one image, and one with text only; for paligemma, where the prefix ends."""
    types = torch.zeros(3, LENGTH, dtype=torch.int64)
    if name.startswith("paligemma"):
        types[:, 7:] = 1
        types[1, 3:] = 1
    else:
        types[0, 2:5], types[0, 6:11], types[1, 1:12] = 1, 1, 1
    return types


@pytest.mark.parametrize("padding", ["no mask", "all ones", "right", "left"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_bidirectional_images_and_prefixes(name, padding):
    model, ids = make_multimodal(name), torch.randint(8, 97, (3, LENGTH))
    there = PADDINGS[padding]
    there = None if there is None else there.long()
    with_images = assert_what_eager_gives(model, there, input_ids=ids, token_type_ids=token_types(name))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        without = run(model, there, input_ids=ids)
        assert (with_images - without).abs().max() > 1e-3  # the images do matter
        # without any, transformers' sdpa gives paligemma another mask than eager
        model.set_attn_implementation(nta.hf.register("eager"))
        torch.testing.assert_close(run(model, there, input_ids=ids), without, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
def test_bidirectional_gemma3(padding):
    model = make("gemma3_text", "Gemma3TextModel", use_bidirectional_attention=True)
    causal = make("gemma3_text", "Gemma3TextModel")
    ids, there = torch.randint(8, 97, (3, LENGTH)), PADDINGS[padding]
    there = None if there is None else there.long()
    both_ways = assert_what_eager_gives(model, there, input_ids=ids, tolerance=1e-5)
    assert (assert_what_eager_gives(causal, there, input_ids=ids, tolerance=1e-5) - both_ways).abs().max() > 1e-3


WITHOUT_CAUSALITY = {
    "llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model",
    "phi3": "Phi3Model", "gemma2": "Gemma2Model", "gemma3_text": "Gemma3TextModel", "gpt_oss": "GptOssModel",
    "gpt2": "GPT2Model", "opt": "OPTModel",
}  # fmt: skip


def assert_as_eager_also_patched(model, there, ids):
    there = None if there is None else there.long()
    want = assert_what_eager_gives(model, there, input_ids=ids, tolerance=1e-5)
    model.set_attn_implementation("eager")
    with torch.no_grad(), nta.patch(model):
        torch.testing.assert_close(run(model, there, input_ids=ids), want, rtol=1e-5, atol=1e-5)


@covering({"model_type": WITHOUT_CAUSALITY, "padding": ["no mask", "right", "left"]})
def test_decoders_with_is_causal_false(model_type, padding):
    """In these models, a window of w includes w tokens on both sides, not w - 1."""
    model = make(model_type, WITHOUT_CAUSALITY[model_type], is_causal=False)
    assert_as_eager_also_patched(model, PADDINGS[padding], torch.randint(8, 97, (3, LENGTH)))


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_encoders_with_is_decoder(model_type, padding):
    kind = {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}[model_type]
    model = make(model_type, f"{kind}Model", is_decoder=True)
    assert_as_eager_also_patched(model, PADDINGS[padding], torch.randint(8, 90, (3, LENGTH)))


MODELS_WITH_A_MASK_OF_THE_CALLER = {
    "llama": "LlamaModel",
    "bert": "BertModel",
    "gemma2": "Gemma2Model",
    "gpt_oss": "GptOssModel",
}


@pytest.mark.parametrize("model_type", MODELS_WITH_A_MASK_OF_THE_CALLER)
def test_four_dimensional_mask_of_the_caller(model_type):
    model = make(model_type, MODELS_WITH_A_MASK_OF_THE_CALLER[model_type])
    ids = torch.randint(8, 97, (3, LENGTH))
    if model_type == "bert":
        ids = ids.clamp(max=90)
    seen = torch.rand(3, 1, LENGTH, LENGTH) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    for mask in (seen, seen[:1]):
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        bias = additive + torch.randn(mask.shape)
        with torch.no_grad():
            for which, other in ((additive, mask), (bias, None)):
                model.set_attn_implementation("eager")
                want = model(ids, attention_mask=which)[0]
                for over in ("sdpa", "eager"):
                    model.set_attn_implementation(nta.hf.register(over))
                    for given in (which, other):
                        if given is not None:
                            got = model(ids, attention_mask=given)[0]
                            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

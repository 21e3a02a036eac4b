"""Vision-language models: text alone is packed, and text beside images if the language model is patched."""

import pytest
import torch
import transformers
from small_models import small_of

import nt_attention as nta

AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}


def small_model(name):
    """A small model of a class of transformers, in float64."""
    kind = getattr(transformers, name)
    config = kind.config_class()
    if "Qwen2" in name:  # as in its checkpoints; the default config has no sections
        config.text_config.rope_parameters = AXES
    with torch.device("meta"):
        original = kind(config)
    return small_of(original).double()


def placed(rows, length, side):
    """Rows of ids (1, n) with padding on a side, and their mask."""
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for n, row in enumerate(rows):
        at = slice(0, row.shape[1]) if side == "right" else slice(length - row.shape[1], length)
        ids[n, at], mask[n, at] = row[0], 1
    return ids, mask


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
    ],
)
def test_text_alone_is_packed(name, side):
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    model = small_model(name)
    rows = [torch.randint(6, 50, (1, n)) for n in (12, 1, 5, 8)]
    want = [model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] for ids in rows]
    ids, mask = placed(rows, 12, side)
    with nta.patch(model, on_fallback="raise") as handle:
        logits = model(input_ids=ids, attention_mask=mask).logits
    assert handle.calls == {None: 1}
    for n, alone in enumerate(want):  # positions in float32 are shifted by padding on the left
        torch.testing.assert_close(logits[n][mask[n].bool()], alone, rtol=1e-5, atol=1e-5)


TEXT = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 37, "head_dim": 16, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
IMAGE = 90  # an image of four patches is four of these tokens


def text_and_image():
    ids = torch.randint(6, 80, (2, 13))
    ids[0, 2:6] = IMAGE
    mask = (torch.arange(13) < torch.tensor([[13], [5]])).long()
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(1, 3, 16, 16, dtype=torch.float64)}


def test_llava_with_an_image_is_packed_by_a_patch_of_its_language_model():
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    model, call = transformers.LlavaForConditionalGeneration(config).eval().double(), text_and_image()
    tokens = call["attention_mask"].bool()
    want = model(**call).logits[tokens]
    with nta.patch(model.model.language_model, on_fallback="raise") as handle:
        got = model(**call).logits[tokens]
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_gemma3_with_an_image_falls_back():
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=4)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**VISION), image_token_id=IMAGE,
        mm_tokens_per_image=4,
    )  # fmt: skip
    model, call = transformers.Gemma3ForConditionalGeneration(config).eval().double(), text_and_image()
    call["token_type_ids"] = (call["input_ids"] == IMAGE).long()
    want = model(**call).logits
    with nta.patch(model.model.language_model) as handle, pytest.warns(UserWarning, match="attention_mask is not"):
        torch.testing.assert_close(model(**call).logits, want)
    assert handle.calls == {"its attention_mask is not (batch, length)": 1}

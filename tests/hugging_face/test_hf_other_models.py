"""Models with code of their own for attention, masks, states along the row, or images beside text, patched.

Outputs and gradients are those of each sequence alone. A new model is a line in MODELS.
"""

import copy

import pytest
import torch
import transformers
from small_models import build_small, small_of
from sweeps import sweep_except
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM

import nt_attention as nta
from nt_attention.hf.pack import attention_code

LENGTHS = (9, 1, 40, 9, 23)
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}


def of_class(model_type, name):
    """A small model of a class, with random weights."""

    def build():
        model = build_small(model_type, name)
        for number, parameter in enumerate(model.parameters()):  # not those of the class
            draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=parameter.dtype)
            parameter.data.add_(draw, alpha=0.1)
        return model

    return build


def hybrid(name, **fields):
    """A model with states or convolutions along the row."""
    sizes = {"head_dim": 8, "max_position_embeddings": 128, **fields}
    sizes = {**GROUPED, "num_hidden_layers": 4, **sizes}
    if "hybrid_override_pattern" in fields:
        del sizes["num_hidden_layers"]
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).double()


def llama4(**changed):
    layers = {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 4, "attn_scale": 0.9, "attention_chunk_size": 8}
    sizes = {"head_dim": 8, "intermediate_size_mlp": 48, "num_hidden_layers": 4}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**EXPERTS, **sizes, **layers, **changed}))


def llama4_with_a_window():
    """It does not read it, and neither does the packed run."""
    model = llama4()
    model.model.layers[1].self_attn.sliding_window = 5
    return model


def big_bird(kind="original_full", head=transformers.BigBirdForMaskedLM):
    config = {**SIZES, "intermediate_size": 48, "attention_type": kind, "block_size": 4, "num_random_blocks": 1}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return head(transformers.BigBirdConfig(**config)).double()


def big_bird_that_was_switched():
    model = big_bird("block_sparse")
    model.bert.set_attention_type("original_full")
    return model


def with_images(name):
    def build():
        kind = getattr(transformers, name)
        config = kind.config_class()
        if "Qwen2" in name:  # as in its checkpoints; the default config has no sections
            axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
            config.text_config.rope_parameters = axes
        with torch.device("meta"):
            original = kind(config)
        return small_of(original).double()

    return build


DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATES = {"num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8}
NEMOTRON = {
    "hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
    "chunk_size": 8,
}  # fmt: skip
INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 16,
    "d_rel": 4, "rel_extent": 32, "mlp_layer_types": ["dense"] * 4,
}  # fmt: skip
OWN_ATTENTION = {
    "bloom": "BloomForCausalLM", "codegen": "CodeGenForCausalLM", "deberta": "DebertaForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM", "falcon": "FalconForCausalLM", "flaubert": "FlaubertWithLMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM", "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM", "gptj": "GPTJForCausalLM",
    "layoutlm": "LayoutLMForMaskedLM", "luke": "LukeForMaskedLM", "markuplm": "MarkupLMForTokenClassification",
    "megatron-bert": "MegatronBertForMaskedLM", "mpnet": "MPNetForMaskedLM", "mpt": "MptForCausalLM",
    "mvp": "MvpForCausalLM", "nemotron": "NemotronForCausalLM", "openai-gpt": "OpenAIGPTLMHeadModel",
    "rembert": "RemBertForMaskedLM", "roformer": "RoFormerForMaskedLM", "squeezebert": "SqueezeBertForMaskedLM",
    "stablelm": "StableLmForCausalLM", "t5": "T5ForTokenClassification", "trocr": "TrOCRForCausalLM",
    "xglm": "XGLMForCausalLM", "xlm": "XLMWithLMHeadModel",
}  # fmt: skip
PADDED = {  # their padded modules read masks, tuples or padding
    "bamba": "BambaForCausalLM", "convbert": "ConvBertForMaskedLM", "doge": "DogeForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM", "mobilebert": "MobileBertForMaskedLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM", "rwkv": "RwkvForCausalLM",
}  # fmt: skip
IMAGES = [f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Gemma3", "Llava")]
MODELS = {
    **{name: of_class(name, kind) for name, kind in (OWN_ATTENTION | PADDED).items()},
    "qwen3_5_text": hybrid("qwen3_5_text", **DELTA),
    "lfm2": hybrid("lfm2", full_attn_idxs=[1, 3], conv_L_cache=3),
    "nemotron_h": hybrid("nemotron_h", **NEMOTRON),
    "mamba2": hybrid("mamba2", **STATES),
    "inkling_text": hybrid("inkling_text", **INKLING),  # its convolutions come after sums of hidden states
    "llama4": llama4,
    "llama4 without norms": lambda: llama4(use_qk_norm=False),
    "llama4 without temperature": lambda: llama4(attn_temperature_tuning=False),
    "llama4 with a floor of 64": lambda: llama4(floor_scale=64),
    "llama4 with a window": llama4_with_a_window,
    "big_bird": big_bird,
    "big_bird that was switched": big_bird_that_was_switched,
    **{name: with_images(name) for name in IMAGES},
}
# Those that `make test` runs: one for each kind of code.
SELECTED = (
    *("bloom", "deberta-v2", "gpt_neo", "megatron-bert", "mpnet", "squeezebert", "t5"),
    *("qwen3_5_text", "lfm2", "nemotron_h", "llama4", "big_bird", "Qwen2VLForConditionalGeneration"),
)
BOTH_SIDES = {*PADDED, *IMAGES}  # the others may count padding on the left in their positions
# In other models, some norms, rotations, or states are computed in float32.
EXACT = {
    *("bloom", "deberta", "deberta-v2", "megatron-bert", "mpnet", "rembert", "squeezebert"),
    *("convbert", "mobilebert", "big_bird", "big_bird that was switched"),
}
NO_CHECKPOINTS = ("bamba", "falcon_h1", "recurrent_gemma", "rwkv")


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batch_of(model, side="right", lengths=LENGTHS):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = mask if side == "right" else mask.flip(1)
    ids = torch.randint(6, 50, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    padding = model.config.get_text_config().pad_token_id or 0
    padded = torch.full(mask.shape, padding).masked_scatter(mask, ids)
    return {"input_ids": padded, "attention_mask": mask.long()}, mask


def weighted(values):
    generator = torch.Generator().manual_seed(5)
    return (values * torch.randn(values.shape, generator=generator, dtype=values.dtype)).sum()


def gradients_of(model, values):
    model.zero_grad()
    weighted(values).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def check(got, want, tolerance):
    assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.detach().abs().max()))


def check_gradients(got, want, tolerance):
    assert got.keys() == want.keys()
    largest = max(float(x.abs().max()) for x in want.values() if x.numel())
    for name, x in want.items():
        assert not x.numel() or float((got[name] - x).abs().max()) <= tolerance * max(1.0, largest), name


@pytest.mark.parametrize("name", sweep_except(MODELS, *SELECTED))
def test_packed_is_as_each_sequence_alone(name):
    if name in IMAGES and not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    model = make(name)
    tolerance = 1e-9 if name in EXACT and model.dtype == torch.float64 else 1e-4
    unpatched, before = copy.deepcopy(model), [set(vars(module)) for module in model.modules()]
    nta.patch(model).remove()
    assert [set(vars(module)) for module in model.modules()] == before
    batch, tokens = batch_of(model)
    rows = [ids[mask][None] for ids, mask in zip(batch["input_ids"], tokens, strict=True)]
    alone = [unpatched(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] for ids in rows]
    want = torch.cat(alone)
    wanted = gradients_of(unpatched, want)
    attention_code._cached_tensors.clear()
    with nta.patch(model, packing="always", on_fallback="silent" if name in PADDED else "raise") as handle:
        with torch.inference_mode():  # what is cached here can be saved for a backward
            model(**batch)
        for side in ("right", "left") if name in BOTH_SIDES else ("right",):
            batch, tokens = batch_of(model, side)
            got = model(**batch).logits[tokens]
            check(got, want, tolerance)
            check_gradients(gradients_of(model, got), wanted, tolerance)
        if model.supports_gradient_checkpointing and name not in NO_CHECKPOINTS:
            batch, tokens = batch_of(model.train())
            for reentrant in (False, True):
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
                check_gradients(gradients_of(model, model(**batch).logits[tokens]), wanted, tolerance)
        assert handle.calls.keys() == {None}
    if name in ("lfm2", "inkling_text", "qwen3_5_text", "nemotron_h", "mamba2"):
        how = "zeros between sequences" if name in ("lfm2", "inkling_text") else "padded"
        assert how in str(handle.layers), "the handle names the modules that mix the tokens of a row"


def test_llama4_with_padding_on_the_left_gives_what_the_padded_batch_gives():
    model = llama4().eval()
    batch, tokens = batch_of(model, "left")
    want = model(**batch).logits[tokens]
    with nta.patch(model):
        check(model(**batch).logits[tokens], want, 2e-5)


def phimoe(window):
    return transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**EXPERTS, sliding_window=window))


def qwen2(layer=None, window=3):
    """With another window in a layer, or in its config."""
    config = {**GROUPED, "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config, sliding_window=3))
    if layer is None:
        model.config.sliding_window = window
    else:
        model.model.layers[layer].self_attn.sliding_window = window
    return model


DIFFERS = "differs between a packed row and each sequence alone"
DEEPSEEK = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "intermediate_size": 64,
}  # fmt: skip
# What is refused, and the reason; None for models beside them that are not.
REFUSED = {
    "a window that only the mask has": (lambda: phimoe(5), DIFFERS),
    "a window longer than the rows of the check": (lambda: phimoe(100), None),
    "a window of the config": (lambda: qwen2(window=2), DIFFERS),
    "a window in a layer without": (lambda: qwen2(0, 4), DIFFERS),
    "a shorter window": (lambda: qwen2(3, 2), DIFFERS),
    "no window any more": (lambda: qwen2(3, None), DIFFERS),
    "the same window": (lambda: qwen2(3, 3), None),
    "block sparse": (lambda: big_bird("block_sparse"), r"block sparse.* call set_attention_type\('original_full'\)"),
    "it does not run": (lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**DEEPSEEK)), "rows of token ids: RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name):
    build, reason = REFUSED[name]
    if reason is None:
        assert nta.patch(build().eval()).active
        return
    with pytest.raises(ValueError, match=reason):
        nta.patch(build().eval())


def test_attention_whose_keys_are_chosen_is_an_error():
    more = {
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_topk": 4,
    }  # fmt: skip
    config = AutoConfig.for_model("deepseek_v32", **{**DEEPSEEK, **more, "pad_token_id": 0})
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(6, 26).view(2, 10)
    with nta.patch(model, padding_free=False), pytest.raises(ValueError, match="the keys that each query sees"):
        model(input_ids=ids)


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


def test_gemma3_with_an_image_falls_back():
    text, vision = transformers.Gemma3TextConfig(**TEXT, sliding_window=4), transformers.SiglipVisionConfig(**VISION)
    config = {"text_config": text, "vision_config": vision, "image_token_id": IMAGE, "mm_tokens_per_image": 4}
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**config)).eval().double()
    call = text_and_image()
    call["token_type_ids"] = (call["input_ids"] == IMAGE).long()
    want = model(**call).logits
    with nta.patch(model.model.language_model) as handle, pytest.warns(UserWarning, match="attention_mask is not"):
        torch.testing.assert_close(model(**call).logits, want)
    assert handle.calls == {"its attention_mask is not (batch, length)": 1}

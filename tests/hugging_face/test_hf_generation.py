"""generate() gives token for token what it gives under eager: with every cache, registered and patched."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import transformers
from sweeps import covering
from tiny import PAD, TEXT, make

import nt_attention as nta
from nt_attention import NotPackedWarning
from nt_attention.hf.route.by_name import MIX_ROWS

# a CPU has no kernel with gemma2's softcap
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
LENGTHS, LENGTH, NEW = [11, 2, 7, 5], 11, 7  # the windows of 5 are shorter than the prompt

DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

GENERATION_MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "greedy, static cache": {"cache_implementation": "static"},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "without a cache": {"use_cache": False},
}


def make_decoder(model_type, **more):
    model = make(model_type, DECODERS[model_type], **more)
    model.generation_config.eos_token_id = None  # so that every row goes on to the end
    return model


def prompts(lengths=LENGTHS):
    """Padded on the left, as for generation."""
    length = max(lengths)
    mask = torch.arange(length) >= length - torch.tensor(lengths)[:, None]
    ids = torch.randint(4, 97, mask.shape).masked_fill(~mask, PAD)
    return {"input_ids": ids, "attention_mask": mask.long()}


def generate(model, batch, **mode):
    out = model.generate(
        **batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True, **mode
    )
    if not model.config.is_encoder_decoder:
        assert out.sequences.shape[1] == batch["input_ids"].shape[1] + NEW
    return out


def assert_same_tokens(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for mine, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@covering({"model_type": DECODERS, "mode": GENERATION_MODES})
def test_generate_gives_the_tokens_of_eager(model_type, mode):
    model, batch, mode = make_decoder(model_type), prompts(), GENERATION_MODES[mode]
    want = generate(model, batch, **mode)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        assert_same_tokens(generate(model, batch, **mode), want)
    model.set_attn_implementation("eager")
    with nta.patch(model, padding_free=False), warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        assert_same_tokens(generate(model, batch, **mode), want)
    with nta.patch(model) as handle, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", NotPackedWarning)
        assert_same_tokens(generate(model, batch, **mode), want)
    assert not [w for w in said if w.category is NotPackedWarning]
    if mode.get("use_cache", True):
        assert handle.calls["it continues from a cache"] > 0
        assert None not in handle.calls
    else:  # all tokens at each step, so the calls run packed
        assert handle.calls == {None: NEW}
    assert model.config._attn_implementation == "eager"
    assert_same_tokens(generate(model, batch, **mode), want)


@covering({"model_type": DECODERS, "padded": [False, True]})
def test_several_new_tokens_beside_a_cache(model_type, padded):
    """A prompt in three parts: the first fills the cache, and the others continue from it."""
    model = make_decoder(model_type)
    batch = prompts(LENGTHS if padded else [LENGTH] * 2)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if model_type == "opt":
        positions = None
    real = mask.bool()

    def in_parts(cuts, cache=None):
        cache, found = cache or transformers.DynamicCache(config=model.config), []
        for begin, end in itertools.pairwise(cuts):
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=None if positions is None else positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(out.logits)
        return torch.cat(found, 1)[real]

    with torch.no_grad():
        want = in_parts([0, LENGTH])
        for over in ("sdpa", "eager"):
            model.set_attn_implementation(nta.hf.register(over))
            for cuts in ([0, LENGTH], [0, 3, 5, LENGTH], [0, 8, LENGTH], [0, 1, 2, LENGTH]):
                torch.testing.assert_close(in_parts(cuts), want, rtol=1e-4, atol=1e-4)
                static = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3)
                torch.testing.assert_close(in_parts(cuts, static), want, rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("eager")
        with warnings.catch_warnings(), nta.patch(model):
            warnings.simplefilter("error", NotPackedWarning)
            torch.testing.assert_close(in_parts([0, 3, LENGTH]), want, rtol=1e-4, atol=1e-4)


@covering({"model_type": DECODERS, "told": ["positions", "lengths", "a mask of ones"]})
def test_packed_prompt_that_fills_a_cache(model_type, told):
    model = make_decoder(model_type)
    layout = nta.SequenceLayout.from_lengths([7, 1, 9, 3])
    ids = torch.randint(4, 97, (1, layout.total))
    more = {"position_ids": layout.position_ids[None], "use_cache": True}
    if told == "lengths":
        more |= {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
        more |= {"max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen}
    if told == "a mask of ones":
        more["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        begins = layout.host_offsets.tolist()
        rows = [ids[:, a:b] for a, b in itertools.pairwise(begins)]
        want = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
        for over in ("sdpa", "eager"):
            model.set_attn_implementation(nta.hf.register(over))
            out = model(ids, **more)
            torch.testing.assert_close(out.logits, want, rtol=1e-4, atol=1e-4)
            assert out.past_key_values.get_seq_length() == layout.total


def make_translator(model_type):
    sizes = {
        "t5": {"d_model": 48, "d_kv": 8, "d_ff": 53, "num_layers": 2, "num_heads": 6, "dropout_rate": 0.0},
        "bart": {
            "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
            "decoder_attention_heads": 6, "encoder_ffn_dim": 53, "decoder_ffn_dim": 59, "dropout": 0.0,
            "max_position_embeddings": 64, "forced_eos_token_id": None,
        },
    }[model_type]  # fmt: skip
    kinds = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration"}
    tokens = {key: TEXT[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    config = transformers.CONFIG_MAPPING[model_type](**sizes, **tokens, decoder_start_token_id=2)
    torch.manual_seed(7)
    model = getattr(transformers, kinds[model_type])._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


@covering(
    {
        "model_type": ["t5", "bart"],
        "mode": ["greedy", "beams", "greedy, static cache", "without a cache"],
        "side": ["left", "right", "right"],
    }
)
def test_generate_of_encoder_decoders(model_type, mode, side):
    model, batch, mode = make_translator(model_type), prompts(), GENERATION_MODES[mode]
    if side == "right":
        batch = {name: x.flip(1) for name, x in batch.items()}
    want = generate(model, batch, **mode)
    with nta.patch(model):
        assert_same_tokens(generate(model, batch, **mode), want)
    if model_type in MIX_ROWS:
        return
    with nta.patch(model, padding_free=False):
        assert_same_tokens(generate(model, batch, **mode), want)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        assert_same_tokens(generate(model, batch, **mode), want)


@pytest.mark.sweep
def test_continuous_batching_under_an_accepted_name_gives_the_reason():
    """It accepts names with "flash" in them."""
    from transformers import GenerationConfig

    from nt_attention.hf.patch_model import VISION_NAME

    model = make("llama", "LlamaForCausalLM", "sdpa")
    asked = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=1)
    model.config._attn_implementation_internal = VISION_NAME
    prompts = [[5, 6, 7], [9, 11, 7, 8]]
    few = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)  # by default, most of the memory
    found = model.generate_batch(prompts, asked, few, progress_bar=False)
    assert len(found) == 2
    for request in found.values():
        assert request.generated_tokens == []
        assert "continuous batching (generate_batch) uses a paged cache" in request.error

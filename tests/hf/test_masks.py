"""The mask function: no mask where the attention function is told as much, and the stock mask everywhere else."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import transformers
from tiny import TEXT, config_of, make
from transformers import masking_utils as stock

import nt_attention as nta
from nt_attention.hf import masks

# a CPU has no kernel with gemma2's softcap
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

LENGTHS, LENGTH = [13, 7, 2], 13
WINDOWED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5}
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1]] * 3)
IDS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]] * 3)


def packed(mask_function):
    """What this version of transformers makes of a mask function where rows are packed."""
    if hasattr(stock, "packed_sequence_compatibility_function"):
        return stock.packed_sequence_compatibility_function(mask_function, POSITIONS, IDS)
    return stock.and_masks(mask_function, stock.packed_sequence_mask_function(IDS))


def every_third(batch, head, q, k):
    return k % 3 == 0


class Callable:
    def __call__(self, batch, head, q, k):
        return k <= q


CAUSAL, CHUNKS = stock.causal_mask_function, stock.chunked_causal_mask_function(5, torch.zeros(3, dtype=torch.int64))
BLOCKS = stock.blockwise_overlay(IDS)
PLAIN = {
    "causal": CAUSAL,
    "bidirectional": stock.bidirectional_mask_function,
    "causal window": stock.sliding_window_causal_mask_function(5),
    "bidirectional window": stock.sliding_window_bidirectional_mask_function(5),
    "packed": packed(CAUSAL),
    "packed window": packed(stock.sliding_window_causal_mask_function(5)),
    "packed twice": packed(packed(CAUSAL)),
    "nothing at all": stock.and_masks(),
}
NOT_PLAIN = {
    "chunks": CHUNKS,
    "packed chunks": packed(CHUNKS),
    "blocks alone": BLOCKS,
    "causal or blocks": stock.or_masks(CAUSAL, BLOCKS),
    "causal or bidirectional": stock.or_masks(CAUSAL, stock.bidirectional_mask_function),
    "packed blocks": packed(stock.or_masks(CAUSAL, BLOCKS)),
    "a window over an or": stock.and_masks(stock.or_masks(CAUSAL, BLOCKS), stock.sliding_window_overlay(5)),
    "and somebody's own": stock.and_masks(CAUSAL, every_third),
    "somebody's own": every_third,
    "a lambda": lambda batch, head, q, k: k <= q,
    "a partial": functools.partial(CAUSAL),
    "and a partial": stock.and_masks(functools.partial(CAUSAL)),
    "an object": Callable(),
    "a builtin": max,
    "padding": stock.padding_mask_function(torch.ones(3, LENGTH, dtype=torch.bool)),
    "offsets": stock.add_offsets_to_mask_function(CAUSAL, 2, 0),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_mask_of_causality_windows_and_packed_rows_is_plain(name):
    assert masks.is_plain(PLAIN[name])


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_every_other_mask_is_not(name):
    assert not masks.is_plain(NOT_PLAIN[name])


def right(size=LENGTH):
    return torch.arange(size) < torch.tensor(LENGTHS)[:, None]


PADDINGS = {
    "no mask": None,
    "all ones": torch.ones(3, LENGTH, dtype=torch.bool),
    "right": right(),
    "left": right().flip(1),
    "a row without tokens": right() & torch.tensor([1, 0, 1]).bool()[:, None],
}


def ask(over, mask_function, padding, config, function=None, **more):
    """The mask that ours makes (or ``function``), asked as transformers' makers ask it."""
    windowed = {"local_size": 5} if "window" in str(more.pop("name", "")) else {}
    given = {
        "batch_size": 3, "q_length": LENGTH, "kv_length": LENGTH, "q_offset": 0, "kv_offset": 0,
        "mask_function": mask_function, "attention_mask": padding, "dtype": torch.float32, "config": config,
        "use_vmap": False, "device": torch.device("cpu"), **windowed, **more,
    }  # fmt: skip
    return masks.mask(over=over, **given) if function is None else function(**given)


def same(got, want):
    return got is None if want is None else got is not None and got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    "name", [*sorted(PLAIN.keys() - {"nothing at all"}), "chunks", "causal or blocks", "and somebody's own"]
)
@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_there_is_no_mask_for_plain_whole_rows_and_the_stock_one_for_all_others(over, name, padding):
    mask_function, there = {**PLAIN, **NOT_PLAIN}[name], PADDINGS[padding]
    function = {"sdpa": stock.sdpa_mask, "eager": stock.eager_mask}[over]
    skips = {"allow_is_causal_skip": name == "causal", "allow_is_bidirectional_skip": name == "bidirectional"}
    for model_type in ("llama", "olmo2", None):
        config = None if model_type is None else transformers.CONFIG_MAPPING[model_type]()
        got = ask(over, mask_function, there, config, name=name, **skips)
        none = model_type == "llama" and name in PLAIN and padding in ("no mask", "all ones")
        want = None if none else ask(over, mask_function, there, config, function, name=name, **skips)
        assert same(got, want), model_type


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_rows_onto_a_cache_get_the_stock_mask(over):
    config = transformers.LlamaConfig()
    function = {"sdpa": stock.sdpa_mask, "eager": stock.eager_mask}[over]
    for place in (
        {"q_length": 3, "q_offset": LENGTH - 3},  # several tokens onto a cache
        {"q_length": 1, "q_offset": LENGTH - 1},  # decoding
        {"q_offset": torch.tensor(0)},  # a static cache that the prompt just fills
        {"q_length": 7, "q_offset": torch.tensor(0)},  # and one with room
        {"q_length": 3, "kv_length": 7, "q_offset": LENGTH - 3, "kv_offset": LENGTH - 7},  # a sliding cache
    ):
        for padding in ("no mask", "all ones", "left"):
            for skip in (True, False):
                given = {**place, "allow_is_causal_skip": skip}
                got = ask(over, CAUSAL, PADDINGS[padding], config, **given)
                assert same(got, ask(over, CAUSAL, PADDINGS[padding], config, function, **given)), (place, padding)
    for over_a_cache in ({"q_length": 3, "q_offset": LENGTH - 3}, {"q_length": 7, "q_offset": torch.tensor(0)}):
        assert ask(over, CAUSAL, PADDINGS["left"], config, **over_a_cache) is not None


def test_a_window_that_a_caller_lays_over_a_mask_is_not_lost():
    config = transformers.LlamaConfig(**{**TEXT, "num_attention_heads": 6}, attn_implementation=nta.hf.register())
    embeds = torch.zeros(3, LENGTH, 48)
    for and_mask in (stock.sliding_window_overlay(5), every_third):
        got = stock.create_causal_mask(config, embeds, None, None, and_mask_function=and_mask)
        config._attn_implementation = "sdpa"
        want = stock.create_causal_mask(config, embeds, None, None, and_mask_function=and_mask)
        config._attn_implementation = nta.hf.register()
        assert same(got, want)


def test_every_maker_of_transformers_gives_none_for_whole_rows_and_the_stock_mask_for_padded_ones():
    config = config_of("mistral", attention_chunk_size=5)
    embeds = torch.zeros(3, LENGTH, 48)
    positions = torch.arange(LENGTH)[None]
    makers = (
        stock.create_causal_mask, stock.create_sliding_window_causal_mask, stock.create_bidirectional_mask,
        stock.create_bidirectional_sliding_window_mask, stock.create_chunked_causal_mask,
    )  # fmt: skip
    for make_mask in makers:
        for padding in (None, right().long(), right().flip(1)):
            for over in ("sdpa", "eager"):
                found = []
                for name in (nta.hf.register(over), over):
                    config._attn_implementation = name
                    more = {} if "bidirectional" in make_mask.__name__ else {"position_ids": positions}
                    found.append(make_mask(config, embeds, padding, past_key_values=None, **more))
                none = padding is None and "chunked" not in make_mask.__name__
                assert same(found[0], None if none else found[1]), make_mask.__name__


# Models whose pattern is in their mask function alone, or whose family is in no table of ours.

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
OTHERS = {
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", ALTERNATING),
    "glm4": ("Glm4ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", ALTERNATING),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
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


def make_other(model_type):
    kind, more = OTHERS[model_type]
    fields = {**WINDOWED, **more}
    return build(kind, transformers.CONFIG_MAPPING[model_type](**fields))


def make_chunked():
    config = transformers.Llama4TextConfig(
        **{**WINDOWED, "intermediate_size_mlp": 53, "num_local_experts": 2, "attention_chunk_size": 5},
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    )
    return build("Llama4ForCausalLM", config)


def run(model, padding=None, **inputs):
    """The first output, its real tokens alone where there is padding."""
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
    """A row with two images, one with one image, and one of text alone; for paligemma, where the prefix ends."""
    types = torch.zeros(3, LENGTH, dtype=torch.int64)
    if name.startswith("paligemma"):
        types[:, 7:] = 1
        types[1, 3:] = 1
    else:
        types[0, 2:5], types[0, 6:11], types[1, 1:12] = 1, 1, 1
    return types


@pytest.mark.parametrize("padding", ["no mask", "all ones", "right", "left"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_images_and_prefixes_that_see_both_ways_do_as_under_eager(name, padding):
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


@pytest.mark.parametrize("padding", ["no mask", "all ones", "right", "left"])
def test_chunks_do_as_under_eager(padding):
    model, ids = make_chunked(), torch.randint(8, 97, (3, LENGTH))
    there = PADDINGS[padding]
    there = None if there is None else there.long()
    chunked = assert_what_eager_gives(model, there, input_ids=ids)
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.attention_chunk_size = 64
    assert (assert_what_eager_gives(model, there, input_ids=ids) - chunked).abs().max() > 1e-3


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
def test_a_bidirectional_gemma3_does_as_under_eager(padding):
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


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
@pytest.mark.parametrize("model_type", WITHOUT_CAUSALITY)
def test_decoders_whose_config_is_not_causal_do_as_under_eager(model_type, padding):
    """transformers' window of w reaches w tokens to both sides there, not w - 1."""
    model = make(model_type, WITHOUT_CAUSALITY[model_type], is_causal=False)
    assert_as_eager_also_patched(model, PADDINGS[padding], torch.randint(8, 97, (3, LENGTH)))


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra", "esm"])
def test_encoders_that_are_decoders_do_as_under_eager(model_type, padding):
    kind = {"bert": "Bert", "roberta": "Roberta", "electra": "Electra", "esm": "Esm"}[model_type]
    model = make(model_type, f"{kind}Model", is_decoder=True)
    assert_as_eager_also_patched(model, PADDINGS[padding], torch.randint(8, 90, (3, LENGTH)))


@pytest.mark.parametrize("padding", ["no mask", "right", "left"])
@pytest.mark.parametrize("model_type", OTHERS)
def test_families_that_no_table_knows_do_as_under_eager(model_type, padding):
    there = PADDINGS[padding]
    ids = torch.randint(8, 97, (3, LENGTH))
    assert_what_eager_gives(make_other(model_type), None if there is None else there.long(), input_ids=ids)


def packed_batch():
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    return torch.randint(8, 97, (1, layout.total)), layout


def each_alone(model, ids, layout, **more):
    """Every sequence by itself, under eager."""
    model.set_attn_implementation("eager")
    offsets = layout.host_offsets.tolist()
    rows = [ids[:, begin:end] for begin, end in itertools.pairwise(offsets)]
    with torch.no_grad():
        return torch.cat([model(row, **more)[0] for row in rows], 1)


def told(layout, how):
    lengths = {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
    lengths |= {"max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen}
    positions = {"position_ids": layout.position_ids[None]}
    ones = {"attention_mask": torch.ones(1, layout.total, dtype=torch.int64)}
    return {
        "positions": {**positions, "use_cache": False},
        "lengths": {**positions, **lengths, "use_cache": False},
        "positions with a mask of ones": {**positions, **ones, "use_cache": False},
        "positions with a cache": {**positions, "use_cache": True},
        "lengths with a mask of ones and a cache": {**positions, **lengths, **ones, "use_cache": True},
    }[how]


HOW = [
    "positions",
    "lengths",
    "positions with a mask of ones",
    "positions with a cache",
    "lengths with a mask of ones and a cache",
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model_type", OTHERS)
def test_packed_rows_of_families_that_no_table_knows_stay_apart(model_type, how):
    model = make_other(model_type)
    ids, layout = packed_batch()
    want = each_alone(model, ids, layout)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        with torch.no_grad():
            got = model(ids, **told(layout, how))[0]
        torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("how", HOW)
def test_packed_rows_of_families_in_the_table_stay_apart(how):
    for model_type, kind in (("mistral", "MistralForCausalLM"), ("gemma3_text", "Gemma3ForCausalLM")):
        model = make(model_type, kind)
        ids, layout = packed_batch()
        want = each_alone(model, ids, layout)
        for over in ("sdpa", "eager"):
            model.set_attn_implementation(nta.hf.register(over))
            with torch.no_grad():
                got = model(ids, **told(layout, how))[0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


USERS = {"llama": "LlamaModel", "bert": "BertModel", "gemma2": "Gemma2Model", "gpt_oss": "GptOssModel"}


@pytest.mark.parametrize("model_type", [*USERS, "olmo2"])
def test_masks_of_the_callers_with_four_axes_do_as_under_eager(model_type):
    model = make_other("olmo2") if model_type == "olmo2" else make(model_type, USERS[model_type])
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

"""The mask function: no mask where the attention function has the information, the stock mask everywhere else."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from padding_masks import LENGTH, PADDINGS, right_padding
from tiny import TEXT, config_of
from transformers import masking_utils as stock

import nt_attention as nta
from nt_attention.hf.route import masks

# a CPU has no kernel with gemma2's softcap
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1]] * 3)
IDS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]] * 3)


def packed(mask_function):
    """The mask function that this version of transformers makes for packed rows."""
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
def test_is_plain_for_causal_window_and_packed_masks(name):
    assert masks.is_plain(PLAIN[name])


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_is_plain_is_false_for_other_masks(name):
    assert not masks.is_plain(NOT_PLAIN[name])


def make_mask(over, mask_function, padding, config, function=None, **more):
    """The mask of our function (or ``function``), called as transformers calls it."""
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
def test_mask_is_none_for_plain_masks_without_padding(over, name, padding):
    mask_function, there = {**PLAIN, **NOT_PLAIN}[name], PADDINGS[padding]
    function = {"sdpa": stock.sdpa_mask, "eager": stock.eager_mask}[over]
    skips = {"allow_is_causal_skip": name == "causal", "allow_is_bidirectional_skip": name == "bidirectional"}
    for model_type in ("llama", "nemotron", None):
        config = None if model_type is None else transformers.CONFIG_MAPPING[model_type]()
        got = make_mask(over, mask_function, there, config, name=name, **skips)
        none = model_type == "llama" and name in PLAIN and padding in ("no mask", "all ones")
        want = None if none else make_mask(over, mask_function, there, config, function, name=name, **skips)
        assert same(got, want), model_type


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_mask_beside_a_cache_is_the_stock_mask(over):
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
                got = make_mask(over, CAUSAL, PADDINGS[padding], config, **given)
                assert same(got, make_mask(over, CAUSAL, PADDINGS[padding], config, function, **given)), (
                    place,
                    padding,
                )
    for over_a_cache in ({"q_length": 3, "q_offset": LENGTH - 3}, {"q_length": 7, "q_offset": torch.tensor(0)}):
        assert make_mask(over, CAUSAL, PADDINGS["left"], config, **over_a_cache) is not None


def test_and_mask_function_of_the_caller():
    config = transformers.LlamaConfig(**{**TEXT, "num_attention_heads": 6}, attn_implementation=nta.hf.register())
    embeds = torch.zeros(3, LENGTH, 48)
    for and_mask in (stock.sliding_window_overlay(5), every_third):
        got = stock.create_causal_mask(config, embeds, None, None, and_mask_function=and_mask)
        config._attn_implementation = "sdpa"
        want = stock.create_causal_mask(config, embeds, None, None, and_mask_function=and_mask)
        config._attn_implementation = nta.hf.register()
        assert same(got, want)


def test_mask_makers_of_transformers():
    config = config_of("mistral", attention_chunk_size=5)
    embeds = torch.zeros(3, LENGTH, 48)
    positions = torch.arange(LENGTH)[None]
    makers = (
        stock.create_causal_mask, stock.create_sliding_window_causal_mask, stock.create_bidirectional_mask,
        stock.create_bidirectional_sliding_window_mask, stock.create_chunked_causal_mask,
    )  # fmt: skip
    for make_mask in makers:
        for padding in (None, right_padding().long(), right_padding().flip(1)):
            for over in ("sdpa", "eager"):
                found = []
                for name in (nta.hf.register(over), over):
                    config._attn_implementation = name
                    more = {} if "bidirectional" in make_mask.__name__ else {"position_ids": positions}
                    found.append(make_mask(config, embeds, padding, past_key_values=None, **more))
                none = padding is None and "chunked" not in make_mask.__name__
                assert same(found[0], None if none else found[1]), make_mask.__name__

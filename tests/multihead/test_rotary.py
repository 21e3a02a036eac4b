"""Rotary: rotation of packed and padded rows, NTK and YaRN scaling, and transformers' functions as references.

Dimensions: L tokens of a sequence, E embed dim, H heads, D head dim, R of its dims turn.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from rotary_reference import (
    CLOSE,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    NEAR,
    frequencies_of,
    neox_config,
    rotated_by_complex_numbers,
)
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, ntk, yarn

ROTARIES = {
    "halves": Rotary(),
    "pairs": Rotary(interleaved=True),
    "halves, partial": Rotary(101.0, dims=6),
    "pairs, partial": Rotary(101.0, dims=6, interleaved=True),
    "two dims": Rotary(dims=2),
}


def random_heads(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, HEADS, HEAD_DIM, dtype=dtype, requires_grad=True)


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_rotate_packed_rows(rotary):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    x = random_heads(layout.total + 3)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, layout)
    assert got.shape == x.shape
    got = got[: layout.total]
    want = rotated_by_complex_numbers(
        x[: layout.total], positions_of(LENGTHS), frequencies_of(rotary), rotary.interleaved
    )
    torch.testing.assert_close(got, want, **CLOSE)
    above = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, above) for y in (got, want)), **CLOSE)


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_rotate_padded_rows_at_given_positions(rotary, rows):
    x, positions = random_heads(2, 11), torch.randint(1000, (rows, 11))
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, positions)
    torch.testing.assert_close(
        got, rotated_by_complex_numbers(x, positions, frequencies_of(rotary), rotary.interleaved), **CLOSE
    )


def test_rotate_at_far_positions():
    rotary, x = Rotary(), random_heads(1, 7)
    positions = torch.arange(100_003, 100_010).unsqueeze(0)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, positions)
    torch.testing.assert_close(got, rotated_by_complex_numbers(x, positions, frequencies_of(rotary), False), **CLOSE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-4), (torch.bfloat16, 0.02), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_rotate_in_narrow_dtypes(rotary, dtype, tolerance):
    layout = nta.SequenceLayout.from_lengths([2049])  # past where bfloat16 counts in steps of 16
    x = random_heads(2049, dtype=dtype)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, layout)
    assert got.dtype == dtype
    want = rotated_by_complex_numbers(x.double(), torch.arange(2049), frequencies_of(rotary), rotary.interleaved)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    if dtype != torch.float32:  # nothing but the result is rounded
        wide = rotary.of_head_dim(HEAD_DIM).rotate(x.float(), layout)
        assert torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_scaling_function(interleaved, factor):
    given = []

    def scaling(frequencies: Tensor) -> Any:
        given.append(frequencies)
        return (frequencies / 3, factor) if factor != 1 else frequencies / 3

    rotary = Rotary(101.0, dims=6, interleaved=interleaved, scaling=scaling)
    rotation = rotary.of_head_dim(HEAD_DIM)
    x, positions = random_heads(1, 13), torch.arange(13).unsqueeze(0)
    want = rotated_by_complex_numbers(x, positions, frequencies_of(rotary) / 3, interleaved, factor)
    for _ in range(2):
        torch.testing.assert_close(rotation.rotate(x, positions), want, **CLOSE)
    assert len(given) == 1
    torch.testing.assert_close(given[0].double(), frequencies_of(rotary))


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.3])
@pytest.mark.parametrize("dims", [4, 6, 64, 128])
def test_ntk_changes_the_base(factor, dims):
    scaled = Rotary(503.0, scaling=ntk(factor)).of_head_dim(dims)
    other = Rotary(503.0 * factor ** (dims / (dims - 2))).of_head_dim(dims)
    torch.testing.assert_close(torch.tensor(scaled.frequencies), torch.tensor(other.frequencies), rtol=1e-6, atol=0)
    plain = Rotary(503.0).of_head_dim(dims)
    assert scaled.frequencies[0] == plain.frequencies[0] == 1
    assert scaled.frequencies[-1] == pytest.approx(plain.frequencies[-1] / factor, rel=1e-6)
    assert scaled.factor == 1


def test_ntk_of_one_pair():
    assert Rotary(scaling=ntk(3.0)).of_head_dim(2).frequencies == (1.0,)


def rope_config(base: float, head_dim: int, **parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": base, **parameters},
        attn_implementation="eager",
    )


YARNS = [
    {"base": 1e4, "head_dim": 128, "factor": 16.0, "length": 4096},
    {"base": 1e4, "head_dim": 64, "factor": 40.0, "length": 4096},
    {"base": 1e6, "head_dim": 128, "factor": 4.0, "length": 32768},
    {"base": 5e5, "head_dim": 96, "factor": 8.0, "length": 8192, "beta_fast": 17.0, "beta_slow": 2.0},
    {"base": 101.0, "head_dim": 14, "factor": 3.0, "length": 509},
    {"base": 1e4, "head_dim": 10, "factor": 1.0, "length": 509},
    {"base": 1e4, "head_dim": 22, "factor": 2.3, "length": 31},
    {"base": 1e4, "head_dim": 2, "factor": 3.0, "length": 2048},
    *(
        {"base": base, "head_dim": dim, "factor": factor, "length": length}
        for base, dim, factor, length in itertools.product((1e4, 1.5e5), (34, 80), (1.7, 32.0), (331, 2048, 16381))
    ),
]


@pytest.mark.parametrize("case", YARNS, ids=lambda case: "-".join(f"{x:g}" for x in case.values()))
def test_yarn_gives_the_frequencies_of_transformers(case):
    betas = {name: x for name, x in case.items() if "beta" in name}
    more = {"rope_type": "yarn", "factor": case["factor"], "original_max_position_embeddings": case["length"]}
    config = rope_config(case["base"], case["head_dim"], **more, **betas)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rotation = Rotary(case["base"], scaling=yarn(case["factor"], case["length"], **betas)).of_head_dim(case["head_dim"])
    torch.testing.assert_close(torch.tensor(rotation.frequencies).float(), frequencies, rtol=1e-5, atol=0)
    assert rotation.factor == pytest.approx(factor, rel=1e-9)
    bare = yarn(case["factor"], case["length"], attention=False, **betas)
    cool = Rotary(case["base"], scaling=bare).of_head_dim(case["head_dim"])
    assert cool.frequencies == rotation.frequencies
    assert cool.factor == 1


@pytest.mark.parametrize("length", [1, 3, 1 << 40])
def test_yarn_frequencies_at_any_length(length):
    plain = torch.tensor(Rotary().of_head_dim(64).frequencies).double()
    scaled = torch.tensor(Rotary(scaling=yarn(4.0, length)).of_head_dim(64).frequencies).double()
    slower = plain / scaled
    assert (slower > 1 - 1e-6).all()
    assert (slower < 4 + 1e-5).all()
    assert (slower.diff() > -1e-5).all()


def test_yarn_attention_factor_multiplies_queries_and_keys():
    rotary = Rotary(101.0, dims=6, scaling=yarn(4.0, 31))
    rotation = rotary.of_head_dim(HEAD_DIM)
    x = random_heads(1, 13)
    got = rotation.rotate(x, torch.arange(13).unsqueeze(0))
    factor = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(got[..., :6].norm(dim=-1), factor * x[..., :6].norm(dim=-1), **CLOSE)
    assert torch.equal(got[..., 6:], x[..., 6:])


def test_rotary_halves_give_what_llama_gives():
    config = rope_config(503.0, HEAD_DIM, rope_type="default")
    q, k = random_heads(1, 61), random_heads(1, 61)
    positions = torch.arange(61).unsqueeze(0)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    want = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotation = Rotary(503.0).of_head_dim(HEAD_DIM)
    for x, y in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotation.rotate(x, positions), y, **NEAR)


@pytest.mark.parametrize("dims", [6, HEAD_DIM])
def test_rotary_interleaved_gives_what_gptj_gives(dims):
    x = random_heads(1, 61)
    sin, cos = gptj.create_sinusoidal_positions(61, dims).double().unsqueeze(0).chunk(2, -1)
    want = torch.cat([gptj.apply_rotary_pos_emb(x[..., :dims], sin, cos), x[..., dims:]], -1)
    got = Rotary(dims=dims, interleaved=True).of_head_dim(HEAD_DIM).rotate(x, torch.arange(61).unsqueeze(0))
    torch.testing.assert_close(got, want, **NEAR)


def test_partial_rotary_gives_what_gpt_neox_gives():
    q, k = random_heads(1, 61), random_heads(1, 61)
    positions = torch.arange(61).unsqueeze(0)
    cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(neox_config())(q, positions)
    assert cos.shape[-1] == 6
    want = gpt_neox.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotation = Rotary(503.0, dims=6).of_head_dim(HEAD_DIM)
    for x, y in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotation.rotate(x, positions), y, **NEAR)


def test_rotary_equality_and_hash():
    assert Rotary(101.0, 6) == Rotary(101.0, dims=6)
    assert hash(Rotary(101.0, 6)) == hash(Rotary(101.0, 6))
    assert Rotary(101.0).of_head_dim(8) == Rotary(101.0, dims=8).of_head_dim(14)
    with pytest.raises(AttributeError):
        Rotary().base = 3.0

"""Rotary: rotation of packed and padded rows, NTK and YaRN scaling, and transformers' layers as references.

Dimensions: L tokens of a sequence, E embed dim, H heads, D head dim, R of its dims turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from parameters import with_random_parameters
from rotary_reference import (
    CLOSE,
    EMBED,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    NEAR,
    frequencies_of,
    rotated_by_complex_numbers,
)
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, Rotation, ntk, yarn

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
    x, positions = random_heads(2, 11), torch.randint(100_000, (rows, 11))
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, positions)
    want = rotated_by_complex_numbers(x, positions, frequencies_of(rotary), rotary.interleaved)
    torch.testing.assert_close(got, want, **CLOSE)


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
    {"base": 5e5, "head_dim": 96, "factor": 8.0, "length": 8192, "beta_fast": 17.0, "beta_slow": 2.0},
    {"base": 101.0, "head_dim": 14, "factor": 3.0, "length": 509},
    {"base": 1e4, "head_dim": 10, "factor": 1.0, "length": 509},
    {"base": 1e4, "head_dim": 22, "factor": 2.3, "length": 31},
    {"base": 1e4, "head_dim": 2, "factor": 3.0, "length": 2048},
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


@pytest.mark.parametrize("dims", [6, HEAD_DIM])
def test_rotary_interleaved_gives_what_gptj_gives(dims):
    x = random_heads(1, 61)
    sin, cos = gptj.create_sinusoidal_positions(61, dims).double().unsqueeze(0).chunk(2, -1)
    want = torch.cat([gptj.apply_rotary_pos_emb(x[..., :dims], sin, cos), x[..., dims:]], -1)
    got = Rotary(dims=dims, interleaved=True).of_head_dim(HEAD_DIM).rotate(x, torch.arange(61).unsqueeze(0))
    torch.testing.assert_close(got, want, **NEAR)


def test_rotary_equality_and_hash():
    assert Rotary(101.0, 6) == Rotary(101.0, dims=6)
    assert hash(Rotary(101.0, 6)) == hash(Rotary(101.0, 6))
    assert Rotary(101.0).of_head_dim(8) == Rotary(101.0, dims=8).of_head_dim(14)
    with pytest.raises(AttributeError):
        Rotary().base = 3.0


def assert_same_layer(
    ours: nta.VarlenMultiheadAttention, theirs: nn.Module, embedding: nn.Module, causal: bool, tolerance: float = 2e-5
) -> None:
    """Ours on a ragged batch in every form of input, against theirs, one sequence at a time."""
    lengths = [7, 1, 31, 0, 13]
    parts = [torch.randn(n, ours.embed_dim) for n in lengths]
    wants, weights = [], []
    for x in filter(len, parts):
        x = x.unsqueeze(0)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None] if causal else None
        out, weight = theirs(x, position_embeddings=embedding(x, places), attention_mask=mask)
        wants.append(out.squeeze(0))
        weights.append(weight.squeeze(0))
    close = {"rtol": tolerance, "atol": tolerance}
    outs, found = ours(parts, parts, parts, is_causal=causal, need_weights=True, average_attn_weights=False)
    alone, _ = ours(parts, parts, parts, is_causal=causal)
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    inside, _ = ours(nested, nested, nested, is_causal=causal)
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    padding = torch.arange(padded.shape[1]) >= torch.tensor(lengths)[:, None]
    dense, _ = ours(padded, padded, padded, key_padding_mask=padding, need_weights=False, is_causal=causal)
    sighted = [i for i, n in enumerate(lengths) if n]
    for i, want, weight in zip(sighted, wants, weights, strict=True):
        n = lengths[i]
        for got in (outs[i], alone[i], inside[i], dense[i, :n]):
            torch.testing.assert_close(got, want, **close)
        torch.testing.assert_close(found[i, :, :n, :n], weight, **close)


SCALINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (None, {"rope_type": "default"}),
    "linear": (lambda x: x / 3, {"rope_type": "linear", "factor": 3.0}),
    "yarn": (yarn(4.0, 29), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 29}),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_llama_attention_layer(scaling, bias, causal):
    own, rope = SCALINGS[scaling]
    config = LlamaConfig(
        hidden_size=42,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        attention_bias=bias,
        rope_parameters={"rope_theta": 503.0, **rope},
        attn_implementation="eager",
    )
    theirs = with_random_parameters(llama.LlamaAttention(config, 0), std=0.3).eval()
    rotary = Rotary(503.0, scaling=own)
    ours = nta.VarlenMultiheadAttention(42, 6, bias=bias, batch_first=True, num_kv_heads=3, head_dim=10, rotary=rotary)
    state = {
        f"in_proj_{kind}": torch.cat([getattr(getattr(theirs, f"{x}_proj"), kind) for x in "qkv"])
        for kind in ("weight", "bias")[: 1 + bias]
    }
    ours.load_state_dict(state | {f"out_proj.{name}": x for name, x in theirs.o_proj.state_dict().items()})
    assert_same_layer(ours, theirs, llama.LlamaRotaryEmbedding(config), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("eps", [1e-6, torch.finfo(torch.float32).eps])
def test_qwen3_attention_layer(causal, eps):
    config = Qwen3Config(
        hidden_size=EMBED,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1009.0},
        attn_implementation="eager",
    )
    theirs = with_random_parameters(qwen3.Qwen3Attention(config, 0), std=0.3).eval()
    norm = "rms" if eps != 1e-6 else lambda dim: nn.RMSNorm(dim, eps=1e-6)
    options = {"num_kv_heads": 2, "head_dim": 14, "rotary": Rotary(1009.0), "qk_norm": norm}
    ours = nta.VarlenMultiheadAttention(EMBED, 6, bias=False, batch_first=True, **options)
    state = {name.replace("o_proj", "out_proj"): x for name, x in theirs.state_dict().items()}
    state["in_proj_weight"] = torch.cat([state.pop(f"{x}_proj.weight") for x in "qkv"])
    ours.load_state_dict(state)
    assert_same_layer(ours, theirs, qwen3.Qwen3RotaryEmbedding(config), causal)


@contextlib.contextmanager
def counted_tables() -> Iterator[list[int]]:
    """How many positions each table was made for."""
    made: list[int] = []
    original = Rotation.tables

    def tables(rotation: Rotation, positions: Tensor, dtype: torch.dtype) -> Any:
        made.append(positions.numel())
        return original(rotation, positions, dtype)

    with mock.patch.object(Rotation, "tables", tables):
        yield made


@pytest.mark.parametrize("form", ["packed", "jagged", "weights"])
def test_layers_of_equal_settings_share_rotary_tables(form):
    def layer(factor: float = 3.0, **options: Any) -> nta.VarlenMultiheadAttention:
        return nta.VarlenMultiheadAttention(
            EMBED, 5, dtype=torch.float64, rotary=Rotary(101.0, dims=6, scaling=ntk(factor)), **options
        )  # a function of its own each time

    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    rows = torch.randn(layout.total, EMBED, dtype=torch.float64)

    def run(attention: nta.VarlenMultiheadAttention) -> int:
        with counted_tables() as made:
            if form == "jagged":
                x = layout.to_nested(rows)
                attention(x, x, x)
            else:
                attention(rows, rows, rows, layout=layout, need_weights=form == "weights")
        return len(made)

    assert run(layer()) == 1  # for queries and keys together
    assert run(layer()) == run(layer(num_kv_heads=1, head_dim=9, qk_norm="rms")) == 0
    assert run(layer(factor=5.0)) == 1
    with torch.inference_mode():
        assert run(layer()) == 0
    again = nta.SequenceLayout.from_offsets(layout.offsets)
    with counted_tables() as made:
        layer()(rows, rows, rows, layout=again)
    assert not made

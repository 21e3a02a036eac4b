"""Rotary position embedding against complex numbers in float64, transformers' functions, and its attention layers.

Dimensions: L tokens of a sequence, E embed dim, H heads, D head dim, R of its dims turn.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, Rotation, ntk, yarn

LENGTHS = [5, 0, 1, 127, 13]
HEADS, HEAD_DIM, EMBED = 3, 14, 35
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # transformers counts angles in float32
ROTARIES = {
    "halves": Rotary(),
    "pairs": Rotary(interleaved=True),
    "halves, partial": Rotary(101.0, dims=6),
    "pairs, partial": Rotary(101.0, dims=6, interleaved=True),
    "two dims": Rotary(dims=2),
}


def frequencies_of(rotary: Rotary, head_dim: int = HEAD_DIM) -> Tensor:
    dims = head_dim if rotary.dims is None else rotary.dims
    return rotary.base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool, factor: float = 1.0) -> Tensor:
    """(…, H, D) at positions (…): pairs of dims as complex numbers times factor · exp(i · position · frequency)."""
    dims = 2 * len(frequencies)
    turning, rest = x[..., :dims], x[..., dims:]
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.tensor_split(2, -1)
    angles = positions.double()[..., None, None] * frequencies
    numbers = torch.complex(first, second) * torch.polar(torch.full_like(angles, factor), angles)
    both = torch.stack([numbers.real, numbers.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([both, rest], -1)


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, HEADS, HEAD_DIM, dtype=dtype, requires_grad=True)


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


# Rotation by itself


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_packed_rows_turn_as_complex_numbers_do(rotary):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    x = heads(layout.total + 3)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, layout)
    assert got.shape == x.shape
    got = got[: layout.total]
    want = turned(x[: layout.total], positions_of(LENGTHS), frequencies_of(rotary), rotary.interleaved)
    torch.testing.assert_close(got, want, **CLOSE)
    above = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, above) for y in (got, want)), **CLOSE)


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_padded_rows_turn_by_the_positions_that_are_passed(rotary, rows):
    x, positions = heads(2, 11), torch.randint(1000, (rows, 11))
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, positions)
    torch.testing.assert_close(got, turned(x, positions, frequencies_of(rotary), rotary.interleaved), **CLOSE)


def test_far_positions_are_as_exact_as_the_dtype():
    rotary, x = Rotary(), heads(1, 7)
    positions = torch.arange(100_003, 100_010).unsqueeze(0)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, positions)
    torch.testing.assert_close(got, turned(x, positions, frequencies_of(rotary), False), **CLOSE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-4), (torch.bfloat16, 0.02), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_narrow_dtypes_turn_at_exact_positions(rotary, dtype, tolerance):
    layout = nta.SequenceLayout.from_lengths([2049])  # past where bfloat16 counts in steps of 16
    x = heads(2049, dtype=dtype)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, layout)
    assert got.dtype == dtype
    want = turned(x.double(), torch.arange(2049), frequencies_of(rotary), rotary.interleaved)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    if dtype != torch.float32:  # nothing but the result is rounded
        wide = rotary.of_head_dim(HEAD_DIM).rotate(x.float(), layout)
        assert torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_scores_depend_on_distances_alone(rotary):
    q, k = heads(1, 7), heads(1, 11)
    rotation = rotary.of_head_dim(HEAD_DIM)

    def scores(shift: int, key_shift: int) -> Tensor:
        places, key_places = (torch.arange(n).unsqueeze(0) + by for n, by in ((7, shift), (11, key_shift)))
        return torch.einsum("blhd,bshd->bhls", rotation.rotate(q, places), rotation.rotate(k, key_places))

    for shift in (1, 13, 1009):
        torch.testing.assert_close(scores(shift, shift), scores(0, 0), **CLOSE)
    assert (scores(1, 0) - scores(0, 0)).abs().max() > 0.1


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_lengths_stay_and_position_zero_and_the_other_dims_are_untouched(rotary):
    x = heads(1, 17)
    got = rotary.of_head_dim(HEAD_DIM).rotate(x, torch.arange(17).unsqueeze(0))
    dims = rotary.dims or HEAD_DIM
    assert torch.equal(got[:, 0], x[:, 0])
    assert torch.equal(got[..., dims:], x[..., dims:])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), **CLOSE)
    assert (got[:, 1:, :, :dims] != x[:, 1:, :, :dims]).all()


# Scaling


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_scaling_of_one_s_own(interleaved, factor):
    given = []

    def scaling(frequencies: Tensor) -> Any:
        given.append(frequencies)
        return (frequencies / 3, factor) if factor != 1 else frequencies / 3

    rotary = Rotary(101.0, dims=6, interleaved=interleaved, scaling=scaling)
    rotation = rotary.of_head_dim(HEAD_DIM)
    x, positions = heads(1, 13), torch.arange(13).unsqueeze(0)
    want = turned(x, positions, frequencies_of(rotary) / 3, interleaved, factor)
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


def test_ntk_of_one_pair_has_nothing_to_slow_down():
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
def test_yarn_is_transformers_own(case):
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
def test_yarn_goes_from_kept_to_slowed_at_any_length(length):
    plain = torch.tensor(Rotary().of_head_dim(64).frequencies).double()
    scaled = torch.tensor(Rotary(scaling=yarn(4.0, length)).of_head_dim(64).frequencies).double()
    slower = plain / scaled
    assert (slower > 1 - 1e-6).all()
    assert (slower < 4 + 1e-5).all()
    assert (slower.diff() > -1e-5).all()


def test_yarn_multiplies_queries_and_keys():
    rotary = Rotary(101.0, dims=6, scaling=yarn(4.0, 31))
    rotation = rotary.of_head_dim(HEAD_DIM)
    x = heads(1, 13)
    got = rotation.rotate(x, torch.arange(13).unsqueeze(0))
    factor = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(got[..., :6].norm(dim=-1), factor * x[..., :6].norm(dim=-1), **CLOSE)
    assert torch.equal(got[..., 6:], x[..., 6:])


# transformers' functions


def test_halves_are_llama_s():
    config = rope_config(503.0, HEAD_DIM, rope_type="default")
    q, k = heads(1, 61), heads(1, 61)
    positions = torch.arange(61).unsqueeze(0)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    want = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotation = Rotary(503.0).of_head_dim(HEAD_DIM)
    for x, y in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotation.rotate(x, positions), y, **NEAR)


@pytest.mark.parametrize("dims", [6, HEAD_DIM])
def test_pairs_are_gpt_j_s(dims):
    x = heads(1, 61)
    sin, cos = gptj.create_sinusoidal_positions(61, dims).double().unsqueeze(0).chunk(2, -1)
    want = torch.cat([gptj.apply_rotary_pos_emb(x[..., :dims], sin, cos), x[..., dims:]], -1)
    got = Rotary(dims=dims, interleaved=True).of_head_dim(HEAD_DIM).rotate(x, torch.arange(61).unsqueeze(0))
    torch.testing.assert_close(got, want, **NEAR)


def neox_config(**more: Any) -> GPTNeoXConfig:
    rope = {"rope_type": "default", "rope_theta": 503.0, "partial_rotary_factor": 3 / 7}
    return GPTNeoXConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        rope_parameters=rope,
        attn_implementation="eager",
        **more,
    )


def test_partial_rotation_is_gpt_neox_s():
    q, k = heads(1, 61), heads(1, 61)
    positions = torch.arange(61).unsqueeze(0)
    cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(neox_config())(q, positions)
    assert cos.shape[-1] == 6
    want = gpt_neox.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotation = Rotary(503.0, dims=6).of_head_dim(HEAD_DIM)
    for x, y in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotation.rotate(x, positions), y, **NEAR)


# transformers' layers


def filled(module: nn.Module) -> Any:
    for x in module.parameters():
        nn.init.normal_(x, std=0.3)
    return module.eval()


def assert_same_layer(
    ours: nta.VarlenMultiheadAttention, theirs: nn.Module, embedding: nn.Module, causal: bool, tolerance: float = 2e-5
) -> None:
    """Ours on a ragged batch by each way to pass it, against theirs, one sequence at a time."""
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
def test_a_llama_layer_s_weights_give_its_outputs(scaling, bias, causal):
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
    theirs = filled(llama.LlamaAttention(config, 0))
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
def test_a_qwen_3_layer_s_weights_give_its_outputs(causal, eps):
    config = Qwen3Config(
        hidden_size=EMBED,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1009.0},
        attn_implementation="eager",
    )
    theirs = filled(qwen3.Qwen3Attention(config, 0))
    norm = "rms" if eps != 1e-6 else lambda dim: nn.RMSNorm(dim, eps=1e-6)
    options = {"num_kv_heads": 2, "head_dim": 14, "rotary": Rotary(1009.0), "qk_norm": norm}
    ours = nta.VarlenMultiheadAttention(EMBED, 6, bias=False, batch_first=True, **options)
    state = {name.replace("o_proj", "out_proj"): x for name, x in theirs.state_dict().items()}
    state["in_proj_weight"] = torch.cat([state.pop(f"{x}_proj.weight") for x in "qkv"])
    ours.load_state_dict(state)
    assert_same_layer(ours, theirs, qwen3.Qwen3RotaryEmbedding(config), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_a_gpt_neox_layer_s_weights_give_its_outputs(causal):
    config = neox_config()
    theirs = filled(gpt_neox.GPTNeoXAttention(config, 0))
    width = HEADS * HEAD_DIM
    ours = nta.VarlenMultiheadAttention(width, HEADS, batch_first=True, rotary=Rotary(503.0, dims=6))
    qkv = theirs.query_key_value
    state = {
        f"in_proj_{kind}": x.unflatten(0, (HEADS, 3, HEAD_DIM)).transpose(0, 1).flatten(0, 2)  # theirs are by head
        for kind, x in qkv.state_dict().items()
    }
    ours.load_state_dict(state | {f"out_proj.{name}": x for name, x in theirs.dense.state_dict().items()})
    assert_same_layer(ours, theirs, gpt_neox.GPTNeoXRotaryEmbedding(config), causal)


# In the module


def module(**options: Any) -> nta.VarlenMultiheadAttention:
    options = {"rotary": Rotary(101.0, dims=6), "dtype": torch.float64, **options}
    return nta.VarlenMultiheadAttention(EMBED, 5, **options)


@pytest.mark.parametrize("need_weights", [False, True])
def test_positions_start_anew_in_each_sequence(need_weights):
    attention = module()
    parts = [torch.randn(n, EMBED, dtype=torch.float64) for n in LENGTHS]
    outs, _ = attention(parts, parts, parts, need_weights=need_weights)
    for x, out in zip(parts, outs, strict=True):
        torch.testing.assert_close(out, attention([x], [x], [x])[0][0], **CLOSE)
    backwards, _ = attention(*[parts[::-1]] * 3, need_weights=need_weights)
    for x, y in zip(outs, backwards[::-1], strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


def test_order_matters_with_it_alone():
    attention = module()
    x = torch.randn(11, EMBED, dtype=torch.float64)
    for rotary, differs in ((attention, True), (module(rotary=None), False)):
        out, back = (rotary([y], [y], [y])[0][0] for y in (x, x.flip(0)))
        assert bool((out - back.flip(0)).abs().max() > 1e-3) == differs


def test_queries_and_keys_stand_at_their_own_positions():
    attention = module()
    queries, keys = (
        [torch.randn(n, EMBED, dtype=torch.float64) for n in lengths] for lengths in ([3, 1, 7], [5, 11, 2])
    )
    outs, _ = attention(queries, keys, keys)
    frequencies = frequencies_of(Rotary(101.0, dims=6))
    for q, k, out in zip(queries, keys, outs, strict=True):
        products = (x @ w.T for x, w in zip((q, k, k), attention.in_proj_weight.chunk(3), strict=True))
        q, k, v = (x.unflatten(-1, (5, 7)) for x in products)
        q, k = (turned(x, torch.arange(len(x)), frequencies, False) for x in (q, k))
        weights = torch.einsum("lhd,shd->hls", q, k).div(math.sqrt(7)).softmax(-1)
        want = attention.out_proj(torch.einsum("hls,shd->lhd", weights, v).flatten(1))
        torch.testing.assert_close(out, want, **CLOSE)


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
def test_layers_of_equal_settings_share_their_tables(form):
    def layer(factor: float = 3.0, **options: Any) -> nta.VarlenMultiheadAttention:
        return module(rotary=Rotary(101.0, dims=6, scaling=ntk(factor)), **options)  # a function of its own each time

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


def test_what_a_layout_remembers_of_a_padded_batch_is_by_its_rows():
    attention = module()
    layout = nta.SequenceLayout.from_lengths([3, 7])
    for past in (0, 5, 2):
        rows = torch.randn(10 + past, EMBED, dtype=torch.float64)
        out, _ = attention(rows, rows, rows, layout=layout)
        parts = list(rows[:10].split([3, 7]))
        torch.testing.assert_close(out[:10], torch.cat(attention(parts, parts, parts)[0]), **CLOSE)


def test_no_parameters_or_buffers_are_added():
    assert module().state_dict().keys() == module(rotary=None).state_dict().keys()
    assert not list(module().buffers())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_narrow_modules_are_near(dtype, tolerance, need_weights):
    wide, narrow = module(qk_norm="rms"), module(qk_norm="rms", dtype=dtype)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())
    parts = [torch.randn(n, EMBED, dtype=dtype) for n in LENGTHS]
    got = torch.cat(narrow(parts, parts, parts, is_causal=True, need_weights=need_weights)[0])
    assert got.dtype == dtype
    parts = [x.double() for x in parts]
    want = torch.cat(wide(parts, parts, parts, is_causal=True)[0])
    assert (got.double() - want).norm() < tolerance * want.norm()


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_layouts_made_in_a_graph_turn_the_same():
    attention = module(qk_norm="rms", num_kv_heads=1)
    parameters = [*attention.parameters()]

    def run(x: Tensor, offsets: Tensor) -> Tensor:
        layout = nta.SequenceLayout.from_offsets(offsets)
        return attention(x, x, x, layout=layout, is_causal=True)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for lengths in ([3, 0, 7], [5, 4, 1]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        x = torch.randn(11, EMBED, dtype=torch.float64, requires_grad=True)
        got, want = compiled(x, offsets), run(x, offsets)
        torch.testing.assert_close(got, want, **CLOSE)
        grads = [torch.autograd.grad(y.square().sum(), [x, *parameters]) for y in (got, want)]
        torch.testing.assert_close(*grads, **CLOSE)


# Errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Rotary(base=0.0), "base must be greater than 0, got 0.0"),
        (lambda: Rotary(base=-1.0), "base must be greater than 0, got -1.0"),
        (lambda: Rotary(dims=0), "an even number greater than 0, got 0"),
        (lambda: Rotary(dims=-2), "an even number greater than 0, got -2"),
        (lambda: Rotary(dims=7), "an even number greater than 0, got 7"),
        (lambda: Rotary().of_head_dim(7), r"head_dim is 7 .*pass an even head_dim, or Rotary\(dims=...\)"),
        (lambda: Rotary(dims=10).of_head_dim(8), "head_dim is 8.* dims is 10"),
        (lambda: module(rotary=Rotary()), "head_dim is 7"),
        (
            lambda: Rotary(scaling=lambda x: x[1:]).of_head_dim(8),
            r"must return the shape \(4,\), got \(3,\)",
        ),
        (lambda: Rotary(scaling=lambda x: (x[None], 1.0)).of_head_dim(8), r"must return the shape \(4,\)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("given", [True, 10000.0, Rotary().of_head_dim(6)], ids=["bool", "float", "rotation"])
def test_anything_but_a_rotary_is_refused(given):
    with pytest.raises(TypeError, match=f"must be a Rotary, got {type(given).__name__}"):
        module(rotary=given)


def test_settings_are_values():
    assert Rotary(101.0, 6) == Rotary(101.0, dims=6)
    assert hash(Rotary(101.0, 6)) == hash(Rotary(101.0, 6))
    assert Rotary(101.0).of_head_dim(8) == Rotary(101.0, dims=8).of_head_dim(14)
    with pytest.raises(AttributeError):
        Rotary().base = 3.0

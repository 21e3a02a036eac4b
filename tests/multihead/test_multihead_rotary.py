"""rotary= in VarlenMultiheadAttention, against transformers' attention layers and one sequence at a time.

Dimensions: L tokens of a sequence, E embed dim, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import math
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
    frequencies_of,
    neox_config,
    rotated_by_complex_numbers,
)
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, Rotation, ntk, yarn


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


@pytest.mark.parametrize("causal", [False, True])
def test_gpt_neox_attention_layer(causal):
    config = neox_config()
    theirs = with_random_parameters(gpt_neox.GPTNeoXAttention(config, 0), std=0.3).eval()
    width = HEADS * HEAD_DIM
    ours = nta.VarlenMultiheadAttention(width, HEADS, batch_first=True, rotary=Rotary(503.0, dims=6))
    qkv = theirs.query_key_value
    state = {
        f"in_proj_{kind}": x.unflatten(0, (HEADS, 3, HEAD_DIM)).transpose(0, 1).flatten(0, 2)  # theirs are by head
        for kind, x in qkv.state_dict().items()
    }
    ours.load_state_dict(state | {f"out_proj.{name}": x for name, x in theirs.dense.state_dict().items()})
    assert_same_layer(ours, theirs, gpt_neox.GPTNeoXRotaryEmbedding(config), causal)


def make_module(**options: Any) -> nta.VarlenMultiheadAttention:
    options = {"rotary": Rotary(101.0, dims=6), "dtype": torch.float64, **options}
    return nta.VarlenMultiheadAttention(EMBED, 5, **options)


@pytest.mark.parametrize("need_weights", [False, True])
def test_rotary_positions_start_at_0_in_each_sequence(need_weights):
    attention = make_module()
    parts = [torch.randn(n, EMBED, dtype=torch.float64) for n in LENGTHS]
    outs, _ = attention(parts, parts, parts, need_weights=need_weights)
    for x, out in zip(parts, outs, strict=True):
        torch.testing.assert_close(out, attention([x], [x], [x])[0][0], **CLOSE)
    backwards, _ = attention(*[parts[::-1]] * 3, need_weights=need_weights)
    for x, y in zip(outs, backwards[::-1], strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


def test_rotary_positions_of_queries_and_keys_in_cross_attention():
    attention = make_module()
    queries, keys = (
        [torch.randn(n, EMBED, dtype=torch.float64) for n in lengths] for lengths in ([3, 1, 7], [5, 11, 2])
    )
    outs, _ = attention(queries, keys, keys)
    frequencies = frequencies_of(Rotary(101.0, dims=6))
    for q, k, out in zip(queries, keys, outs, strict=True):
        products = (x @ w.T for x, w in zip((q, k, k), attention.in_proj_weight.chunk(3), strict=True))
        q, k, v = (x.unflatten(-1, (5, 7)) for x in products)
        q, k = (rotated_by_complex_numbers(x, torch.arange(len(x)), frequencies, False) for x in (q, k))
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
def test_layers_of_equal_settings_share_rotary_tables(form):
    def layer(factor: float = 3.0, **options: Any) -> nta.VarlenMultiheadAttention:
        return make_module(
            rotary=Rotary(101.0, dims=6, scaling=ntk(factor)), **options
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


def test_rotary_tables_of_a_layout_with_rows_past_its_end():
    attention = make_module()
    layout = nta.SequenceLayout.from_lengths([3, 7])
    for past in (0, 5, 2):
        rows = torch.randn(10 + past, EMBED, dtype=torch.float64)
        out, _ = attention(rows, rows, rows, layout=layout)
        parts = list(rows[:10].split([3, 7]))
        torch.testing.assert_close(out[:10], torch.cat(attention(parts, parts, parts)[0]), **CLOSE)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_rotary_with_a_layout_made_in_a_graph():
    attention = make_module(qk_norm="rms", num_kv_heads=1)
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
        (lambda: make_module(rotary=Rotary()), "head_dim is 7"),
        (
            lambda: Rotary(scaling=lambda x: x[1:]).of_head_dim(8),
            r"must return the shape \(4,\), got \(3,\)",
        ),
        (lambda: Rotary(scaling=lambda x: (x[None], 1.0)).of_head_dim(8), r"must return the shape \(4,\)"),
    ],
)
def test_rotary_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("given", [True, 10000.0, Rotary().of_head_dim(6)], ids=["bool", "float", "rotation"])
def test_rotary_must_be_a_rotary(given):
    with pytest.raises(TypeError, match=f"must be a Rotary, got {type(given).__name__}"):
        make_module(rotary=given)

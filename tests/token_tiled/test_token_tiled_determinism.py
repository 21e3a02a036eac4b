"""deterministic and batch_invariant calls of the token-tiled kernels give the same bits."""

from functools import partial

import pytest
import torch
from oracle import GEOMETRIES, assert_same
from token_tiled_cases import (
    DEVICE,
    DTYPES,
    GPU,
    HALVES,
    IGNORED_WARNINGS,
    TOLERANCE,
    bits,
    case_of,
    cases_of,
    exact,
    on_tiles,
    random_inputs,
    truth,
)

import nt_attention as nta
from nt_attention.kernels.token_tiled import ops
from nt_attention.kernels.token_tiled.configs import config_for

gpu = pytest.mark.gpu

pytestmark = IGNORED_WARNINGS


def assert_repeats(lengths, dtype, times):
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    tensors, grad = random_inputs(layout.total, 4 if GPU else 2, 2 if GPU else 1, 64 if GPU else 5, dtype)
    function = partial(nta.varlen_attention, layout=layout, is_causal=True, deterministic=True, backend="token_tiled")
    first = bits(function, tensors, grad)
    for _ in range(times):
        for one, two in zip(first, bits(function, tensors, grad), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_call_gives_the_same_bits_again(dtype):
    assert_repeats([37, 5, 0, 13, 17], dtype, 1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_1000_deterministic_calls_give_the_same_bits(dtype):
    assert_repeats([2049, 5, 0, 129, 17, 1031, *[31] * 97], dtype, 1000)


def assert_alone_as_in_the_batch(lengths, heads, kv_heads, head_dim, dtype, **options):
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    tensors, grad = random_inputs(layout.total, heads, kv_heads, head_dim, dtype)
    options |= {"batch_invariant": True, "backend": "token_tiled"}
    together = bits(partial(nta.varlen_attention, layout=layout, **options), tensors, grad)
    parts = [x.split(lengths) for x in (*tensors, grad, *together)]
    for q, k, v, upper, *want in zip(*parts, strict=True):
        alone = nta.SequenceLayout.from_lengths([len(q)], device=DEVICE)
        got = bits(partial(nta.varlen_attention, layout=alone, **options), (q, k, v), upper)
        for name, one, two in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.equal(one, two), (name, len(q))


@cases_of("dtype, geometry", 1, DTYPES, ["full", "both-sides"])
def test_batch_invariant_sequence_gives_the_same_bits_alone(dtype, geometry):
    assert_alone_as_in_the_batch([3, 17, 1, 33, 0, 5, 16, 2], 2, 1, 5, dtype, **GEOMETRIES[geometry])


def test_batch_invariant_tile_sizes_are_always_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(ops, "config_for", lambda *args: asked.append(args) or config_for(*args))

    def ask(lengths, **options):
        layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
        x = torch.zeros(layout.total, 1, 5, device=DEVICE, dtype=torch.float16)
        nta.varlen_attention(x, x, x, layout, window_size=(0, 0), backend="token_tiled", **options)

    for lengths in ([1], [3] * 17, [131, 1], [257]):
        ask(lengths, batch_invariant=True)
    assert len(set(asked)) == 1
    ask([1])
    ask([257])
    assert len(set(asked)) == 3


@gpu
@pytest.mark.parametrize("geometry", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_batch_invariant_1000_sequences_give_the_same_bits_alone(dtype, head_dim, geometry):
    lengths = [1, 15, 16, 17, 31, 33, 127, 128, 129, 2049] * 5
    lengths += torch.randint(0, 200, (1000 - len(lengths),)).tolist()
    lengths = [lengths[i] for i in torch.randperm(len(lengths)).tolist()]
    assert_alone_as_in_the_batch(lengths, 4, 2, head_dim, dtype, **GEOMETRIES[geometry])


@exact
@pytest.mark.parametrize("geometry", ["full", "causal"])
def test_batch_invariant_sequence_is_independent_of_nan_in_others(geometry):
    case = case_of("self", geometry, "gqa", dtype=torch.float16)
    want = truth(case)
    last = case.lengths[-1]
    for name in ("query", "key", "value"):
        case.inputs[name][-last:] = torch.nan
    got = case.solve(on_tiles(case, batch_invariant=True))
    assert got["out"][-last:].isnan().all()
    got, want = ({name: x[:-last] for name, x in found.items()} for found in (got, want))
    assert_same(got, want, TOLERANCE[torch.float16])

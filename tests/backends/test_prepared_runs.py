"""Forwards and backwards that a backend prepares, and that run again for the next layers of a model."""

import pytest
import torch
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.kernels import adapters
from nt_attention.kernels.backends import cpu

LENGTHS = [5, 1, 12, 7]


@pytest.fixture
def prepared(registered_variant):
    """Registers a variant of the CPU backend that prepares its runs. Counts preparations and runs."""
    counts = {"forward": [], "backward": []}

    def prepare_forward(query, key, value, call):
        counts["forward"].append(0)
        at, call = len(counts["forward"]) - 1, call._replace(prepared=None)

        def run(query, key, value):
            counts["forward"][at] += 1
            return cpu.forward(query, key, value, call)

        return run

    def prepare_backward(saved, query, key, value, call):
        counts["backward"].append(0)
        at, call = len(counts["backward"]) - 1, call._replace(prepared=None)

        def run(saved, query, key, value):
            counts["backward"][at] += 1
            return cpu.backward(saved, query, key, value, call)

        return run

    registered_variant(cpu.BACKEND, "preparing", prepare_forward=prepare_forward, prepare_backward=prepare_backward)
    return counts


def layer(layout, backend="preparing", change=lambda x: x, attend=nta.varlen_attention, **options):
    """The output and the gradients of a layer with tensors of its own."""
    leaves = [torch.randn(layout.total, 4, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def run(backend):
        out = attend(*map(change, leaves), layout, backend=backend, **options)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    for found, wanted in zip(run(backend), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "graph"])
def test_layers_share_what_is_prepared(prepared, is_compiled):
    attend = torch.compile(nta.varlen_attention, backend="aot_eager") if is_compiled else nta.varlen_attention
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    for _ in range(3):
        layer(layout, is_causal=True, attend=attend)
    assert prepared == {"forward": [3], "backward": [3]}


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
        lambda x: F.pad(x, (0, 16))[..., :16],
    ],
    ids=["strides", "alignment", "part of a tensor"],
)
def test_other_tensors_are_prepared_for_themselves(prepared, change):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    for each in (lambda x: x, change, lambda x: x, change):
        layer(layout, change=each)
    assert prepared["forward"] == [2, 2]
    assert sum(prepared["backward"]) == 4


def test_most_that_is_kept(prepared, monkeypatch):
    monkeypatch.setattr(adapters, "MOST_PREPARED", 3)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    for more in range(5):
        for _ in range(2):
            layer(layout, change=lambda x, more=more: F.pad(x, (0, more))[..., :16])
    assert prepared["forward"][0] == 2
    assert len(prepared["forward"]) > 6


def test_options_and_layouts_do_not_share(prepared):
    layouts = [nta.SequenceLayout.from_lengths(lengths) for lengths in (LENGTHS, LENGTHS[::-1])]
    for layout in layouts:
        for options in ({}, {"is_causal": True}, {"window_size": (3, 0)}, {"scale": 0.5}):
            layer(layout, **options)
    assert prepared == {"forward": [1] * 8, "backward": [1] * 8}


def test_backends_do_not_share(prepared):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    query = torch.randn(layout.total, 4, 16)
    for name in ("preparing", "cpu", "preparing"):
        nta.varlen_attention(query, query, query, layout, backend=name)
    assert prepared["forward"] == [2]


@pytest.mark.parametrize("with_bias", [False, True], ids=["slopes", "relative bias"])
def test_calls_with_more_tensors_are_not_prepared(prepared, with_bias):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    for _ in range(2):
        if with_bias:
            distance = torch.arange(-11, 12).abs().clamp(max=7)
            options = {"relative": nta.RelativeBias(distance, torch.randn(4, 8, dtype=torch.float64))}
        else:
            options = {"alibi_slopes": torch.rand(4)}
        layer(layout, **options)
    assert prepared == {"forward": [], "backward": []}


def test_rows_past_the_end_are_not_prepared(prepared):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    longer = torch.randn(layout.total + 3, 4, 16)
    out = nta.varlen_attention(longer, longer, longer, layout, backend="preparing")
    assert not out[layout.total :].any()
    assert prepared["forward"] == []


def test_gradient_of_lse_is_not_prepared(prepared):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    query = torch.randn(layout.total, 4, 16, requires_grad=True)
    for _ in range(2):
        _, lse = nta.varlen_attention(query, query, query, layout, backend="preparing", return_lse=True)
        lse.sum().backward()
    assert prepared["backward"] == []


def test_keys_in_pools_have_other_lengths_in_each_call(prepared):
    """The lengths of both calls have the same sum, so the gathered keys have the same shape."""
    layout = nta.SequenceLayout.from_lengths([1, 1])
    query, pool = torch.randn(2, 4, 16, dtype=torch.float64), torch.randn(16, 4, 16, dtype=torch.float64)
    for lengths in ([3, 5], [5, 3]):
        paged = nta.PagedLayout.from_slots(torch.tensor([0, 8]), torch.tensor(lengths), max_seqlen=8)
        found, wanted = (
            nta.varlen_attention(query, pool, pool, layout, paged, backend=backend)
            for backend in ("preparing", "reference")
        )
        torch.testing.assert_close(found, wanted)

"""Forwards and backwards that a backend prepares, and that run again for the next layers of a model."""

import pytest
import torch
from sweeps import sweep_except
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.kernels import adapters
from nt_attention.kernels.backend import Hooks
from nt_attention.kernels.backends import cpu

LENGTHS = [5, 1, 12, 7]


@pytest.fixture
def prepared(registered_variant):
    """Registers a variant of the CPU backend that prepares its runs. Counts the runs of each preparation."""
    counts = {"forward": [], "backward": []}

    def preparing(name, function):
        def prepare(*inputs):
            *_, call = inputs
            counts[name].append(0)
            at, call = len(counts[name]) - 1, call._replace(prepared=None)

            def run(*tensors):
                counts[name][at] += 1
                return function(*tensors, call)

            return run

        return prepare

    hooks = Hooks(**{f"prepare_{name}": preparing(name, getattr(cpu, name)) for name in counts})
    registered_variant(cpu.BACKEND, "preparing", hooks=hooks)
    return counts


def layer(layout, change=lambda x: x, attend=nta.varlen_attention, **options):
    """Compare the output and the gradients of a layer with tensors of its own with the reference."""
    leaves = [torch.randn(layout.total, 4, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def run(attend, backend):
        out = attend(*map(change, leaves), layout, backend=backend, **options)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    torch.testing.assert_close(run(attend, "preparing"), run(nta.varlen_attention, "reference"))


@pytest.mark.parametrize("is_compiled", sweep_except([False, True], False), ids=["eager", "graph"])
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


def test_options_layouts_and_backends_do_not_share(prepared):
    layouts = [nta.SequenceLayout.from_lengths(lengths) for lengths in (LENGTHS, LENGTHS[::-1])]
    for layout in layouts:
        for options in ({}, {"is_causal": True}, {"window_size": (3, 0)}, {"scale": 0.5}):
            layer(layout, **options)
    assert prepared == {"forward": [1] * 8, "backward": [1] * 8}
    query = torch.randn(layouts[0].total, 4, 16)
    for name in ("preparing", "cpu", "preparing"):
        nta.varlen_attention(query, query, query, layouts[0], backend=name)
    assert prepared["forward"] == [*[1] * 8, 2]


def test_calls_that_need_more_are_not_prepared(prepared):
    """With slopes, biases, rows past the end, or a gradient of lse."""
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    biases = nta.RelativeBias(torch.arange(-11, 12).abs().clamp(max=7), torch.randn(4, 8, dtype=torch.float64))
    for options in ({"alibi_slopes": torch.rand(4)}, {"relative": biases}) * 2:
        layer(layout, **options)
    longer = torch.randn(layout.total + 3, 4, 16)
    out = nta.varlen_attention(longer, longer, longer, layout, backend="preparing")
    assert not out[layout.total :].any()
    assert prepared == {"forward": [], "backward": []}
    query = torch.randn(layout.total, 4, 16, requires_grad=True)
    _, lse = nta.varlen_attention(query, query, query, layout, backend="preparing", return_lse=True)
    lse.sum().backward()
    assert prepared["backward"] == []


def test_keys_in_pools_have_other_lengths_in_each_call(prepared):
    """The lengths of both calls have the same sum, so the gathered keys have the same shape."""
    layout = nta.SequenceLayout.from_lengths([1, 1])
    query, pool = torch.randn(2, 4, 16, dtype=torch.float64), torch.randn(16, 4, 16, dtype=torch.float64)
    for lengths in ([3, 5], [5, 3]):
        paged = nta.PagedLayout.from_slots(torch.tensor([0, 8]), torch.tensor(lengths), max_seqlen=8)
        given = (query, pool, pool, layout, paged)
        torch.testing.assert_close(
            nta.varlen_attention(*given, backend="preparing"), nta.varlen_attention(*given, backend="reference")
        )

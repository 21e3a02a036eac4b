"""Prepared launches of `split_kv`. Triton's interpreter keeps none, so these tests keep the first launch themselves."""

import weakref

import pytest
import torch
from freeing import without_garbage_collector

import nt_attention as nta
from nt_attention.functional import plan
from nt_attention.kernels.launch import launch
from nt_attention.kernels.split_kv import launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS = [300, 7, 129]


def layer(layout, key_layout):
    shapes = ((layout.total, 4, 16), (key_layout.total, 2, 16), (key_layout.total, 2, 16))
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


@pytest.fixture
def kept(monkeypatch):
    """The next launches of a prepared run are those of the first one, on other first tensors."""
    again = []

    def launch_cached(cache, key, first, make):
        made = make()
        launch(made, first)
        return made

    def launch_again(made, first):
        again.append(made.kernel)
        launch(made, first)

    monkeypatch.setattr(launches, "launch_cached", launch_cached)
    monkeypatch.setattr(launches, "launch_again", launch_again)
    return again


def test_next_layers_use_the_launches_of_the_first_one(kept):
    layouts = (
        nta.SequenceLayout.from_lengths([1, 2, 1], device=DEVICE),
        nta.SequenceLayout.from_lengths(KEYS, device=DEVICE),
    )
    options = {"is_causal": True, "backend": "split_kv"}
    run = launches.prepare_forward(*layer(*layouts), plan(*layer(*layouts), *layouts, **options))
    for number in range(3):
        inputs = layer(*layouts)
        out, lse = run(*inputs)
        want, want_lse = nta.varlen_attention(*inputs, *layouts, return_lse=True, is_causal=True, backend="reference")
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)
        assert len(kept) == 2 * number  # the kernels of attention and of the sums over parts


def test_prepared_run_keeps_no_layout(kept):
    layout, key_layout = (nta.SequenceLayout.from_lengths(x, device=DEVICE) for x in ([1, 1, 1], KEYS))
    call = plan(*layer(layout, key_layout), layout, key_layout, backend="split_kv")
    run = launches.prepare_forward(*layer(layout, key_layout), call)
    gone = weakref.ref(layout)
    with without_garbage_collector():
        del layout, call
        assert gone() is None
    assert callable(run)

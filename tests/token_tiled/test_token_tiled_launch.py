"""The cache of launches, with a kernel that records its arguments. On a GPU, all tests of the backend use the cache."""

import gc
import weakref

import pytest
import torch
from token_tiled_cases import DEVICE

import nt_attention as nta
from nt_attention.functional import plan
from nt_attention.kernels import launch as module
from nt_attention.kernels.launch import Launch, launch_cached
from nt_attention.kernels.token_tiled import ops


class RecordingKernel:
    """In the place of a Triton kernel: `kernel[grid](…)` compiles, and `compiled[grid](…)` launches."""

    def __init__(self):
        self.fn, self.compiled, self.launched = object(), [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, num_warps, num_stages):
            self.compiled.append((grid, arguments))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return RecordingKernel()


def prepared(kernel, tiles, integers=(3,)):
    return lambda: Launch(kernel, (5, 2), (tiles,), integers, (0.5,), (True,), 4, 1)


def test_next_launch_passes_other_addresses_and_the_same_numbers(kernel):
    launches, tiles = {}, torch.zeros(4)
    for _ in range(2):
        x = torch.zeros(64)
        launch_cached(launches, "a key", (x, None), prepared(kernel, tiles))
    assert kernel.compiled == [((5, 2), (kernel.compiled[0][1][0], tiles, tiles, 3, 0.5, True))]
    assert kernel.launched == [((5, 2, 1), (x.data_ptr(), 0, tiles.data_ptr(), 3, 0.5, True))]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(64).double(), None),
        (torch.zeros(64)[1:], None),
        (torch.zeros(64), torch.zeros(64)),
    ],
    ids=["dtype", "alignment", "given"],
)
def test_tensors_of_another_kind_are_compiled_for_themselves(kernel, other):
    launches, tiles = {}, torch.zeros(4)
    for first in ((torch.zeros(64), None), other):
        launch_cached(launches, "a key", first, prepared(kernel, tiles))
    assert len(kernel.compiled) == 2
    assert not kernel.launched


def test_another_key_makes_another_launch_of_the_same_compiled_kernel(kernel):
    launches, x = {}, torch.zeros(64)
    tiles, others = torch.zeros(4), torch.zeros(4)
    launch_cached(launches, "a key", (x,), prepared(kernel, tiles))
    launch_cached(launches, "another key", (x,), prepared(kernel, others, integers=(5,)))
    assert len(kernel.compiled) == 1
    assert kernel.launched == [((5, 2, 1), (x, others, 5, 0.5, True))]


def test_prepared_forward_launches_its_kernel_on_other_tensors(kernel, monkeypatch):
    from nt_attention.kernels.token_tiled import triton_kernels

    monkeypatch.setattr(triton_kernels, "forward_kernel", kernel)
    layout = nta.SequenceLayout.from_lengths([5, 9], device=DEVICE)
    layers = [torch.zeros(3, layout.total, 2, 16, device=DEVICE).unbind() for _ in range(3)]
    call = plan(*layers[0], layout, backend="token_tiled", dropout_p=0.5)
    run = ops.prepare_forward(*layers[0], call)
    results = [run(*layer) for layer in layers]
    assert len(kernel.compiled) == 1
    for (grid, arguments), layer, result in zip(kernel.launched, layers[1:], results[1:], strict=True):
        out, lse, seed = result
        expected = [x.data_ptr() for x in (*layer, out, lse)]
        assert (grid, arguments[:7]) == (kernel.launched[0][0], (*expected, 0, seed.data_ptr()))
    seeds = [tuple(seed.tolist()) for *_, seed in results]
    assert len(set(seeds)) == 3


def test_tensors_at_kept_addresses_are_not_freed(kernel):
    launches, tiles = {}, torch.zeros(4)
    launch_cached(launches, "a key", (torch.zeros(64),), prepared(kernel, tiles))
    reference = weakref.ref(tiles)
    del tiles
    kernel.compiled.clear()
    gc.collect()
    assert reference() is not None
    launches.clear()
    gc.collect()
    assert reference() is None

"""Runs test functions in several processes with a process group: gloo on the CPU, or NCCL with a GPU each.

The processes stay for further tests of the same number of processes. Those on the CPU are forked from a server that has
imported torch, so a start takes less than a second. No GPU can be used in a fork of a process that has used one, as the
server does if an imported package asks for the GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

SECONDS = 120  # for a test
_pools: dict[tuple[int, str], Pool] = {}
_context = multiprocessing.get_context("forkserver")
# What the tests import, so that not each process does.
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "nt_attention", "transformers.trainer"),
        *("accelerate", "pytest", "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"),
    ]
)


class Pool:
    """Processes that wait for functions to run."""

    def __init__(self, world: int, backend: str) -> None:
        context: Any = _context if backend == "gloo" else multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._tasks = [context.Queue() for _ in range(world)]
        self._results = context.Queue()
        store = os.path.join(self._folder.name, "store")
        self.processes = [
            context.Process(
                target=_work, args=(rank, world, backend, store, sys.path, tasks, self._results), daemon=True
            )
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for tasks in self._tasks:
            tasks.put((function, arguments))
        results: dict[int, Any] = {}
        errors: list[str] = []
        while len(results) + len(errors) < len(self._tasks):
            try:
                rank, result, error = self._results.get(timeout=SECONDS)
            except queue.Empty:
                errors.append(f"ranks {[r for r in range(len(self._tasks)) if r not in results]} did not return")
                break
            if error is not None:
                errors.append(f"rank {rank}: {error}")
                break  # the others may wait for it
            results[rank] = result
        if errors:
            self.end()
            raise AssertionError("\n".join(errors))
        return [results[rank] for rank in range(len(self._tasks))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def run_in_processes(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `world` processes, and return the result of each rank.

    The function must be importable, and results must be picklable. Tensors without gradients are.

    Raises:
        AssertionError: a rank raised an error, or did not return in time. The processes are ended then.
    """
    return _run(world, "gloo", function, arguments)


def run_on_gpus(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The same with NCCL. Each process has a GPU, which is its current device."""
    return _run(world, "nccl", function, arguments)


def _run(world: int, backend: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    pool = _pools.get((world, backend))
    if pool is None or not all(process.is_alive() for process in pool.processes):
        pool = _pools[world, backend] = Pool(world, backend)
    return pool.run(function, arguments)


@contextlib.contextmanager
def under_torchrun(fsdp: bool = False, gpus: bool = False) -> Iterator[None]:
    """A context for code with accelerate: it has the variables that torchrun sets, and resets accelerate's state.

    Accelerate has FSDP2 and `ParallelismConfig` for several GPUs, and not for several CPUs. With `fsdp` on CPUs, it
    takes the processes for those of GPUs. Its device is still the CPU, and the process group is gloo.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 0}
    names |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": 1}
    AcceleratorState._reset_state(True)
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        state = PartialState() if gpus else PartialState(cpu=True, backend="gloo")
        if fsdp and not gpus:
            state.distributed_type = DistributedType.MULTI_GPU
            assert PartialState().distributed_type == DistributedType.MULTI_GPU
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)


@atexit.register
def end_all() -> None:
    """End all processes. tests/conftest.py calls it too, because workers of pytest-xdist run nothing at their exit."""
    for pool in _pools.values():
        pool.end()
    _pools.clear()


def _work(rank: int, world: int, backend: str, store: str, path: list[str], tasks: Any, results: Any) -> None:
    """What a process does."""
    sys.path[:] = path
    gc.freeze()  # the objects of the imported packages
    gc.set_threshold(10_000, 20, 50)
    torch.set_num_threads(1)
    from nt_attention.distributed import planner

    planner.PAIRS_PER_EXCHANGE = 0  # small batches are cut too, so that something is exchanged
    if backend == "gloo":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    else:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    # The tests of a process share meshes: each group of gloo has a thread that polls as long as the process lives.
    meshes = torch.distributed.device_mesh
    meshes.init_device_mesh = torch.distributed.init_device_mesh = functools.cache(meshes.init_device_mesh)
    while True:
        function, arguments = tasks.get()
        torch.manual_seed(0)
        try:
            results.put((rank, _numpy(function(*arguments)), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))


def _numpy(result: Any) -> Any:
    """Tensors as copies, because a queue would share their memory."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu().clone().numpy(), result)

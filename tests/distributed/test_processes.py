"""The helper that runs test functions in several processes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Pool, run_in_processes


def sum_of_ranks(more):
    x = torch.tensor([dist.get_rank() + more])
    dist.all_reduce(x)
    return x


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("wrong")
    dist.barrier()


def test_results_of_all_ranks():
    world = 2
    assert run_in_processes(world, sum_of_ranks, 0.5) == [np.array(sum(range(world)) + 0.5 * world)] * world


def test_an_error_of_one_rank_is_raised():
    """And its processes are ended. They are not those of other tests."""
    pool = Pool(2, "gloo")
    with pytest.raises(AssertionError, match="ValueError: wrong"):
        pool.run(fail_on_rank_1, ())
    assert not any(process.is_alive() for process in pool.processes)

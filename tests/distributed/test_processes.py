"""The helper that runs test functions in several processes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes


def sum_of_ranks(more):
    x = torch.tensor([dist.get_rank() + more])
    dist.all_reduce(x)
    return x


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("wrong")
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_results_of_all_ranks(world):
    assert run_in_processes(world, sum_of_ranks, 0.5) == [np.array(sum(range(world)) + 0.5 * world)] * world


def test_an_error_of_one_rank_is_raised():
    with pytest.raises(AssertionError, match="ValueError: wrong"):
        run_in_processes(2, fail_on_rank_1)
    assert len(run_in_processes(2, sum_of_ranks, 1)) == 2

"""DDP and FSDP2 of patched Hugging Face models: two processes find the gradients of one."""

import pytest
import torch
from patched_models import close, gradients, make, make_batch
from processes import run_in_processes

import nt_attention as nta

# Two processes. Each sees two rows of the batch; the gradients are the mean of what single processes find.
WRAPPERS = ["ddp of a patched model", "ddp, then patched", "sharded while patched", "sharded, then patched"]


def batches():
    torch.manual_seed(0)
    return [make_batch(lengths=[7, 13]), make_batch(lengths=[19, 2])]


def worker():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch = batches()[torch.distributed.get_rank()]
    found = {}
    for way in WRAPPERS:
        inner = make()
        handle = nta.patch(inner) if "then" not in way else None
        if way.startswith("ddp"):
            model = DistributedDataParallel(inner)
        else:
            for layer in inner.model.layers:
                fully_shard(layer)
            model = fully_shard(inner)
        handle = handle or nta.patch(model)
        for removed in (False, True):
            model.zero_grad()
            model(**batch).loss.backward()
            grads = [parameter.grad for parameter in inner.parameters()]
            grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]
            handle.remove()
            found[way, removed] = grads, handle.calls[None]
    return found


@pytest.fixture(scope="module")
def of_two_processes():
    found, _ = run_in_processes(2, worker)
    model = make()
    want = [sum(grads) / 2 for grads in zip(*(gradients(model, batch) for batch in batches()), strict=True)]
    return found, want


@pytest.mark.sweep
@pytest.mark.parametrize("way", WRAPPERS)
def test_ddp_and_fsdp_find_the_gradients_of_one_process(way, of_two_processes):
    found, want = of_two_processes
    for removed in (False, True):
        grads, packed = found[way, removed]
        close([torch.from_numpy(grad) for grad in grads], want)
        assert packed == 1

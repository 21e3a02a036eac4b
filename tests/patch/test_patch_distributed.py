"""DDP and FSDP2 of patched Hugging Face models: two processes find the gradients of one."""

import socket

import pytest
import torch
from patched_models import close, gradients, make, make_batch

import nt_attention as nta

# Two processes. Each sees two rows of the batch; the gradients are the mean of what single processes find.
WRAPPERS = ["ddp of a patched model", "ddp, then patched", "sharded while patched", "sharded, then patched"]


def worker(rank, port, folder):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batches = torch.load(f"{folder}/batches.pt")
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
            model(**batches[rank]).loss.backward()
            grads = [parameter.grad for parameter in inner.parameters()]
            grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]
            handle.remove()
            found[way, removed] = grads, handle.calls[None]
    dist.barrier()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    batches = [make_batch(lengths=[7, 13]), make_batch(lengths=[19, 2])]
    torch.save(batches, folder / "batches.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, folder), nprocs=2)
    model = make()
    want = [sum(grads) / 2 for grads in zip(*(gradients(model, batch) for batch in batches), strict=True)]
    return torch.load(folder / "found.pt"), want


@pytest.mark.sweep
@pytest.mark.parametrize("way", WRAPPERS)
def test_ddp_and_fsdp_find_the_gradients_of_one_process(way, of_two_processes):
    found, want = of_two_processes
    for removed in (False, True):
        grads, packed = found[way, removed]
        close(grads, want)
        assert packed == 1

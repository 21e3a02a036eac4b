"""Several training steps of a model with `patch(model, mesh=...)` over data parallel × context parallel ranks.

Each data parallel rank has batches of its own, and the ranks of a context parallel group pass the same. The steps are
compared with those of one process, which takes the mean of the losses of the data parallel ranks.
"""

import contextlib
import functools

import numpy as np
import pytest
import torch
from processes import run_in_processes
from ranks import DECODER, padded_batch, run_in_float64, whole
from sweeps import sweep_except
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import nt_attention as nta

STEPS = 3
ACCUMULATED = 2  # calls of a step, if gradients are accumulated
LENGTHS = [[23, 1, 5, 12, 40], [7, 31, 11], [2, 2, 2, 3], [53], [19, 17, 3], [5, 29]]


def make():
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**DECODER)).double().train()


def batch_of(number):
    batch = padded_batch(LENGTHS[number % len(LENGTHS)], number)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def loss_of(model, batch, reads_logits):
    """The loss of a call in float64. With `reads_logits`, another loss of the padded logits is added."""
    out = run_in_float64(model, batch)
    if not reads_logits:
        return out.loss
    mask = batch["attention_mask"][..., None]
    return out.loss + (out.logits * mask).square().sum() / mask.sum()


def train(model, calls_of, way, no_sync=contextlib.nullcontext):
    """The losses of each call. `calls_of(number)` are the batches whose mean loss is taken."""
    # With this eps, the scale of gradients matters.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    micro = ACCUMULATED if "accumulated" in way else 1
    for number in range(STEPS * micro):
        is_last = (number + 1) % micro == 0
        with contextlib.nullcontext() if is_last else no_sync():
            found = [loss_of(model, batch, "padded" in way) for batch in calls_of(number)]
            (sum(found) / len(found) / micro).backward()
        losses.append([loss.item() for loss in found])
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return torch.tensor(losses, dtype=torch.float64)


def in_one_process(way, data_ranks):
    model = make()
    losses = train(model, lambda i: [batch_of(i * data_ranks + rank) for rank in range(data_ranks)], way)
    return losses, dict(model.named_parameters())


@contextlib.contextmanager
def fsdp_no_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def on_each_rank(engine, way):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, rank = make(), mesh["dp"].get_local_rank()
    if "checkpointed" in way:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = nta.patch(model, mesh=mesh["cp"], on_fallback="raise")
    if engine == "fsdp":
        both = mesh._flatten("dp_cp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=both)
        wrapped = fully_shard(model, mesh=both)
        no_sync = functools.partial(fsdp_no_sync, model)
    else:
        wrapped = DistributedDataParallel(model)
        no_sync = wrapped.no_sync
    losses = train(wrapped, lambda i: [batch_of(i * 2 + rank)], way, no_sync)
    assert handle.calls == {None: len(losses)}, handle.calls
    return losses, {n: whole(x) for n, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        ("fsdp", ""),
        ("ddp", "accumulated checkpointed padded"),
        *sweep_except([("fsdp", "accumulated checkpointed"), ("fsdp", "padded"), ("ddp", "")]),
    ],
)
def test_training_steps_over_data_and_context_parallel_ranks(engine, way):
    want_losses, want = in_one_process(way, data_ranks=2)
    for rank, (losses, found) in enumerate(run_in_processes(4, on_each_rank, engine, way)):
        np.testing.assert_allclose(losses[:, 0], want_losses[:, rank // 2], rtol=1e-9, atol=1e-9)
        assert want.keys() == found.keys()
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=name)

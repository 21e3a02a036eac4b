"""Training steps of a model that shares prefixes, over two data parallel ranks with FSDP2 or DDP.

Each rank has batches of its own. The steps are compared with those of one process without sharing.
"""

import copy

import numpy as np
import pytest
import torch
from processes import run_in_processes
from ranks import SMALL, mesh_of_all, run_in_float64, whole
from sweeps import sweep_except
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import nt_attention as nta

STEPS = 3


def make():
    """A model whose norms stay in float64."""
    torch.manual_seed(3)
    config = GPTNeoXConfig(**SMALL, hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2)
    return GPTNeoXForCausalLM(config).double().train()


def batch_of(number):
    """Two prompts of other lengths in each batch, with answers."""
    generator = torch.Generator().manual_seed(number)
    rows = []
    for prompt, answers in ((32 + number, (3, 9, 1)), (40, (2, 5))):
        first = torch.randint(5, 61, (prompt,), generator=generator)
        rows += [torch.cat([first, torch.randint(5, 61, (n,), generator=generator)]) for n in answers]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model, numbers_of):
    """The losses of each step. `numbers_of(step)` are the batches whose mean loss is taken."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        found = [run_in_float64(model, batch_of(number)).loss for number in numbers_of(step)]
        (sum(found) / len(found)).backward()
        losses.append([loss.item() for loss in found])
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses, dtype=torch.float64)


def on_each_rank(engine):
    model, rank = make(), torch.distributed.get_rank()
    if "checkpoints" in engine:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "after" not in engine:
        handle = nta.patch(model, on_fallback="raise", shared_prefixes=True)
    if "FSDP2" in engine:
        for layer in model.gpt_neox.layers:
            fully_shard(layer, mesh=mesh_of_all())
        wrapped = fully_shard(model, mesh=mesh_of_all())
    else:
        wrapped = DistributedDataParallel(model)
    if "after" in engine:
        handle = nta.patch(model, on_fallback="raise", shared_prefixes=True)
    losses = train(wrapped, lambda step: [2 * step + rank])
    counts = dict(handle.prefixes.calls), handle.prefixes.computed / handle.prefixes.tokens
    return losses, {name: whole(x) for name, x in model.named_parameters()}, counts


@pytest.mark.parametrize(
    "engine", sweep_except(["FSDP2", "FSDP2, checkpoints", "FSDP2, patched after it", "DDP"], "FSDP2", "DDP")
)
def test_training_steps(engine):
    model = make()
    alone = copy.deepcopy(model)
    want_losses = train(alone, lambda step: [2 * step, 2 * step + 1])
    want = dict(alone.named_parameters())
    for rank, (losses, found, (calls, share)) in enumerate(run_in_processes(2, on_each_rank, engine)):
        np.testing.assert_allclose(losses[:, 0], want_losses[:, rank], rtol=1e-9, atol=1e-9)
        assert calls == {None: STEPS}
        assert share < 0.6
        assert want.keys() == found.keys()
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=name)

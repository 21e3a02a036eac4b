"""A small model on a `ShardedLayout` with PyTorch's own engines: one training step, against one process."""

import tempfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import run_in_processes
from sweeps import covering
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import nt_attention as nta

LENGTHS = [23, 1, 0, 5, 12, 40]
TOKENS = sum(LENGTHS)


class Block(nn.Module):
    """Attention and a feed-forward layer on packed tokens (T, 12)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x, layout):
        q, k, v = self.qkv(x).unflatten(1, (3, 3, 4)).unbind(1)
        x = x + self.out(nta.varlen_attention(q, k, v, layout, is_causal=True).flatten(1))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, checkpoints, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.checkpoints = checkpoints
        self.double()

    def forward(self, x, layout):
        for block in self.blocks:
            x = checkpoint(block, x, layout, use_reentrant=False) if self.checkpoints else block(x, layout)
        return x


def batch():
    generator = torch.Generator().manual_seed(4)
    x, target = torch.randn(2, TOKENS, 12, dtype=torch.float64, generator=generator)
    has_label = torch.arange(TOKENS) < 20  # some ranks have no labels
    return x, target, has_label


def loss_of(out, target, has_label, count):
    return ((out - target).square().sum(1) * has_label).sum() / count


def in_one_process():
    model, (x, target, has_label) = Model(False), batch()
    loss = loss_of(model(x, nta.SequenceLayout.from_lengths(LENGTHS)), target, has_label, 20)
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return [loss.detach(), *[x.detach() for x in model.parameters()]]


def on_each_rank(checkpoints, fsdp):
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model, sharded = Model(checkpoints), nta.SequenceLayout.from_lengths(LENGTHS).shard(mesh)
    if fsdp:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x, target, has_label = (sharded.local(each) for each in batch())
    loss = loss_of(model(x, sharded), target, has_label, 20)
    (loss * world if fsdp else loss).backward()  # FSDP takes the mean of the ranks
    if not fsdp:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    torch.optim.SGD(model.parameters(), 0.1).step()
    loss = loss.detach()
    torch.distributed.all_reduce(loss)
    return [loss, *[x.full_tensor() if fsdp else x.detach() for x in model.parameters()]]


@covering({"world": [2, 4, 2, 4], "fsdp": [False, True], "checkpoints": [False, True, True]})
def test_one_step(world, fsdp, checkpoints):
    want = in_one_process()
    for found in run_in_processes(world, on_each_rank, checkpoints, fsdp):
        for one, other in zip(found, want, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-9)


def divided(mesh, seed=3):
    """A model under FSDP2 with its optimizer, the layout of its batch, and a function that does a training step."""
    model, sharded = Model(False, seed), nta.SequenceLayout.from_lengths(LENGTHS).shard(mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, target, has_label = (sharded.local(each) for each in batch())

    def step():
        (loss_of(model(x, sharded), target, has_label, 20) * mesh.size()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def save(folder):
    model, optimizer, step = divided(init_device_mesh("cpu", (2,)))
    step()
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=folder)


def load_and_go_on(folder):
    model, optimizer, step = divided(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), seed=5)
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"])
    step()
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


def test_checkpoint():
    """Saved by two ranks after a step; loaded by one process without a group, and by four ranks and one for a step."""
    model, (x, target, has_label) = Model(False), batch()
    layout, optimizer = nta.SequenceLayout.from_lengths(LENGTHS), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    after = []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model(x, layout), target, has_label, 20).backward()
        optimizer.step()
        after.append({name: x.detach().clone() for name, x in model.state_dict().items()})
    with tempfile.TemporaryDirectory() as folder:
        run_in_processes(2, save, folder)
        other = Model(False, seed=5)
        dcp.load({"model": other.state_dict()}, checkpoint_id=folder, no_dist=True)
        torch.testing.assert_close(dict(other.state_dict()), after[0], rtol=0, atol=1e-9)
        for world in (1, 4):
            for found in run_in_processes(world, load_and_go_on, folder):
                for name, want in after[1].items():
                    np.testing.assert_allclose(found[name], want.numpy(), rtol=0, atol=1e-9)


def changed_in_place():
    mesh = init_device_mesh("cpu", (2,))
    sharded = nta.SequenceLayout.from_lengths([9, 4]).shard(mesh)
    q, k, v = (torch.randn(sharded.total, 2, 4, requires_grad=True) * 1 for _ in range(3))
    out = nta.varlen_attention(q, k, v, sharded)
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    local, shape = torch.randn(sharded.total, 2, 4), (sharded.layout.total, 2, 4)
    q = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(8, 4, 1))
    q.requires_grad_()
    out = nta.varlen_attention(q, q, q, sharded).to_local().sum()
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    slopes = torch.ones(2)
    q = torch.randn(sharded.total, 2, 4, requires_grad=True)
    out = nta.varlen_attention(q, q, q, sharded, is_causal=True, alibi_slopes=slopes)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        q = torch.randn(sharded.total, 2, 4)
        assert nta.varlen_attention(q, q, q, sharded).shape == q.shape
    with torch.autocast("cpu", torch.bfloat16):
        q = torch.randn(sharded.total, 2, 4, requires_grad=True)
        out = nta.varlen_attention(q, q, q, sharded, is_causal=True)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert q.grad.dtype == torch.float32


def backward_twice():
    mesh = init_device_mesh("cpu", (2,))
    sharded = nta.SequenceLayout.from_lengths([0, 1]).shard(mesh)  # one rank has no tokens
    q = torch.randn(sharded.total, 2, 4, requires_grad=True)
    out = nta.varlen_attention(q, q, q, sharded, backend="reference").sum()
    first, second = (torch.autograd.grad(out, q, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_backward_twice():
    run_in_processes(2, backward_twice)


def test_changes_in_place_inference_and_autocast():
    run_in_processes(2, changed_in_place)


def compiled():
    mesh = init_device_mesh("cpu", (2,))
    sharded = nta.SequenceLayout.from_lengths(LENGTHS).shard(mesh)
    block, x = Block(), sharded.local(torch.randn(TOKENS, 12))
    want = block(x, sharded)
    torch.testing.assert_close(torch.compile(block, backend="aot_eager")(x, sharded), want)


@pytest.mark.sweep
def test_compiled_around_a_graph_break():
    run_in_processes(2, compiled)

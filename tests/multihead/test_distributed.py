"""VarlenMultiheadAttention inside of DDP and FSDP2: two processes on ragged batches find the gradients of one."""

import itertools

import pytest
import torch
from processes import run_in_processes
from torch import nn

import nt_attention as nta

EMBED, LENGTHS = 14, [[5, 1, 7], [2, 0, 11, 3]]
WAYS = list(itertools.product(["ddp", "fsdp"], ["nested", "packed"]))


class Block(nn.Module):
    """A residual block on NestedTensors, or on packed rows and their offsets."""

    def __init__(self):
        super().__init__()
        rotary = nta.Rotary(dims=4)
        self.attention = nta.VarlenMultiheadAttention(EMBED, 7, num_kv_heads=1, head_dim=6, rotary=rotary, sinks=True)
        self.norm = nn.LayerNorm(EMBED)

    def forward(self, x, offsets=None):
        layout = None if offsets is None else nta.SequenceLayout.from_offsets(offsets)
        out = x + self.attention(x, x, x, is_causal=True, layout=layout)[0]
        return self.norm(out.values() if out.is_nested else out)


def make():
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block()).double()


def loss(model, rank, form):
    """A weighted sum over all tokens of the output; ``model`` wraps both blocks."""
    generator = torch.Generator().manual_seed(rank)
    layout = nta.SequenceLayout.from_lengths(LENGTHS[rank])
    rows = torch.randn(layout.total, EMBED, dtype=torch.float64, generator=generator)
    weights = torch.randn(rows.shape, dtype=torch.float64, generator=generator)
    out = model(layout.to_nested(rows)) if form == "nested" else model(rows, layout.offsets)
    return (out * weights).sum()


class Chain(nn.Module):
    """Both blocks, for a wrapper that calls one forward."""

    def __init__(self):
        super().__init__()
        self.blocks = make()

    def forward(self, x, offsets=None):
        for block in self.blocks:
            rows = block(x, offsets)
            x = torch.nested.nested_tensor_from_jagged(rows, x.offsets()) if x.is_nested else rows
        return rows


def worker(run):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for way in WAYS:
        wrapper, form = way
        torch._dynamo.reset()
        inner = Chain()
        if run == "compiled":
            for block in inner.blocks:
                block.compile(backend="aot_eager")
        if wrapper == "ddp":
            model = DistributedDataParallel(inner)
        else:
            for block in inner.blocks:
                fully_shard(block)
            model = fully_shard(inner)
        loss(model, torch.distributed.get_rank(), form).backward()
        grads = [parameter.grad for parameter in inner.parameters()]
        found[way] = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return found


@pytest.mark.parametrize("run", ["eager", pytest.param("compiled", marks=pytest.mark.sweep)])
def test_ddp_and_fsdp_find_the_gradients_of_one_process(run):
    found, _ = run_in_processes(2, worker, run)
    model = Chain()
    for rank in (0, 1):
        (loss(model, rank, "packed") / 2).backward()
    want = [parameter.grad for parameter in model.parameters()]
    assert all(x.any() for x in want)
    assert list(found) == WAYS
    for way in WAYS:
        got = [torch.from_numpy(x) for x in found[way]]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=lambda text, way=way: f"{way}: {text}")

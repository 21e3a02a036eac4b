"""NestedTensors with a `ShardedLayout`: `local`, `gather` and `varlen_attention`, against one process."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from ranks import mesh_of_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nt_attention as nta

LENGTHS = [23, 1, 0, 5, 40]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def shard(lengths):
    layout = nta.SequenceLayout.from_lengths(lengths)
    return layout, layout.shard(mesh_of_all())


def rows_of(layout, *shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(layout.total, *shape, dtype=torch.float64, generator=generator)


def local_and_gather(lengths):
    layout, sharded = shard(lengths)
    rows = rows_of(layout, 3, 2)
    for is_transposed in (False, True):
        x = layout.to_nested(rows)
        x = (x.transpose(1, 2) if is_transposed else x).detach().requires_grad_()
        local = sharded.local(x)
        assert local.layout == torch.jagged
        assert local._ragged_idx == x._ragged_idx
        assert local._offsets is sharded.local_layout.offsets
        assert local.shape[0] == len(sharded.pieces)
        own = local.transpose(1, 2).values() if is_transposed else local.values()
        close(own, rows[sharded.rows])
        if not is_transposed:
            for piece, found in zip(sharded.pieces, local.unbind(), strict=True):
                begin = layout.offsets[piece.sequence]
                close(found, rows[begin + piece.start : begin + piece.stop])
        whole = sharded.gather(local * 2)
        assert whole._offsets is layout.offsets
        close(whole.values(), (2 * x).values())
        weights = torch.arange(1.0, layout.total + 1, dtype=torch.float64).view(-1, 1, 1)
        values = whole.transpose(1, 2).values() if is_transposed else whole.values()
        (values * weights).sum().backward()
        gradient = x.grad.transpose(1, 2).values() if is_transposed else x.grad.values()
        expected = torch.zeros_like(rows)
        expected[sharded.rows] = 2 * weights.expand_as(rows)[sharded.rows]  # the rows of this rank alone
        close(gradient, expected)


@pytest.mark.parametrize("lengths", [LENGTHS, [2, 0, 1], [0, 1], [0, 0], []])
def test_local_and_gather(lengths):
    run_in_processes(2, local_and_gather, lengths)


def holes_and_inference():
    layout, sharded = shard([4, 6, 2])
    values = rows_of(nta.SequenceLayout.from_lengths([17]), 3)
    with_holes = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([1, 6, 13, 17]), torch.tensor([4, 6, 2])
    )  # the rows 1 … 4, 6 … 11 and 13, 14
    packed = values[[1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14]]
    close(sharded.local(with_holes).values(), packed[sharded.rows])
    close(sharded.gather(sharded.local(with_holes)).values(), packed)
    with torch.inference_mode():
        local = sharded.local(layout.to_nested(packed))
        close(sharded.gather(local).values(), packed)


def test_holes_and_inference():
    run_in_processes(2, holes_and_inference)


def no_sync():
    """NestedTensors of `local`, and results, are recognized by their offsets, which are read once."""
    layout, sharded = shard(LENGTHS)
    x = sharded.local(layout.to_nested(rows_of(layout, 2, 4)))
    reads, real = [], nta.layouts.cache._read
    nta.layouts.cache._read = lambda offsets: reads.append(offsets) or real(offsets)
    try:
        out = nta.varlen_attention(x, x, x, sharded, is_causal=True)
        sharded.gather(out + x)
        assert not reads
        other = torch.nested.nested_tensor_from_jagged(x.values(), x.offsets().clone())
        close(nta.varlen_attention(other, other, other, sharded, is_causal=True).values(), out.values())
        assert len(reads) == 1
    finally:
        nta.layouts.cache._read = real


def test_offsets_are_read_once():
    run_in_processes(2, no_sync)


def attention(is_transposed, key_lengths):
    layout, sharded = shard(LENGTHS)
    key_layout, key_sharded = (layout, sharded) if key_lengths is None else shard(key_lengths)
    packed = [rows_of(layout, 4, 8), rows_of(key_layout, 2, 8) + 1, rows_of(key_layout, 2, 5)]
    packed = [x.requires_grad_() for x in packed]
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    options = {"sinks": sinks, "is_causal": True, "window_size": (9, -1), "return_lse": True}
    out, lse = nta.varlen_attention(*packed, layout, key_layout, backend="reference", **options)
    weights, of_lse = rows_of(layout, 4, 5), rows_of(layout, 4)
    grads = torch.autograd.grad((out * weights).sum() + (lse * of_lse).sum(), (*packed, sinks))

    each = zip(packed, (layout, key_layout, key_layout), (sharded, key_sharded, key_sharded), strict=True)
    local = [own.local(of_all.to_nested(x)) for x, of_all, own in each]
    local = [x.transpose(1, 2) if is_transposed else x for x in local]
    given = (*local, sharded) if key_lengths is None else (*local, sharded, key_sharded)
    found, found_lse = nta.varlen_attention(*given, backend="reference", **options)
    assert found._ragged_idx == local[0]._ragged_idx
    assert found_lse._ragged_idx == 1
    assert found._offsets is sharded.local_layout.offsets
    found = found.transpose(1, 2) if is_transposed else found
    close(sharded.gather(found).values(), out)
    close(sharded.gather(found_lse).values(), lse)
    loss = (found.values() * sharded.local(weights)).sum() + (found_lse.values() * sharded.local(of_lse)).sum()
    for one, other in zip(torch.autograd.grad(loss, (*packed, sinks)), grads, strict=True):
        dist.all_reduce(one)
        close(one, other)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["BjHD", "BHjD"])
def test_attention(is_transposed):
    run_in_processes(2, attention, is_transposed, None)


def test_cross_attention():
    run_in_processes(2, attention, False, [30, 4, 7, 9, 41])


class Block(nn.Module):
    """Attention and a feed-forward layer on NestedTensors."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = nta.VarlenMultiheadAttention(12, 3, rotary=nta.Rotary())
        self.linear = nn.Linear(12, 12)

    def forward(self, x, layout=None):
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, layout=layout, is_causal=True)[0]
        return x + torch.relu(self.linear(x))


def model(lengths, fsdp, checkpoints):
    layout, sharded = shard(lengths)
    torch.manual_seed(5)
    blocks = nn.ModuleList([Block(), Block()]).double()
    rows, weights = rows_of(layout, 12).requires_grad_(), rows_of(layout, 12)
    x = layout.to_nested(rows)
    for block in blocks:
        x = block(x)
    out = x.values()
    leaves = [rows, *blocks.parameters()]
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    if fsdp:
        for block in blocks:
            fully_shard(block, mesh=sharded.mesh)
    x = sharded.local(layout.to_nested(rows))
    for block in blocks:
        x = checkpoint(block, x, sharded, use_reentrant=False) if checkpoints else block(x, sharded)
    found = sharded.gather(x)
    close(found.values(), out)
    (found.values() * weights).sum().backward()
    leaves = [rows.grad, *[p.grad for p in blocks.parameters()]]
    for one, other in zip(leaves, grads, strict=True):
        if fsdp and one is not rows.grad:  # FSDP takes the mean of the ranks
            one = one.full_tensor() * sharded.ranks
        else:
            dist.all_reduce(one)
        close(one, other)


@pytest.mark.parametrize(("lengths", "fsdp", "checkpoints"), [([0, 1], False, False), (LENGTHS, True, True)])
def test_a_model_of_nested_tensors(lengths, fsdp, checkpoints):
    run_in_processes(2, model, lengths, fsdp, checkpoints)


def data_parallel():
    """Without a `ShardedLayout`, each rank has a batch of its own, and the gradients are those of the mean loss."""
    batches = [rows_of(nta.SequenceLayout.from_lengths(lengths), 12) for lengths in RANKS]

    def loss_of(call, rank):
        layout = nta.SequenceLayout.from_lengths(RANKS[rank])
        return call(layout.to_nested(batches[rank])).values().square().sum()

    torch.manual_seed(5)
    block = Block().double()
    want = torch.autograd.grad((loss_of(block, 0) + loss_of(block, 1)) / 2, [*block.parameters()])
    for wrap in (DistributedDataParallel, fully_shard):
        each = copy.deepcopy(block)
        wrapped = wrap(each)  # which must live until the backward
        loss_of(wrapped, dist.get_rank()).backward()
        close([x.full_tensor() if isinstance(x, DTensor) else x for x in (p.grad for p in each.parameters())], [*want])


RANKS = [5, 1, 7], [2, 0, 11, 3]


def test_data_parallel_ranks():
    run_in_processes(2, data_parallel)


def errors():
    layout, sharded = shard([8, 2])
    whole = layout.to_nested(torch.randn(10, 2, 4))
    local = sharded.local(whole)
    other = nta.SequenceLayout.from_lengths([2, 8]).to_nested(torch.randn(10, 2, 4))
    strided = torch.nested.nested_tensor([torch.randn(8, 4), torch.randn(2, 4)])

    def attend(*given):
        return nta.varlen_attention(*given, sharded)

    for match, call in {
        r"x must have the lengths of the batch, \[8, 2\], got \[2, 8\]": lambda: sharded.local(other),
        "must have the lengths of the pieces of rank": lambda: sharded.gather(whole),
        "query must have the lengths of the pieces of rank": lambda: attend(whole, whole, whole),
        "value must have the lengths of the pieces of rank": lambda: attend(local, local, other),
        "x is a strided NestedTensor": lambda: sharded.local(strided),
        "x is a strided": lambda: sharded.gather(strided),
        "must be three NestedTensors": lambda: attend(local, local.values(), local.values()),
        "query must be a torch.Tensor": lambda: attend(None, local, local),
        "leave out layout=": lambda: nta.varlen_attention(whole, whole, whole, layout),
    }.items():
        with pytest.raises((ValueError, TypeError), match=match):
            call()
    local._offsets[-1] -= 1
    with pytest.raises(ValueError, match="must have the lengths"):
        attend(local, local, local)


def test_errors():
    run_in_processes(2, errors)

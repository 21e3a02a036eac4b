"""Tensor parallelism by PyTorch's styles: a rank has some heads of all tokens, or of those of a `ShardedLayout`."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from ranks import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nt_attention as nta

E, H, G, D = 11, 8, 4, 3
LENGTHS = [23, 1, 0, 5, 12, 40]
PLAN = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}
OPTIONS = {
    "window": {"is_causal": True, "window_size": (7, 0)},
    "alibi": {"is_causal": True, "alibi_slopes": torch.linspace(0.1, 0.8, H)},
}


class Block(nn.Module):
    """Attention and a feed-forward layer on packed tokens (T, E). A rank may have some of the heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.query, self.key, self.value = nn.Linear(E, H * D), nn.Linear(E, G * D), nn.Linear(E, G * D)
        self.out = nn.Linear(H * D, E)
        self.up, self.down = nn.Linear(E, 14), nn.Linear(14, E)

    def forward(self, x, layout, **options):
        normed = self.norm(x)
        q, k, v = (project(normed).unflatten(1, (-1, D)) for project in (self.query, self.key, self.value))
        x = x + self.out(nta.varlen_attention(q, k, v, layout, **options).flatten(1))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.double()

    def forward(self, x, layout, **options):
        for block in self.blocks:
            x = block(x, layout, **options)
        return x


def batch():
    torch.manual_seed(4)
    return torch.randn(2, sum(LENGTHS), E, dtype=torch.float64)


def check(options, fsdp):
    layout, (x, target) = nta.SequenceLayout.from_lengths(LENGTHS), batch()
    one, given = Model(), x.clone().requires_grad_()
    want = one(given, layout, **options)
    (want - target).square().sum().backward()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        if fsdp:
            fully_shard(block, mesh=mesh["cp"])
    if fsdp:
        fully_shard(model, mesh=mesh["cp"])
    masks = {key: value for key, value in options.items() if key in ("is_causal", "window_size")}
    sharded = layout.shard(mesh["cp"], **masks)
    local = sharded.local(x).requires_grad_()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].chunk(2)[mesh["tp"].get_local_rank()]
    out = model(local, sharded, **options)
    factor = 2 if fsdp else 1  # FSDP takes the mean of the ranks
    ((out - sharded.local(target)).square().sum() * factor).backward()
    close = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(sharded.gather(out.detach()), want.detach(), **close)
    torch.testing.assert_close(sharded.gather(local.grad) / factor, given.grad, **close)
    for (name, found), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        gradient = whole(found.grad)
        if not fsdp:
            dist.all_reduce(gradient, group=mesh["cp"].get_group())
        torch.testing.assert_close(gradient, expected.grad, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("name", "fsdp"), [("alibi", False), ("window", True)])
def test_heads_and_tokens_divided(name, fsdp):
    run_in_processes(4, check, OPTIONS[name], fsdp)


def module_of_the_guide():
    """`Attention` and the styles of its parts, as the guide shows them."""
    page = (Path(__file__).parents[2] / "docs/guides/several_gpus.md").read_text()
    code, _, _ = page[page.index("class Attention") :].partition("# one process")
    names = {"nn": nn, "nta": nta, "ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel}
    exec(code, names)
    return names["Attention"], names["HEADS"]


def check_guide(options):
    kind, styles = module_of_the_guide()
    torch.manual_seed(3)
    one = kind(24, 8, 4).double()
    divided = kind(24, 8, 4).double()
    divided.load_state_dict(one.state_dict())
    parallelize_module(divided, init_device_mesh("cpu", (2,)), styles)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    x, weights = torch.randn(2, layout.total, 24, dtype=torch.float64)
    own = options | {name: x.chunk(2)[dist.get_rank()] for name, x in options.items() if isinstance(x, torch.Tensor)}
    results = []
    for module, given in ((one, options), (divided, own)):
        leaf = x.clone().requires_grad_()
        out = module(leaf, layout, **given)
        (out * weights).sum().backward()
        results.append([out.detach(), leaf.grad, *[whole(p.grad) for p in module.parameters()]])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-9)
    assert divided.query.weight.to_local().shape == (12, 24)


def test_heads_divided_as_in_the_guide():
    run_in_processes(2, check_guide, OPTIONS["alibi"])

"""Sharded attention in graphs of torch.compile: one graph for all batches, equal to the eager call."""

import numpy as np
import pytest
import torch
from processes import run_in_processes
from ranks import average, mesh_of_all, use_two_calls
from sweeps import sweep_except
from test_patched_models import ONE_LAYER, batch_of, in_one_process, infer, make, step
from torch import nn

import nt_attention as nta

BATCHES = [[23, 1, 0, 5, 12, 40], [50, 3]]


class Graphs:
    """A compiler that counts graphs, and whether a graph has attention."""

    def __init__(self):
        self.count, self.attentions = 0, 0

    def __call__(self, graph, inputs):
        self.count += 1
        self.attentions += sum("sharded_forward" in str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 48), nn.Linear(12, 12)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 3))
        self.options = options
        self.double()

    def forward(self, x, sharded):
        q, k, v = self.qkv(x)[:, :36].unflatten(1, (3, 3, 4)).unbind(1)
        sinks = self.sinks if self.options.get("return_lse") else None
        found = nta.varlen_attention(q, k, v, sharded, sinks=sinks, **self.options)
        out, lse = found if isinstance(found, tuple) else (found, torch.zeros(()))
        return x + self.out(out.flatten(1)), lse


OPTIONS = {
    "window": {"is_causal": True, "window_size": (4, -1), "scale": 0.3},
    "lse and sinks": {"is_causal": True, "return_lse": True, "softcap": 3.0},
    "two-sided window": {"window_size": (3, 2)},
    "alibi": {"is_causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 1.0], dtype=torch.float64)},
}


def compiled_block(name):
    torch._dynamo.reset()
    mesh = mesh_of_all()
    block, graphs = Block(OPTIONS[name]), Graphs()
    compiled = torch.compile(block, backend=graphs, dynamic=True, fullgraph=True)
    for lengths in BATCHES:
        sharded = nta.SequenceLayout.from_lengths(lengths).shard(mesh)
        results = []
        for call in (block, compiled):
            torch.manual_seed(1)
            x = sharded.local(torch.randn(sum(lengths), 12, dtype=torch.float64)).requires_grad_()
            out, lse = call(x, sharded)
            total = out.square().sum() + lse.sum()
            results.append([out, lse, *torch.autograd.grad(total, [x, *block.parameters()], allow_unused=True)])
        for eager, found in zip(*results, strict=True):
            assert (eager is None) == (found is None)
            if eager is not None:
                torch.testing.assert_close(found, eager, rtol=1e-10, atol=1e-10)
    assert graphs.count <= 2, graphs.count  # one more where a size is 1
    assert graphs.attentions == graphs.count


@pytest.mark.parametrize("name", sweep_except(OPTIONS, "two-sided window"))
def test_one_graph_for_all_batches(name):
    run_in_processes(2, compiled_block, name)


def compiled_block_in_two_calls():
    with pytest.MonkeyPatch.context() as patch:
        use_two_calls(patch, splits_heads=True)
        compiled_block("lse and sinks")


@pytest.mark.sweep
def test_two_groups_of_heads():
    run_in_processes(2, compiled_block_in_two_calls)


def compiled_model(name, lengths):
    torch._dynamo.reset()
    mesh = mesh_of_all()
    model, graphs = make(name), Graphs()
    handle = nta.patch(model, mesh=mesh, on_fallback="raise")
    compiled = torch.compile(model, backend=graphs, dynamic=True)
    found = []
    for each in lengths:
        model.zero_grad()
        batch = batch_of(name, each)
        found.append((infer(compiled.eval(), batch), step(compiled.train(), batch, average)))
    assert handle.calls == {None: 2 * len(lengths)}
    assert graphs.attentions, "no graph has attention"
    return found, graphs.count


@pytest.mark.parametrize("name", sweep_except(ONE_LAYER))
def test_patched_models(name):
    lengths = [[23, 1, 5, 12, 40], [11, 33, 2, 8]]
    for found, graphs in run_in_processes(2, compiled_model, name, lengths):
        assert graphs <= 6, graphs
        for each, results in zip(lengths, found, strict=True):
            for want, result in zip(in_one_process(name, each), results, strict=True):
                for key, value in result.items():  # the loss of Llama casts logits to float32
                    wanted = want[key.removeprefix("_orig_mod.")].numpy()
                    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=key)

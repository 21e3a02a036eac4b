"""Sharded attention in graphs: what compilers do with tensors, memory, and errors of a backward."""

import gc
import weakref

import pytest
import torch
from processes import run_in_processes
from ranks import mesh_of_all

import nt_attention as nta


def inputs(lengths):
    torch.manual_seed(0)
    sharded = nta.SequenceLayout.from_lengths(lengths).shard(mesh_of_all())
    return sharded, sharded.local(torch.randn(sum(lengths), 48, dtype=torch.float64)).requires_grad_()


def attend(x, sharded, **options):
    q, k, v = ((x * factor).sin().unflatten(1, (3, 16)) for factor in (1.1, 1.3, 0.7))
    return nta.varlen_attention(q, k, v, sharded, **{"is_causal": True, **options})


def attend_without_gradient_of_query(x, sharded):
    q, k, v = (x.detach() * 1.1).unflatten(1, (3, 16)), *((x * factor).unflatten(1, (3, 16)) for factor in (1.3, 0.7))
    return nta.varlen_attention(q, k, v, sharded, backend="reference")


def one_graph():
    """Of one graph: its memory is freed without a backward, and a backward refuses what would be wrong."""
    torch._dynamo.reset()
    compiled, inputs_of_calls = torch.compile(attend, backend="aot_eager"), []
    for _ in range(4):
        sharded, x = inputs([50, 3])
        out = compiled(x, sharded)
        inputs_of_calls.append(weakref.ref(x))
        del x, out
    gc.collect()
    assert sum(each() is not None for each in inputs_of_calls) == 0
    sharded, x = inputs([50, 3])
    out = compiled(x, sharded)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = compiled(x, sharded)
    with pytest.raises(RuntimeError, match="can't have its saved tensors copied"):
        out.sum().backward()
    with pytest.raises(Exception, match="must be True or False"):
        compiled(x, sharded, is_causal=1)
    eager = attend_without_gradient_of_query
    outs = [call(x, sharded) for call in (eager, torch.compile(eager, backend="aot_eager"))]
    want, found = (torch.autograd.grad(out.square().sum(), x)[0] for out in outs)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


def test_one_graph():
    run_in_processes(2, one_graph)


def gradients_of_inductor(name):
    torch._dynamo.reset()

    def then_softmax(x, sharded):
        return torch.softmax(torch.softmax(attend(x, sharded).flatten(1) * 3, -1) * 5, -1).square()

    def then_lse(x, sharded):
        out, lse = attend(x, sharded, return_lse=True)
        return out.sum() + lse.cos().sum()

    def slopes_of_the_graph(x, sharded):
        slopes = torch.linspace(-1, 1, 3, dtype=torch.float64).exp() + 0 * x.detach().sum()
        out = attend(x, sharded, alibi_slopes=slopes)
        later = out.sum((0, 2)).sin() * 1000  # as large as the slopes, so Inductor writes it to their memory
        return out * later.cumsum(0)[None, :, None]

    function = {"softmax": then_softmax, "lse": then_lse, "slopes": slopes_of_the_graph}[name]
    sharded, x = inputs([50, 3])
    found = [torch.autograd.grad(call(x, sharded).sum(), x)[0] for call in (function, torch.compile(function))]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["softmax", "lse", "slopes"])
def test_gradients_with_inductor(name):
    run_in_processes(2, gradients_of_inductor, name)

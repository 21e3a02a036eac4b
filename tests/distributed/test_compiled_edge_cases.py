"""Sharded attention in graphs: what compilers do with tensors; and calls like one before."""

import gc
import weakref

import pytest
import torch
from processes import run_in_processes
from ranks import mesh_of_all
from sweeps import sweep_except
from torch.distributed.device_mesh import init_device_mesh

import nt_attention as nta


def shard(lengths):
    return nta.SequenceLayout.from_lengths(lengths).shard(
        init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    )


def inputs(lengths):
    torch.manual_seed(0)
    sharded = shard(lengths)
    return sharded, sharded.local(torch.randn(sum(lengths), 48, dtype=torch.float64)).requires_grad_()


def attend(x, sharded, **options):
    q, k, v = ((x * factor).sin().unflatten(1, (3, 16)) for factor in (1.1, 1.3, 0.7))
    return nta.varlen_attention(q, k, v, sharded, **{"is_causal": True, **options})


def then_pointwise(x, sharded):
    """The compiler may write to the memory of the output."""
    return attend(x, sharded) * 2


def then_softmax(x, sharded):
    return torch.softmax(torch.softmax(attend(x, sharded).flatten(1) * 3, -1) * 5, -1).square()


FUNCTIONS = {f.__name__: f for f in (then_pointwise, then_softmax)}


def gradients_of_inductor(name, lengths):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    sharded, x = inputs(lengths)
    found = [torch.autograd.grad(call(x, sharded).sum(), x)[0] for call in (function, torch.compile(function))]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "lengths"),
    sweep_except([("then_softmax", [50, 3]), ("then_pointwise", [50, 3]), ("then_softmax", [20] * 4)]),
)
def test_gradients_with_inductor(name, lengths):
    run_in_processes(2, gradients_of_inductor, name, lengths)


def lse_of_inductor(lengths):
    torch._dynamo.reset()
    sharded, x = inputs(lengths)

    def function(x, sharded):
        out, lse = attend(x, sharded, return_lse=True)
        return out.sum() + lse.cos().sum()

    torch.testing.assert_close(torch.compile(function)(x, sharded), function(x, sharded))


@pytest.mark.sweep
def test_lse_with_inductor():
    run_in_processes(2, lse_of_inductor, [50, 3])


def output_changed_in_place(lengths):
    torch._dynamo.reset()
    sharded, x = inputs(lengths)
    out = torch.compile(attend, backend="aot_eager")(x, sharded)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_output_changed_in_place():
    run_in_processes(2, output_changed_in_place, [50, 3])


def memory_without_backward(lengths):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager")
    inputs_of_calls = []
    for _ in range(4):
        sharded, x = inputs(lengths)
        out = compiled(x, sharded)
        inputs_of_calls.append(weakref.ref(x))
        del x, out
    gc.collect()
    assert sum(each() is not None for each in inputs_of_calls) == 0


def slopes_of_the_graph():
    torch._dynamo.reset()
    sharded = nta.SequenceLayout.from_lengths([23, 1, 40]).shard(mesh_of_all())
    inputs = [torch.randn(sharded.total, h, 8, dtype=torch.float64, requires_grad=True) for h in (6, 3, 3)]
    log_slopes = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def run(q, k, v, log_slopes):
        slopes = log_slopes.exp()
        out = nta.varlen_attention(q, k, v, sharded, is_causal=True, alibi_slopes=slopes)
        later = out.sum((0, 2)).sin() * 1000  # as large as the slopes, so Inductor writes it to their memory
        return out * later.cumsum(0)[None, :, None]

    want, found = (
        torch.autograd.grad(call(*inputs, log_slopes).sum(), inputs)
        for call in (run, torch.compile(run, fullgraph=True))
    )
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.sweep
def test_slopes_of_the_graph():
    run_in_processes(2, slopes_of_the_graph)


def test_memory_is_freed_without_backward():
    run_in_processes(2, memory_without_backward, [50, 3])


def hooks_that_copy(lengths):
    torch._dynamo.reset()
    sharded, x = inputs(lengths)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = torch.compile(attend, backend="aot_eager")(x, sharded)
    with pytest.raises(RuntimeError, match="can't have its saved tensors copied"):
        out.sum().backward()


def test_saved_tensors_hooks_that_copy():
    run_in_processes(2, hooks_that_copy, [50, 3])


def window_as_list():
    sharded, x = inputs([50, 3])
    want = attend(x, sharded, window_size=(4, -1))
    torch.testing.assert_close(attend(x, sharded, window_size=[4, -1]), want)


def test_window_size_as_list():
    run_in_processes(2, window_as_list)


def bad_window_after_good_one():
    sharded, x = inputs([50, 3])
    attend(x, sharded, window_size=(4, -1))
    with pytest.raises(ValueError, match="two integers"):
        attend(x, sharded, window_size=(4.0, -1.0))


def test_window_of_floats_after_good_one():
    run_in_processes(2, bad_window_after_good_one)


def strided_nested():
    sharded, _ = inputs([5, 3])
    x = torch.nested.nested_tensor([torch.randn(5, 4, 8), torch.randn(3, 4, 8)])
    out = nta.varlen_attention(x, x, x, sharded, is_causal=True)  # with alibi_slopes, this works
    assert out.is_nested


def test_strided_nested_tensors():
    run_in_processes(1, strided_nested)


def second_derivative():
    sharded, x = inputs([50, 3])
    out = attend(x, sharded)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_second_derivatives_raise_an_error():
    run_in_processes(2, second_derivative)


def wrong_is_causal():
    torch._dynamo.reset()
    sharded, x = inputs([50, 3])
    with pytest.raises(Exception, match="must be True or False"):
        torch.compile(attend, backend="aot_eager")(x, sharded, is_causal=1)


def test_invalid_options_in_a_graph():
    run_in_processes(2, wrong_is_causal)

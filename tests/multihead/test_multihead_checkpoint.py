"""Activation checkpoints over VarlenMultiheadAttention on ragged inputs, eager and compiled."""

import contextlib
import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from multihead_compile import FORMS, LENGTHS, Batch, Residual, close, compiled, make
from sweeps import sweep_except
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nt_attention.modules.rotary import Rotary

pytestmark = [
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

OFFSETS = torch.ops.nt_attention.offsets.default  # reads and copies offsets; it may run again


class Counting(TorchDispatchMode):
    """Counts calls of the attention operators in ``calls``."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        count(self.calls, function)
        return function(*args, **(kwargs or {}))


def count(calls, function):
    if getattr(function, "namespace", "") == "nt_attention" and function is not OFFSETS:
        calls.append(function.__name__.partition(".")[0].rpartition("_")[2])


def counting_backend(calls):
    """Counts them in graphs, where they may be an argument of another operator."""

    def look(graph, inputs):
        for node in graph.graph.nodes:
            for function in (node.target, *node.args):
                count(calls, function)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look, bw_compiler=look)


def save_attention(context, function, *args, **kwargs):
    attention = function.namespace == "nt_attention"
    return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE


KEEPING = functools.partial(create_selective_checkpoint_contexts, save_attention)

CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "attention saved": {"use_reentrant": False, "context_fn": KEEPING},
}


@pytest.mark.parametrize(
    ("kind", "form", "graph"),
    [
        *((kind, form, False) for kind in CHECKPOINTS for form in FORMS),
        *sweep_except([("attention saved", "nested", True), ("attention saved", "layout", True)]),
        *sweep_except([("not reentrant", "offsets", True)]),
    ],
)
def test_activation_checkpoints_change_no_gradient(kind, form, graph):
    model, batch, calls = Residual(make(rotary=Rotary(), add_zero_attn=True), causal=True), Batch(LENGTHS), []

    def call(x, place):
        return checkpoint(model, x.sin(), place, **CHECKPOINTS[kind])

    want = batch.results(lambda x, place: model(x.sin(), place), form, model.parameters())
    function = compiled(call, counting_backend(calls)) if graph else call
    with contextlib.nullcontext() if graph else Counting(calls):
        close(batch.results(function, form, model.parameters()), want)
    if kind == "attention saved":
        assert calls == ["forward", "backward"]
    elif not graph:  # a graph may keep what it likes
        assert calls == ["forward", "forward", "backward"]

"""Graphs over VarlenMultiheadAttention: how many, what they refuse, checkpoints, FakeTensors and torch.func."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from multihead_cases import (
    EMBED,
    LENGTHS,
    Attend,
    arguments_of,
    gradients,
    make,
    random_batches,
    random_sequences,
    rows,
)
from parameters import with_random_parameters
from sweeps import sweep_except
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformer_layers import (
    BATCH,
    IGNORED_WARNINGS,
    LENGTH,
    SOME_PADDED,
    as_nested,
    close,
    decoder_layer,
    double,
    encoder,
    encoder_layer,
    with_our_attention,
)
from transformer_layers import EMBED as LAYER_EMBED

import nt_attention as nta
from nt_attention import SequenceLayout

pytestmark = [
    *IGNORED_WARNINGS,
    pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning"),
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]
FORMS = ["nested", "layout", "offsets"]


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})


@pytest.mark.parametrize(
    ("form", "train"), sweep_except([(form, x) for form in FORMS for x in (True, False)], ("layout", False))
)
def test_at_most_four_graphs_for_all_lengths(form, train):
    """Self-attention in training, cross-attention in inference."""
    model = Attend(make("rotary"), causal=train)
    counter = CompileCounterWithBackend("aot_eager" if train else "eager")
    graph = compiled(model, counter)
    for lengths, key_lengths in random_batches(12):
        queries, keys = random_sequences(lengths), random_sequences(key_lengths)
        parts = [queries] * 3 if train else [queries, keys, keys]
        with torch.set_grad_enabled(train):
            outs = [rows(function(*arguments_of(form, parts))) for function in (graph, model)]
        close(*[gradients(out, [*queries, *model.parameters()]) for out in outs] if train else outs)
    assert counter.frame_count <= 4


def test_offsets_are_checked_when_the_graph_runs():
    """A kernel on a GPU would read past the end."""
    graph, x = compiled(Attend(make("add_bias_kv"), causal=False), dynamic=True), double(11, EMBED)
    for lengths, text in (
        ([4, 7], None),
        ([5, -2, 8], "offsets decrease from 5 to 3"),
        ([5, 5, 3], r"query has shape \(11, 5, 7\).*13 tokens"),
        ([29, 97], r"query has shape \(11, 5, 7\).*126 tokens"),
    ):
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        with contextlib.nullcontext() if text is None else pytest.raises(ValueError, match=text):
            graph(x, x, x, offsets)


def test_dense_batches_are_one_graph():
    module, padding = make("all"), torch.arange(7) >= torch.tensor([7, 3, 5])[:, None]
    options = {"key_padding_mask": padding, "need_weights": False, "is_causal": True}
    x = double(3, 7, EMBED, requires_grad=True)
    found = []
    for function in (compiled(lambda x: module(x, x, x, **options)), lambda x: module(x, x, x, **options)):
        out = function(x)[0][~padding]  # eager leaves out padded queries
        found.append(gradients(out, [x, *module.parameters()]))
    close(*found)


@pytest.mark.parametrize("form", sweep_except(["layout", "offsets", "dense"], "offsets"))
def test_dropout_in_a_graph_keeps_the_mean(form):
    """400 equal sequences."""
    count, length, module = 400, 5, make("plain", dropout=0.3, bias=False)
    x, values = (double(length, EMBED).repeat(count, 1) for _ in range(2))
    layout = SequenceLayout.from_lengths([length] * count)
    places = {"layout": [layout], "offsets": [layout.offsets.clone()], "dense": []}[form]
    x, values = (y.view(count, length, EMBED) if form == "dense" else y for y in (x, values))
    values.requires_grad_()

    def run(function):
        torch.manual_seed(5)
        return function(x, x, values, *places).view(count, length, EMBED)

    model = Attend(module, causal=False)
    graph = compiled(model)
    out = run(graph)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (grad,) = torch.autograd.grad((out * weights).sum(), values)
    close((grad * values).sum(), (out * weights).sum())  # linear in values, so the backward drops the same weights
    assert torch.equal(out, run(graph))  # under the same seed
    error = out.std(0) / count**0.5
    assert (error > 0).all()
    module.eval()
    assert ((out.mean(0) - run(model)[0]).abs() < 5 * error).all()


# The module's options, the call's, and what the error says
NOT_IN_A_GRAPH = {
    "weights": ({}, {"need_weights": True}, "weights.*need the lengths, which are not known in a graph"),
    "mask": ({}, {"attn_mask": torch.ones(17, 17).tril(2) == 0}, "attn_mask.*not known in a graph"),
    "dropout of 1": ({"dropout": 1.0}, {}, "dropout of 1.*not known in a graph"),
    "mod": ({}, {"mask_mod": lambda b, h, query, key: query >= key}, "mask_mod.*graph"),
}


@pytest.mark.parametrize(
    ("form", "name", "fullgraph"),
    sweep_except(
        [(form, name, x) for form in FORMS for name in NOT_IN_A_GRAPH for x in (True, False)],
        *[("offsets", name, True) for name in NOT_IN_A_GRAPH],
    ),
)
def test_options_that_a_graph_does_not_take_are_refused_or_break_it(form, name, fullgraph):
    options, arguments, text = NOT_IN_A_GRAPH[name]
    module, given = make("plain", **options), arguments_of(form, [random_sequences(LENGTHS)] * 3)

    def call(query, key, value, place=None, _=None):
        layout = SequenceLayout.from_offsets(place) if isinstance(place, torch.Tensor) else place
        out, weights = module(query, key, value, layout=layout, **arguments)
        return out if weights is None else (out, weights)

    if fullgraph:
        with pytest.raises(Exception, match=text):
            compiled(call)(*given)
    elif form != "nested":
        close(compiled(call, fullgraph=False)(*given), call(*given))


def test_nested_tensors_with_holes_in_a_graph_are_refused():
    offsets = torch.tensor([0, 5, 6, 23, 26])
    holes = torch.nested.nested_tensor_from_jagged(double(26, EMBED), offsets, torch.tensor([4, 1, 12, 3]))
    with pytest.raises(Exception, match=r"query has holes between its sequences: call contiguous\(\) on it outside"):
        compiled(Attend(make("plain"), causal=False))(holes, holes, holes)


@pytest.mark.parametrize("then", sweep_except(["in the next graph", "outside of any"], "outside of any"))
def test_layout_made_in_a_graph_used_outside_of_it(then):
    module, parts = make("added keys"), [random_sequences(LENGTHS)] * 3
    x, _, _, offsets, _ = arguments_of("offsets", parts)

    def call(x, offsets):
        layout = SequenceLayout.from_offsets(offsets)
        x = x.sin()
        if then == "outside of any":
            return torch.compiler.disable(module)(x, x, x, layout=layout)[0]
        torch._dynamo.graph_break()
        return module(x, x, x, layout=layout)[0]

    leaves = [*parts[0], *module.parameters()]
    got = gradients(compiled(call, fullgraph=False)(x, offsets), leaves)
    close(got, gradients(call(torch.cat(parts[0]), offsets), leaves))


OFFSETS = torch.ops.nt_attention.offsets.default  # reads and copies offsets; it may run again


class Counting(TorchDispatchMode):
    """Counts calls of the attention operators in `calls`."""

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
    return CheckpointPolicy.MUST_SAVE if function.namespace == "nt_attention" else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("saved", "form", "graph"),
    [
        *((saved, form, False) for saved in (True, False) for form in FORMS),
        *sweep_except([(True, "nested", True), (True, "layout", True), (False, "offsets", True)]),
    ],
)
def test_checkpoints_recompute_attention_unless_it_is_saved(saved, form, graph):
    model, parts, calls = Attend(make("rotary"), causal=True), [random_sequences([5, 1, 17, 3])] * 3, []
    context = functools.partial(create_selective_checkpoint_contexts, save_attention)
    more = {"context_fn": context} if saved else {}
    leaves = [*parts[0], *model.parameters()]
    want = gradients(rows(model(*arguments_of(form, parts))), leaves)

    def call(*given):
        return checkpoint(model, *given, use_reentrant=False, **more)

    function = compiled(call, counting_backend(calls)) if graph else call
    with contextlib.nullcontext() if graph else Counting(calls):
        close(gradients(rows(function(*arguments_of(form, parts))), leaves), want)
    if saved:
        assert calls == ["forward", "backward"]
    elif not graph:  # a graph may keep what it likes
        assert calls == ["forward", "forward", "backward"]


@pytest.mark.parametrize("name", ["plain", "rotary", "added keys", "alibi"])
def test_fake_tensors_and_exports_leave_nothing_behind(name):
    """Nothing is cached with the layout or elsewhere: the call after it computes with real values."""
    module, layout = make(name), SequenceLayout.from_lengths([3, 1, 7])
    fresh = make(name)
    fresh.load_state_dict(module.state_dict())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(double(11, EMBED)).requires_grad_()
        out, _ = module(x, x, x, layout=layout, is_causal=True)
        out.sum().backward()
        assert x.grad.shape == out.shape == (11, EMBED)
    if name == "alibi":
        torch.export.export(Attend(module, causal=True), (double(2, 5, EMBED),) * 3)
    x = double(11, EMBED)
    want = fresh(x, x, x, layout=SequenceLayout.from_lengths([3, 1, 7]), is_causal=True)[0]
    close(module(x, x, x, layout=layout, is_causal=True)[0], want)
    rotation = nta.Rotary().of_head_dim(8)
    with FakeTensorMode() as mode:  # mixing real and fake tensors is an error
        x, positions = mode.from_tensor(torch.randn(2, 5, 2, 8)), mode.from_tensor(torch.arange(5)[None])
        assert rotation.rotate(x, positions).shape == x.shape


@pytest.mark.parametrize(
    ("kind", "norm_first", "train"),
    [
        ("patched encoder", False, False),
        *sweep_except([("layer", False, False), ("layer", True, True), ("patched encoder", True, True)]),
    ],
)
def test_compiled_encoders_on_nested_tensors_are_one_graph(kind, norm_first, train):
    """In eval without gradients, stock layers have a fused kernel, which does not support jagged NestedTensors."""
    stock = encoder_layer(norm_first=norm_first) if kind == "layer" else encoder(1, norm=True, norm_first=norm_first)
    model = (with_our_attention(stock) if kind == "layer" else stock).train(train)
    parts = [double(n, LAYER_EMBED, requires_grad=train) for n in (5, 1, 17, 3)]
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    with contextlib.nullcontext() if kind == "layer" else nta.patch(model), torch.set_grad_enabled(train):
        graph = compiled(lambda x: model(x, is_causal=True), counter)
        for some in (parts, parts[:2]):
            outs = [f(as_nested(some, "jagged")).values() for f in (graph, lambda x: model(x, is_causal=True))]
            close(*[gradients(out, [*some, *model.parameters()]) for out in outs] if train else outs)
    assert counter.frame_count <= 2


def test_functional_call_grad_and_vmap():
    stock = encoder_layer()
    ours = with_our_attention(stock)
    x = double(BATCH, LENGTH, LAYER_EMBED)
    params = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    call = torch.func.functional_call
    jagged = as_nested([double(n, LAYER_EMBED) for n in (4, 1, 9)], "jagged")
    close(call(ours, params, (x,)), call(stock, params, (x,)))
    with_random_parameters(stock).load_state_dict(params)
    close(torch.cat(call(ours, params, (jagged,)).unbind()), torch.cat([stock(one) for one in jagged.unbind()]))

    def loss(params, model, x, hidden):
        return call(model, params, (x,), {"src_key_padding_mask": hidden}).square().sum()

    got, want = (torch.func.grad(loss)(params, model, x, SOME_PADDED) for model in (ours, stock))
    close(got, want)
    each = torch.func.vmap(torch.func.grad(loss), (None, None, 0, 0))  # gradients of each example
    close(each(params, ours, x, SOME_PADDED), each(params, stock, x, SOME_PADDED))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    ensemble = torch.func.vmap(lambda p: call(ours, p, (x,)))(stacked)
    close(ensemble, torch.stack([call(stock, {k: v[i] for k, v in stacked.items()}, (x,)) for i in (0, 1)]))


class PaddedDecoderLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, memory, hidden):
        return self.layer(x, memory, memory_key_padding_mask=hidden)


WHERE = {
    "meta": lambda layer, x, hidden: layer.requires_grad_(False).to("meta")(*[t.to("meta") for t in (x, x, hidden)]),
    "exported": lambda layer, x, hidden: torch.export.export(layer, (x, x, hidden)).module()(x, x, hidden),
    "traced": lambda layer, x, hidden: torch.jit.trace(layer, (x, x, hidden.flip(0)), check_trace=False)(x, x, hidden),
    "mapped": lambda layer, x, hidden: torch.func.vmap(layer)(x, x, hidden),
}


@pytest.mark.parametrize("where", WHERE)
def test_padded_decoder_layers_run_where_values_can_not_be_read(where):
    stock, x = PaddedDecoderLayer(decoder_layer()), double(BATCH, LENGTH, LAYER_EMBED)
    want = WHERE[where](copy.deepcopy(stock), x, SOME_PADDED)
    got = WHERE[where](with_our_attention(stock), x, SOME_PADDED)
    if where == "meta":
        assert got.shape == want.shape == x.shape
    else:
        close(want, stock(x, x, SOME_PADDED))
        close(got, want)

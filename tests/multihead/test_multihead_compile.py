"""torch.compile over VarlenMultiheadAttention on ragged and dense inputs; eager is the reference."""

from __future__ import annotations

import random

import pytest
import torch
from functorch.compile import make_boxed_func
from multihead_compile import (
    ADDED,
    EMBED,
    HEADS,
    KEY_LENGTHS,
    LENGTHS,
    POSITIONS,
    Batch,
    Residual,
    Stack,
    as_layout,
    close,
    compiled,
    gradients,
    in_form,
    make,
    offsets_of,
    slow_backend,
    weighted_sum,
)
from sweeps import sweep_except
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from nt_attention import SequenceLayout
from nt_attention.modules.rotary import Rotary

pytestmark = [
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def recording_backend(read):
    """A compiler that appends to ``read`` each node of its graphs that reads a value from the device."""
    asking = ("aten.item", "_local_scalar_dense", "aten.nonzero", "aten.unique", "aten.equal")

    def look(graph, inputs):
        read.extend(node for node in graph.graph.nodes if any(name in str(node.target) for name in asking))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look, bw_compiler=look)


@pytest.mark.parametrize(
    ("options", "form", "cross"),
    sweep_except(
        [
            *(("plain", "nested", True), ("plain", "layout", False), ("plain", "offsets", True)),
            *(("all", "nested", False), ("all", "layout", False), ("all", "layout", True), ("all", "offsets", True)),
        ],
        *(("plain", "nested", True), ("all", "layout", False), ("all", "offsets", True)),
    ),
)
def test_graph_gives_what_eager_gives_without_reading_values(options, form, cross):
    """It reads none although the compiler would allow it. It runs before eager, which could leave cached values."""
    modules = [make(**x) for x in (({}, {}) if options == "plain" else (POSITIONS, ADDED))]
    model = Stack(Residual(module, causal) for module, causal in zip(modules, (cross, not cross), strict=True))
    batch = Batch(LENGTHS, KEY_LENGTHS if cross else None, past=0 if form == "nested" else 2)
    read = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        got = batch.results(compiled(model, recording_backend(read)), form, model.parameters())
    assert not read
    close(got, batch.results(model, form, model.parameters()))


@pytest.mark.parametrize("form", sweep_except(["nested", "offsets"], "offsets"))
def test_autocast_in_a_graph(form):
    module, batch = make(torch.float32, add_bias_kv=True), Batch(LENGTHS, dtype=torch.float32)

    def call(x, place):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, x, x, layout=as_layout(place))[0]

    got, want = (batch.results(function, form, module.parameters()) for function in (compiled(call), call))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    close(got, want, 1e-2)


@pytest.mark.sweep
def test_inductor_trains_on_nested_tensors():
    """Without vectorization, which compiles faster."""
    model, batch = Residual(make(torch.float32, rotary=Rotary()), causal=True), Batch(LENGTHS, dtype=torch.float32)
    want = batch.results(model, "nested", model.parameters())
    plainest = {"cpp.simdlen": 0, "cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(plainest):
        got = batch.results(compiled(model, "inductor"), "nested", model.parameters())
    close(got, want, 1e-4)


def test_offsets_are_checked_when_the_graph_runs():
    """A kernel on a GPU would read past the end."""
    model = Residual(make(add_bias_kv=True))
    graph = compiled(model, dynamic=True)
    x, dtype = torch.randn(11, EMBED, dtype=torch.float64), torch.int32
    close(graph(x, offsets_of([4, 7], dtype)), model(x, offsets_of([4, 7], dtype)))
    for lengths, text in (
        ([5, -2, 8], "offsets decrease from 5 to 3"),
        ([5, 5, 3], r"query has shape \(11, 6, 6\).*13 tokens"),
        ([29, 97], r"query has shape \(11, 6, 6\).*126 tokens"),
    ):
        with pytest.raises(ValueError, match=text):
            graph(x, offsets_of(lengths, dtype))


def random_batches(count=24):
    """Batches of various sizes and lengths. One of them has a sequence shorter than 2."""
    r = random.Random(0)
    lengths = [[r.randint(2, 23) for _ in range(r.choice([1, 2, 3, 5, 8]))] for _ in range(count)]
    lengths[count // 2][0] = 1
    return [(x, [r.randint(2, 19) for _ in x]) for x in lengths]


@pytest.mark.parametrize(
    ("form", "mode", "causal"),
    sweep_except(
        [
            *(("nested", "train", True), ("layout", "train", False), ("offsets", "train", True)),
            *(("nested", "inference", False), ("layout", "no_grad", True), ("offsets", "inference", False)),
        ],
        ("layout", "no_grad", True),
    ),
)
def test_at_most_four_graphs_for_all_lengths(form, mode, causal):
    """Self-attention in training, cross-attention in inference."""
    model, train = Residual(make(rotary=Rotary()), causal), mode == "train"
    counter = CompileCounterWithBackend("aot_eager" if train else "eager")
    graph = compiled(model, counter)
    for lengths, key_lengths in random_batches():
        batch = Batch(lengths, None if train else key_lengths)
        want = batch.results(model, form, model.parameters(), mode)
        close(batch.results(graph, form, model.parameters(), mode), want)
    assert counter.frame_count <= 4


DENSE = {
    "weights by head": {"average_attn_weights": False, "key_padding_mask": True},
    "padding": {"key_padding_mask": True, "need_weights": False, "is_causal": True},
    "masks": {"key_padding_mask": True, "attn_mask": True},
}


@pytest.mark.parametrize("name", sweep_except(DENSE, "padding"))
def test_dense_batches_are_one_graph(name):
    cross = "weights" in name
    queries, keys, options = 7, 11 if cross else 7, dict(DENSE[name])
    padding = torch.arange(keys) >= torch.tensor([keys, 3, 5])[:, None]
    made = {"key_padding_mask": padding, "attn_mask": torch.randn(3 * HEADS, queries, keys, dtype=torch.float64)}
    options.update({what: made[what] for what in made if what in options})
    module = make(**({"add_bias_kv": True} if cross else {"num_kv_heads": 2, "alibi": True, "sinks": True}))
    inputs = [torch.randn(3, n, EMBED, dtype=torch.float64) for n in ((queries, keys) if cross else (queries,))]

    def call(x, memory=None):
        memory = x if memory is None else memory
        return module(x, memory, memory, **options)

    def results(function, train=True):
        leaves = [x.clone().requires_grad_(train) for x in inputs]
        out, weights = function(*leaves)
        out = out if cross else out[~padding]  # eager leaves out padded queries where nobody asks for weights
        both = [out] if weights is None else [out, weights]
        flat = torch.cat([x.flatten() for x in both])
        return [*both, *(gradients(flat, [*leaves, *module.parameters()]) if train else ())]

    graph = compiled(call)
    close(results(graph), results(call))
    if name == "padding":
        with torch.no_grad():
            close(results(graph, False), results(call, False))


@pytest.mark.parametrize("form", sweep_except(["layout", "offsets", "dense"], "offsets", "dense"))
@slow_backend
def test_dropout_in_a_graph_keeps_the_mean(form):
    """400 equal sequences."""
    count, length = 400, 5
    module = make(dropout=0.3, bias=False)
    rows, values = (torch.randn(length, EMBED, dtype=torch.float64).repeat(count, 1) for _ in range(2))
    values.requires_grad_()

    def call(x, value, place=None):
        return module(x, x, value, layout=as_layout(place), need_weights=False)[0]

    def run(function):
        torch.manual_seed(5)
        if form == "dense":
            return function(rows.view(count, length, EMBED), values.view(count, length, EMBED))
        x, place = in_form(form, rows, [length] * count)
        return function(x, values, place).view(count, length, EMBED)

    graph = compiled(call)
    out = run(graph)
    (grad,) = torch.autograd.grad(weighted_sum(out), values)
    close((grad * values).sum(), weighted_sum(out), 1e-8)  # linear in values, so the backward drops the same weights
    assert torch.equal(out, run(graph))  # under the same seed
    error = out.std(0) / count**0.5
    assert (error > 0).all()
    module.eval()
    assert ((out.mean(0) - run(call)[0]).abs() < 5 * error).all()


def causal_mask_mod(batch, head, query, key):
    return query >= key


# the module's options, the call's, and what the error says
NOT_IN_A_GRAPH = {
    "weights": ({}, {"need_weights": True}, "weights.*need the lengths, which are not known in a graph"),
    "mask": ({}, {"attn_mask": torch.ones(17, 17).tril(2) == 0}, "attn_mask.*not known in a graph"),
    "dropout of 1": ({"dropout": 1.0}, {}, "dropout of 1.*not known in a graph"),
    "mod": ({}, {"mask_mod": causal_mask_mod}, "mask_mod.*graph"),
}
FORMS_AND_OPTIONS = [
    *(("nested", "weights"), ("layout", "weights"), ("offsets", "weights"), ("nested", "dropout of 1")),
    *(("offsets", "mask"), ("offsets", "mod"), ("layout", "mod")),
]


def call_with(name):
    options, arguments, text = NOT_IN_A_GRAPH[name]
    module = make(**options)

    def call(x, place):
        return module(x, x, x, layout=as_layout(place), **arguments)

    return call, text


@pytest.mark.parametrize(("form", "name"), FORMS_AND_OPTIONS)
def test_options_that_a_graph_does_not_take_are_refused_with_the_reason(form, name):
    call, text = call_with(name)
    with pytest.raises(Exception, match=text):
        call_on(compiled(call), form, Batch(LENGTHS))


@pytest.mark.parametrize(("form", "name"), sweep_except(FORMS_AND_OPTIONS, ("offsets", "mask")))
@slow_backend
def test_options_that_a_graph_does_not_take_break_the_graph(form, name):
    (call, _), batch = call_with(name), Batch(LENGTHS)
    close(call_on(compiled(call, fullgraph=False), form, batch), call_on(call, form, batch))


def call_on(function, form, batch):
    out, weights = function(*in_form(form, batch.rows, batch.lengths))
    out = out.values() if form == "nested" else out
    return [out] if weights is None else [out, weights]


@pytest.mark.parametrize("then", sweep_except(["in the next graph", "outside of any"], "outside of any"))
def test_layout_made_in_a_graph_used_outside_of_it(then):
    module, batch = make(**ADDED), Batch(LENGTHS)

    def call(x, offsets):
        layout = SequenceLayout.from_offsets(offsets)
        x = x.sin()
        if then == "outside of any":
            return torch.compiler.disable(module)(x, x, x, layout=layout)[0]
        torch._dynamo.graph_break()
        return module(x, x, x, layout=layout)[0]

    got = batch.results(compiled(call, fullgraph=False), "offsets", module.parameters())
    close(got, batch.results(call, "offsets", module.parameters()))


@pytest.mark.sweep
@slow_backend
def test_softcap_in_a_graph():
    model, batch = Residual(make(softcap=2.0), causal=True), Batch(LENGTHS, KEY_LENGTHS)
    got = batch.results(compiled(model, fullgraph=False), "offsets", model.parameters())
    close(got, batch.results(model, "offsets", model.parameters()))


def test_nested_tensors_with_holes_in_a_graph_are_refused():
    rows = torch.randn(sum(LENGTHS), EMBED, dtype=torch.float64)
    holes = torch.nested.nested_tensor_from_jagged(rows, offsets_of(LENGTHS), torch.tensor([4, 1, 12, 3]))
    with pytest.raises(Exception, match=r"query has holes between its sequences: call contiguous\(\) on it outside"):
        compiled(Residual(make()))(holes)

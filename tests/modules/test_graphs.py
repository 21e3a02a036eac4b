"""VarlenMultiheadAttention in graphs: compiled, exported and checkpointed; alone, and inside PyTorch's encoders.

A ragged batch comes in one of three forms: jagged NestedTensors; packed rows beside a SequenceLayout; packed rows
beside offsets, of which the graph makes the layout. Eager is the reference.

Dimensions: T rows, B sequences, E embed dim, H heads.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import random

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nt_attention as nta
from nt_attention import SequenceLayout, VarlenMultiheadAttention
from nt_attention.modules.rotary import Rotary

pytestmark = [
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EMBED, HEADS = 36, 6
LENGTHS, KEY_LENGTHS = [5, 1, 17, 3], [2, 7, 13, 4]
FORMS = ["nested", "layout", "offsets"]
every_form = pytest.mark.parametrize("form", FORMS)
slow_backend = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
MODES = {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
POSITIONS = {"rotary": Rotary(dims=4), "alibi": True, "window_size": (5, 3), "num_kv_heads": 2, "qk_norm": "rms"}
ADDED = {"add_bias_kv": True, "add_zero_attn": True, "bias": False, "sinks": True, "rotary": Rotary()}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def scrambled(module):
    """With parameters that are nowhere constant: fresh biases and sinks are 0 and would hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def make(dtype=torch.float64, **options):
    return scrambled(VarlenMultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype, **options))


def offsets_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def placed(form, rows, lengths):
    """The batch as two arguments: the tokens, and what tells where sequences begin, if they do not themselves."""
    if form == "layout":
        return rows, SequenceLayout.from_lengths(lengths)
    if form == "offsets":
        return rows, offsets_of(lengths)
    extremes = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
    return torch.nested.nested_tensor_from_jagged(rows, offsets_of(lengths), **extremes), None


def as_layout(place):
    return SequenceLayout.from_offsets(place) if isinstance(place, torch.Tensor) else place


class Residual(nn.Module):
    """``x + attention(x, …)``, from whichever form."""

    def __init__(self, attention, causal=False):
        super().__init__()
        self.attention, self.causal = attention, causal

    def forward(self, x, place=None, memory=None, memory_place=None):
        keys = x if memory is None else memory
        layouts = {"layout": as_layout(place), "key_layout": as_layout(memory_place)}
        return x + self.attention(x, keys, keys, is_causal=self.causal, **layouts)[0]


class Stack(nn.ModuleList):
    """Residual layers over the same memory, if any."""

    def forward(self, x, *more):
        for layer in self:
            x = layer(x, *more)
        return x


@dataclasses.dataclass
class Batch:
    """Rows (T, E) of a ragged batch, and of keys; the same for one call after the other."""

    lengths: list[int]
    key_lengths: list[int] | None = None
    dtype: torch.dtype = torch.float64
    past: int = 0  # rows past the end

    def __post_init__(self):
        both = (self.lengths, self.key_lengths or [])
        self.rows, self.keys = (torch.randn(sum(x) + self.past, EMBED, dtype=self.dtype) for x in both)

    def results(self, function, form, parameters=(), mode="train"):
        """The output's rows and, in training, the gradients of all rows and parameters."""
        parameters, train = list(parameters), mode == "train"
        with MODES[mode]():
            rows, keys = (x.clone().requires_grad_(train) for x in (self.rows, self.keys))
            leaves = [rows] if self.key_lengths is None else [rows, keys]
            arguments = placed(form, rows, self.lengths)
            if self.key_lengths is not None:
                arguments += placed(form, keys, self.key_lengths)
            out = function(*arguments)
            if form == "nested":
                out = (out + arguments[0]).values()
            return [out, *(gradients(out, [*leaves, *parameters]) if train else ())]


def gradients(out, leaves):
    """By way of ``backward``, which reentrant checkpoints ask for."""
    for leaf in leaves:
        leaf.grad = None
    weighted(out).backward()
    return [leaf.grad for leaf in leaves]


def weighted(out):
    """A number to differentiate, in which every element counts for something else."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})


# --- one graph gives what eager gives


def looking(read):
    """A compiler that notes in ``read`` whatever in its graphs asks a device for a number."""
    asking = ("aten.item", "_local_scalar_dense", "aten.nonzero", "aten.unique", "aten.equal")

    def look(graph, inputs):
        read.extend(node for node in graph.graph.nodes if any(name in str(node.target) for name in asking))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look, bw_compiler=look)


@pytest.mark.parametrize(
    ("options", "form", "cross"),
    [
        *(("plain", "nested", True), ("plain", "layout", False), ("plain", "offsets", True)),
        *(("all", "nested", False), ("all", "layout", False), ("all", "layout", True), ("all", "offsets", True)),
    ],
)
def test_a_graph_gives_what_eager_gives_and_reads_no_number(options, form, cross):
    """It reads none even where the compiler would let it, and it is made before eager has left anything behind."""
    modules = [make(**x) for x in (({}, {}) if options == "plain" else (POSITIONS, ADDED))]
    model = Stack(Residual(module, causal) for module, causal in zip(modules, (cross, not cross), strict=True))
    batch = Batch(LENGTHS, KEY_LENGTHS if cross else None, past=0 if form == "nested" else 2)
    read = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        got = batch.results(compiled(model, looking(read)), form, model.parameters())
    assert not read
    close(got, batch.results(model, form, model.parameters()))


@pytest.mark.parametrize("form", ["nested", "offsets"])
def test_autocast_decides_the_precision(form):
    module, batch = make(torch.float32, add_bias_kv=True), Batch(LENGTHS, dtype=torch.float32)

    def call(x, place):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, x, x, layout=as_layout(place))[0]

    got, want = (batch.results(function, form, module.parameters()) for function in (compiled(call), call))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    close(got, want, 1e-2)


def test_inductor_trains_on_nested_tensors():
    """With the plainest code that it writes, which is the quickest to compile."""
    model, batch = Residual(make(torch.float32, rotary=Rotary()), causal=True), Batch(LENGTHS, dtype=torch.float32)
    want = batch.results(model, "nested", model.parameters())
    plainest = {"cpp.simdlen": 0, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(plainest):
        got = batch.results(compiled(model, "inductor"), "nested", model.parameters())
    close(got, want, 1e-4)


def test_offsets_are_checked_when_the_graph_runs():
    """Rows that are not there are refused before a kernel, which on a GPU would read past the end."""
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


# --- lengths that vary


def random_batches(count=24):
    """Batches of various sizes and lengths. One of them has a sequence shorter than 2."""
    r = random.Random(0)
    lengths = [[r.randint(2, 23) for _ in range(r.choice([1, 2, 3, 5, 8]))] for _ in range(count)]
    lengths[count // 2][0] = 1
    return [(x, [r.randint(2, 19) for _ in x]) for x in lengths]


@pytest.mark.parametrize(
    ("form", "mode", "causal"),
    [
        *(("nested", "train", True), ("layout", "train", False), ("offsets", "train", True)),
        *(("nested", "inference", False), ("layout", "no_grad", True), ("offsets", "inference", False)),
    ],
)
def test_few_graphs_serve_all_lengths(form, mode, causal):
    """In training self-attention, in inference cross-attention."""
    model, train = Residual(make(rotary=Rotary()), causal), mode == "train"
    counter = CompileCounterWithBackend("aot_eager" if train else "eager")
    graph = compiled(model, counter)
    for lengths, key_lengths in random_batches():
        batch = Batch(lengths, None if train else key_lengths)
        want = batch.results(model, form, model.parameters(), mode)
        close(batch.results(graph, form, model.parameters(), mode), want)
    assert counter.frame_count <= 4


# --- inside PyTorch's encoders


def encoder_layer(norm_first=False, dropout=0.0, attention=VarlenMultiheadAttention.from_torch):
    layer = nn.TransformerEncoderLayer(
        EMBED, HEADS, 50, dropout=dropout, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layer.self_attn = attention(layer.self_attn)
    return scrambled(layer)


@pytest.mark.parametrize(("norm_first", "mode"), [(True, "train"), (False, "no_grad"), (True, "inference")])
def test_an_encoder_layer_on_nested_tensors(norm_first, mode):
    """In eval without gradients stock layers have a kernel of their own, which does not know NestedTensors' layout."""
    layer, batch = encoder_layer(norm_first).train(mode == "train"), Batch(LENGTHS)

    def call(x, _):
        return layer(x, is_causal=norm_first)

    want = batch.results(call, "nested", layer.parameters(), mode)
    close(batch.results(compiled(call, "aot_eager_decomp_partition"), "nested", layer.parameters(), mode), want)


@pytest.mark.parametrize(("norm_first", "mode"), [(False, "train"), (True, "no_grad")])
def test_a_patched_encoder_on_nested_tensors_is_one_graph(norm_first, mode):
    layer = encoder_layer(norm_first, attention=lambda stock: stock)
    model = nn.TransformerEncoder(layer, 1, nn.LayerNorm(EMBED).double(), enable_nested_tensor=False)
    scrambled(model).train(mode == "train")
    counter = CompileCounterWithBackend("aot_eager")
    with nta.patch(model):
        graph = compiled(model, counter)
        for lengths in (LENGTHS, [7, 11]):
            batch = Batch(lengths)
            want, got = (
                batch.results(lambda x, _, f=f: f(x, is_causal=True), "nested", model.parameters(), mode)
                for f in (model, graph)
            )
            close(got, want)
    assert counter.frame_count <= 2


def test_a_patched_encoder_on_padded_batches_breaks_the_graph_at_the_mask_alone():
    layer = encoder_layer(attention=lambda stock: stock)
    model = scrambled(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    counter, r, graphs = CompileCounterWithBackend("aot_eager"), random.Random(0), []
    with nta.patch(model) as handle:
        graph = torch.compile(model, backend=counter)
        for _ in range(5):
            lengths = [r.randint(1, 13) for _ in range(r.randint(2, 6))]
            padding = torch.arange(max(lengths) + 1) >= torch.tensor(lengths)[:, None]
            x = torch.randn(*padding.shape, EMBED, dtype=torch.float64, requires_grad=True)
            outs = [function(x, src_key_padding_mask=padding) for function in (model, graph)]
            close(*([out, *gradients(out, [x, *model.parameters()])] for out in outs))
            graphs.append(counter.frame_count)
        assert handle.calls == {None: 10}
    assert graphs[-1] == graphs[2] <= 8, graphs  # before the mask and after it; for two sizes, and then for all


# --- dense batches

DENSE = {
    "weights by head": {"average_attn_weights": False, "key_padding_mask": True},
    "padding": {"key_padding_mask": True, "need_weights": False, "is_causal": True},
    "masks": {"key_padding_mask": True, "attn_mask": True},
}


@pytest.mark.parametrize("name", DENSE)
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


# --- dropout


@pytest.mark.parametrize("form", ["layout", "offsets", "dense"])
@slow_backend
def test_dropout_in_a_graph_changes_nothing_in_the_mean(form):
    """Four hundred sequences that are all alike. On a CPU ragged dropout is no operator, and breaks the graph."""
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
        x, place = placed(form, rows, [length] * count)
        return function(x, values, place).view(count, length, EMBED)

    graph = compiled(call, fullgraph=form == "dense")
    out = run(graph)
    (grad,) = torch.autograd.grad(weighted(out), values)
    close((grad * values).sum(), weighted(out), 1e-8)  # linear in values, so the backward drops the very same weights
    assert torch.equal(out, run(graph))  # under the same seed
    error = out.std(0) / count**0.5
    assert (error > 0).all()
    module.eval()
    assert ((out.mean(0) - run(call)[0]).abs() < 5 * error).all()


@slow_backend
def test_an_encoder_layer_trains_with_the_dropout_that_it_has_by_default():
    layer, count, length = encoder_layer(dropout=0.1), 400, 5
    batch = Batch([length] * count)
    batch.rows = batch.rows[:length].repeat(count, 1)

    def call(x, _):
        return layer(x, is_causal=True)

    out, *grads = batch.results(compiled(call, fullgraph=False), "nested", layer.parameters())
    assert all(x.isfinite().all() and x.any() for x in grads)
    one, other = (x.view(count, length, EMBED) for x in (out, batch.results(call, "nested")[0]))
    error = (one.var(0) / count + other.var(0) / count).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()


# --- what a graph does not take


def sees_no_later_key(batch, head, query, key):
    return query >= key


# the module's options, the call's, and what the refusal says
TOO_MUCH = {
    "weights": ({}, {"need_weights": True}, "weights.*graph"),
    "mask": ({}, {"attn_mask": torch.ones(17, 17).tril(2) == 0}, "attn_mask.*graph"),
    "dropout of 1": ({"dropout": 1.0}, {}, "dropout of 1.*graph"),
    "mod": ({}, {"mask_mod": sees_no_later_key}, "mask_mod.*graph"),
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("nested", "weights"), ("layout", "weights"), ("offsets", "weights"), ("nested", "dropout of 1")),
        *(("offsets", "mask"), ("offsets", "mod"), ("layout", "mod")),
    ],
)
@slow_backend
def test_what_a_graph_does_not_take_is_told_and_runs_outside_of_it(form, name):
    options, asked, text = TOO_MUCH[name]
    module, batch = make(**options), Batch(LENGTHS)

    def call(x, place):
        return module(x, x, x, layout=as_layout(place), **asked)

    with pytest.raises(Exception, match=text):
        call_on(compiled(call), form, batch)
    torch._dynamo.reset()
    close(call_on(compiled(call, fullgraph=False), form, batch), call_on(call, form, batch))


def call_on(function, form, batch):
    out, weights = function(*placed(form, batch.rows, batch.lengths))
    out = out.values() if form == "nested" else out
    return [out] if weights is None else [out, weights]


@pytest.mark.parametrize("then", ["in the next graph", "outside of any"])
def test_a_layout_may_outlive_the_graph_that_it_was_made_in(then):
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


@slow_backend
def test_what_the_reference_alone_has_runs_in_the_graph_or_outside_of_it():
    model, batch = Residual(make(softcap=2.0), causal=True), Batch(LENGTHS, KEY_LENGTHS)
    got = batch.results(compiled(model, fullgraph=False), "offsets", model.parameters())
    close(got, batch.results(model, "offsets", model.parameters()))


def test_nested_tensors_with_holes_are_refused_with_what_to_do():
    rows = torch.randn(sum(LENGTHS), EMBED, dtype=torch.float64)
    holes = torch.nested.nested_tensor_from_jagged(rows, offsets_of(LENGTHS), torch.tensor([4, 1, 12, 3]))
    with pytest.raises(Exception, match=r"query has holes between its sequences: call contiguous\(\) on it outside"):
        compiled(Residual(make()))(holes)


@pytest.mark.parametrize(
    "options", [{}, POSITIONS, ADDED, {"alibi": True}], ids=["plain", "positions", "added", "alibi"]
)
def test_an_imagined_call_leaves_nothing_behind(options):
    """Neither with the layout nor anywhere else: the real call after it finds real numbers."""
    module, lengths = make(**options), [3, 1, 7]
    layout = SequenceLayout.from_lengths(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(11, EMBED, dtype=torch.float64)).requires_grad_()
        out, _ = module(x, x, x, layout=layout, is_causal=True)
        out.sum().backward()
        assert x.grad.shape == out.shape == (11, EMBED)
    x = torch.randn(11, EMBED, dtype=torch.float64)
    got, _ = module(x, x, x, layout=layout, is_causal=True)
    alone = [module(part, part, part, is_causal=True, need_weights=False)[0] for part in x.split(lengths)]
    close(got, torch.cat(alone))


# --- torch.export


@pytest.mark.parametrize(("options", "strict"), [({}, True), (POSITIONS, False), (ADDED, True)])
def test_an_exported_program_runs_other_lengths_after_saving_and_loading(options, strict):
    """And exporting leaves the module as it was."""
    model = Residual(make(**options).eval(), causal=True)
    rows, batch, keys = torch.export.Dim("T"), torch.export.Dim("B1", min=2), torch.export.Dim("S")

    def arguments(lengths, key_lengths):
        both = [(torch.randn(sum(x), EMBED, dtype=torch.float64), offsets_of(x)) for x in (lengths, key_lengths)]
        return (*both[0], *both[1])

    example = arguments([5, 3, 7], [4, 6, 2])
    want = model(*example)
    shapes = ({0: rows}, {0: batch}, {0: keys}, {0: batch})
    program = torch.export.export(model, example, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    close(model(*example), want)
    for lengths, key_lengths in (([5, 3, 7], [4, 6, 2]), ([2, 11], [1, 4]), ([1, 0, 9, 4], [3, 5, 1, 2]), ([6], [8])):
        given = arguments(lengths, key_lengths)
        close(loaded(*given), model(*given))


# --- activation checkpointing


class Counting(TorchDispatchMode):
    """Counts calls of the attention operators in ``calls``."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        count(self.calls, function)
        return function(*args, **(kwargs or {}))


def count(calls, function):
    if getattr(function, "namespace", "") == "nt_attention":
        calls.append(function.__name__.partition(".")[0].rpartition("_")[2])


def counting_backend(calls):
    """Counts them in graphs, where they may stand as another operator's argument."""

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
        *(("attention saved", "nested", True), ("attention saved", "layout", True), ("not reentrant", "offsets", True)),
    ],
)
def test_checkpoints_change_no_gradient(kind, form, graph):
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

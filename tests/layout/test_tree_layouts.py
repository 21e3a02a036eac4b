"""`TreeLayout`: sequences that share prefixes, against the same sequences with their prefixes repeated."""

import contextlib
import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import nt_attention as nta
from nt_attention import SequenceLayout, TreeLayout, varlen_attention
from nt_attention.kernels import tree as ways
from nt_attention.kernels.backend import Hooks
from nt_attention.kernels.select import BACKENDS
from nt_attention.layouts.tree import BLOCK

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

H, G, D = 4, 2, 8
TREE = TreeLayout([3, 2, 1, 4, 0, 2, 2], [-1, 0, 0, 2, 2, -1, 5])  # sequences of 5, 8, 4 and 4 tokens
OPTIONS = [
    {},
    {"window_size": (3, -1)},
    {"softcap": 2.0},
    {"scale": 0.3, "causal_alignment": "upper_left"},  # of queries with keys of their own, both are the same
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.3], dtype=torch.float64)},
    {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)},
    {"backend": "reference"},
    {"deterministic": True},
]


def draw(rows, *, more=0):
    return [torch.randn(rows + more, heads, D, dtype=torch.float64, requires_grad=True) for heads in (H, G, G)]


def check(tree, **options):
    """Output, log-sum-exp and gradients, with rows past the last token."""
    q, k, v = draw(tree.total, more=2)
    got = varlen_attention(q, k, v, tree, is_causal=True, return_lse=True, **options)
    repeated = [tree.expand(x) for x in (q, k, v)]
    want = varlen_attention(*repeated, tree.sequences, is_causal=True, return_lse=True, **options)
    assert not got[0][tree.total :].any()
    got = [tree.expand(x) for x in got]
    torch.testing.assert_close(got, list(want), rtol=1e-9, atol=1e-9)
    weights = [torch.randn_like(x) for x in want]
    grads = [torch.autograd.grad(each, (q, k, v), weights) for each in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [ways.JOINED, ways.COPIED])
@pytest.mark.parametrize("options", [{}, {"sinks": OPTIONS[5]["sinks"]}], ids=["causal", "sinks"])
def test_both_ways(way, options, monkeypatch):
    monkeypatch.setattr(ways, "way_of", lambda *_: way)
    check(TREE, **options)


def whole_forward(query, key, value, call):
    rows = call.layout.total
    return tuple(x[:rows] for x in ways.forward(CPU, ways.Tensors(query, key, value), call)[:2])


def whole_backward(saved, query, key, value, call):
    assert saved.grad_lse is None
    return tuple(x[: call.layout.total] for x in ways.backward(CPU, saved, ways.Tensors(query, key, value), call))


CPU = BACKENDS["cpu"]
WHOLE = dataclasses.replace(
    CPU,
    name="whole",
    hooks=Hooks(takes_tree=lambda spec: True, tree_forward=whole_forward, tree_backward=whole_backward),
)


@pytest.mark.parametrize("options", [{}, {"sinks": OPTIONS[5]["sinks"]}], ids=["causal", "sinks"])
def test_a_kernel_with_the_mask_of_the_tree(options, monkeypatch):
    way_of = ways.way_of
    monkeypatch.setattr(
        ways, "way_of", lambda backend, call: ways.MASKED if backend is WHOLE else way_of(backend, call)
    )
    with nta.register_backend(WHOLE):
        check(TREE, backend="whole", **options)


@pytest.mark.parametrize("way", [ways.JOINED, ways.COPIED])
def test_kernels_on_a_tree(way, monkeypatch):
    """The kernel that joins results, and gradients by kernels that get the log-sum-exp of all keys."""
    monkeypatch.setattr(ways, "way_of", lambda *_: way)
    inputs = [x.detach().float().requires_grad_() for x in draw(TREE.total)]
    for _ in range(2):  # the second time with what was kept of the first
        results = [
            varlen_attention(*inputs, TREE, is_causal=True, return_lse=True, backend=backend)
            for backend in ("token_tiled", "reference")
        ]
        torch.testing.assert_close(*results)
        weights = [torch.randn_like(x) for x in results[0]]
        torch.testing.assert_close(*(torch.autograd.grad(each, inputs, weights) for each in results))


DEPTHS = [("cpu", dtype, depth) for dtype in (torch.bfloat16, torch.float16) for depth in (1, 4, 16)]
DEPTHS += [pytest.param("token_tiled", torch.float16, 4, marks=pytest.mark.sweep)]


@pytest.mark.parametrize(
    ("backend", "dtype", "depth"),
    DEPTHS,
    ids=str,
)
def test_errors_in_16_bits_do_not_grow_with_the_depth(backend, dtype, depth, monkeypatch):
    """At most 1.5 times those of repeated rows: of all rows, and of the leaves, which have the most partial results."""
    monkeypatch.setattr(ways, "interpreted", lambda: backend != "cpu")
    tree = TreeLayout([8] * depth + [4] * 12, [*range(-1, depth - 1), *[depth - 1] * 12])
    weight = torch.randn(tree.sequences.total, H, 32).to(dtype)
    rows = [torch.randn(tree.total, heads, 32).to(dtype) for heads in (H, G, G)]

    def attend(backend, dtype, repeats):
        leaves = [x.to(dtype).requires_grad_() for x in rows]
        given = [tree.expand(x) for x in leaves] if repeats else leaves
        out = varlen_attention(*given, tree.sequences if repeats else tree, is_causal=True, backend=backend)
        out = out if repeats else tree.expand(out)
        return [tree.collapse(out), *torch.autograd.grad(out, leaves, weight.to(dtype))]

    exact = attend("reference", torch.float64, True)
    results = [attend(backend, dtype, repeats) for repeats in (False, True)]
    for part in (slice(None), slice(-4 * 12, None)):
        of_tree, of_repeated = (
            torch.stack([(x - y)[part].norm() for x, y in zip(found, exact, strict=True)]) for found in results
        )
        assert (of_tree < 1.5 * of_repeated).all()


def test_learned_biases_by_distance():
    biases = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((H, 3), (14, H, 3), (14, H, 3))
    ]
    buckets = torch.tensor([0, 1, 2, 1, 0])
    q, k, v = draw(TREE.total)
    got = varlen_attention(q, k, v, TREE, is_causal=True, relative=nta.RelativeBias(buckets, *biases))
    repeated = [TREE.expand(x) for x in (q, k, v)]
    relative = nta.RelativeBias(buckets, biases[0], *[TREE.expand(x) for x in biases[1:]])
    want = varlen_attention(*repeated, TREE.sequences, is_causal=True, relative=relative)
    torch.testing.assert_close(TREE.expand(got), want, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad(x, (q, k, v, *biases), weight) for x in (TREE.expand(got), want)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


class Watcher(TorchDispatchMode):
    """Sees all operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("watches", [("forward",), ("backward",), ("forward", "backward")], ids=" ".join)
def test_dispatch_modes(watches):
    q, k, v = draw(TREE.total)
    want = torch.autograd.grad(varlen_attention(q, k, v, TREE, is_causal=True).square().sum(), (q, k, v))
    with Watcher() if "forward" in watches else contextlib.nullcontext():
        out = varlen_attention(q, k, v, TREE, is_causal=True)
    with Watcher() if "backward" in watches else contextlib.nullcontext():
        got = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(got, want)


@st.composite
def batches(draw):
    """Rows of few tokens of an alphabet of two, so that prefixes of any depth are shared; also empty and equal rows."""
    rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=7))
    return rows, draw(st.integers(1, 3)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(batches())
def test_prefixes_that_are_found(batch):
    rows, min_shared, sort = batch
    layout = SequenceLayout.from_lengths([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    tree = TreeLayout.from_prefixes(tokens, layout, min_shared, sort=sort)
    assert tree.sequences.lengths.tolist() == layout.lengths.tolist()
    assert torch.equal(tree.expand(tree.collapse(tokens)), tokens)
    assert torch.equal(tree.expand(tree.position_ids), layout.position_ids)
    paths = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert tree.total >= len(paths)
    firsts = {tuple(row[:min_shared]) for row in rows if len(row) >= min_shared}
    roots = [n for n, parent in zip(tree.segments.lengths, tree.parents, strict=True) if parent < 0 and n >= min_shared]
    assert not sort or len(roots) == len(firsts)
    check(tree)


def test_end_is_the_mask():
    row, end = torch.arange(TREE.total), TREE.end
    visible = (row <= row[:, None]) & (row[:, None] < end)
    q, k, v = draw(TREE.total)
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible)
    torch.testing.assert_close(varlen_attention(q, k, v, TREE, is_causal=True), want.transpose(0, 1))


def test_blocks_are_those_of_the_mask():
    """Each pair is visible exactly if it is in a full block, or in one that needs the mask and `end` says so."""
    tree = TreeLayout([300, 40, 1, 0, 77, 130, 5, 90, 200], [-1, 0, 0, 0, 0, -1, 5, 5, -1])
    row, end = torch.arange(tree.total), tree.end
    visible = (row <= row[:, None]) & (row[:, None] < end)
    pad = -tree.total % BLOCK
    some, every = (
        torch.nn.functional.pad(visible, (0, pad, 0, pad), value=value)
        .unflatten(0, (-1, BLOCK))
        .unflatten(2, (-1, BLOCK))
        for value in (False, True)
    )
    masked, full = (torch.from_numpy(x) for x in tree.blocks())
    assert torch.equal(masked | full, some.any(3).any(1))
    assert torch.equal(full, every.all(3).all(1))
    assert not (masked & full).any()


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 5), (2, 0, 3)], ids=str)
def test_expand_and_collapse_with_second_derivatives(shape):
    tree, x = TreeLayout([2, 1, 1], [-1, 0, 0]), torch.randn(6, *shape, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 1, 2, 0, 1, 3])
    assert torch.equal(tree.expand(x), x[index])
    assert torch.autograd.gradcheck(tree.expand, x)
    assert torch.autograd.gradgradcheck(lambda x: tree.expand(x).pow(3), x)
    assert torch.autograd.gradcheck(tree.collapse, x)
    weight = torch.randn(6, *shape, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):  # the copies are added in float32, and rounded once
        rounded = weight.to(dtype)
        (got,) = torch.autograd.grad(tree.expand(x.to(dtype)), x, rounded)
        assert torch.equal(got, torch.zeros_like(x).index_add(0, index, rounded.double()).to(dtype).double())


def test_one_graph_for_a_tree():
    torch._dynamo.reset()
    q, k, v = draw(TREE.total)

    def attend(q, k, v, tree):
        return varlen_attention(q, k, v, tree, is_causal=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got, want = compiled(q, k, v, TREE), varlen_attention(q, k, v, TREE, is_causal=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)))


@pytest.mark.parametrize("options", [{}, {"rotary": nta.Rotary(8)}, {"num_kv_heads": 2}], ids=str)
def test_module(options):
    attention = nta.VarlenMultiheadAttention(32, 4, dtype=torch.float64, batch_first=True, **options)
    x = torch.randn(TREE.total, 32, dtype=torch.float64, requires_grad=True)
    got = TREE.expand(attention(x, x, x, layout=TREE, is_causal=True)[0])
    repeated = TREE.expand(x)
    want = attention(repeated, repeated, repeated, layout=TREE.sequences, is_causal=True)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want)))


def test_copies_and_pickles():
    for tree in (copy.copy(TREE), copy.deepcopy(TREE), pickle.loads(pickle.dumps(TREE))):
        torch.testing.assert_close((tree.end, tree.position_ids), (TREE.end, TREE.position_ids))
        check(tree)


def test_explain_and_empty_trees():
    q, k, v = draw(TREE.total)
    explanation = nta.explain(q, k, v, TREE, is_causal=True)
    assert explanation.chosen == "cpu"
    assert "joined by their log-sum-exp" in str(explanation)
    assert "are copied" in nta.explain(q, k, v, TREE, is_causal=True, window_size=(3, 0)).prefixes
    assert not nta.explain(q, k, v, TREE.segments, is_causal=True).prefixes
    assert varlen_attention(*draw(0), TreeLayout([], []), is_causal=True).shape == (0, H, D)


def attend(x, **options):
    options = {"layout": TREE, "is_causal": True, **options}
    return nta.VarlenMultiheadAttention(H * D, H, batch_first=True)(x, x, x, **options)


ERRORS = [
    (lambda q: varlen_attention(q, q, q, TREE), "needs is_causal=True"),
    (lambda q: varlen_attention(q, q, q, TREE, dropout_p=0.5, is_causal=True), "dropout_p is not supported"),
    (lambda q: varlen_attention(q, q, q, TREE, TREE.sequences, is_causal=True), "key_layout is not supported"),
    (
        lambda q: varlen_attention(q, q, q, SequenceLayout.from_lengths([14]), TREE, is_causal=True),
        "without key_layout",
    ),
    (lambda q: varlen_attention(q, q, q, TREE, is_causal=True, alibi_slopes=torch.ones(4, H)), "of each sequence"),
    (lambda q: varlen_attention(q, q, q, TREE, is_causal=True, score_mod=lambda *x: x[0]), "score_mod"),
    (lambda q: varlen_attention(q[:5], q[:5], q[:5], TREE, is_causal=True), "14 tokens"),
    (lambda q: TreeLayout([1, 2], [-1]), "2 lengths and 1 parents"),
    (lambda q: TreeLayout([1, -2], [-1, 0]), r"lengths\[1\] is -2"),
    (lambda q: TreeLayout([1, 1, 1, 1], [-1, 0, 0, 1]), r"parents\[3\] is 1"),
    (lambda q: TreeLayout([1.5], [-1]), "one integer for each segment"),
    (lambda q: TreeLayout.from_prefixes(q, TREE.sequences), r"tokens must be \(T,\) integers"),
    (lambda q: TreeLayout.from_prefixes(torch.ones(21).long(), TREE.sequences, 0), "min_shared"),
    (lambda q: TREE.expand(q[:3]), "14 tokens"),
    (lambda q: TREE.expand([1, 2]), "must be a torch.Tensor"),
    (lambda q: TreeLayout(torch.ones(2, device="meta"), [-1, 0]), "meta device"),
    (lambda q: TREE.pad(q), "pad can't have a TreeLayout"),
    (lambda q: attend(q.flatten(1), need_weights=True), "can't have a TreeLayout"),
    (lambda q: attend(q.flatten(1), attn_mask=torch.rand(14, 14), is_causal=False), "TreeLayout"),
]


@pytest.mark.parametrize(("function", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors(function, message):
    with pytest.raises((ValueError, TypeError), match=message):
        function(torch.randn(TREE.total, H, D))

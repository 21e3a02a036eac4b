"""`varlen_attention` with a `ShardedLayout`, in several processes, against one process."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from processes import run_in_processes
from ranks import mesh_of_all, use_two_calls
from sweeps import covering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention.distributed.attention import prepare
from nt_attention.kernels.backend import Hooks
from nt_attention.kernels.backends import cpu

BATCHES = {
    "mixed": [40, 1, 0, 7, 13, 3, 90],
    "one": [50],
    "short": [3, 4, 5, 2, 6, 1, 3],
    "fewer tokens than ranks": [0, 2, 1],
    "no tokens": [0, 0],
}
HEADS = {"equal": (4, 4), "grouped": (4, 2), "one key head": (4, 1), "uneven": (6, 3), "fewer heads than ranks": (3, 3)}


def inputs_of(lengths, heads, kv_heads, key_lengths=None, value_dim=5):
    generator = torch.Generator().manual_seed(1)
    keys = lengths if key_lengths is None else key_lengths
    shapes = [(sum(lengths), heads, 8), (sum(keys), kv_heads, 8), (sum(keys), kv_heads, value_dim)]
    shapes += [(sum(lengths), heads, value_dim), (sum(lengths), heads)]
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


def options_of(kind, heads, batch):
    if kind == "alibi":
        return {"is_causal": True, "alibi_slopes": torch.linspace(0.1, 1, heads, dtype=torch.float64)}
    if kind == "alibi of each sequence":
        return {"is_causal": True, "alibi_slopes": torch.rand(batch, heads).double()}
    if kind == "open alibi":
        return {"alibi_slopes": torch.linspace(0.1, 1, heads, dtype=torch.float64)}
    if kind == "mods":
        return {
            "score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.1 * h - 0.01 * (q_idx - kv_idx) + 0.2 * b,
            "mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx + q_idx * q_idx + h + b) % 3 != 1,
        }
    if kind == "window and mods":
        return {"window_size": (5, 4), **options_of("mods", heads, batch)}
    return {
        "full": {},
        "causal": {"is_causal": True},
        "upper left": {"is_causal": True, "causal_alignment": "upper_left"},
        "window": {"is_causal": True, "window_size": (9, -1)},
        "two-sided window": {"window_size": (5, 4)},
        "window behind": {"window_size": (6, -1)},
        "softcap": {"is_causal": True, "softcap": 2.0},
        "scale": {"is_causal": True, "scale": -0.3},
    }[kind]


def in_one_process(lengths, heads, kv_heads, kind, sinks, key_lengths):
    """out, lse, and the gradients of query, key, value and sinks."""
    *leaves, grad, grad_lse = inputs_of(lengths, heads, kv_heads, key_lengths)
    leaves = [x.requires_grad_() for x in leaves]
    leaves += [torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_()] if sinks else []
    layout = nta.SequenceLayout.from_lengths(lengths)
    key_layout = layout if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths)
    more = {"sinks": leaves[3]} if sinks else {}
    torch.manual_seed(0)
    options = options_of(kind, heads, len(lengths))
    out, lse = nta.varlen_attention(
        *leaves[:3], layout, key_layout, return_lse=True, backend="reference", **more, **options
    )
    finite = lse.isfinite()
    total = (out * grad).sum() + (lse.where(finite, 0) * grad_lse).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(total, leaves))]


def on_each_rank(lengths, heads, kv_heads, kind, sinks, key_lengths, backend):
    mesh = mesh_of_all()
    *leaves, grad, grad_lse = inputs_of(lengths, heads, kv_heads, key_lengths)
    sharded = nta.SequenceLayout.from_lengths(lengths).shard(mesh)
    keys = sharded if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths).shard(mesh)
    leaves = [each.local(x).requires_grad_() for each, x in zip((sharded, keys, keys), leaves, strict=True)]
    leaves += [torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_()] if sinks else []
    more = {"sinks": leaves[3]} if sinks else {}
    torch.manual_seed(0)
    options = options_of(kind, heads, len(lengths))
    out, lse = nta.varlen_attention(
        *leaves[:3], sharded, None if key_lengths is None else keys, return_lse=True,
        backend=backend, **more, **options,
    )  # fmt: skip
    finite = lse.isfinite()
    total = (out * sharded.local(grad)).sum() + (lse.where(finite, 0) * sharded.local(grad_lse)).sum()
    grads = torch.autograd.grad(total, leaves)
    gathered = [
        each.gather(x) for each, x in zip((sharded, sharded, sharded, keys, keys), (out, lse, *grads), strict=False)
    ]
    if sinks:
        torch.distributed.all_reduce(grads[3])
        gathered.append(grads[3])
    return gathered


def check(world, lengths, heads, kind, sinks=False, key_lengths=None, backend="reference", function=on_each_rank):
    want = in_one_process(lengths, *heads, kind, sinks, key_lengths)
    found = run_in_processes(world, function, lengths, *heads, kind, sinks, key_lengths, backend)
    for got in found:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("which", BATCHES)
def test_batches(world, which):
    check(world, BATCHES[which], (4, 2), "causal", sinks=True)


def in_two_calls(splits_heads, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        use_two_calls(patch, splits_heads)
        return on_each_rank(*arguments)


def writes_to_given_tensors():
    calls = []

    def forward(query, key, value, call, out=None):
        result, lse = cpu.BACKEND.forward(query, key, value, call)
        calls.append(out is not None)
        return (result if out is None else out.copy_(result)), lse

    def backward(saved, query, key, value, call, dq=None):
        result, *others = cpu.BACKEND.backward(saved, query, key, value, call)
        calls.append(dq is not None)
        return (result if dq is None else dq.copy_(result)), *others

    backend = replace(cpu.BACKEND, name="writes", forward=forward, backward=backward, hooks=Hooks())
    backend = replace(backend, traits=cpu.BACKEND.traits | {"takes_outputs"})
    handle = nta.register_backend(backend)
    try:
        sharded = nta.SequenceLayout.from_lengths([300, 5, 40]).shard(mesh_of_all())
        inputs = [torch.randn(sharded.total, heads, 8, requires_grad=True) for heads in (6, 3, 3)]
        results = []
        for name in ("writes", "cpu"):
            out = nta.varlen_attention(*inputs, sharded, is_causal=True, backend=name)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    finally:
        handle.remove()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert calls == [True] * 4


def test_two_calls_write_to_the_joined_tensors():
    run_in_processes(2, partial(in_two_calls_of, writes_to_given_tensors))


def in_two_calls_of(function, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        use_two_calls(patch, splits_heads=True)
        function(*arguments)


def with_checkpoint(lengths, heads, kv_heads, backend, use_reentrant):
    sharded = nta.SequenceLayout.from_lengths(lengths).shard(mesh_of_all())
    shapes = [(sharded.total, count, 8) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(*tensors):
        return nta.varlen_attention(*tensors, sharded, is_causal=True, backend=backend)

    want, found = (
        torch.autograd.grad(out.square().sum(), inputs) if not use_reentrant else backward(out, inputs)
        for out in (run(*inputs), checkpoint(run, *inputs, use_reentrant=use_reentrant))
    )
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def backward(out, inputs):
    """A reentrant checkpoint needs `backward`."""
    out.square().sum().backward()
    grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return grads


CHECKPOINTED = [(2, [1]), (4, [5])]  # ranks, lengths: with a rank that has no token


@covering({"which": range(len(CHECKPOINTED)), "backend": ["cpu", "reference"], "use_reentrant": [False, True]})
def test_checkpoint(which, backend, use_reentrant):
    """All ranks compute the forward again as often as the others, or they would wait forever."""
    world, lengths = CHECKPOINTED[which]
    for function in (with_checkpoint, partial(in_two_calls_of, with_checkpoint)):
        run_in_processes(world, function, lengths, 6, 3, backend, use_reentrant)


def in_place_before_backward():
    sharded = nta.SequenceLayout.from_lengths([30, 5]).shard(mesh_of_all())
    inputs = [torch.randn(sharded.total, 2, 8, requires_grad=True) for _ in range(3)]
    query, key, value = (x * 1 for x in inputs)
    out = nta.varlen_attention(query, key, value, sharded, backend="reference")
    query.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs)


def test_reference_finds_in_place_changes():
    run_in_processes(2, in_place_before_backward)


def copies():
    sharded = nta.SequenceLayout.from_lengths([9, 4]).shard(mesh_of_all())
    assert sharded.group is not None
    assert copy.deepcopy(sharded).sizes == pickle.loads(pickle.dumps(sharded)).sizes == sharded.sizes


def test_copy_and_pickle():
    run_in_processes(2, copies)


def schedule_of(lengths, kv_heads=8):
    """The groups of key heads, and whether whole sequences run alone, for 32 heads of 128 in bfloat16."""
    sharded = nta.SequenceLayout.from_lengths(lengths).shard(mesh_of_all())
    row = torch.empty(1, 1, 128, dtype=torch.bfloat16)
    query, key = (row.expand(sharded.total, heads, 128) for heads in (32, kv_heads))
    _, schedule = prepare(query, key, key, sharded, None, None, None, {"is_causal": True})
    return schedule.groups, schedule.is_async


def selected_calls():
    assert schedule_of([16384]) == ([2, 6], True)  # the first group is small, because its keys travel alone
    assert schedule_of([131072]) == ([4, 4], True)  # halves need less memory
    assert schedule_of([16384], kv_heads=1) == ([1], False)
    assert schedule_of([200, 30]) == ([8], False)  # waits for the host
    assert schedule_of([64] * 10) == ([], False)  # nothing is cut


def test_selected_calls():
    run_in_processes(2, selected_calls)


@covering(
    {
        "world": [2, 4, 2, 4],
        "which": ["mixed", "fewer tokens than ranks", "one", "mixed"],
        "kind": ["causal", "alibi of each sequence"],
        "splits_heads": [True, True, False, False],
    }
)
def test_calls_run_while_rows_travel(world, which, kind, splits_heads):
    heads = (6, 3)  # groups of 1 and 2 key heads
    check(world, BATCHES[which], heads, kind, sinks=True, function=partial(in_two_calls, splits_heads))


def test_two_calls_of_a_backend_with_a_backward():
    check(2, BATCHES["mixed"], (4, 2), "causal", backend="cpu", function=partial(in_two_calls, True))


@pytest.mark.parametrize(
    "kind", ["full", "upper left", "window", "softcap", "scale", "alibi", "alibi of each sequence", "mods"]
)
def test_masks(kind):
    check(2, BATCHES["mixed"], (4, 2), kind)


@covering({"world": [2, 4], "kind": ["two-sided window", "window behind", "open alibi", "window and mods"]})
def test_masks_with_keys_after_a_query(world, kind):
    """The calls have more queries than the rank."""
    check(world, BATCHES["mixed"], (4, 2), kind)
    for splits_heads in (True, False):
        check(world, BATCHES["mixed"], (6, 3), kind, backend="cpu", function=partial(in_two_calls, splits_heads))


@pytest.mark.parametrize("which", HEADS)
def test_heads(which):
    check(4, BATCHES["mixed"], HEADS[which], "alibi")


@covering(
    {
        "kind": ["full", "causal", "upper left", "window", "two-sided window", "alibi", "mods"],
        "splits_heads": [False, True],
    }
)
def test_cross_attention(kind, splits_heads):
    """One rank has no queries, and sequences have fewer or more keys than queries."""
    function = partial(in_two_calls, True) if splits_heads else on_each_rank
    check(2, [5, 0, 9, 3], (4, 2), kind, key_lengths=[7, 2, 0, 20], function=function)
    check(4, [1, 1, 9, 0], (4, 2), kind, sinks=True, key_lengths=[7, 2, 3, 20], function=function)


def test_a_backend_with_a_backward():
    check(2, BATCHES["mixed"], (4, 2), "causal", backend="cpu")


def local_rows_and_dtensor(lengths):
    mesh = mesh_of_all()
    layout = nta.SequenceLayout.from_lengths(lengths)
    sharded = layout.shard(mesh)
    x = torch.arange(2.0 * layout.total).view(-1, 2).requires_grad_()
    local = sharded.local(x)
    (sharded.gather(local) * x.detach()).sum().backward()
    assert torch.equal(x.grad[sharded.rows], x.detach()[sharded.rows])
    assert torch.equal(sharded.position_ids, layout.position_ids[sharded.rows])
    q = torch.randn(sharded.total, 2, 4)
    as_dtensor = DTensor.from_local(q, mesh, [Shard(0)], run_check=False, shape=(layout.total, 2, 4), stride=(8, 4, 1))
    out = nta.varlen_attention(as_dtensor, as_dtensor, as_dtensor, sharded, is_causal=True)
    assert out.shape == (layout.total, 2, 4)
    assert torch.equal(out.to_local(), nta.varlen_attention(q, q, q, sharded, is_causal=True))
    assert [len(each) for each in x.chunk(sharded.ranks)] == [n for n in sharded.sizes if n]
    return sharded.gather(local)


@pytest.mark.parametrize("world", [2, 4])
def test_local_rows_and_gather(world):
    for lengths in ([40, 1, 0, 7], [2, 0, 1]):
        for found in run_in_processes(world, local_rows_and_dtensor, lengths):
            np.testing.assert_array_equal(found, np.arange(2.0 * sum(lengths)).reshape(-1, 2))


def another_document(changed):
    mesh = init_device_mesh("cpu", (2,))
    sharded = nta.SequenceLayout.from_lengths([30, 12, 41]).shard(mesh)
    query, key, value = (x.clone() for x in inputs_of([30, 12, 41], 4, 2)[:3])
    for x in (query, key, value):
        x[30:42] += changed
    local = [sharded.local(x) for x in (query, key, value)]
    return sharded.gather(nta.varlen_attention(*local, sharded, is_causal=True))


def test_a_document_changes_no_other():
    one, other = (run_in_processes(2, another_document, changed)[0] for changed in (0.0, 1.0))
    np.testing.assert_array_equal(np.delete(one, range(30, 42), 0), np.delete(other, range(30, 42), 0))
    assert np.abs(one[30:42] - other[30:42]).min() > 0


def calls_on_one_layout():
    lengths, mesh, every = [40, 7], mesh_of_all(), (0, 1, 2)
    layout = nta.SequenceLayout.from_lengths(lengths)
    sharded = layout.shard(mesh)
    for heads, dtype, needed, options, key_lengths in (
        (4, torch.float64, (), {"backend": "reference"}, None),
        (4, torch.float64, (2,), {"backend": "reference"}, None),
        (4, torch.float64, every, {"scale": 0.2}, None),
        (4, torch.float64, every, {"scale": 0.9}, None),
        (4, torch.float64, (1,), {"scale": 0.9, "softcap": 1.0}, None),
        (2, torch.float64, every, {"scale": 0.9}, None),
        (2, torch.float32, every, {"scale": 0.9}, None),
        (2, torch.float32, every, {"scale": 0.9}, [3, 50]),
        (2, torch.float32, every, {"scale": 0.9}, [41, 12]),
    ):
        keys = None if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths)
        of_keys = None if keys is None else keys.shard(mesh)
        *inputs, weights, _ = (x.to(dtype) for x in inputs_of(lengths, heads, 2, key_lengths))
        cuts = [sharded.local, *[(of_keys or sharded).local] * 2]
        results = []
        for layouts, own in (((layout, keys), [torch.clone] * 3), ((sharded, of_keys), cuts)):
            tensors = [cut(x).requires_grad_(i in needed) for i, (cut, x) in enumerate(zip(own, inputs, strict=True))]
            out = nta.varlen_attention(*tensors, *layouts, is_causal=True, **options)
            assert out.requires_grad == bool(needed)
            if needed:
                (out * own[0](weights)).sum().backward()
            results.append([out.detach(), *[x.grad for x in tensors]])
        for cut, want, found in zip((sharded.local, *cuts), *results, strict=True):
            assert (want is None) == (found is None)
            if want is not None:
                torch.testing.assert_close(found, cut(want))


def test_calls_on_one_layout():
    """Each call has other options, shapes, dtypes, keys or needs of gradients than the one before."""
    run_in_processes(2, calls_on_one_layout)


class CountedCalls:
    def __init__(self):
        self.count, self.real = 0, torch.distributed.all_to_all_single

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.real(*args, **kwargs)


def collectives(lengths):
    torch.distributed.all_to_all_single = counted = CountedCalls()
    try:
        sharded = nta.SequenceLayout.from_lengths(lengths).shard(init_device_mesh("cpu", (2,)))
        q = torch.randn(sharded.total, 2, 4, requires_grad=True)
        nta.varlen_attention(q, q, q, sharded, is_causal=True).sum().backward()
        return counted.count
    finally:
        torch.distributed.all_to_all_single = counted.real


def test_no_collective_where_nothing_is_cut():
    assert run_in_processes(2, collectives, [8, 8]) == [0, 0]
    assert run_in_processes(2, collectives, [16]) == [2, 2]


def changed_in_place():
    sharded = nta.SequenceLayout.from_lengths([9, 4]).shard(mesh_of_all())
    leaf = torch.randn(sharded.total, 2, 4, requires_grad=True)
    slopes = torch.ones(2)
    local = DTensor.from_local(
        leaf.detach(), sharded.mesh, [Shard(0)], run_check=False, shape=(13, 2, 4), stride=(8, 4, 1)
    )
    for x in (leaf * 1, local.requires_grad_(), slopes):
        query, options = (leaf, {"alibi_slopes": slopes}) if x is slopes else (x, {})
        out = nta.varlen_attention(query, query, query, sharded, is_causal=True, **options)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (out.to_local() if isinstance(out, DTensor) else out).sum().backward()


def test_changes_in_place():
    run_in_processes(2, changed_in_place)


def modes():
    """A backward runs twice, also on a rank without tokens; inference mode; autocast; no second derivatives."""
    mesh = mesh_of_all()
    few, sharded = (nta.SequenceLayout.from_lengths(lengths).shard(mesh) for lengths in ([0, 1], [9, 4]))
    for each in (few, sharded):
        q = torch.randn(each.total, 2, 4, requires_grad=True)
        out = nta.varlen_attention(q, q, q, each, backend="reference").sum()
        first, second = (torch.autograd.grad(out, q, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
    q = torch.randn(sharded.total, 2, 4, requires_grad=True)
    out = nta.varlen_attention(q, q, q, sharded, is_causal=True)
    with torch.inference_mode():
        torch.testing.assert_close(nta.varlen_attention(*[q.clone()] * 3, sharded, is_causal=True), out.detach())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = nta.varlen_attention(q, q, q, sharded, is_causal=True)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert q.grad.dtype == torch.float32


def test_modes_of_autograd():
    run_in_processes(2, modes)


def errors():
    mesh = init_device_mesh("cpu", (2,))
    layout = nta.SequenceLayout.from_lengths([6, 2])
    sharded, other = layout.shard(mesh), nta.SequenceLayout.from_lengths([8]).shard(mesh)
    q = torch.randn(4, 2, 4)

    def attend(*args, **options):
        return nta.varlen_attention(*args, **options)

    want = attend(q, q, q, sharded, window_size=(4, -1))
    torch.testing.assert_close(attend(q, q, q, sharded, window_size=[4, -1]), want)
    strided = torch.nested.nested_tensor([torch.randn(6, 4, 8), torch.randn(2, 4, 8)])
    whole = layout.shard(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"])
    assert attend(strided, strided, strided, whole, is_causal=True).is_nested

    elsewhere = DTensor.from_local(q, whole.mesh, [Shard(0)])
    for match, call in {
        "must be Shard.0. on the mesh of the layout": lambda: attend(elsewhere, elsewhere, elsewhere, sharded),
        "must have the 4 rows of rank": lambda: attend(torch.randn(8, 2, 4), q, q, sharded),
        "dropout is not supported": lambda: attend(q, q, q, sharded, dropout_p=0.1),
        "as many sequences": lambda: attend(q, q, q, sharded, other),
        "must be a ShardedLayout": lambda: attend(q, q, q, sharded, layout),
        "mesh must be a DeviceMesh": lambda: layout.shard(None),
        "window_size": lambda: layout.shard(mesh, window_size=(-5, 0)),
        "two integers": lambda: attend(q, q, q, sharded, window_size=(4.0, -1.0)),  # after a good one
        "must have one dimension": lambda: layout.shard(init_device_mesh("cpu", (2, 1))),
    }.items():
        with pytest.raises((ValueError, TypeError), match=match):
            call()


def test_errors():
    run_in_processes(2, errors)

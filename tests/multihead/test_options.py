"""The table of VarlenMultiheadAttention: options of the constructor × forms of input × modes.

Each call gives what each sequence gives by itself, through the oracle in float64 and, where the options are those of
nn.MultiheadAttention, through that module. The gradients of inputs and parameters are compared too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import oracle
import pytest
import torch
from functorch.compile import make_boxed_func
from multihead_cases import (
    EMBED,
    FORMS,
    KEY_LENGTHS,
    LENGTHS,
    OPTIONS,
    STOCK,
    TOLERANCE,
    Attend,
    added_keys,
    arguments_of,
    call,
    causal_masks,
    expected,
    gradients,
    inputs_of,
    leaves_of,
    make,
    one_at_a_time,
    random_sequences,
    results_of,
    rows,
)
from sweeps import covering
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention import SequenceLayout

pytestmark = [
    pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning"),
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]
WEIGHTS = {"need_weights": True, "average_attn_weights": False}
Routes = Iterator[tuple[str, Tensor, Tensor | None]]


def test_every_option_has_a_row():
    options = {*inspect.signature(nta.VarlenMultiheadAttention).parameters}
    options -= {"embed_dim", "device", "dtype", "unknown"}  # device and dtype: test_nn_module.py
    assert options == set().union(*OPTIONS.values())


def ragged(module: Any, parts: Sequence[list[Tensor]], causal: bool) -> Routes:
    """Outputs (T, E), and weights (B, H, L, S) or None, of every ragged form and kind of mask."""
    shapes = [(len(q), len(k)) for q, k in zip(*parts[:2], strict=True)]
    masks = causal_masks(parts) if causal else [torch.zeros(shape, dtype=torch.bool) for shape in shapes]
    numbers = [torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -torch.inf) for x in masks]
    for form in FORMS:
        yield form, *call(form, module, parts, is_causal=causal)
    yield "weights", *call("packed", module, parts, is_causal=causal, **WEIGHTS)
    yield "mask", *call("packed", module, parts, attn_mask=masks)
    yield "mask and weights", *call("strided", module, parts, attn_mask=masks, **WEIGHTS)
    yield "mask of numbers", *call("list", module, parts, attn_mask=numbers)
    if not added_keys(module):
        mods = {"mask_mod": lambda b, h, i, j: (i >= j) | (not causal), "score_mod": lambda s, b, h, i, j: s + 0.0}
        yield "mods", *call("jagged", module, parts, **mods)
        yield "mods and weights", *call("packed", module, parts, **mods, **WEIGHTS)


def dense(module: Any, parts: Sequence[list[Tensor]], side: str, causal: bool) -> Routes:
    """The same of padded batches."""

    def padded(xs: list[Tensor]) -> Tensor:
        longest = max(map(len, xs))
        sides = [(0, 0, longest - len(x), 0) if side == "left" else (0, 0, 0, longest - len(x)) for x in xs]
        return torch.stack([F.pad(x, n) for x, n in zip(xs, sides, strict=True)])

    def run(**arguments: Any) -> tuple[Tensor, Tensor | None]:
        given = inputs if module.batch_first else [swapped[id(x)] for x in inputs]
        out, weights = module(*given, **arguments)
        return (out if module.batch_first else out.transpose(0, 1))[real], weights

    once = {id(xs): padded(xs) for xs in parts}
    inputs = [once[id(xs)] for xs in parts]
    swapped = {id(x): x.transpose(0, 1) for x in once.values()}
    real, here = (padded([torch.ones(len(x), 1) for x in xs]).squeeze(-1).bool() for xs in parts[:2])
    mask = torch.ones(inputs[0].shape[1], inputs[1].shape[1], dtype=torch.bool).triu(1) if causal else None
    numbers = torch.zeros(here.shape, dtype=torch.float64).masked_fill(~here, -torch.inf)
    for name, padding in (("bool", ~here), ("float", numbers)):
        yield f"{side}, {name}", *run(key_padding_mask=padding, need_weights=False, is_causal=causal)
        out, weights = run(key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
        seen = None if side == "left" else weights.masked_fill(~real[:, None, :, None], 0.0)
        yield f"{side}, {name}, weights", out, seen


@covering({"name": OPTIONS, "cross": [False, True], "causal": [True, False, False]})
def test_every_form_gives_each_sequence_alone(name, cross, causal):
    module = make(name)
    parts = inputs_of(module, cross)
    want, weights = expected(module, parts, is_causal=causal)
    found = [*ragged(module, parts, causal), *dense(module, parts, "right", causal)]
    if parts[0] is parts[1]:  # by column, keys at the right of the row are not across from queries at its left
        found += dense(module, parts, "left", causal)
    if name in STOCK:
        found.append(("nn.MultiheadAttention", *one_at_a_time(module, parts, causal_masks(parts) if causal else None)))
    leaves = leaves_of(module, parts)
    wants = {weighed: results_of((want, weights if weighed else None), leaves) for weighed in (False, True)}
    wrong = []
    for route, out, seen in found:
        try:
            oracle.assert_same(results_of((out, seen), leaves), wants[seen is not None], TOLERANCE)
        except AssertionError as error:
            wrong.append(f"{route}: {' '.join(str(error).split())[:300]}")
    assert not wrong, "\n".join(wrong)
    last = [xs[-1] for xs in parts]  # a single sequence (L, E), and the mean of its weights
    mask = causal_masks(parts)[-1] if causal else None
    out, mean = module(*last, attn_mask=mask)
    torch.testing.assert_close(out, want[-len(last[0]) :], rtol=TOLERANCE, atol=TOLERANCE)
    kept = [*range(len(last[1])), *range(weights.shape[3] - added_keys(module), weights.shape[3])]
    torch.testing.assert_close(mean, weights[-1].mean(0)[: len(last[0]), kept], rtol=TOLERANCE, atol=TOLERANCE)


def recording(read: list[Any]) -> Callable[..., Any]:
    """A compiler that appends to `read` each node of its graphs that reads a value from the device."""
    asking = ("aten.item", "_local_scalar_dense", "aten.nonzero", "aten.unique", "aten.equal")

    def look(graph: Any, inputs: Any) -> Any:
        read.extend(node for node in graph.graph.nodes if any(name in str(node.target) for name in asking))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look, bw_compiler=look)


def compiled(model: Attend, form: str, parts: Sequence[list[Tensor]]) -> Tensor:
    """It runs before eager, which could leave cached values, and reads none although the compiler would allow it."""
    read: list[Any] = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        out = torch.compile(model, backend=recording(read), fullgraph=True)(*arguments_of(form, parts))
    assert not read
    return rows(out)


def exported(model: Attend, form: str, parts: Sequence[list[Tensor]]) -> Tensor:
    """With example inputs of other lengths, after saving and loading."""
    lengths = [5, 3, 7], [4, 6, 2], [4, 6, 2]
    others = [random_sequences(n, xs[0].shape[1]) for n, xs in zip(lengths, parts, strict=True)]
    query, key, batch = (torch.export.Dim(name, min=2) for name in "TSB")
    shapes = {0: query}, {0: key}, {0: key}, ({0: batch}, {0: batch})
    example = tuple(arguments_of("offsets", others))
    program = torch.export.export(model, example, dynamic_shapes=shapes, strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()(*arguments_of("offsets", parts))


def checkpointed(model: Attend, form: str, parts: Sequence[list[Tensor]], **how: Any) -> Tensor:
    return rows(checkpoint(model, *arguments_of(form, parts), **how))


def eager(model: Attend, form: str, parts: Sequence[list[Tensor]]) -> Tensor:
    return rows(model(*arguments_of(form, parts)))


def without_gradients(mode: Any, model: Attend, form: str, parts: Sequence[list[Tensor]]) -> Tensor:
    """And with them afterwards, on what the first call left behind."""
    parts_of = {id(xs): [x.detach() for x in xs] for xs in parts}
    given = [parts_of[id(xs)] for xs in parts]
    with mode():
        first = rows(model(*arguments_of(form, given)))
    out = eager(model, form, parts)
    torch.testing.assert_close(first.clone(), out.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    return out


EXACT: dict[str, Callable[..., Tensor]] = {
    "compiled": compiled,
    "exported": exported,
    "checkpoint": functools.partial(checkpointed, use_reentrant=False),
    "reentrant checkpoint": functools.partial(checkpointed, use_reentrant=True),
    "no_grad": functools.partial(without_gradients, torch.no_grad),
    "inference": functools.partial(without_gradients, torch.inference_mode),
}


@covering(
    {
        "name": OPTIONS,
        "mode": [*EXACT, *[mode for mode in EXACT if mode not in ("compiled", "exported")], "no_grad"],
        "form": ["nested", "layout", "offsets", "nested", "offsets"],
        "cross": [False, True, True],
        "causal": [True, False],
    }
)
def test_every_mode_gives_each_sequence_alone(name, mode, form, cross, causal):
    module = make(name, **({"backend": "auto"} if mode == "compiled" else {}))
    parts = inputs_of(module, cross or mode == "exported")
    leaves = leaves_of(module, parts)
    got = gradients(EXACT[mode](Attend(module, causal), form, parts), leaves)
    want = gradients(expected(module, parts, is_causal=causal)[0], leaves)
    if mode == "exported":  # the program has parameters of its own
        got, want = got[:1], want[:1]
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@covering({"name": OPTIONS, "way": ["plain", "weights", "mask", "float mask", "dense"], "narrow": [True, False]})
def test_autocast_and_bfloat16_are_close_to_float32(name, way, narrow):
    module = make(name, dtype=torch.float32)
    widths = (EMBED, module.kdim, module.vdim)
    queries, keys, values = (random_sequences([5, 7], width, torch.float32) for width in widths)
    parts = [queries, keys, values] if module.kdim != EMBED else [queries] * 3
    arguments: dict[str, Any] = {
        "weights": {"need_weights": True},
        "mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(2)},
        "float mask": {"attn_mask": torch.randn(7, 7)},
        "dense": {"need_weights": False, "key_padding_mask": (torch.arange(7) > 4)[None]},
    }.get(way, {})

    def run(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        once = {id(xs): [x.to(dtype) for x in xs] for xs in parts}
        given = [once[id(xs)] for xs in parts]
        more = {k: x.to(dtype) if way == "float mask" else x for k, x in arguments.items()}
        if way == "dense":
            batches = {id(xs): xs[1][None] if module.batch_first else xs[1][:, None] for xs in given}
            out, _ = module(*(batches[id(xs)] for xs in given), **more)
        else:
            out, _ = call("jagged" if way == "plain" else "packed", module, given, **more)
        loss = out.float().square().sum()
        return out, torch.autograd.grad(loss, [*module.parameters()], materialize_grads=True)

    want, wanted = run(module, torch.float32)
    if narrow:
        out, grads = run(copy.deepcopy(module).bfloat16(), torch.bfloat16)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            out, grads = run(module, torch.float32)
        assert {x.dtype for x in grads} == {torch.float32}
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).norm() < 0.03 * want.norm()
    off, size = (torch.cat([x.flatten() for x in xs]).norm() for xs in (map(torch.sub, grads, wanted), wanted))
    assert off < 0.1 * size


@covering({"name": OPTIONS, "way": ["packed", "weights", "masks", "mods", "lists"]})
def test_torch_func_grad_gives_autograd_s_gradients(name, way):
    module = make(name)
    parts = [[x.detach() for x in xs] for xs in inputs_of(module, cross=True)]
    layouts = dict(zip(("layout", "key_layout"), map(SequenceLayout.from_lengths, (LENGTHS, KEY_LENGTHS)), strict=True))
    arguments: dict[str, Any] = {
        "weights": {"need_weights": True},
        "masks": {"attn_mask": torch.rand(13, 13) < 0.3},
        "mods": {"mask_mod": None if added_keys(module) else lambda b, h, q, k: (q + k) % 3 != 0},
    }.get(way, {})
    parameters = {key: x.detach() for key, x in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], *rows: Tensor) -> Tensor:
        given: list[Any] = list(rows)
        if way == "lists":
            lengths = LENGTHS, KEY_LENGTHS, KEY_LENGTHS
            given = [list(x.split(n)) for x, n in zip(rows, lengths, strict=True)]
        more = arguments if way == "lists" else {**arguments, **layouts}
        outs, weights = torch.func.functional_call(module, parameters, tuple(given), more)
        outs = outs if way == "lists" else [outs]
        return sum(x.square().sum() for x in outs) + (0.0 if weights is None else weights.square().sum())

    rows_of = [torch.cat(xs) for xs in parts]
    (grads, grad), value = torch.func.grad_and_value(loss, argnums=(0, 1))(parameters, *rows_of)
    leaves = {key: x.requires_grad_() for key, x in parameters.items()}
    query = rows_of[0].requires_grad_()
    alone = loss(leaves, query, *rows_of[1:])
    want = torch.autograd.grad(alone, [*leaves.values(), query], materialize_grads=True)
    torch.testing.assert_close([value, *grads.values(), grad], [alone.detach(), *want], rtol=TOLERANCE, atol=TOLERANCE)


@covering({"name": OPTIONS, "how": [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]})
def test_copies_have_their_own_parameters_and_the_same_results(name, how):
    if name == "norm of one's own" and how is not copy.deepcopy:
        how = copy.deepcopy
    module = make(name)
    parts = inputs_of(module, cross=False)
    want = call("jagged", module, parts, need_weights=True)  # before, so that whatever is kept is copied too
    twin = how(module)
    assert {id(x) for x in twin.parameters()}.isdisjoint(id(x) for x in module.parameters())
    torch.testing.assert_close(call("jagged", twin, parts, need_weights=True), want, rtol=0, atol=0)
    loaded = make(name)
    loaded.load_state_dict(module.state_dict())
    torch.testing.assert_close(call("jagged", loaded, parts, need_weights=True), want, rtol=0, atol=0)

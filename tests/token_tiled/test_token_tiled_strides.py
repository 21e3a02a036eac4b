"""The token-tiled kernels on tensors with any strides."""

from functools import partial

import calls
import pytest
import torch
from oracle import Problem, assert_same
from sweeps import sweep_product
from token_tiled_cases import (
    DEVICE,
    DTYPES,
    GPU,
    IGNORED_WARNINGS,
    TOLERANCE,
    bits,
    case_of,
    cases_of,
    check,
    exact,
    on_tiles,
    placed,
    truth,
)
from torch.nn import functional as F

import nt_attention as nta

gpu = pytest.mark.gpu

pytestmark = IGNORED_WARNINGS

STRIDES = calls.STRIDES | {"one-element-on": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape)}


@exact
@cases_of("name, stride, dtype", 5, ["query", "key", "value", "grad"], STRIDES, DTYPES)
def test_any_strides(name, stride, dtype):
    case = case_of("cross", "causal", "gqa", dtype=dtype, head_dim=16, value_dim=32)  # kernels read 16 bytes at a time
    stride, function = STRIDES[stride], on_tiles(case)

    def strided(**arguments):
        if name in arguments:
            arguments[name] = stride(arguments[name])
        return function(**arguments)

    want = truth(case)
    if GPU:  # so that a kernel compiled for other strides exists, which must not run
        assert_same(case.solve(function), want, TOLERANCE[dtype])
    if name == "grad":
        case.grads = (stride(case.grads[0]), case.grads[1])
    assert_same(case.solve(strided), want, TOLERANCE[dtype])


def test_stride_of_heads_exceeds_32_bits():
    """As in a view of one long (H, T, D) tensor. Here the memory between heads is never touched."""
    dtype, apart = torch.float16, 2**30 + 16
    case = placed(Problem([37, 5], None, 3, 3, 16, 16, dtype=dtype))
    memory = torch.empty(2 * apart + 4 * 42 * 16, dtype=dtype, device=DEVICE)

    def far(x, index):
        return memory.as_strided(x.shape, (x.shape[2], apart, 1), index * x[:, 0].numel()).copy_(x)

    *tensors, grad = (far(x, index) for index, x in enumerate((*case.inputs.values(), case.grads[0])))
    got = bits(lambda *qkv: on_tiles(case)(*qkv)[0], tensors, grad)
    case.grads = (case.grads[0], torch.zeros_like(case.grads[1]))
    want = truth(case)
    names = ("out", "d query", "d key", "d value")
    assert_same(dict(zip(names, got, strict=True)), {name: want[name] for name in names}, TOLERANCE[dtype])


@exact
def test_expanded_gradients():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    case.grads = tuple(torch.ones((), dtype=g.dtype, device=DEVICE).expand(g.shape) for g in case.grads)
    check(case)


@exact
def test_expanded_key_heads_of_token_tiled():
    case = case_of("cross", "causal", "plain", dtype=torch.float16)
    for name in ("key", "value"):
        case.inputs[name] = case.inputs[name][:, :1]
    want = truth(case)
    function = on_tiles(case)

    def expanded(query, key, value, **options):
        return function(query, key.expand(-1, 2, -1), value.expand(-1, 2, -1), **options)

    assert_same(case.solve(expanded), want, TOLERANCE[torch.float16])


@exact
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_one_projection(dtype):
    """Queries, keys and values as ``qkv.unbind(1)``, and their gradients in one tensor."""
    case = case_of("self", "causal", "plain", dtype=dtype)
    qkv = torch.stack([case.inputs[name] for name in ("query", "key", "value")], 1).requires_grad_()
    out, lse = on_tiles(case)(*qkv.unbind(1), **case.options)
    (got,) = torch.autograd.grad((out, lse), qkv, (case.grads[0], case.grads[1].float()))
    want = truth(case)
    want = {"out": want["out"], "d qkv": torch.stack([want[f"d {name}"] for name in ("query", "key", "value")], 1)}
    assert_same({"out": out, "d qkv": got}, want, TOLERANCE[dtype])


ALIBI_CHANGES = {
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand_as(x),
    "float64": lambda x: x.double(),
}


@exact
@sweep_product("change, extra", ALIBI_CHANGES, ["alibi", "alibi-each-gqa"])
def test_any_strides_of_alibi_slopes(change, extra):
    case = case_of("cross", "causal", extra, dtype=torch.float16)
    case.options["alibi_slopes"] = ALIBI_CHANGES[change](case.options["alibi_slopes"])
    check(case)


@gpu
def test_tensors_exceed_32_bit_sizes():
    """If each query sees its own key alone, out is the value, and only the value has a gradient."""
    rows, heads = 2**24 + 129, 3
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
    layout = nta.SequenceLayout.from_lengths([rows - 129, 129], device="cuda")
    # rows × 64 fit into 31 bits; heads × rows × 64 and rows × (heads × 64) do not
    q, k, v, grad = (torch.empty(heads, rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v, grad):
        x.normal_()
    v, grad = (x.view(rows, heads, 64) for x in (v, grad))
    function = partial(nta.varlen_attention, layout=layout, window_size=(0, 0), backend="token_tiled")
    out, dq, dk, dv = bits(function, (q.transpose(0, 1), k.transpose(0, 1), v), grad)
    assert torch.equal(out, v)
    assert torch.equal(dv, grad)
    # dout · out − delta, the same sum in two orders
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2

"""The custom operators of the token-tiled kernels: opcheck, graphs, FLOP counts."""

import itertools

import pytest
import torch
from token_tiled_cases import DEVICE, IGNORED_WARNINGS

gpu = pytest.mark.gpu

pytestmark = IGNORED_WARNINGS

FORWARD = torch.ops.nt_attention.attention_forward.default

BACKWARD = torch.ops.nt_attention.attention_backward.default


def operands(
    lengths=(5, 37, 1, 13), heads=4, kv_heads=2, head_dim=20, value_dim=12, alibi=True, relative=False, dropout_p=0.0
):
    """The positional arguments of an operator, and a gradient of its output."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    rows = sum(lengths)
    with DEVICE:
        q, k = torch.randn(rows, heads, head_dim), torch.randn(rows, kv_heads, head_dim)
        v, grad = torch.randn(rows, kv_heads, value_dim), torch.randn(rows, heads, value_dim)
        slopes = torch.rand(len(lengths), heads) if alibi else None
        biases = [None] * 4
        if relative:
            rows_of = torch.randn(2, rows, heads, 13)
            biases = [torch.randint(13, (9,)), torch.randn(heads, 13), *rows_of]
    options = (0.3, False, "lower_right", (11, 0), 0.0, dropout_p, False, False, True, relative)
    return (q, k, v, cu_seqlens, cu_seqlens, slopes, *biases, None, None, None, [], *options, [], "token_tiled"), grad


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("relative", [False, True], ids=["", "relative"])
def test_opcheck(alibi, relative):
    arguments, grad = operands(lengths=(5, 17, 1), heads=2, kv_heads=1, alibi=alibi, relative=relative)
    torch.library.opcheck(FORWARD, arguments)
    out, lse, *more = FORWARD(*arguments)
    torch.library.opcheck(BACKWARD, (grad, torch.randn_like(lse) if alibi else None, out, lse, *more, *arguments))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared", "batch-invariant"])
def test_heads_first_gradient_of_lse(batch_invariant):
    """The strides of lse itself. Autograd never passes such a gradient, but operators can be called directly."""
    arguments, grad = operands(lengths=(37, 5), heads=2, kv_heads=1, alibi=False)
    arguments = (*arguments[:-5], batch_invariant, *arguments[-4:])
    out, lse, *more = FORWARD(*arguments)
    grad_lse = torch.randn_like(lse)
    assert grad_lse.stride() == (1, len(lse))
    one, two = (BACKWARD(grad, g, out, lse, *more, *arguments)[:3] for g in (grad_lse, grad_lse.contiguous()))
    assert all(map(torch.equal, one, two))


def both_ways(grad, *arguments):
    out, lse, *more = FORWARD(*arguments)
    return out, lse, *BACKWARD(grad, lse, out, lse, *more, *arguments)[:3]


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_token_tiled_operators_in_one_graph(compiler):
    compiled = torch.compile(both_ways, fullgraph=True, backend=compiler)
    for lengths in ((5, 37, 1, 13), (17, 3, 0, 19), (1, 2, 3, 4, 5)):
        arguments, grad = operands(lengths)
        for one, two in zip(compiled(grad, *arguments), both_ways(grad, *arguments), strict=True):
            assert one.stride() == two.stride()
            assert torch.equal(one, two)

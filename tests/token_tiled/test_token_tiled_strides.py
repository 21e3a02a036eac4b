"""The token-tiled kernels on tensors with any strides."""

from functools import partial

import pytest
import torch
from oracle import Problem, assert_same
from token_tiled_cases import (
    DEVICE,
    IGNORED_WARNINGS,
    TOLERANCE,
    bits,
    on_tiles,
    placed,
    truth,
)

import nt_attention as nta

gpu = pytest.mark.gpu

pytestmark = IGNORED_WARNINGS


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

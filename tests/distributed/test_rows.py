"""`RowTable`, which copies and adds rows of keys and values."""

import pytest
import torch

from nt_attention.distributed.rows import Pair, RowTable
from nt_attention.kernels.triton_support import interpreted

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not interpreted(), reason="Triton does not interpret")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def case(rows, terms, widths, is_strided, has_second, dtype=torch.float32):
    """out, table, first, second, and the rows that must come out."""
    make = torch.Generator().manual_seed(rows + terms)
    total = sum(widths)
    if is_strided:  # views of one tensor, as of a fused projection
        first = Pair.columns(torch.randn(11, total + 3, generator=make).to(dtype)[:, :total], widths[0])
    else:
        first = Pair(*[torch.randn(11, width, generator=make).to(dtype) for width in widths])
    second = torch.randn(6, total, generator=make).to(torch.bfloat16) if has_second else None
    table = torch.randint(-1, 17 if has_second else 11, (rows, terms), generator=make, dtype=torch.int32)
    known = torch.cat(first, 1).double()
    known = known if second is None else torch.cat([known, second.double()])
    want = torch.zeros(rows, total, dtype=torch.float64)
    for i in range(rows):
        for index in table[i].tolist():
            want[i] += known[index] if index >= 0 else 0
    return table, first, second, want


# rows, terms, widths, is_strided, has_second
CASES = [
    (9, 1, (24, 24), False, False),
    (9, 1, (8, 40), True, True),
    (70, 3, (1500, 20), False, True),
    (1, 2, (5, 3), True, True),
]


@pytest.mark.parametrize("which", range(len(CASES)))
def test_on_the_cpu(which):
    table, first, second, want = case(*CASES[which])
    out = torch.full_like(want, torch.nan, dtype=torch.float32)
    RowTable(table).gather(Pair.columns(out, CASES[which][2][0]), first, second)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)


@on_devices
@pytest.mark.parametrize("which", range(len(CASES)))
def test_kernel(which, device):
    table, first, second, want = case(*CASES[which])
    out = torch.full(want.shape, torch.nan, device=device)
    first = Pair(*[torch.empty_strided(x.shape, x.stride(), device=device).copy_(x) for x in first])
    second = None if second is None else second.to(device)
    table = RowTable(table.to(device))
    for _ in range(2):  # the second launch is cached on a GPU
        table.launch(Pair.columns(out, CASES[which][2][0]), first, second)
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-6, atol=1e-6)


@on_devices
def test_kernel_copies_bits(device):
    table, first, _, want = case(40, 1, (64, 64), False, False, torch.bfloat16)
    out = torch.empty(want.shape, dtype=torch.bfloat16, device=device)
    RowTable(table.to(device)).launch(Pair.columns(out, 64), Pair(*[x.to(device) for x in first]))
    assert torch.equal(out.cpu().double(), want)


def test_no_rows():
    first = Pair(torch.randn(3, 4), torch.randn(3, 4))
    RowTable(torch.empty(0, 1, dtype=torch.int32)).gather(Pair(torch.empty(0, 4), torch.empty(0, 4)), first)


def test_pair_copies_elements_that_are_apart():
    x = torch.randn(5, 1, 12)[:, :, ::3]
    assert [each.stride(1) for each in Pair.of(x, x)] == [1, 1]
    assert torch.equal(Pair.of(x, x).key, x[:, 0])

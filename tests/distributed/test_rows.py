"""`RowTable`, which copies and adds rows of keys and values."""

import pytest
import torch

from nt_attention.distributed.rows import RowTable
from nt_attention.kernels.triton_support import interpreted

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not interpreted(), reason="Triton does not interpret")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def case(rows, terms, widths, is_strided, has_second, dtype=torch.float32):
    """The table, keys and values, further rows, and the rows that must come out."""
    make = torch.Generator().manual_seed(rows + terms)
    total = sum(widths)
    if is_strided:  # views of one tensor, as of a fused projection
        keys = torch.randn(11, 1, total + 3, generator=make).to(dtype)[:, :, :total].split(widths, 2)
    else:
        keys = [torch.randn(11, 1, width, generator=make).to(dtype) for width in widths]
    second = torch.randn(6, total, generator=make).to(torch.bfloat16) if has_second else None
    table = torch.randint(-1, 17 if has_second else 11, (rows, terms), generator=make, dtype=torch.int32)
    known = torch.cat(keys, 2)[:, 0].double()
    known = known if second is None else torch.cat([known, second.double()])
    want = torch.zeros(rows, total, dtype=torch.float64)
    for i in range(rows):
        for index in table[i].tolist():
            want[i] += known[index] if index >= 0 else 0
    return table, keys, second, want


# rows, terms, widths, is_strided, has_second, and the dtype
CASES = [
    (9, 1, (24, 24), False, False),
    (9, 1, (8, 40), True, True),
    (70, 3, (1500, 20), False, True, torch.bfloat16),
    (1, 2, (5, 3), True, True),
]


@pytest.mark.parametrize("which", range(len(CASES)))
def test_on_the_cpu(which):
    table, keys, second, want = case(*CASES[which])
    out = torch.full_like(want, torch.nan, dtype=torch.float32)
    RowTable(table).gather(out, *keys, second)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)


@on_devices
@pytest.mark.parametrize("which", range(len(CASES)))
def test_kernel(which, device):
    table, keys, second, want = case(*CASES[which])
    out = torch.full(want.shape, torch.nan, device=device)
    keys = [torch.empty_strided(x.shape, x.stride(), device=device).copy_(x) for x in keys]
    second = None if second is None else second.to(device)
    table = RowTable(table.to(device))
    for _ in range(2):  # the second launch is cached on a GPU
        table.launch(out, *keys, second)
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-6, atol=1e-6)


@on_devices
def test_kernel_copies_bits(device):
    table, keys, _, want = case(40, 1, (64, 64), False, False, torch.bfloat16)
    out = torch.empty(want.shape, dtype=torch.bfloat16, device=device)
    RowTable(table.to(device)).launch(out, *[x.to(device) for x in keys])
    assert torch.equal(out.cpu().double(), want)


def test_separate_keys_and_values_out():
    table, keys, _, want = case(9, 1, (24, 40), False, False)
    out = [torch.full((9, 2, 12), torch.nan), torch.full((9, 4, 10), torch.nan)]
    RowTable(table).gather(out, *keys)
    torch.testing.assert_close(torch.cat([x.flatten(1) for x in out], 1).double(), want)


def test_no_rows():
    first, out = torch.randn(2, 3, 1, 4), torch.randn(2, 0, 1, 4).unbind()
    RowTable(torch.empty(0, 1, dtype=torch.int32)).gather(out, *first)


@on_devices
def test_elements_that_are_apart_are_copied(device):
    x = torch.randn(5, 4, 12, device=device)
    table = RowTable(torch.arange(5, dtype=torch.int32, device=device)[:, None])
    table._has_kernel = True
    for apart in (x[:, :, ::3], x[:, ::2], x.transpose(1, 2)):
        out = torch.full((2, *apart.shape), torch.nan, device=device)
        table.gather(out.unbind(), apart, apart)
        assert torch.equal(out, torch.stack([apart, apart]))

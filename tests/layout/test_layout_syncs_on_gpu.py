"""On a GPU a layout waits for the device once, and calls with it never."""

import pytest
import torch
from waiting import syncs

import nt_attention as nta

gpu = pytest.mark.gpu

LENGTHS = [1, 4096, 0, 17, 1031, 128, 129, 65, 15]


@gpu
def test_second_layer_on_a_nested_tensor_does_not_sync():
    module = nta.VarlenMultiheadAttention(64, 4, device="cuda", dtype=torch.bfloat16)
    parts = [torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in LENGTHS]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).detach().requires_grad_()
    first, _ = module(x, x, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second, _ = module(first, first, first, is_causal=True)
        (first + second).values().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second.offsets() is x.offsets()
    assert x.grad.values().isfinite().all()


@gpu
@pytest.mark.parametrize("make", ["offsets", "nested", "bool mask", "int mask", "position_ids", "lengths", "list"])
def test_layout_syncs_once(make):
    host = nta.SequenceLayout.from_lengths([3, 0, 5])
    mask = host.pad(torch.ones(8)).bool().cuda()
    values = torch.randn(8, 2, device="cuda")
    source = {
        "offsets": (nta.SequenceLayout.from_offsets, host.offsets.cuda()),
        "nested": (
            nta.SequenceLayout.from_nested,
            torch.nested.nested_tensor_from_jagged(values, host.offsets.cuda()),
        ),
        "bool mask": (nta.SequenceLayout.from_attention_mask, mask),
        "int mask": (nta.SequenceLayout.from_attention_mask, mask.long()),
        "position_ids": (nta.SequenceLayout.from_position_ids, host.position_ids.cuda()),
        "lengths": (nta.SequenceLayout.from_lengths, host.lengths.cuda()),
        "list": (lambda x: nta.SequenceLayout.from_lengths(x, device="cuda"), [3, 0, 5]),
    }
    constructor, given = source[make]
    made = []
    assert syncs(lambda: made.append(constructor(given))) == (0 if make == "list" else 1)
    layout = made[0]

    def use():
        layout.position_ids, layout.sequence_ids, layout.lengths  # noqa: B018
        layout.pack(layout.pad(values))
        layout.to_nested(values)
        nta.SequenceLayout.from_offsets(layout.cu_seqlens)
        nta.SequenceLayout.from_offsets(layout.offsets)

    assert syncs(use) == 0
    assert layout.total == 8

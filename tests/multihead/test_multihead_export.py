"""torch.export and FakeTensors over VarlenMultiheadAttention, and what they leave behind."""

import io

import pytest
import torch
from multihead_compile import ADDED, EMBED, POSITIONS, Residual, close, make, offsets_of
from sweeps import sweep_except
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import nt_attention as nta
from nt_attention import SequenceLayout

pytestmark = [
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


@pytest.mark.parametrize(
    "options", [{}, POSITIONS, ADDED, {"alibi": True}], ids=["plain", "positions", "added", "alibi"]
)
def test_fake_tensor_call_leaves_nothing_behind(options):
    """Nothing is cached with the layout or elsewhere: the call after it computes with real values."""
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


@pytest.mark.parametrize(
    ("options", "strict"), sweep_except([({}, True), (POSITIONS, False), (ADDED, True)], ({}, True), (POSITIONS, False))
)
def test_exported_program_runs_other_lengths_after_saving_and_loading(options, strict):
    """Exporting does not change the module."""
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


def test_export_and_fake_tensors_leave_nothing_behind():
    """Nothing that an export or a call with FakeTensors cached is used by a later call."""
    fresh = [nta.VarlenMultiheadAttention(34, 17, alibi=True, rotary=nta.Rotary(), batch_first=True) for _ in range(2)]
    fresh[1].load_state_dict(fresh[0].state_dict())
    x, layout = torch.randn(2, 5, 34), nta.SequenceLayout.from_lengths([5, 5])
    packed = x.flatten(0, 1)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = fresh[0]

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    exported = torch.export.export(Whole(), (x,)).module()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(packed)
        fresh[0](fake, fake, fake, layout=layout)
    want = fresh[1](packed, packed, packed, layout=nta.SequenceLayout.from_lengths([5, 5]))[0].unflatten(0, (2, 5))
    torch.testing.assert_close(fresh[0](packed, packed, packed, layout=layout)[0].unflatten(0, (2, 5)), want)
    torch.testing.assert_close(exported(x), want)
    assert want.abs().max() < 100


def test_rotation_of_fake_positions_makes_no_real_tensors():
    rotation = nta.Rotary().of_head_dim(8)
    with FakeTensorMode() as mode:  # mixing real and fake tensors is an error
        x, positions = mode.from_tensor(torch.randn(2, 5, 2, 8)), mode.from_tensor(torch.arange(5)[None])
        assert rotation.rotate(x, positions).shape == x.shape

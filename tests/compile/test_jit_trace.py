"""torch.jit.trace is refused, because lengths would be constants of the trace."""

import pytest
import torch
from calls import OFFSETS, attend

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["offsets", "layout", "nested", "module"])
def test_jit_trace_is_refused(form):
    layout, x = SequenceLayout.from_offsets(OFFSETS), torch.randn(14, 3, 7)
    module, nested = nta.VarlenMultiheadAttention(21, 3).requires_grad_(False), layout.to_nested(x)
    programs = {
        "offsets": lambda x: attend(x, OFFSETS),
        "layout": lambda x: varlen_attention(x, x, x, layout),
        "nested": lambda x: x + varlen_attention(nested, nested, nested).values(),
        "module": lambda x: module(*[x.flatten(1)] * 3, layout=layout)[0],
    }
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace keeps the lengths"):
        torch.jit.trace(programs[form], x, check_trace=False)

"""`varlen_attention` under autocast, compared with scaled_dot_product_attention."""

import pytest
import torch
from oracle import assert_same
from torch.nn import functional as F

from nt_attention import SequenceLayout, explain, varlen_attention

LAYOUT = SequenceLayout.from_lengths([4, 0, 3])

CAST = {
    "float32": (torch.float32,) * 3,
    "float16": (torch.float16,) * 3,
    "mixed": (torch.float32, torch.bfloat16, torch.float16),
    "float64": (torch.float64,) * 3,
}


class TestAutocast:
    @pytest.mark.parametrize("dtypes", CAST.values(), ids=CAST)
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    @pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
    def test_autocast_dtypes_are_those_of_scaled_dot_product_attention(self, to, backend, dtypes):
        tensors = [torch.randn(7, 3, 5, dtype=dtype, requires_grad=True) for dtype in dtypes]
        with torch.autocast("cpu", dtype=to):
            usual = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in tensors)).dtype
            got = varlen_attention(*tensors, LAYOUT, return_lse=True, backend=backend)
            explanation = explain(*tensors, LAYOUT, backend=backend)
        want = varlen_attention(*(x.to(usual) for x in tensors), LAYOUT, return_lse=True, backend=backend)
        assert got[0].dtype == usual
        assert explanation.chosen == backend
        assert_same(dict(zip(("out", "lse"), got, strict=True)), dict(zip(("out", "lse"), want, strict=True)), 0)
        got[0].sum().backward()
        assert [x.grad.dtype for x in tensors] == list(dtypes)

    def test_autocast_of_nested_tensors(self):
        x = LAYOUT.to_nested(torch.randn(7, 3, 5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = varlen_attention(x, x, x)
        assert out.dtype == torch.bfloat16
        assert out.offsets() is x.offsets()

    def test_autocast_does_not_cast_sinks_and_alibi_slopes(self):
        exact = {"sinks": torch.tensor([1.001, 0.0, 2.003]), "alibi_slopes": torch.tensor([0.1003, 0.2, 0.3])}
        tensors = [torch.randn(7, 3, 5).bfloat16() for _ in range(3)]
        want = varlen_attention(*tensors, LAYOUT, **exact, return_lse=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = varlen_attention(*tensors, LAYOUT, **exact, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))

    def test_autocast_disabled(self):
        x = torch.randn(7, 3, 5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            assert varlen_attention(x, x, x, LAYOUT).dtype == torch.float32
        with pytest.raises(ValueError, match="share one floating-point dtype"):
            varlen_attention(x, x.bfloat16(), x, LAYOUT)

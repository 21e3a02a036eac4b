"""FlashAttention-4: which packages it needs, and calls that are recorded and launched again."""

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import nt_attention as nta
from nt_attention.kernels.backends import flash_attn_4
from nt_attention.kernels.backends.flash_attn_4_launch import LaunchAgain


def test_flash_attn_4_without_cutlass_is_missing(monkeypatch, tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attn_4, "no_cuda", lambda: None)
    assert "nvidia-cutlass-dsl" in flash_attn_4.missing.__wrapped__()
    (tmp_path / "cutlass").mkdir()
    assert flash_attn_4.missing.__wrapped__() is None


@pytest.fixture
def interface(monkeypatch):
    """A stand-in for the interface: `attend(a, b)` returns a + b and 2 a, by way of memory that is 0 before."""
    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = modules["flash_attn.cute.interface"]
    modules["flash_attn.cute"].interface = module
    module.calls = []

    def compiled(a, b, out, double, zeros, scale):
        with _disable_current_modes():  # a compiled function runs no operators
            module.calls.append("compiled")
            zeros.add_(a)
            out.copy_(zeros + b * scale)
            double.copy_(2 * zeros)

    def attend(a, b):
        module.calls.append("interface")
        out, double, zeros = torch.empty_like(a), torch.empty(a.shape), torch.zeros(a.shape)
        attend.compile_cache["key"](a.detach(), b.detach(), out, double, zeros, 1.0)
        return out, double.add_(1) if module.does_more else double

    attend.compile_cache = {"key": compiled}
    module.attend, module.does_more = attend, False
    return module


def test_third_call_does_not_run_the_interface(interface):
    launch = LaunchAgain(interface.attend)
    for number in range(4):
        a, b = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
        out, double = launch(a, b)
        assert torch.equal(out, a + b)
        assert torch.equal(double, 2 * a)
        assert interface.calls == ["interface"] * (number < 2) + ["compiled"]
        interface.calls.clear()
    assert isinstance(interface.attend.compile_cache, dict)


def test_call_that_does_more_is_not_recorded(interface):
    launch, interface.does_more = LaunchAgain(interface.attend), True
    for _ in range(4):
        a = torch.randn(4, 5)
        assert torch.equal(launch(a, a)[1], 2 * a + 1)
    assert interface.calls.count("interface") == 4


def test_call_on_a_part_of_memory_is_not_recorded(interface):
    interface.parts = LaunchAgain(lambda a, b: interface.attend(a[:2], b[:2]))
    for _ in range(4):
        a = torch.randn(4, 5)
        assert torch.equal(interface.parts(a, a)[0], 2 * a[:2])
    assert interface.calls.count("interface") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"is_causal": True, "window_size": (40, 0)}, {"softcap": 5.0}, {"deterministic": True}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [[300, 7, 64, 27], [90] * 40], ids=["few", "many"])
def test_recorded_calls_on_a_gpu(options, kv_heads, head_dims, lengths):
    head_dim, value_dim = head_dims

    def results(layout, tensors):
        try:
            out = nta.varlen_attention(*tensors, layout, backend="flash_attn_4", **options)
        except ValueError as error:
            pytest.skip(str(error).splitlines()[0])
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out) * tensors[0][..., :1])

    def layout():
        return nta.SequenceLayout.from_lengths(lengths, device="cuda")

    kept = layout()
    for _ in range(5):
        shapes = (4, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
        tensors = [torch.randn(kept.total, *x, device="cuda", dtype=torch.bfloat16).requires_grad_() for x in shapes]
        pairs = list(zip(results(kept, tensors), results(layout(), tensors), strict=True))
        assert torch.equal(*pairs[0])
        for again, once in pairs[1:]:  # sums of atomic additions have no fixed order
            torch.testing.assert_close(again, once, rtol=0.02, atol=0.02 * float(once.abs().max()))

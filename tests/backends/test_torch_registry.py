"""Our kernels in PyTorch's registry of flash attention implementations."""

import warnings

import pytest
import torch
from torch.nn import attention
from torch.nn import functional as F

import nt_attention as nta
from nt_attention import torch_private, torch_registry
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.call_size import CallSize
from nt_attention.kernels.select import explain_spec
from nt_attention.torch_registry import FlashOperators

if not torch_registry.is_supported():  # before torch 2.12
    pytest.skip("this version of torch takes no flash attention implementations", allow_module_level=True)

from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

gpu = pytest.mark.gpu
OPERATORS = list(torch_private.FLASH_OPERATORS.values())
LENGTHS, KEY_LENGTHS = [5, 0, 17, 1], [3, 4, 20, 0]


@pytest.fixture
def activated():
    attention.activate_flash_attention_impl("nt_attention")
    yield
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def offsets_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def has_cuda_kernel(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def is_python_kernel(name):
    return f"aten/{name}/CUDA" in torch.library._impls


class TestRegistration:
    def test_activate_and_restore(self):
        before = {name: has_cuda_kernel(name) for name in OPERATORS}
        for _ in range(2):
            attention.activate_flash_attention_impl("nt_attention")
            assert attention.current_flash_attention_impl() == "nt_attention"
            assert all(map(is_python_kernel, OPERATORS))
            assert all(map(has_cuda_kernel, OPERATORS))
            attention.restore_flash_attention_impl()
            assert attention.current_flash_attention_impl() is None
            assert not any(map(is_python_kernel, OPERATORS))
            assert {name: has_cuda_kernel(name) for name in OPERATORS} == before

    def test_activated_twice_and_removed_twice(self, activated):
        attention.activate_flash_attention_impl("nt_attention")
        assert all(map(is_python_kernel, OPERATORS))
        _, handle = attention._registry._FLASH_ATTENTION_ACTIVE
        handle.remove()
        handle.remove()
        assert not any(map(is_python_kernel, OPERATORS))

    @pytest.mark.parametrize("before", ["2.10.0", "2.11.0+cu130"])
    def test_a_torch_without_a_registry(self, monkeypatch, before):
        if before.startswith("2.10"):
            monkeypatch.delattr(attention, "register_flash_attention_impl")
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(before))
        assert not torch_registry.is_supported()
        with pytest.raises(RuntimeError, match=r"install torch 2\.12 or later, or call nt_attention\.varlen_attention"):
            torch_registry.register()


def test_other_arguments_are_refused_when_it_is_activated(monkeypatch):
    with pytest.raises(RuntimeError, match="aten::_no_operator does not exist in torch"):
        torch_registry.check_arguments("_no_operator")
    monkeypatch.setattr(torch_registry, "_ARGUMENTS", {"query", "key", "value"})
    with pytest.raises(RuntimeError, match=r"aten::_flash_attention_forward is .*does not support: call "):
        attention.activate_flash_attention_impl("nt_attention")
    assert attention.current_flash_attention_impl() is None


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "token_tiled"])
WINDOWS = {
    "full": {},
    "causal": {"window_size_left": -1, "window_size_right": 0, "is_causal": True},
    "window": {"window_size_left": 3, "window_size_right": 1},
}


def packed(lengths, key_lengths, dtype=torch.float32):
    shapes = (sum(lengths), 4, 16), (sum(key_lengths), 2, 16), (sum(key_lengths), 2, 16), (sum(lengths), 4, 16)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@BACKENDS
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
def test_packed(backend, window, key_lengths):
    query, key, value, grad = packed(LENGTHS, key_lengths)
    offsets = offsets_of(LENGTHS)
    key_offsets = offsets if key_lengths is LENGTHS else offsets_of(key_lengths)
    call = (offsets, key_offsets, max(LENGTHS), max(key_lengths), 0.0, window.get("is_causal", False))
    named = {name: x for name, x in window.items() if name != "is_causal"} | {"scale": 0.3}
    operators = FlashOperators(backend)
    out, lse, *states = operators.forward(query, key, value, *call, False, **named)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    sizes = tuple(window.get(f"window_size_{side}", -1) for side in ("left", "right"))
    layouts = [nta.SequenceLayout.from_offsets(x) for x in (offsets, key_offsets)]
    options = {"window_size": sizes, "scale": 0.3, "backend": "reference", "return_lse": True}
    expected, expected_lse = nta.varlen_attention(*leaves, *layouts, **options)
    torch.testing.assert_close(out, expected.detach(), atol=1e-4, rtol=1e-4)
    expected_lse = expected_lse.detach().T
    torch.testing.assert_close(
        lse, expected_lse.masked_fill(expected_lse == -torch.inf, torch.inf), atol=1e-4, rtol=1e-4
    )
    assert [(x.shape, x.dtype) for x in states] == [((2,), torch.uint64), ((), torch.uint64), ((0,), torch.float32)]
    given = [x.detach() for x in leaves]
    grads = operators.backward(grad, *given, out, lse, *call, states[0], states[1], **named)
    for x, y in zip(grads, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    into = torch.full_like(out, torch.nan)
    torch.testing.assert_close(operators.forward_into(into, *given, *call, False, **named), lse)
    torch.testing.assert_close(into, out)


@BACKENDS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (3, 9)], ids=["square", "lower-right"])
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-first", "tokens-first"])
def test_dense(backend, is_causal, lengths, tokens_first):
    """As SDPA, with its causal mask aligned lower right, as that of flash attention."""
    length, key_length = lengths

    def random(heads, tokens):
        shape = (2, tokens, heads, 16) if tokens_first else (2, heads, tokens, 16)
        return torch.randn(shape).transpose(1, 2) if tokens_first else torch.randn(shape)

    query, key, value, grad = random(4, length), random(2, key_length), random(2, key_length), random(4, length)
    operators = FlashOperators(backend)
    out, lse, *rest = operators.sdpa_forward(query, key, value, 0.0, is_causal)
    assert rest[:4] == [None, None, length, key_length]
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    mask = torch.ones(length, key_length, dtype=torch.bool).tril(key_length - length) if is_causal else None
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected.detach(), atol=1e-4, rtol=1e-4)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 4
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    call = (None, None, length, key_length, 0.0, is_causal)
    grads = operators.sdpa_backward(grad, query, key, value, out, lse, *call, *rest[4:6])
    for x, y, given in zip(grads, torch.autograd.grad(expected, leaves, grad), (query, key, value), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
        assert x.stride() == given.stride()
    assert out.stride() == query.stride()
    batch_first = [x.transpose(1, 2) for x in (query, key, value)]
    torch.testing.assert_close(operators.forward(*batch_first, *call, False)[0], out.transpose(1, 2))


class TestThroughTheDispatcher:
    """PyTorch's functions with the operators replaced on the CPU, which has none of its own."""

    @pytest.fixture(autouse=True)
    def replaced(self):
        handle = torch_registry.activate("cpu", "CPU")
        yield
        handle.remove()
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)], ids=str)
    @pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_varlen_attn(self, window, key_lengths, compiled, fresh_compiler):
        *inputs, grad = packed(LENGTHS, key_lengths)
        offsets = offsets_of(LENGTHS), offsets_of(key_lengths)

        def function(query, key, value):
            longest = max(LENGTHS), max(key_lengths)
            return varlen_attn(query, key, value, *offsets, *longest, window_size=window, enable_gqa=True)

        leaves = [x.requires_grad_() for x in inputs]
        out = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(*leaves)
        layouts = [nta.SequenceLayout.from_offsets(x) for x in offsets]
        expected = nta.varlen_attention(*leaves, *layouts, window_size=window)
        torch.testing.assert_close(out, expected)
        for x, y in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, expected)), strict=True):
            torch.testing.assert_close(x, y)

    def test_varlen_attn_out(self):
        query, key, value, _ = packed(LENGTHS, LENGTHS)
        offsets, out = offsets_of(LENGTHS), torch.empty_like(query)
        varlen_attn_out(out, query, key, value, offsets, offsets, 17, 17, enable_gqa=True)
        torch.testing.assert_close(
            out, nta.varlen_attention(query, key, value, nta.SequenceLayout.from_offsets(offsets))
        )

    def test_keys_in_slots(self):
        query, key, value, _ = packed(LENGTHS, KEY_LENGTHS)
        offsets, starts, used = offsets_of(LENGTHS), offsets_of(KEY_LENGTHS), torch.tensor([2, 0, 19, 0])
        lengths = (max(LENGTHS), max(KEY_LENGTHS))
        options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used.int()}
        out = varlen_attn(query, key, value, offsets, starts, *lengths, **options)
        keys = [torch.cat([x[a : a + n] for a, n in zip(starts, used, strict=False)]) for x in (key, value)]
        layouts = nta.SequenceLayout.from_offsets(offsets), nta.SequenceLayout.from_lengths(used)
        torch.testing.assert_close(out, nta.varlen_attention(query, *keys, *layouts, is_causal=True))

    def test_keys_in_pages(self):
        query = torch.randn(4, 4, 16)
        pools = torch.randn(2, 9, 4, 2, 16).unbind()
        table, used = torch.randperm(9)[:8].view(4, 2).int(), torch.tensor([5, 0, 8, 1]).int()
        offsets = torch.arange(5, dtype=torch.int32)
        out = varlen_attn(query, *pools, offsets, None, 1, 8, enable_gqa=True, seqused_k=used, block_table=table)
        layout = nta.SequenceLayout.from_offsets(offsets)
        want = nta.varlen_attention(query, *pools, layout, nta.PagedLayout(table, used, 4))
        torch.testing.assert_close(out, want)

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_the_operator_of_sdpa(self, compiled, fresh_compiler):
        leaves = [x.requires_grad_() for x in torch.randn(3, 2, 4, 9, 16).unbind()]

        def function(query, key, value):
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]

        out = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(*leaves)
        expected = F.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        for x, y in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, expected)), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8)], ids=str)
def test_empty_batches(shape):
    x = torch.randn(shape)
    out, lse, *_ = FlashOperators("cpu").sdpa_forward(x, x, x)
    assert (out.shape, lse.shape) == (shape, shape[:3])
    call = (None, None, shape[2], shape[2], 0.0, False, None, None)
    grads = FlashOperators("cpu").sdpa_backward(x, x, x, x, out, lse, *call)
    assert all(grad.shape == shape for grad in grads)


class TestRefused:
    def forward(self, backend="cpu", dropout_p=0.0, debug=False, **named):
        query, key, value, _ = packed([3, 4], [3, 4])
        offsets = named.pop("offsets", offsets_of([3, 4]))
        key_offsets = named.pop("key_offsets", offsets)
        return FlashOperators(backend).forward(
            query, key, value, offsets, key_offsets, 4, 4, dropout_p, False, debug, **named
        )

    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"dropout_p": 0.1}, r"does not support dropout_p=0\.1: pass 0"),
            ({"debug": True}, "does not support return_debug_mask"),
            ({"block_table": torch.tensor([[0]])}, "block_table needs seqused_k"),
            ({"seqused_k": torch.tensor([3, 4]), "key_offsets": None}, "needs cum_seq_k"),
            ({"seqused_k": torch.tensor([3, 4, 0])}, r"lengths must be \(2,\)"),
            ({"alibi_slopes": torch.ones(4)}, "does not support alibi_slopes"),
            ({"num_splits": 3}, "num_splits=3: pass None, or 1"),
            ({"key_offsets": None}, "cum_seq_k must be the offsets of the keys, got None"),
            ({"num_splits": 1}, "leave batch_invariant at False"),  # of the CPU backend
        ],
        ids=str,
    )
    def test_arguments(self, named, message):
        with pytest.raises(ValueError, match=message):
            self.forward(**named)

    def test_a_bound_below_the_longest_sequence(self):
        query, key, value, _ = packed([3, 4], [3, 4])
        offsets = offsets_of([3, 4])
        with pytest.raises(ValueError, match="max_seqlen=3 is below"):
            FlashOperators("cpu").forward(query, key, value, offsets, offsets, 3, 3, 0.0, False, False)

    def test_out_of_another_shape(self):
        query, key, value, _ = packed([3, 4], [3, 4])
        call = (query, key, value, offsets_of([3, 4]), offsets_of([3, 4]), 4, 4, 0.0, False, False)
        with pytest.raises(ValueError, match="out must have the shape"):
            FlashOperators("cpu").forward_into(query[1:].clone(), *call)

    def test_batch_invariance_is_that_of_the_kernel(self):
        torch.manual_seed(0)
        invariant = self.forward("token_tiled", num_splits=1)
        torch.manual_seed(0)
        torch.testing.assert_close(invariant[:2], self.forward("token_tiled")[:2])


def test_selection_while_it_is_active(activated, not_verified):
    """`torch_flash` would call the replaced operator, which calls our kernel."""
    spec = AttentionSpec.of(torch.device("cuda"), torch.bfloat16, ((100, 8, 64),) * 3, {"scale": None})
    explanation = explain_spec(spec, CallSize(10, 100, 1000))
    assert "the flash attention implementation 'nt_attention' is active" in explanation.reasons["torch_flash"][0]
    assert explanation.chosen == "token_tiled"
    assert explain_spec(spec, CallSize(10, 100, 1000), "torch_flash").chosen is None


def test_calls_on_a_cpu_do_not_change(activated):
    layout = nta.SequenceLayout.from_lengths([3, 4])
    x = torch.randn(7, 2, 8)
    assert nta.explain(x, x, x, layout).chosen == "cpu"
    nta.varlen_attention(x, x, x, layout)
    dense = torch.randn(1, 2, 7, 8)
    F.scaled_dot_product_attention(dense, dense, dense)


@gpu
class TestOnAGpu:
    @staticmethod
    def both(function, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        torch.manual_seed(0)
        return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))

    @staticmethod
    def activated_and_not(function):
        """The results of PyTorch's kernel, and of ours."""
        expected = function()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attention.activate_flash_attention_impl("nt_attention")
        try:
            return expected, function()
        finally:
            attention.restore_flash_attention_impl()

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0), (20, 7)], ids=str)
    @pytest.mark.parametrize("heads", [4, 2])
    def test_varlen_attn(self, window, heads):
        lengths = [129, 5, 0, 300, 17, 1, 64]
        offsets, total = offsets_of(lengths, "cuda"), sum(lengths)
        inputs = [torch.randn(total, n, 64, dtype=torch.bfloat16, device="cuda") for n in (4, heads, heads)]

        def run():
            return self.both(
                lambda q, k, v: varlen_attn(
                    q, k, v, offsets, offsets, 300, 300, window_size=window, enable_gqa=heads != 4
                ),
                *inputs,
            )

        for x, y in zip(*self.activated_and_not(run), strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_sdpa(self, is_causal):
        inputs = torch.randn(3, 2, 4, 200, 64, dtype=torch.bfloat16, device="cuda").unbind()

        def run():
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                return self.both(lambda *x: F.scaled_dot_product_attention(*x, is_causal=is_causal), *inputs)

        for x, y in zip(*self.activated_and_not(run), strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)

    def test_sdpa_in_a_captured_cuda_graph(self, activated):
        inputs = torch.randn(3, 2, 4, 200, 64, dtype=torch.bfloat16, device="cuda").unbind()

        def run():
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*inputs, is_causal=True)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for x in inputs:
            x.normal_()
        graph.replay()
        torch.testing.assert_close(out, run(), atol=2e-2, rtol=2e-2)

    def test_our_kernel_runs(self, activated, monkeypatch):
        from nt_attention.kernels import adapters

        names, forward = [], adapters.forward
        monkeypatch.setattr(adapters, "forward", lambda backend, *x: names.append(backend.name) or forward(backend, *x))
        x = torch.randn(1, 2, 64, 64, dtype=torch.float16, device="cuda")
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(x, x, x)
        assert names == ["token_tiled"]

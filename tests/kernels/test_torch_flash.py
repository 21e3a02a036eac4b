"""Torch's in-tree flash kernels on a GPU: errors within twice those of PyTorch's own attention, and no waiting.

Without a GPU only the reasons for refusing a call are tested.
"""

import dataclasses
import warnings

import oracle
import pytest
import torch
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.kernels import torch_flash
from nt_attention.kernels.select import SlowBackendWarning
from nt_attention.kernels.spec import AttentionSpec

gpu = pytest.mark.gpu
LENGTHS = [1, 4096, 0, 17, 1031, 128, 129, 65, 15]
KEY_LENGTHS = [4, 4096, 3, 31, 1031, 131, 257, 65, 16]  # never fewer keys than queries: each sees some

CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "gqa-causal-128": {"is_causal": True, "heads": 6, "kv_heads": 2, "head_dim": 128},
    "window": {"window_size": (100, 7)},
    "causal-window": {"window_size": (64, 0), "is_causal": True},
    "cross": {"cross": True},
    "cross-causal": {"cross": True, "is_causal": True},
    "cross-window-gqa": {"cross": True, "window_size": (70, 30), "heads": 6, "kv_heads": 3},
    "padded-head-dim": {"head_dim": 20, "is_causal": True},
    "narrow-values": {"head_dim": 40, "value_dim": 24},
    "head-dim-256": {"head_dim": 256, "is_causal": True},
    "scale": {"scale": 0.3},
}


def inputs(dtype, *, cross=False, heads=3, kv_heads=None, head_dim=64, value_dim=None, **options):
    """Leaves q, k, v in ``dtype`` on the GPU, the gradient from above, and the lengths of either side."""
    lengths, key_lengths = LENGTHS, KEY_LENGTHS if cross else LENGTHS
    draw = torch.Generator("cuda").manual_seed(5)

    def random(rows, count, width):
        return torch.randn(rows, count, width, generator=draw, device="cuda").to(dtype)

    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    q = random(sum(lengths), heads, head_dim)
    k, v = random(sum(key_lengths), kv_heads, head_dim), random(sum(key_lengths), kv_heads, value_dim)
    return (q, k, v), random(sum(lengths), heads, value_dim), lengths, key_lengths, options


def with_grads(function, tensors, grad):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def pytorch(q, k, v, lengths, key_lengths, is_causal=False, window_size=(-1, -1), scale=None):
    """scaled_dot_product_attention in the inputs' own precision, one sequence at a time."""
    outs = []
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    for a, b, c in zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True):
        if not len(a):
            outs.append(a.new_zeros(0, q.shape[1], v.shape[2]))
            continue
        own = torch.arange(len(a), device="cuda")[:, None] + len(b) - len(a)
        ahead = torch.arange(len(b), device="cuda") - own
        left, right = window_size
        seen = torch.ones_like(ahead, dtype=torch.bool)
        seen &= (ahead <= 0) | (not is_causal)
        seen &= (ahead >= -left) | (left < 0)
        seen &= (ahead <= right) | (right < 0)
        mask = None if bool(seen.all()) else seen
        out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (a, b, c)), attn_mask=mask, scale=scale)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_errors_are_within_twice_pytorch_s_own(case, dtype):
    tensors, grad, lengths, key_lengths, options = inputs(dtype, **CASES[case])
    layout, key_layout = (nta.SequenceLayout.from_lengths(x, device="cuda") for x in (lengths, key_lengths))
    # what a freed block left behind must not be read
    torch.full((2**26,), torch.nan, device="cuda")

    def ours(*qkv):
        return nta.varlen_attention(*qkv, layout, key_layout, backend="torch_flash", **options)

    def truth(*qkv):
        with torch.device("cuda"):
            return oracle.attention(*qkv, lengths, key_lengths, **options)[0]

    got = with_grads(ours, tensors, grad)
    want = with_grads(truth, [x.double() for x in tensors], grad)  # so that it is not rounded itself
    rival = with_grads(lambda *qkv: pytorch(*qkv, lengths, key_lengths, **options), tensors, grad)
    for name, mine, theirs, true in zip(("out", "dq", "dk", "dv"), got, rival, want, strict=True):
        print(f"{name:>3} {error(mine, true):.1e}, PyTorch {error(theirs, true):.1e}")
        assert error(mine, true) <= 2 * error(theirs, true), name


@gpu
@pytest.mark.parametrize("head_dim", [20, 64, 256], ids=["column", "wider-column", "second-pass"])
def test_gradients_through_lse_and_sinks(head_dim):
    """With sinks and a loss on lse, against float64; blind rows, no keys, and rows past the end among them."""
    lengths, key_lengths = [5, 0, 300, 7, 33], [2, 3, 300, 0, 65]
    layout, key_layout = (nta.SequenceLayout.from_lengths(x, device="cuda") for x in (lengths, key_lengths))
    q = torch.randn(layout.total + 3, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, key_layout.total + 2, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(4, device="cuda")
    grad, grad_lse = torch.randn_like(q), torch.randn(layout.total + 3, 4, device="cuda")

    def solve(function):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
        out, lse = function(*leaves)
        grads = torch.autograd.grad((out, lse), leaves, (grad.to(out.dtype), grad_lse.to(lse.dtype)))
        return [out, lse, *grads]

    def truth(q, k, v, sinks):
        with torch.device("cuda"):
            return oracle.attention(q, k, v, lengths, key_lengths, is_causal=True, sinks=sinks)

    got = solve(
        lambda q, k, v, sinks: nta.varlen_attention(
            q, k, v, layout, key_layout, is_causal=True, sinks=sinks, return_lse=True, backend="torch_flash"
        )
    )
    for name, mine, true in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, solve(truth), strict=True):
        finite = true.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        assert error(mine[finite], true[finite]) < 8e-3, name  # bf16 keeps 8 bits


@gpu
def test_a_second_layer_on_the_same_nested_tensor_waits_for_nothing():
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


def syncs(function):
    """How often ``function`` waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in said)


@gpu
@pytest.mark.parametrize("make", ["offsets", "nested", "bool mask", "int mask", "position_ids", "lengths", "list"])
def test_a_layout_waits_once_and_its_use_never(make):
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


@gpu
def test_a_patched_model_waits_once_a_forward():
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    model = BertModel(config).cuda().bfloat16().eval()
    mask = (torch.arange(40, device="cuda") < torch.tensor([[40], [3], [17]], device="cuda")).long()
    ids = torch.randint(99, (3, 40), device="cuda")
    want = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    with nta.patch(model):
        model(ids, attention_mask=mask)
        assert syncs(lambda: model(ids, attention_mask=mask)) == 1
        got = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@gpu
def test_views_of_one_projection_are_not_copied():
    qkv = torch.randn(sum(LENGTHS), 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    layout = nta.SequenceLayout.from_lengths(LENGTHS, device="cuda")
    nta.varlen_attention(*qkv.unbind(1), layout)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = nta.varlen_attention(*qkv.unbind(1), layout)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 1.5 * out.nbytes


@gpu
def test_dropout_keeps_the_mean_and_its_own_gradient():
    layout = nta.SequenceLayout.from_lengths([512] * 8, device="cuda")
    q, k, v = (torch.randn(layout.total, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v = torch.ones_like(v).requires_grad_()
    out = nta.varlen_attention(q, k, v, layout, dropout_p=0.25, backend="torch_flash")
    assert out.std() > 0.01
    assert abs(out.float().mean() - 1) < 0.01
    out.sum().backward()
    # each row's weights that were kept are what its values get back
    torch.testing.assert_close(v.grad.float().sum(), out.float().sum(), rtol=0.01, atol=0)


@gpu
def test_auto_takes_it_where_it_is_ahead():
    layout = nta.SequenceLayout.from_lengths([9, 4], device="cuda")
    q = torch.randn(13, 2, 32, device="cuda")
    half = q.bfloat16()
    assert not nta.explain(half, half, half, layout).reasons["torch_flash"]
    assert nta.explain(half, half, half, layout).chosen == nta.explain(q, q, q, layout).chosen == "token_tiled"
    wide = torch.randn(650, 2, 160, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    long = nta.SequenceLayout.from_lengths([650], device="cuda")
    assert nta.explain(wide, wide, wide, long).chosen == "torch_flash"
    with pytest.warns(SlowBackendWarning, match="needs float16, bfloat16 or float32"):
        nta.varlen_attention(q.double(), q.double(), q.double(), layout)
    with torch.autocast("cuda", torch.bfloat16):
        assert nta.varlen_attention(q, q, q, layout).dtype == torch.bfloat16


SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 4, 4, 64, 64, 0.125)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 20, "value_dim": 12}, None),
        ({"causal_alignment": "upper_left", "is_causal": True}, None),  # equal lengths: one and the same
        ({"causal_alignment": "upper_left", "is_causal": True, "equal_lengths": False}, "lower_right"),
        ({"dtype": torch.float32}, "torch.autocast"),
        ({"head_dim": 320}, "got 320"),
        ({"softcap": 2.0}, "softcap at 0"),
        ({"alibi": True}, "alibi_slopes"),
        ({"mask_mod": lambda *_: True}, "mask_mod"),
        ({"deterministic": True}, None),
        ({"deterministic": True, "needs_grad": True}, "deterministic at False"),
        ({"device": torch.device("cpu")}, "got cpu: move them"),
    ],
)
def test_refuses_what_the_kernel_lacks(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reasons = torch_flash.unsupported(dataclasses.replace(SPEC, **change))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]

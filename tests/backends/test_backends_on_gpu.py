"""Every backend on a GPU with all options it supports: accuracy, gradients of lse, syncs, memory, CUDA graphs.

Errors are compared with those of PyTorch's own attention in the same precision, both against the float64 oracle.
"""

import gc
import itertools
import statistics
from functools import partial

import oracle
import pytest
import torch
from operators import BACKWARD, FORWARD
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import nt_attention as nta
from nt_attention.kernels.custom_ops import Arguments
from nt_attention.kernels.select import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

LENGTHS = [1, 2049, 0, 17, 129, 15, 31, 128, 33, 127, 16]

KEY_LENGTHS = [4, 2049, 3, 31, 131, 16, 257, 128, 33, 129, 19]  # never fewer keys than queries: each sees some

ON_A_GPU = [name for name in BACKENDS if name not in ("cpu", "reference")]

OPERATORS = [name for name in ON_A_GPU if BACKENDS[name].backward is not None]

CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "upper-left": {"cross": True, "is_causal": True, "causal_alignment": "upper_left"},
    "window": {"window_size": (100, 7)},
    "causal-window": {"window_size": (64, 0), "is_causal": True},
    "upper-left-window": {"cross": True, "window_size": (70, 30), "causal_alignment": "upper_left"},
    "gqa-6-2": {"is_causal": True, "heads": 6, "kv_heads": 2},
    "gqa-4-1": {"heads": 4, "kv_heads": 1, "head_dim": 128},
    "cross": {"cross": True},
    "cross-causal": {"cross": True, "is_causal": True},
    "cross-window-gqa": {"cross": True, "window_size": (70, 30), "heads": 6, "kv_heads": 3},
    "narrow-values": {"head_dim": 64, "value_dim": 24, "is_causal": True},
    "wide-values": {"head_dim": 40, "value_dim": 128},
    "scale": {"scale": 0.3},
    "dims-192-128": {"head_dim": 192, "value_dim": 128, "is_causal": True},
    "dims-576-512": {"head_dim": 576, "value_dim": 512, "is_causal": True},
    "deterministic": {"deterministic": True, "is_causal": True},
    "all-1-grouped": {"short": True, "heads": 4, "kv_heads": 2},
    "negative-scale": {"scale": -0.3, "is_causal": True},
    "softcap": {"softcap": 1.7},
    "softcap-causal": {"softcap": 30.0, "scale": 2.0, "is_causal": True, "heads": 4, "kv_heads": 2},
    "alibi": {"alibi": "H", "heads": 6, "kv_heads": 3},
    "alibi-causal": {"alibi": "H", "is_causal": True, "head_dim": 128},
    "alibi-each": {"alibi": "BH"},
    "softcap-alibi": {"alibi": "BH", "softcap": 5.0, "is_causal": True},
    "batch-invariant": {"batch_invariant": True, "is_causal": True},
    "batch-invariant-cross-gqa": {"batch_invariant": True, "cross": True, "heads": 6, "kv_heads": 2, "head_dim": 128},
}

CASES |= {
    f"head-dim-{dim}": {"head_dim": dim, "is_causal": True} for dim in (16, 20, 32, 80, 96, 128, 192, 256, 320, 512)
}

CASES |= {f"head-dim-{dim}-full": {"head_dim": dim} for dim in (16, 128, 256)}


def masked_sdpa(q, k, v, is_causal=False, causal_alignment="lower_right", window_size=(-1, -1), scale=None):
    """scaled_dot_product_attention of one sequence, heads first, under the same mask, spelled out."""
    shift = k.shape[2] - q.shape[2] if causal_alignment == "lower_right" else 0
    own = torch.arange(q.shape[2], device=q.device)[:, None] + shift
    ahead = torch.arange(k.shape[2], device=q.device) - own
    left, right = window_size
    visible = (ahead <= 0) | (not is_causal)
    visible &= (ahead >= -left) | (left < 0)
    visible &= (ahead <= right) | (right < 0)
    mask = None if bool(visible.all()) else visible
    if scale is not None and scale < 0:
        q, scale = -q, -scale  # it gives NaN for these
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def flex(q, k, v, slopes, is_causal=False, softcap=0.0, scale=None):
    """flex_attention of one sequence with itself, not compiled."""

    def score_mod(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (i - j).abs()
        return torch.where(j <= i, score, -torch.inf) if is_causal else score

    return flex_attention(q, k, v, score_mod=score_mod, scale=scale)


def pytorch(q, k, v, lengths, key_lengths, alibi_slopes=None, **options):
    """PyTorch's attention in the inputs' own precision, one sequence at a time."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outs = []
    for i, parts in enumerate(zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)):
        if not lengths[i]:
            continue
        heads_first = [x.transpose(0, 1)[None] for x in parts]
        if alibi_slopes is not None or options.get("softcap"):
            slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
            out = flex(*heads_first, slopes, **options)
        else:
            out = masked_sdpa(*heads_first, **options)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def supported_call(backend, tensors, lengths, key_lengths, **options):
    """The call. The test is skipped if the backend does not support it, with the reasons."""
    if (missing := BACKENDS[backend].missing()) is not None:
        pytest.skip(missing)
    layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
    key_layout = layout if key_lengths is lengths else nta.SequenceLayout.from_lengths(key_lengths, device="cuda")
    leaves = [x.clone().requires_grad_() for x in tensors]
    reasons = nta.explain(*leaves, layout, key_layout, backend=backend, **options).reasons[backend]
    if reasons:
        pytest.skip(" ".join(reasons))
    return partial(nta.varlen_attention, layout=layout, key_layout=key_layout, backend=backend, **options)


def bits(function, tensors, grad):
    """out, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def random_inputs(rows, heads, kv_heads, head_dim, dtype, key_rows=None):
    key_rows = rows if key_rows is None else key_rows
    shapes = [(rows, heads), (key_rows, kv_heads), (key_rows, kv_heads), (rows, heads)]
    *tensors, grad = (torch.randn(*shape, head_dim, device="cuda").to(dtype) for shape in shapes)
    return tensors, grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_errors_are_at_most_twice_those_of_pytorch(monkeypatch, backend, case, dtype):
    if backend == "flex" and dtype != torch.bfloat16 and case not in ("causal", "gqa-6-2", "cross-causal", "window"):
        pytest.skip("compiles for 15 s: python -m nt_attention check runs every feature in every dtype")
    options = dict(CASES[case])
    cross, heads, head_dim = (options.pop(x, y) for x, y in (("cross", False), ("heads", 3), ("head_dim", 64)))
    kv_heads, value_dim = options.pop("kv_heads", heads), options.pop("value_dim", head_dim)
    alibi = options.pop("alibi", "")
    lengths = [1, 0, 1, 1, 0] if options.pop("short", False) else LENGTHS
    key_lengths = KEY_LENGTHS if cross else lengths
    shapes = [(sum(lengths), heads, head_dim), (sum(key_lengths), kv_heads, head_dim)]
    shapes += [(sum(key_lengths), kv_heads, value_dim), (sum(lengths), heads, value_dim)]
    *tensors, grad = (torch.randn(*shape, device="cuda").to(dtype) for shape in shapes)
    if alibi:
        shape = (heads,) if alibi == "H" else (len(lengths), heads)
        options["alibi_slopes"] = torch.rand(*shape, device="cuda") / 8
    ours = supported_call(backend, tensors, lengths, key_lengths, **options)
    for promise in ("batch_invariant", "deterministic"):
        options.pop(promise, None)

    def true(*qkv):
        with torch.device("cuda"):
            return oracle.attention(*qkv, lengths, key_lengths, **options)[0]

    # flex_attention goes through dynamo even when it is not compiled, once for every kind of length
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1009)
    baseline = bits(lambda *qkv: pytorch(*qkv, lengths, key_lengths, **options), tensors, grad)
    torch.full((2**26,), torch.nan, device="cuda")  # what a freed block left behind must not be read
    got = bits(ours, tensors, grad)
    want = bits(true, [x.double() for x in tensors], grad.double())  # so that it is not rounded itself
    bound = 3 if options.get("softcap") else 2
    for name, result, of_baseline, exactly in zip(("out", "dq", "dk", "dv"), got, baseline, want, strict=True):
        own, other = error(result, exactly), error(of_baseline, exactly)
        print(f"{name:>3} {own:.1e}, PyTorch {other:.1e}")
        assert own <= bound * max(other, torch.finfo(dtype).eps / 4), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ON_A_GPU)
def test_deterministic_calls_give_the_same_bits(backend, dtype):
    lengths = [129, 1, 2049, 0, 300, 17]
    tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype)
    ours = supported_call(backend, tensors, lengths, lengths, is_causal=True, deterministic=True)
    first = bits(ours, tensors, grad)
    for _ in range(200):
        assert all(map(torch.equal, first, bits(ours, tensors, grad)))


def operands(backend, cross=False):
    """The positional arguments of an operator, and a gradient of its output."""
    lengths, key_lengths = [5, 37, 1, 13], [7, 31, 3, 13] if cross else [5, 37, 1, 13]
    offsets, key_offsets = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in (lengths, key_lengths)
    )
    dtype = torch.float32 if backend == "torch_efficient" else torch.bfloat16
    tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype, sum(key_lengths))
    key_offsets = key_offsets if cross else offsets
    call = (0.3, True, "lower_right", (-1, -1), 0.0, 0.0, False, False, True, False)
    # no slopes, no relative bias, no pools, and no bounds
    return (*tensors, offsets, key_offsets, *[None] * 8, [], *call, [], backend), grad


OPTIONS = {"dropout_p": 0.25, "softcap": 2.0, "window_left": (9, -1), "window_right": (-1, 9), "deterministic": True}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", OPERATORS)
def test_opcheck_under_each_option(backend, option):
    (*arguments,), grad = operands(backend, cross=False)
    name = "window_size" if "window" in option else option
    arguments[Arguments._fields.index(name)] = OPTIONS[option]
    lengths = arguments[3].diff().tolist()
    supported_call(backend, arguments[:3], lengths, lengths, is_causal=True, **{name: OPTIONS[option]})
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")  # the others compare random numbers
    torch.library.opcheck(FORWARD, tuple(arguments), test_utils=tests)
    out, lse, *more = FORWARD(*arguments)
    assert more[0].numel() == (2 if option == "dropout_p" else 0)
    torch.library.opcheck(BACKWARD, (grad, torch.randn_like(lse), out, lse, *more, *arguments), test_utils=tests)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("backend", OPERATORS)
def test_opcheck(backend, cross):
    arguments, grad = operands(backend, cross)
    lengths, key_lengths = (arguments[at].diff().tolist() for at in (3, 4))
    supported_call(backend, arguments[:3], lengths, key_lengths, is_causal=True)
    torch.library.opcheck(FORWARD, arguments)
    out, lse, *more = FORWARD(*arguments)
    torch.library.opcheck(BACKWARD, (grad, torch.randn_like(lse), out, lse, *more, *arguments))


@pytest.mark.parametrize("backend", OPERATORS)
def test_cuda_graph_capture_and_replay(backend):
    lengths = [129, 5, 0, 2049, 17]
    dtype = torch.float32 if backend == "torch_efficient" else torch.bfloat16
    tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype)
    static = [x.clone() for x in (*tensors, grad)]
    function = supported_call(backend, tensors, lengths, lengths, is_causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            bits(function, static[:3], static[3])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bits(function, static[:3], static[3])
    for _ in range(3):
        tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype)
        for old, new in zip(static, (*tensors, grad), strict=True):
            old.copy_(new)
        graph.replay()
        for one, two in zip(captured, bits(function, tensors, grad), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2)  # other kernels add in no fixed order


@pytest.mark.parametrize("backend", ["auto", *ON_A_GPU])
def test_calls_do_not_sync(backend):
    """Nor does the first call with a layout, once kernels are compiled: plans are made from lengths on the host."""
    dtype = torch.float32 if backend == "torch_efficient" else torch.bfloat16

    def both(lengths):
        tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype)
        supported_call("token_tiled" if backend == "auto" else backend, tensors, lengths, lengths, is_causal=True)
        layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
        for _ in range(2):
            function = partial(nta.varlen_attention, layout=layout, is_causal=True, backend=backend)
            bits(function, tensors, grad)

    both([129, 5, 0, 2049])
    both([7, 131, 0, 1031])  # flex compiles once more, for any length
    torch.cuda.set_sync_debug_mode("error")
    try:
        both([3, 2049, 131, 17])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", OPERATORS)
def test_views_of_one_projection_are_not_copied(backend):
    dtype = torch.float32 if backend == "torch_efficient" else torch.bfloat16
    qkv = torch.randn(sum(LENGTHS), 3, 4, 64, device="cuda", dtype=dtype).requires_grad_()
    q, k, v = qkv.unbind(1)
    function = supported_call(backend, (q, k, v), LENGTHS, LENGTHS)
    for _ in range(2):  # the plan is made in the first
        gc.collect()  # what earlier tests left may go at any moment
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(q, k, v)
        extra = torch.cuda.max_memory_allocated() - before
    assert extra < 1.6 * out.nbytes


@pytest.mark.parametrize("backend", OPERATORS)
def test_memory_grows_linearly_with_the_tokens(backend):
    """Twice the sequences, or sequences of twice the length, take at most twice the memory."""
    dtype = torch.float32 if backend == "torch_efficient" else torch.bfloat16

    def peak(lengths):
        tensors, grad = random_inputs(sum(lengths), 4, 2, 64, dtype)
        function = supported_call(backend, tensors, lengths, lengths, is_causal=True)
        peaks = []
        for _ in range(8):  # the first may leave something behind; what earlier tests left may go at any moment
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bits(function, tensors, grad)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        return statistics.median(peaks[1:])

    once = peak([1024] * 16)
    assert peak([1024] * 32) < 2.2 * once
    assert peak([2048] * 16) < 2.2 * once


def test_auto_selects_the_backend_with_the_shortest_expected_time():
    """It can run the call, and its expected time is the shortest of the backends that can."""
    for dtype, head_dim, needs_grad in itertools.product(DTYPES, (32, 64, 80, 128, 256), (False, True)):
        for lengths in ([17] * 100, [4096] * 4, [8192, *[20] * 300]):
            tensors, _ = random_inputs(sum(lengths), 2, 1, head_dim, dtype)
            layout = nta.SequenceLayout.from_lengths(lengths, device="cuda")
            explanation = nta.explain(*(x.requires_grad_(needs_grad) for x in tensors), layout)
            assert not explanation.reasons[explanation.chosen]
            assert explanation.expected_us[explanation.chosen] == min(explanation.expected_us.values())

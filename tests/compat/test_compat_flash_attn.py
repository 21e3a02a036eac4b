"""`nt_attention.compat.flash_attn` against padded dense attention in float64, and against flash-attn's signatures."""

import inspect

import numpy as np
import oracle
import pytest
import torch
from sweeps import pairwise

import nt_attention as nta
from nt_attention.compat import _layouts
from nt_attention.compat import flash_attn as compat

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
WINDOWS = [(-1, -1), (3, 0), (2, 5), (-1, 2), (0, 0)]
LENGTHS = {
    "equal": ([6, 9, 1], [6, 9, 1]),
    "more keys": ([2, 7, 1], [11, 9, 4]),
    "more queries": ([12, 5, 3], [4, 5, 1]),
    "empty": ([5, 0, 3, 0], [5, 4, 0, 0]),
}
OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": "per head"},
    "alibi per sequence": {"alibi_slopes": "per sequence"},
    "deterministic": {"deterministic": True},
}

VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
KVCACHE = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
# The signatures of flash_attn 2.8: the arguments without a default, and those with one.
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *VARLEN], COMMON | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *VARLEN], COMMON),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], KVCACHE),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_of_arguments_are_those_of_flash_attn(name):
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
    empty = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [*((name, empty) for name in required), *defaults.items()]


def test_all_names_the_functions():
    assert sorted(compat.__all__) == sorted(SIGNATURES)


def check(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=3e-5, rtol=3e-5)


def cu_seqlens(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def options_of(name, heads, batch):
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        shape = (heads,) if options["alibi_slopes"] == "per head" else (batch, heads)
        options["alibi_slopes"] = torch.rand(shape) * 0.3
    return options


def exact(q, k, v, lengths, key_lengths, softmax_scale=None, causal=False, deterministic=False, **options):
    """out (T, H, Dv) and lse (H, T) of packed tensors in float64."""
    out, lse = oracle.attention(q, k, v, lengths, key_lengths, scale=softmax_scale, is_causal=causal, **options)
    return out, lse.T


def reference(q, k, v, q_lengths, k_lengths, **options):
    """The same of padded tensors (B, L, H, D), of which sequence i has the first q_lengths[i] and k_lengths[i] rows."""
    q_lengths, k_lengths = ([int(n) for n in x] for x in (q_lengths, k_lengths))
    packed = [torch.cat([x[:n] for x, n in zip(a, b, strict=True)]) for a, b in ((q, q_lengths), (k, k_lengths))]
    value = torch.cat([x[:n] for x, n in zip(v, k_lengths, strict=True)])
    out, lse = exact(*packed, value, q_lengths, k_lengths, **options)
    return out.unflatten(0, (len(q), -1)), lse.unflatten(1, (len(q), -1)).transpose(0, 1)


# Packed and dense batches, and keys in pages


def in_pages(keys, lengths, page_size):
    """A pool whose pages are in a random order, and the block table, of packed keys or values."""
    each = -(-max(lengths) // page_size)
    pages = len(lengths) * each + 3
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(2))[: len(lengths) * each].view(-1, each)
    pool = torch.randn(pages, page_size, *keys.shape[1:])
    for row, x in zip(table, keys.split(lengths), strict=True):
        for i, key in enumerate(x):
            pool[row[i // page_size], i % page_size] = key
    return pool, table.int()


@pairwise(
    {"kind": ["varlen", "dense", "pages of 1", "pages of 4"], "heads": HEADS, "causal": [False, True]}
    | {"window_size": WINDOWS, "lengths": LENGTHS, "head_dim": [32, 40, 59, 128], "options": OPTIONS}
)
def test_against_the_oracle(kind, heads, causal, window_size, lengths, head_dim, options):
    (nheads, nheads_k), (q_lengths, k_lengths) = HEADS[heads], LENGTHS[lengths]
    if kind == "dense":  # of this number of queries and of keys
        q_lengths, k_lengths = [q_lengths[0]] * 2, [k_lengths[0]] * 2
    leaves = [
        torch.randn(sum(q_lengths), nheads, head_dim, requires_grad=True),
        *(torch.randn(sum(k_lengths), nheads_k, head_dim, requires_grad=True) for _ in range(2)),
    ]
    options = {"causal": causal, "window_size": window_size, **options_of(options, nheads, len(q_lengths))}
    bounds = [cu_seqlens(q_lengths), cu_seqlens(k_lengths), max(q_lengths), max(k_lengths)]
    if lengths == "equal":
        bounds[1] = bounds[0]
    wanted = exact(*leaves, q_lengths, k_lengths, **options)
    if "pages" in kind:
        (k, table), (v, _) = (in_pages(x.detach(), k_lengths, int(kind[-1])) for x in leaves[1:])
        more = {"block_table": table, "return_attn_probs": True}
        out, lse, _ = compat.flash_attn_varlen_func(leaves[0].detach(), k, v, *bounds, **options, **more)
    elif kind == "varlen":
        out, lse, _ = compat.flash_attn_varlen_func(*leaves, *bounds, **options, return_attn_probs=True)
    else:
        dense = [x.unflatten(0, (2, -1)) for x in leaves]
        out, lse, _ = compat.flash_attn_func(*dense, **options, return_attn_probs=True)
        assert lse.shape == (2, nheads, q_lengths[0])
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for one, two in zip((out, lse), wanted, strict=True):
        check(one, two)
    if out.requires_grad:
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, grad)
        for one, two in zip(found, torch.autograd.grad(wanted[0], leaves, grad.double()), strict=True):
            check(one, two.double())


def test_dense_takes_transposed_tensors():
    q, k, v = torch.randn(3, 2, 4, 7, 32).transpose(2, 3).unbind()
    out = compat.flash_attn_func(q, k, v, causal=True)
    check(out, reference(q, k, v, [7, 7], [7, 7], causal=True)[0])


def test_packed_functions_pass_every_option_on(monkeypatch):
    """All arguments have values of their own, so that two that are swapped differ."""
    values = dict.fromkeys(COMMON)
    values |= {name: f"value of {name}" for name in values}
    names = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func"}
    for kind, target in names.items():
        monkeypatch.setattr(compat, target, inspect.signature(getattr(compat, target)).bind)
        middle = "_varlen" if kind == "varlen" else ""
        qkv, q, kv = torch.randn(4, 3, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 2, 8)
        if kind == "dense":
            qkv, q, kv = (x.unsqueeze(0) for x in (qkv, q, kv))
        before = {"varlen": (["cu"] * 1 + ["max"], ["cu_q", "cu_k", "max_q", "max_k"]), "dense": ([], [])}[kind]
        of_qkv = getattr(compat, f"flash_attn{middle}_qkvpacked_func")(qkv, *before[0], **values).arguments
        of_kv = getattr(compat, f"flash_attn{middle}_kvpacked_func")(q, kv, *before[1], **values).arguments
        for arguments in (of_qkv, of_kv):
            assert {name: arguments[name] for name in values} == values
        for arguments, tensors in ((of_qkv, qkv.unbind(-3)), (of_kv, (q, *kv.unbind(-3)))):
            assert all(torch.equal(arguments[name], x) for name, x in zip("qkv", tensors, strict=True))
        if kind == "varlen":
            assert [of_qkv[name] for name in VARLEN] == ["cu", "cu", "max", "max"]
            assert [of_kv[name] for name in VARLEN] == before[1]


def test_without_return_attn_probs_only_the_output_is_returned():
    q = torch.randn(2, 5, 4, 32)
    assert isinstance(compat.flash_attn_func(q, q, q), torch.Tensor)
    out, lse, probabilities = compat.flash_attn_func(q, q, q, return_attn_probs=True)
    assert out.shape == q.shape
    assert lse.dtype == torch.float32
    assert probabilities.numel() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    q = torch.randn(2, 5, 4, 32).to(dtype)
    out = compat.flash_attn_func(q, q, q, causal=True)
    assert out.dtype == dtype
    wanted = reference(*[q.double()] * 3, [5, 5], [5, 5], causal=True)[0]
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)


def test_dropout_drops_weights_and_keeps_their_mean():
    q, k, v = torch.randn(3, 2, 6, 2, 32).unbind()
    outs = torch.stack([compat.flash_attn_func(q, k, v, dropout_p=0.3) for _ in range(400)])
    assert (outs[0] != outs[1]).any()
    torch.testing.assert_close(outs.mean(0), compat.flash_attn_func(q, k, v), atol=0.25, rtol=0.1)


def test_negative_softcap_and_windows_mean_none():
    q = torch.randn(1, 6, 2, 32)
    found = compat.flash_attn_func(q, q, q, softcap=-1.0, window_size=[-2, -5])
    torch.testing.assert_close(found, compat.flash_attn_func(q, q, q), atol=0, rtol=0)


WINDOWS_OF_TENSORS = {
    "a tensor, as in flash-attn's tests": torch.tensor([2, 1]),
    "tensors": (torch.tensor(2), torch.tensor([1])),
    "NumPy": [np.int64(2), 1],
}


@pytest.mark.parametrize("window_size", WINDOWS_OF_TENSORS.values(), ids=WINDOWS_OF_TENSORS)
def test_windows_of_integer_tensors(window_size):
    q = torch.randn(1, 6, 2, 32)
    want = compat.flash_attn_func(q, q, q, window_size=(2, 1))
    torch.testing.assert_close(compat.flash_attn_func(q, q, q, window_size=window_size), want, atol=0, rtol=0)


def test_max_seqlen_may_be_a_bound():
    q, offsets = torch.randn(8, 2, 32), cu_seqlens([3, 5])
    found = compat.flash_attn_varlen_func(q, q, q, offsets, offsets, 100, 64)
    torch.testing.assert_close(found, compat.flash_attn_varlen_func(q, q, q, offsets, offsets, 5, 5))


def test_cu_seqlens_are_read_once(monkeypatch):
    from nt_attention.layouts import cache

    read, original = [], cache._read
    monkeypatch.setattr(cache, "_read", lambda offsets: read.append(offsets) or original(offsets))
    q, offsets = torch.randn(8, 2, 32), cu_seqlens([3, 5])
    for _ in range(3):
        compat.flash_attn_varlen_func(q, q, q, offsets, offsets, 5, 5)
    assert len(read) == 1


# flash_attn_with_kvcache


def rotated(x, cos, sin, positions, interleaved):
    """`x` (B, L, H, D) in float64, rotated as complex numbers by the positions (B, L)."""
    pairs = cos.shape[1]
    factor = torch.complex(cos.double(), sin.double())[positions].unsqueeze(2)
    part, rest = x.double()[..., : 2 * pairs], x.double()[..., 2 * pairs :]
    real, imaginary = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    turned = torch.complex(real, imaginary) * factor
    if interleaved:
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)
    return torch.cat([turned.real, turned.imag, rest], -1)


CAPACITY, BATCH = 32, 3
FORMS = ["rows", "cache_batch_idx", "pages of 4", "pages of 32", "leftpad", "cache_batch_idx and leftpad", "strided"]

# The number of new keys, then the dims that are rotated and whether they are interleaved.
NEW_KEYS = [
    *[(new, None) for new in (None, 1, 4, 6)],
    *[(1, (32, True)), (4, (32, False)), (6, (16, True)), (4, (16, False))],
]


class Cache:
    """The caches of one of the forms, with the arguments that describe them."""

    def __init__(self, form, nheads_k, head_dim=32, value_dim=32):
        self.arguments, self.leftpad = {}, torch.zeros(BATCH, dtype=torch.int32)
        rows, size = (BATCH, CAPACITY)
        if form.startswith("pages"):
            size = int(form.split()[-1])
            per_sequence = CAPACITY // size
            rows = BATCH * per_sequence + 2
            table = torch.randperm(rows)[: BATCH * per_sequence].view(BATCH, -1).int()
            self.arguments["block_table"] = table
        elif "cache_batch_idx" in form:
            rows = BATCH + 2
            table = torch.tensor([3, 0, 4], dtype=torch.int32)
            self.arguments["cache_batch_idx"], table = table, table[:, None]
        else:
            table = torch.arange(BATCH)[:, None]
        if "leftpad" in form:
            self.leftpad = self.arguments["cache_leftpad"] = torch.tensor([2, 0, 5], dtype=torch.int32)
        if form == "strided":  # (B, G, S, D) in memory
            self.pools = [torch.randn(rows, nheads_k, size, dim).transpose(1, 2) for dim in (head_dim, value_dim)]
        else:
            self.pools = [torch.randn(rows, size, nheads_k, dim) for dim in (head_dim, value_dim)]
        self.table, self.size = table.long(), size

    def padded(self):
        """The caches as (B, CAPACITY, G, D), by position."""
        return [pool[self.table].flatten(1, 2) for pool in self.pools]

    def visible(self):
        """The same, with the first key of each sequence at 0."""
        return [
            torch.stack([x.roll(-int(pad), 0) for x, pad in zip(padded, self.leftpad, strict=True)])
            for padded in self.padded()
        ]

    def index(self, sequence, position):
        return int(self.table[sequence, position // self.size]), position % self.size


@pairwise(
    {"form": FORMS, "heads": ["gqa", "mqa"], "causal": [False, True], "window_size": [(-1, -1), (5, 0), (3, 2)]}
    | {"queries": [1, 4], "new_keys": NEW_KEYS, "options": ["plain", "softcap", "alibi per sequence"]}
)
def test_kvcache(form, heads, causal, window_size, queries, new_keys, options):
    check_kvcache(form, heads, causal, window_size, queries, new_keys, options)


def check_kvcache(form, heads, causal, window_size, queries, new_keys, options):
    (nheads, nheads_k), (new, rotary) = HEADS[heads], new_keys
    cache = Cache(form, nheads_k)
    lengths = torch.tensor([9, 0, 26] if cache.leftpad[2] == 0 else [9, 1, 26], dtype=torch.int32)
    q = torch.randn(BATCH, queries, nheads, 32)
    options = {"causal": causal, "window_size": window_size, **options_of(options, nheads, BATCH)}
    arguments, new_k, new_v, wanted_q = {}, None, None, q.double()
    before = [x.double() for x in cache.padded()]
    if new is not None:
        new_k, new_v = torch.randn(2, BATCH, new, nheads_k, 32)
        arguments = {"k": new_k, "v": new_v}
        steps, wanted_k = lengths[:, None].long() + torch.arange(new), new_k.double()
        if rotary is not None:
            dims, interleaved = rotary
            angles = torch.rand(CAPACITY, dims // 2) * 6
            cos, sin = angles.cos(), angles.sin()
            arguments |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
            is_ordered = causal or window_size != (-1, -1)
            at = lengths[:, None].long() + torch.arange(queries) * is_ordered
            wanted_q = rotated(q, cos, sin, at, interleaved)
            wanted_k = rotated(new_k, cos, sin, steps, interleaved)
        for padded, x in zip(before, (wanted_k, new_v.double()), strict=True):
            padded[torch.arange(BATCH)[:, None], steps] = x
    out, lse = compat.flash_attn_with_kvcache(
        q, *cache.pools, cache_seqlens=lengths, **arguments, **cache.arguments, **options, return_softmax_lse=True
    )
    for found, wanted in zip(cache.padded(), before, strict=True):
        check(found, wanted)
    k, v = (x.double() for x in cache.visible())
    keys = lengths - cache.leftpad + (new or 0)
    wanted, wanted_lse = reference(wanted_q, k, v, [queries] * BATCH, keys, **options)
    check(out, wanted)
    check(lse, wanted_lse)


@pairwise(
    {"form": FORMS, "causal": [False, True], "queries": [1, 4], "options": ["plain", "softcap", "alibi per sequence"]}
)
def test_kvcache_on_the_kernels_for_gpus(form, causal, queries, options):
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton interprets kernels only where there is no GPU")
    with nta.use_backend("split_kv"):
        check_kvcache(form, "gqa", causal, (5, 2), queries, (4, (16, False)), options)


@pytest.mark.parametrize("form", FORMS)
def test_new_keys_change_nothing_else_in_the_cache(form):
    cache = Cache(form, 2)
    before = [pool.clone() for pool in cache.pools]
    k, v = torch.randn(2, BATCH, 3, 2, 32)
    starts = [6, 11, 29]
    compat.flash_attn_with_kvcache(
        torch.randn(BATCH, 1, 4, 32), *cache.pools, k, v, cache_seqlens=torch.tensor(starts), **cache.arguments
    )
    for pool, old, new in zip(cache.pools, before, (k, v), strict=True):
        for b, start in enumerate(starts):
            for i in range(3):
                index = cache.index(b, start + i)
                assert torch.equal(pool[index], new[b, i])
                old[index] = new[b, i]
        assert torch.equal(pool, old)


@pytest.mark.parametrize("new", [0, 2])
def test_integer_cache_seqlens_are_those_of_all_sequences(new):
    cache, other = Cache("rows", 2), Cache("rows", 2)
    other.pools = [pool.clone() for pool in cache.pools]
    q = torch.randn(BATCH, 2, 4, 32)
    arguments = dict(zip("kv", torch.randn(2, BATCH, new, 2, 32), strict=True)) if new else {}
    found = compat.flash_attn_with_kvcache(q, *cache.pools, **arguments, cache_seqlens=13, causal=True)
    lengths = torch.full((BATCH,), 13)
    wanted = compat.flash_attn_with_kvcache(q, *other.pools, **arguments, cache_seqlens=lengths, causal=True)
    assert torch.equal(found, wanted)
    assert torch.equal(cache.pools[0], other.pools[0])


def test_without_cache_seqlens_the_whole_cache_is_used():
    cache, q = Cache("pages of 4", 2), torch.randn(BATCH, 2, 4, 32)
    out = compat.flash_attn_with_kvcache(q, *cache.pools, **cache.arguments)
    check(out, reference(q.double(), *(x.double() for x in cache.padded()), [2] * BATCH, [CAPACITY] * BATCH)[0])


def test_values_may_have_another_head_dim():
    cache, q = Cache("cache_batch_idx", 2, value_dim=24), torch.randn(BATCH, 2, 4, 32)
    k, v = torch.randn(BATCH, 1, 2, 32), torch.randn(BATCH, 1, 2, 24)
    out = compat.flash_attn_with_kvcache(q, *cache.pools, k, v, cache_seqlens=4, **cache.arguments)
    check(out, reference(q.double(), *(x.double() for x in cache.padded()), [2] * BATCH, [5] * BATCH)[0])


def test_num_splits_does_not_change_the_result():
    cache, q = Cache("rows", 2), torch.randn(BATCH, 1, 4, 32)
    outs = [compat.flash_attn_with_kvcache(q, *cache.pools, cache_seqlens=20, num_splits=n) for n in (0, 1, 7)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("is_inference", [False, True])
def test_decoding_makes_no_layout_anew(is_inference):
    _layouts._cached.cache_clear()
    cache, lengths = Cache("rows", 2), torch.tensor([3, 0, 9], dtype=torch.int32)
    with torch.inference_mode(is_inference):
        for _ in range(4):
            q, (k, v) = torch.randn(BATCH, 1, 4, 32), torch.randn(2, BATCH, 1, 2, 32)
            out = compat.flash_attn_with_kvcache(q, *cache.pools, k, v, cache_seqlens=lengths, causal=True)
            lengths += 1
            keys = [x.double() for x in cache.padded()]
            check(out, reference(q.double(), *keys, [1] * BATCH, lengths)[0])
    assert _layouts._cached.cache_info().misses == 1
    out = compat.flash_attn_with_kvcache(q.clone(), *cache.pools, cache_seqlens=10)
    assert not out.is_inference()


# Errors


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


# Compilers


def test_functions_compile_to_one_graph(fresh_compiler):
    offsets = cu_seqlens([3, 5])

    def run(q, k_cache, v_cache, k, lengths, slopes):
        packed = q.flatten(0, 1)
        varlen = compat.flash_attn_varlen_func(packed, packed, packed, offsets, offsets, 5, 5, causal=True)
        dense = compat.flash_attn_func(q, q, q, alibi_slopes=slopes)
        decoded = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lengths, causal=True)
        return varlen, dense, decoded

    q, k, lengths = torch.randn(2, 4, 4, 32), torch.randn(2, 4, 2, 32), int32(3, 9)
    caches = torch.randn(2, 2, 16, 2, 32)
    wanted_caches = caches.clone()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = compiled(q, *caches, k, lengths, torch.rand(4) * 0)
    wanted = run(q, *wanted_caches, k, lengths, torch.rand(4) * 0)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert torch.equal(caches, wanted_caches)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_decoding_on_a_gpu_does_not_sync_and_can_be_captured(form):
    torch.manual_seed(1)
    cache = Cache(form, 2, 64, 64)
    pools = [pool.cuda().bfloat16() for pool in cache.pools]
    arguments = {name: x.cuda() for name, x in cache.arguments.items()}
    q = torch.randn(BATCH, 1, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, BATCH, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(CAPACITY, 16, device="cuda")
    arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    lengths = int32(7, 8, 9).cuda()

    def step():
        return compat.flash_attn_with_kvcache(
            q, *pools, k, v, cache_seqlens=lengths, **arguments, return_softmax_lse=True
        )

    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out, lse = step()
    for now in ([7, 8, 9], [20, 6, 31], [30, 12, 5]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        found = out.clone(), lse.clone(), *(pool.clone() for pool in pools)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for x, y in zip(found, (*eager, *pools), strict=True):
            torch.testing.assert_close(x, y)
        for pool, mirror in zip(pools, cache.pools, strict=True):
            mirror.copy_(pool)
        at = torch.tensor(now)[:, None]
        turned = rotated(q.cpu(), angles.cos().cpu(), angles.sin().cpu(), at, True)
        keys = [x.double() for x in cache.visible()]
        wanted, wanted_lse = reference(turned, *keys, [1] * BATCH, torch.tensor(now) - cache.leftpad + 1)
        torch.testing.assert_close(out.cpu().double(), wanted, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_varlen_in_a_cuda_graph_uses_the_offsets_of_each_replay():
    q, k, v = torch.randn(3, 32, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    static = cu_seqlens([12, 20]).cuda()

    def run(offsets):
        return compat.flash_attn_varlen_func(q, k, v, offsets, offsets, 32, 32, causal=True)

    bounded = nta.SequenceLayout.from_offsets(static.clone(), max_seqlen=32, max_tokens=32)
    nta.varlen_attention(q, k, v, bounded, is_causal=True)  # compiles the kernels
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = run(static)
    for lengths in ([12, 20], [1, 31], [32, 0]):
        static.copy_(cu_seqlens(lengths))
        graph.replay()
        wanted = run(cu_seqlens(lengths).cuda())
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("wrong", [{"alibi_slopes": torch.ones(3)}, {"q": torch.float16}], ids=["slopes", "dtype"])
def test_nothing_is_written_if_an_argument_is_invalid(wrong):
    k_cache, v_cache = torch.zeros(2, 2, 16, 1, 8).unbind()
    new = torch.randn(2, 1, 1, 8)
    q = torch.randn(2, 1, 4, 8).to(wrong.pop("q", torch.float32))
    with pytest.raises(ValueError, match=r"alibi_slopes must be|must share one"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3, **wrong)
    assert not k_cache.any()
    assert not v_cache.any()


def test_kvcache_in_one_graph_for_other_batch_sizes(fresh_compiler):
    def function(q, k_cache, v_cache, lengths):
        return compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for batch in (2, 3, 5):
        caches = torch.randn(2, 9, 4, 2, 8).unbind()
        given = (torch.randn(batch, 1, 4, 8), *caches, torch.randint(1, 5, (batch,)))
        torch.testing.assert_close(compiled(*given), function(*given))

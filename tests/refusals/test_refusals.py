"""What is refused, and with which words: `varlen_attention`, flash-attn's functions, `register_backend`, commands."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import nt_attention as nta
from nt_attention import RelativeBias, SequenceLayout, VarlenMultiheadAttention, explain, varlen_attention
from nt_attention.__main__ import main
from nt_attention.compat import flash_attn as compat
from nt_attention.kernels.call import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
LAYOUT = SequenceLayout.from_lengths([4, 0, 3])
BOTH = pytest.mark.parametrize("function", [varlen_attention, explain], ids=["varlen_attention", "explain"])


def inputs(**changes):
    """The arguments of a valid call, with `changes`."""
    given = {"query": torch.randn(7, 6, 5), "key": torch.randn(7, 3, 5), "value": torch.randn(7, 3, 11)}
    return given | {"layout": LAYOUT} | changes


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_calls_that_the_tables_change_are_valid():
    out, lse = varlen_attention(**inputs(), return_lse=True)
    assert (out.shape, lse.shape) == ((7, 6, 11), (7, 6))
    assert isinstance(varlen_attention(**inputs()), torch.Tensor)
    assert cache_call().shape == cache_call(**ROTARY, cache_seqlens=7).shape == (2, 1, 4, 32)


ATTENTION = {
    "query-2d": ({"query": zeros(7, 30)}, "query must be (tokens, heads, head dim), got (7, 30)"),
    "key-4d": ({"key": zeros(1, 7, 3, 5)}, "key must be (tokens, heads, head dim), got (1, 7, 3, 5)"),
    "value-1d": ({"value": zeros(7)}, "value must be (tokens, heads, head dim), got (7,)"),
    "dtypes": ({"key": zeros(7, 3, 5, dtype=torch.half)}, "torch.float32, torch.float16 and torch.float32: cast them"),
    "integers": (
        {name: zeros(7, 3, 5, dtype=torch.long) for name in ("query", "key", "value")},
        "one floating-point dtype, got torch.int64",
    ),
    "float8": (
        {name: zeros(7, 3, 5).to(torch.float8_e4m3fn) for name in ("query", "key", "value")},
        "one floating-point dtype, got torch.float8_e4m3fn",
    ),
    "causal-tensor": ({"is_causal": torch.tensor(True)}, "is_causal must be True or False, got tensor(True)"),
    "causal-word": ({"is_causal": "no"}, "is_causal must be True or False, got 'no'"),
    "deterministic-number": ({"deterministic": 1}, "deterministic must be True or False, got 1"),
    "window-too-wide": ({"window_size": (10**30, 1)}, "window_size must be (left, right)"),
    "mask-mod-number": (
        {"mask_mod": 3},
        "mask_mod must be a function with the signature of flex_attention's mask_mod, got 3",
    ),
    "complex-sinks": ({"sinks": zeros(6, dtype=torch.complex64)}, "sinks must be floating-point numbers"),
    "devices": ({"value": zeros(7, 3, 11, device="meta")}, "on one device, got cpu, cpu and meta"),
    "head-dims": (
        {"key": zeros(7, 3, 7)},
        "query and key must have the same head dim: query (7, 6, 5), key (7, 3, 7), value (7, 3, 11)",
    ),
    "key-and-value-heads": (
        {"value": zeros(7, 2, 11)},
        "key and value must have the same number of heads: query (7, 6, 5), key (7, 3, 5), value (7, 2, 11)",
    ),
    "no-multiple": (
        {"query": zeros(7, 5, 5)},
        "query heads must be a multiple of key heads: query (7, 5, 5), key (7, 3, 5), value (7, 3, 11)",
    ),
    "fewer-query-heads": ({"query": zeros(7, 1, 5)}, "query heads must be a multiple of key heads: query (7, 1, 5)"),
    "no-heads": ({"query": zeros(7, 0, 5)}, "query heads must be a multiple of key heads: query (7, 0, 5)"),
    "no-key-heads": (
        {"key": zeros(7, 0, 5), "value": zeros(7, 0, 5)},
        "must be a multiple of key heads: query (7, 6, 5)",
    ),
    "no-head-dim": ({"query": zeros(7, 6, 0), "key": zeros(7, 3, 0)}, "head dims must not be 0: query (7, 6, 0)"),
    "no-value-dim": (
        {"value": zeros(7, 3, 0)},
        "head dims must not be 0: query (7, 6, 5), key (7, 3, 5), value (7, 3, 0)",
    ),
    "no-layout": ({"layout": None}, "packed tensors such as query (7, 6, 5) need layout=: pass SequenceLayout.from_"),
    "key-layout-alone": ({"layout": None, "key_layout": LAYOUT}, "query (7, 6, 5) need layout="),
    "batch-sizes": ({"key_layout": SequenceLayout.from_lengths([4, 3])}, "layout has 3 sequences and key_layout 2"),
    "query-too-short": (
        {"query": zeros(6, 6, 5)},
        "query has shape (6, 6, 5), but the layout's 3 sequences have 7 tokens",
    ),
    "key-too-short": (
        {"key": zeros(5, 3, 5), "key_layout": SequenceLayout.from_lengths([2, 0, 4])},
        "key has shape (5, 3, 5), but the layout's 3 sequences have 6 tokens",
    ),
    "value-too-short": ({"value": zeros(6, 3, 11)}, "value has shape (6, 3, 11), but the layout's 3 sequences have 7"),
    "key-and-value-tokens": (
        {"key": zeros(9, 3, 5), "value": zeros(8, 3, 11)},
        "key and value must have the same tokens, got (9, 3, 5) and (8, 3, 11)",
    ),
    "layout-elsewhere": (
        {"layout": SequenceLayout.from_lengths([4, 0, 3], device="meta")},
        "query is on cpu and the layout on meta",
    ),
    "key-layout-elsewhere": (
        {"key_layout": SequenceLayout.from_lengths([4, 0, 3], device="meta")},
        "key is on cpu and the layout on meta",
    ),
    "query-none": ({"query": None}, "query must be a torch.Tensor, got NoneType"),
    "layout-is-a-tensor": ({"layout": torch.tensor([0, 4, 4, 7])}, "SequenceLayout.from_offsets"),
    "alignment": ({"causal_alignment": "top_left"}, "must be 'lower_right' or 'upper_left', got 'top_left'"),
    "window-one-number": (
        {"window_size": 3},
        "window_size must be (left, right), two integers from −1 (no limit) to 2^63 − 1, got 3",
    ),
    "window-one-side": ({"window_size": (3,)}, "window_size must be (left, right)"),
    "window-below": (
        {"window_size": (-2, 0)},
        "window_size must be (left, right), two integers from −1 (no limit) to 2^63 − 1, got (",
    ),
    "window-fraction": ({"window_size": (1.5, 0)}, "window_size must be (left, right)"),
    "window-half-open": ({"window_size": (None, 0)}, "window_size must be (left, right)"),
    "window-infinite": ({"window_size": (float("inf"), 0)}, "window_size must be (left, right)"),
    "window-letters": ({"window_size": "ab"}, "window_size must be (left, right)"),
    "scale-nan": ({"scale": float("nan")}, "scale must be a finite number, or None for D^−0.5, got nan"),
    "score-mod-number": (
        {"score_mod": 3},
        "score_mod must be a function with the signature of flex_attention's score_mod, got 3",
    ),
    "scale-tensor": ({"scale": torch.tensor(0.5)}, "To learn one, multiply query by it"),
    "softcap-none": ({"softcap": None}, "softcap must be 0 (off) or a positive number, got None"),
    "softcap-below-0": ({"softcap": -1.0}, "softcap must be 0 (off) or a positive number, got -1.0"),
    "softcap-nan": ({"softcap": float("nan")}, "softcap must be 0 (off) or a positive number, got nan"),
    "softcap-subnormal": ({"softcap": 1e-42}, "softcap must be 0 (off) or a positive number, got 1e-42. The least is"),
    "softcap-true": ({"softcap": True}, "softcap must be 0 (off) or a positive number, got True"),
    "softcap-infinite": ({"softcap": float("inf")}, "softcap must be 0 (off) or a positive number, got inf"),
    "dropout-below-0": ({"dropout_p": -0.1}, "dropout_p must be in [0, 1), got -0.1"),
    "dropout-none": ({"dropout_p": None}, "dropout_p must be in [0, 1), got None"),
    "dropout-1": ({"dropout_p": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
    "sinks-of-key-heads": ({"sinks": zeros(3)}, "one score for each of the 6 query heads, on cpu, got (3,) on cpu"),
    "sinks-a-list": ({"sinks": [0.0] * 6}, "a tensor of one score for each of the 6 query heads, on cpu, got [0.0"),
    "sinks-2d": ({"sinks": zeros(1, 6)}, "one score for each of the 6 query heads, on cpu, got (1, 6) on cpu"),
    "sinks-elsewhere": ({"sinks": zeros(6, device="meta")}, "on cpu, got (6,) on meta"),
    "slopes-a-list": ({"alibi_slopes": [0.5]}, "alibi_slopes must be a tensor (6,) or (3, 6) on cpu, got [0.5]"),
    "slopes-shape": (
        {"alibi_slopes": zeros(3)},
        "must be a tensor (6,) or (3, 6) on cpu, got (3,) on cpu",
    ),
    "slopes-transposed": (
        {"alibi_slopes": zeros(6, 3)},
        "alibi_slopes must be a tensor (6,) or (3, 6) on cpu, got (6, 3) on cpu",
    ),
    "slopes-elsewhere": ({"alibi_slopes": zeros(6, device="meta")}, "on cpu, got (6,) on meta"),
    "slopes-dtype": (
        {"alibi_slopes": zeros(6, dtype=torch.bfloat16)},
        "alibi_slopes must be float32 or float64, got torch.bfloat16",
    ),
    "slopes-learnt": (
        {"alibi_slopes": zeros(6, requires_grad=True)},
        "alibi_slopes must not require a gradient: pass alibi_slopes.detach()",
    ),
    "heads-first": (
        {"query": zeros(6, 7, 5), "key": zeros(3, 7, 5), "value": zeros(3, 7, 11)},
        "pass at least 7 rows. The order is (T, H, D): (H, T, D) may have been passed.",
    ),
    "heads-first-keys": (
        {name: zeros(9, 6, 5) for name in ("key", "value")} | {"query": zeros(9, 7, 5)},
        "(9, 6, 5). The order is (T, H, D): (H, T, D) may have been passed.",
    ),
    "name-of-flash-attn": (
        {"causal": True},
        "varlen_attention() got an unexpected argument 'causal': did you mean is_",
    ),
    "two-names": ({"softmax_scale": 0.5, "dropout": 0.1}, "did you mean dropout_p?\nvarlen_attention() got an unex"),
    "misspelt": ({"retrun_lse": True}, "did you mean return_lse?"),
    "mask": ({"attn_mask": None}, "'attn_mask': pass mask_mod, a function of positions, or score_mod"),
    "padding-mask": ({"key_padding_mask": None}, "pass layout=SequenceLayout.from_attention_mask(~mask), and"),
    "offsets-and-no-layout": (
        {"layout": None, "cu_seqlens": torch.tensor([0, 4, 4, 7])},
        "'cu_seqlens': pass layout=SequenceLayout.from_offsets(cu_seqlens)",
    ),
    "unknown": ({"colour": 1}, "got an unexpected argument 'colour'."),
    "backend": ({"backend": "flash"}, "there is no backend 'flash': pass 'auto' or one of"),
}


@BOTH
@pytest.mark.parametrize(("changes", "words"), ATTENTION.values(), ids=ATTENTION)
def test_attention(changes, words, function):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        function(**inputs(**changes))


UNHASHABLE = {
    "is_causal": "must be True or False, got []",
    "causal_alignment": "must be 'lower_right' or 'upper_left', got []",
    "window_size": "must be (left, right), two integers",
    "scale": "must be a finite number, or None for D^−0.5, got []",
    "softcap": "must be 0 (off) or a positive number, got []",
    "dropout_p": "must be in [0, 1), got []",
    "score_mod": "must be a function with the signature of flex_attention's score_mod, got []",
    "mask_mod": "must be a function with the signature of flex_attention's mask_mod, got []",
    "deterministic": "must be True or False, got []",
    "batch_invariant": "must be True or False, got []",
}


@BOTH
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_in_a_cache_key(function, name):
    with pytest.raises(ValueError, match=re.escape(f"{name} {UNHASHABLE[name]}")):
        function(**inputs(), **{name: []})


@BOTH
@pytest.mark.parametrize(
    ("valid", "invalid"),
    [
        ({"softcap": 0.0}, {"is_causal": 0.0}),
        ({"is_causal": False}, {"is_causal": 0}),
        ({"is_causal": True}, {"is_causal": 1.0}),
        ({"deterministic": False}, {"deterministic": 0.0}),
        ({"batch_invariant": False}, {"batch_invariant": 0}),
    ],
    ids=str,
)
def test_equal_option_of_another_type_is_not_served_from_the_cache_of_the_layout(function, valid, invalid):
    """0.0 == 0 == False: an invalid option must not find the cache entry of a valid one."""
    arguments = inputs(layout=SequenceLayout.from_lengths([4, 0, 3]))
    function(**arguments, **valid)
    ((name, value),) = invalid.items()
    for _ in range(2):  # the error is not cached either
        with pytest.raises(ValueError, match=re.escape(f"{name} must be True or False, got {value!r}")):
            function(**arguments, **invalid)
    function(**arguments, **valid)


SCORE_MODS = {
    "shape (1,)": (lambda score, *_: score[None], r"\(1,\) torch.float32"),
    "float64": (lambda score, *_: score.double(), r"\(\) torch.float64"),
    "integers": (lambda score, b, h, q, k: q - k, r"\(\) torch.int64"),
    "a number": (lambda *_: 1.0, "a float"),
    "nothing": (lambda *_: None, "a NoneType"),
    "a tuple": (lambda score, *_: (score, score), "a tuple"),
}
MASK_MODS = {
    "integers": (lambda b, h, q, k: (q >= k).int(), r"\(\) torch.int32"),
    "differences": (lambda b, h, q, k: q - k, r"\(\) torch.int64"),
    "shape (1,)": (lambda b, h, q, k: (q >= k)[None], r"\(1,\) torch.bool"),
    "True": (lambda *_: True, "a bool"),
}


@pytest.mark.parametrize("through", ["function", "module", "module with weights"])
@pytest.mark.parametrize("name", [*(f"score_mod: {x}" for x in SCORE_MODS), *(f"mask_mod: {x}" for x in MASK_MODS)])
def test_mods_that_return_something_else(name, through):
    option, _, which = name.partition(": ")
    mod, shown = (SCORE_MODS if option == "score_mod" else MASK_MODS)[which]
    with torch.no_grad(), pytest.raises(ValueError, match=rf"{option} must return .* shape \(\).*got {shown}"):
        if through == "function":
            varlen_attention(**inputs(), **{option: mod})
        else:
            module, x = VarlenMultiheadAttention(12, 2, batch_first=True), torch.randn(LAYOUT.total, 12)
            module(x, x, x, layout=LAYOUT, need_weights=through != "module", **{option: mod})


def fields(**changes):
    return {"buckets": torch.zeros(9, dtype=torch.int64), "bias": torch.zeros(3, 7)} | changes


RELATIVE = {
    "no-bias": (fields(bias=None), "relative has no bias: pass bias (H, N)"),
    "list": (fields(bias=[1.0]), "relative.bias must be a torch.Tensor, got list"),
    "buckets-list": (fields(buckets=[1]), "relative.buckets must be a torch.Tensor, got list"),
    "even": (fields(buckets=torch.zeros(8, dtype=torch.int64)), "must be (2R+1,) int32 or int64"),
    "float-buckets": (fields(buckets=torch.zeros(9)), "got (9,) torch.float32"),
    "bucket-too-large": (fields(buckets=torch.full((9,), 7)), "in [0, 7), got values from 7 to 7"),
    "bucket-negative": (fields(buckets=torch.arange(-4, 5)), "in [0, 7), got values from -4 to 4"),
    "heads": (fields(bias=torch.zeros(2, 7)), "relative.bias must be floating-point numbers (3, 7)"),
    "number": (fields(bias=torch.tensor(1.0)), "got () torch.float32"),
    "integers": (fields(bias=torch.zeros(3, 7, dtype=torch.int64)), "got (3, 7) torch.int64"),
    "no-buckets": (fields(bias=torch.zeros(3, 0)), "relative has no buckets"),
    "rows": (
        fields(query_bias=torch.zeros(6, 3, 7)),
        "query_bias must be floating-point numbers (5, 3, 7)",
    ),
    "different-N": (fields(key_bias=torch.zeros(5, 3, 8)), "(5, 3, 7) for 3 query heads and 7 buckets"),
    "device": (fields(bias=torch.zeros(3, 7, device="meta")), "relative.bias is on meta and query on cpu"),
}


@BOTH
@pytest.mark.parametrize(("changes", "words"), RELATIVE.values(), ids=RELATIVE)
def test_relative_bias(changes, words, function):
    x, layout = torch.randn(5, 3, 8), SequenceLayout.from_lengths([2, 3])
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        function(x, x, x, layout, relative=RelativeBias(**changes))


def cache_call(**changes):
    arguments = {
        "q": torch.randn(2, 1, 4, 32),
        **{name: torch.randn(2, 8, 2, 32) for name in ("k_cache", "v_cache")},
        **{name: torch.randn(2, 1, 2, 32) for name in ("k", "v")},
        "cache_seqlens": int32(3, 5),
    } | changes
    before = arguments["k_cache"].detach().clone()
    try:
        return compat.flash_attn_with_kvcache(**arguments)
    except (TypeError, ValueError):
        assert torch.equal(arguments["k_cache"], before), "a refused call changed the cache"
        raise


ROTARY = {"rotary_cos": torch.ones(8, 16), "rotary_sin": torch.zeros(8, 16)}
NOTHING_NEW = {"k": None, "v": None}
KVCACHE = [
    ({"q": torch.randn(2, 4, 32)}, r"q must be a tensor \(B, L, H, D\), got \(2, 4, 32\)"),
    ({"q": torch.randn(2, 1, 3, 32)}, "query heads must be a multiple of key heads"),
    ({"q": torch.randn(2, 1, 4, 16)}, "same head dim"),
    ({"q": torch.randn(2, 1, 4, 32, requires_grad=True)}, "torch.no_grad"),
    ({"v_cache": torch.randn(2, 9, 2, 32)}, "k_cache and v_cache must be"),
    ({"v": None}, "k and v must be passed together"),
    ({"k": torch.randn(2, 1, 1, 32)}, r"k must be \(2, 1, 2, 32\)"),
    ({"v": torch.randn(2, 2, 2, 32)}, r"v must be \(2, 1, 2, 32\)"),
    ({"k": torch.randn(2, 1, 2, 32).double()}, "torch.float32"),
    ({"cache_seqlens": None}, "cache_seqlens is needed"),
    ({"cache_seqlens": int32(3, 8)}, "pass numbers from 0 to 7"),
    ({"cache_seqlens": int32(-1, 3)}, "cache_seqlens has -1"),
    ({"cache_seqlens": int32(3, 5, 6)}, r"cache_seqlens must be \(2,\), got \(3,\)"),
    ({"cache_seqlens": torch.tensor([3.0, 5.0])}, "int32 or int64"),
    ({"cache_seqlens": 8}, "pass numbers from 0 to 7"),
    ({"cache_seqlens": True}, "must be an integer"),
    ({"cache_seqlens": int32(3, 9), **NOTHING_NEW}, "pass numbers from 0 to 8"),
    ({"cache_batch_idx": int32(0)}, r"cache_batch_idx must be \(2,\)"),
    ({"cache_batch_idx": int32(0, 2)}, "page 2, but the cache has 2"),
    ({"cache_batch_idx": int32(0, -1)}, "page -1"),
    ({"cache_batch_idx": int32(0, 5), **NOTHING_NEW}, "pool"),
    ({"block_table": int32(0, 1)}, r"block_table must be \(2, P\), got \(2,\)"),
    ({"block_table": int32(0, -1).view(2, 1)}, "page -1"),
    ({"block_table": int32(0, 1).view(2, 1), "cache_batch_idx": int32(0, 1)}, "cache_batch_idx can't be combined"),
    ({"block_table": int32(0, 1).view(2, 1), "cache_leftpad": int32(0, 1)}, "cache_leftpad can't be combined"),
    ({"cache_leftpad": int32(4, 7)}, "cache_leftpad of sequence 1 must be from 0 to its 6"),
    ({"cache_leftpad": int32(0, -1)}, "cache_leftpad of sequence 1"),
    ({"k_cache": torch.randn(2, 2, 8, 32).transpose(1, 2), "cache_leftpad": int32(0, 1)}, "contiguous cache"),
    ({"k_cache": torch.randn(1, 8, 2, 32), "v_cache": torch.randn(1, 8, 2, 32)}, "1 rows for 2 sequences"),
    ({"rotary_cos": torch.ones(8, 16)}, "passed together"),
    ({**ROTARY, **NOTHING_NEW}, "need new keys"),
    ({"rotary_cos": torch.ones(7, 16), "rotary_sin": torch.ones(7, 16)}, "7 positions, but the cache has 8"),
    ({"rotary_cos": torch.ones(8, 17), "rotary_sin": torch.ones(8, 17)}, "R up to 32"),
    ({**ROTARY, "q": torch.randn(2, 5, 4, 32), "causal": True}, "a query is at position 9"),
    ({"window_size": (1,)}, "window_size must be"),
    ({"softcap": torch.inf}, "softcap must be"),
    ({"softmax_scale": torch.nan}, "softmax_scale must be"),
    ({"causal": 1}, "causal must be True or False"),
]


@pytest.mark.parametrize(("changes", "words"), KVCACHE, ids=lambda x: None if isinstance(x, str) else "+".join(x))
def test_flash_attn_with_kvcache(changes, words):
    with pytest.raises(ValueError, match=words):
        cache_call(**changes)


Q, OFFSETS = torch.randn(8, 4, 32), int32(0, 3, 8)
VARLEN = partial(compat.flash_attn_varlen_func, Q, Q, Q, OFFSETS, OFFSETS)
DENSE = partial(compat.flash_attn_func, *[Q[None]] * 3)
POOL, TABLE, X = torch.randn(4, 4, 4, 32), int32(0, 1).view(2, 1), torch.randn(7, 3, 5)
MINE = nta.Backend("mine", "a test", lambda: None, lambda *_: None, traits={"differentiable"})
named = partial(nta.Backend, about="", missing=lambda: None, forward=lambda *_: None, traits={"differentiable"})
OTHERS = {
    "positional options": (lambda: varlen_attention(X, X, X, LAYOUT, LAYOUT, True), TypeError, "positional"),
    "relative of another type": (
        lambda: varlen_attention(X, X, X, LAYOUT, relative=X), TypeError, "must be a nta.RelativeBias, got Tensor"
    ),
    **{
        f"backend {x!r}": (lambda x=x: varlen_attention(X, X, X, LAYOUT, backend=x), ValueError, "there is no backend")
        for x in ([], None, 1)
    },
    "probabilities with dropout": (
        lambda: VARLEN(5, 5, dropout_p=0.5, return_attn_probs=True), ValueError, "return_attn_probs with dropout_p"
    ),
    "first bound": (lambda: VARLEN(4, 5), ValueError, "max_seqlen=4 is below the longest sequence of 5"),
    "second bound": (lambda: VARLEN(5, 4), ValueError, "max_seqlen=4 is below the longest sequence of 5"),
    "qkv": (lambda: compat.flash_attn_qkvpacked_func(Q), ValueError, r"\(B, L, 3, H, D\), got \(8, 4, 32\)"),
    "kv": (
        lambda: compat.flash_attn_varlen_kvpacked_func(Q, torch.randn(8, 3, 4, 32), OFFSETS, OFFSETS, 5, 5),
        ValueError, r"kv must be a tensor \(K, 2, G, D\), got \(8, 3, 4, 32\)",
    ),
    "batches": (
        lambda: compat.flash_attn_func(torch.randn(2, 3, 4, 32), *torch.randn(2, 1, 3, 4, 32)), ValueError, "same batch"
    ),
    "no pages": (lambda: VARLEN(5, 5, block_table=TABLE), ValueError, r"k must be a tensor \(num_blocks, page_block"),
    "pages with a gradient": (
        lambda: compat.flash_attn_varlen_func(
            Q[:2].clone().requires_grad_(), POOL, POOL, int32(0, 1, 2), OFFSETS, 1, 5, block_table=TABLE
        ),
        ValueError, "gradient",
    ),
    "a list of offsets": (
        lambda: compat.flash_attn_varlen_func(Q, Q, Q, [0, 8], [0, 8], 8, 8), TypeError, "offsets must be a"
    ),
    **{
        f"window {i}": (lambda x=x: DENSE(window_size=x), ValueError, r"window_size must be \(left, right\)")
        for i, x in enumerate([torch.tensor([2.0, 1.0]), (torch.tensor([2, 1]), 1), torch.tensor(2), (2.5, 1)])
    },
    **{
        f"the name {name!r}": (lambda name=name: nta.register_backend(named(name)), ValueError, "identifier of ASCII")
        for name in ("", "my-kernel", "1st", "größe", None, "auto", "cpu")
    },
    **{
        f"the backend {x!r}": (lambda x=x: nta.register_backend(x), TypeError, r"must be a nt_attention\.Backend, got ")
        for x in ("toy", None, nta.Backend)
    },
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), OTHERS.values(), ids=OTHERS)
def test_other_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_name_that_is_taken():
    with nta.register_backend(MINE), pytest.raises(ValueError, match="identifier of ASCII"):
        nta.register_backend(named("mine"))


HERE = str(Path(__file__).parent)
COMMANDS = [
    (["bench", "--lengths", "five"], "such as 5,0,900,17"),
    (["bench", "--lengths", "0,0"], "has no tokens"),
    (["bench", "--heads", "4", "--kv-heads", "3"], "--kv-heads must divide the 4 heads, got 3"),
    (["bench", "--heads", "0"], "must be an integer ≥ 1, got '0'"),
    (["bench", "--options", "window_size=128"], "window_size must be (left, right)"),
    (["bench", "--options", "softcap=-1"], "softcap must be 0 (off) or a positive number"),
    (["bench", "--options", "softcap"], "softcap must be 0 (off) or a positive number"),
    (["bench", "--options", "is_causal=yes"], "is_causal must be True or False"),
    (["bench", "--options", "dropout_p=0.5"], "--options must be of is_causal"),
    (["bench", "--backends", "fastest"], "invalid choice: 'fastest'"),
    (["bench", "--device", "tpu"], "invalid choice: 'tpu'"),
    (["check", "--device", "cpu", "--backends", "fastest"], "invalid choice: 'fastest'"),
    (["check", "--device", "cpu", "--which", "64", "sideways"], "'sideways' is not one of 16, 32, 64"),
    (["tune", "--device", "cpu"], "tune is for a GPU"),
    (["tune", "--device", "cpu", "--minutes", "two"], "invalid float value: 'two'"),
    (["estimate", "."], "one of the arguments --lengths --text is required"),
    (["estimate", "/nothing", "--lengths", __file__], "each line must be a number of tokens"),
    (["estimate", HERE, "--lengths", "/nothing.txt"], "nothing.txt"),
]


@pytest.mark.parametrize(("arguments", "words"), COMMANDS, ids=str)
def test_commands(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

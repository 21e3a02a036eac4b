"""Arguments of `varlen_attention` that are refused, and the messages."""

import re
from functools import partial

import pytest
import torch
from oracle import Problem, assert_same

from nt_attention import SequenceLayout, VarlenMultiheadAttention, explain, varlen_attention
from nt_attention.kernels.call import OPTIONS

LAYOUT = SequenceLayout.from_lengths([4, 0, 3])


def inputs(**changes):
    """The arguments of a valid call, with `changes`."""
    given = {
        "query": torch.randn(7, 6, 5),
        "key": torch.randn(7, 3, 5),
        "value": torch.randn(7, 3, 11),
        "layout": LAYOUT,
    }
    return given | {name: change(given) if callable(change) else change for name, change in changes.items()}


def test_valid_call():
    out, lse = varlen_attention(**inputs(), return_lse=True)
    assert (out.shape, lse.shape) == ((7, 6, 11), (7, 6))
    assert isinstance(varlen_attention(**inputs()), torch.Tensor)


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


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


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("through", ["function", "module", "module with weights"])
@pytest.mark.parametrize("name", [*(f"score_mod: {x}" for x in SCORE_MODS), *(f"mask_mod: {x}" for x in MASK_MODS)])
def test_mods_that_return_something_else_are_named(name, through):
    option, _, which = name.partition(": ")
    mod, shown = (SCORE_MODS if option == "score_mod" else MASK_MODS)[which]
    with torch.no_grad(), pytest.raises(ValueError, match=rf"{option} must return .* shape \(\).*got {shown}"):
        if through == "function":
            varlen_attention(**inputs(), **{option: mod})
        else:
            module, x = VarlenMultiheadAttention(12, 2, batch_first=True), torch.randn(LAYOUT.total, 12)
            module(x, x, x, layout=LAYOUT, need_weights=through != "module", **{option: mod})


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_score_mods_may_return_float32_or_less():
    """As in flex_attention, whose score has the dtype of the query when a score_mod with a table is traced."""
    table = torch.randn(4, 4)
    halves = {name: x.to(torch.bfloat16) for name, x in inputs().items() if name != "layout"}
    got = varlen_attention(**halves, layout=LAYOUT, score_mod=lambda score, b, h, q, k: score + table[q, k])
    wide = {name: x.float() for name, x in halves.items()}
    want = varlen_attention(**wide, layout=LAYOUT, score_mod=lambda score, b, h, q, k: score + table[q, k])
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
    rounded = varlen_attention(**wide, layout=LAYOUT, score_mod=lambda score, *_: score.half())
    torch.testing.assert_close(rounded, varlen_attention(**wide, layout=LAYOUT), rtol=0.01, atol=0.01)


REFUSED = {
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


@pytest.mark.parametrize("function", [varlen_attention, explain], ids=["varlen_attention", "explain"])
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused_with_their_values(changes, message, function):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        function(**inputs(**changes))


def test_options_are_keyword_only():
    x = torch.randn(7, 3, 5)
    with pytest.raises(TypeError, match="positional"):
        varlen_attention(x, x, x, LAYOUT, LAYOUT, True)


def test_value_with_more_rows_past_the_end_than_key():
    case = Problem([5, 3], past=(0, 2))
    want = case.truth()
    case.inputs["key"] = case.inputs["key"][:8]
    function = partial(varlen_attention, layout=SequenceLayout.from_lengths([5, 3]), return_lse=True)
    want["d key"] = want["d key"][:8]
    assert_same(case.solve(function), want, 1e-9)


@pytest.mark.parametrize("function", [varlen_attention, explain], ids=["varlen_attention", "explain"])
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


@pytest.mark.parametrize("function", [varlen_attention, explain], ids=["varlen_attention", "explain"])
@pytest.mark.parametrize("name", UNHASHABLE)
def test_unhashable_option_is_refused_with_its_own_message(function, name):
    with pytest.raises(ValueError, match=re.escape(f"{name} {UNHASHABLE[name]}")):
        function(**inputs(), **{name: []})


def test_unhashable_cases_name_every_option():
    assert set(UNHASHABLE) == set(OPTIONS)


@pytest.mark.parametrize("function", [varlen_attention, explain])
def test_backend_that_is_no_name_is_refused(function):
    query = torch.randn(3, 2, 8)
    for backend in ([], None, 1):
        with pytest.raises(ValueError, match="there is no backend"):
            function(query, query, query, SequenceLayout.from_lengths([3]), backend=backend)

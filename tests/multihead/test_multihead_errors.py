"""VarlenMultiheadAttention: inputs, masks and options that do not fit raise errors that say what to pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from multihead_ragged import EMBED, HEADS, KEY_LENGTHS, LENGTHS, as_jagged, inputs_of, pair, random_sequences
from torch import nn

import nt_attention as nta
from nt_attention.modules.rotary import Rotary

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

X, Y = (2, 5, 6), (2, 4, 6)  # (N, L, E) and (N, S, E), for 3 heads

INPUTS_THAT_DO_NOT_FIT: dict[str, tuple[tuple[int, ...], ...]] = {
    "query 1-D": ((6,), Y, Y),
    "query 4-D": ((1, *X), Y, Y),
    "all 4-D": ((1, *X), (1, *X), (1, *X)),
    "key 2-D": (X, Y[1:], Y),
    "value 2-D": (X, Y, Y[1:]),
    "query 2-D": (X[1:], Y, Y),
    "query width": ((2, 5, 7), Y, Y),
    "width of all": ((2, 5, 7), (2, 5, 7), (2, 5, 7)),
    "key width": (X, (2, 4, 7), Y),
    "value width": (X, Y, (2, 4, 7)),
    "key and value lengths": (X, Y, (2, 3, 6)),
    "key and value batches": (X, Y, (3, 4, 6)),
    "query and key batches": (X, (3, 4, 6), (3, 4, 6)),
    "one sequence of keys": (X, (1, 4, 6), (1, 4, 6)),
    "unbatched, lengths": (X[1:], Y[1:], (3, 6)),
    "unbatched, width": ((5, 7), Y[1:], Y[1:]),
}

# a query's and a key's shape, and those of key_padding_mask and attn_mask
MASKS_THAT_DO_NOT_FIT: dict[
    str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
] = {
    "padding 1-D": (X, Y, (4,), None),
    "padding 3-D": (X, Y, (2, 1, 4), None),
    "padding length": (X, Y, (2, 5), None),
    "padding batch": (X, Y, (3, 4), None),
    "padding of one sequence": (X, Y, (1, 4), None),
    "padding transposed": (X, Y, (4, 2), None),
    "padding 2-D, unbatched": (X[1:], Y[1:], (1, 4), None),
    "padding length, unbatched": (X[1:], Y[1:], (5,), None),
    "mask 1-D": (X, Y, None, (4,)),
    "mask 4-D": (X, Y, None, (2, 3, 5, 4)),
    "mask transposed": (X, Y, None, (4, 5)),
    "mask of each sequence": (X, Y, None, (2, 5, 4)),
    "mask of each head": (X, Y, None, (3, 5, 4)),
    "mask of one": (X, Y, None, (1, 5, 4)),
    "mask of too many heads, unbatched": (X[1:], Y[1:], None, (6, 5, 4)),
    "mask length, unbatched": (X[1:], Y[1:], None, (5, 5)),
    "mask length beside padding": (X, Y, (2, 4), (5, 5)),
    "padding length beside a mask": (X, Y, (2, 5), (5, 4)),
}


def error_type(run: Callable[[], Any]) -> type[Exception]:
    try:
        run()
    except Exception as error:
        return type(error)
    pytest.fail("this fits after all")


def assert_raises_as_stock(run: Callable[[nn.MultiheadAttention], Any], names: str | None = None) -> None:
    """Both raise, and ours the same type or a subclass, with a message that names an argument."""
    stock, ours = (
        kind(6, 3, batch_first=True, dtype=torch.float64)
        for kind in (nn.MultiheadAttention, nta.VarlenMultiheadAttention)
    )
    with pytest.raises(error_type(lambda: run(stock)), match=names):
        run(ours)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("case", INPUTS_THAT_DO_NOT_FIT)
def test_inputs_that_do_not_fit_raise_what_nn_multihead_attention_raises(case, padded, need_weights):
    shapes = INPUTS_THAT_DO_NOT_FIT[case]
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    padding = torch.zeros(shapes[1][:-1], dtype=torch.bool) if padded else None
    assert_raises_as_stock(lambda m: m(query, key, value, padding, need_weights))


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("case", MASKS_THAT_DO_NOT_FIT)
def test_masks_that_do_not_fit_raise_what_nn_multihead_attention_raises(case, dtype, need_weights):
    *inputs, padding_shape, mask_shape = MASKS_THAT_DO_NOT_FIT[case]
    query, key = (torch.randn(shape, dtype=torch.float64) for shape in inputs)
    padding = None if padding_shape is None else torch.zeros(padding_shape, dtype=dtype)
    mask = None if mask_shape is None else torch.zeros(mask_shape, dtype=dtype)
    assert_raises_as_stock(lambda m: m(query, key, key, padding, need_weights, mask), "mask")


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_mask_dtypes_raise_what_nn_multihead_attention_raises(is_self, name, dtype, need_weights):
    x = torch.randn(X, dtype=torch.float64)
    key = x if is_self else x.clone()
    mask = torch.zeros(*((5, 5) if name == "attn_mask" else (2, 5)), dtype=dtype)
    assert_raises_as_stock(lambda m: m(x, key, key, need_weights=need_weights, **{name: mask}), name)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.float64, torch.float32, torch.float64), (torch.int64,) * 3],
    ids=["float32", "float32 key", "integers"],
)
def test_input_dtypes_that_differ_raise_what_nn_multihead_attention_raises(dtypes, padded, need_weights):
    query, key, value = (torch.ones(X, dtype=dtype) for dtype in dtypes)
    padding = torch.zeros(2, 5, dtype=torch.bool) if padded else None
    assert_raises_as_stock(lambda m: m(query, key, value, padding, need_weights))


@pytest.mark.parametrize(
    "arguments", [(7, 2), (0, 2), (6, 0), (-6, 2), (6, -2)], ids=lambda arguments: f"{arguments[0]} by {arguments[1]}"
)
def test_embed_dim_and_num_heads_raise_what_nn_multihead_attention_raises(arguments):
    with pytest.raises(error_type(lambda: nn.MultiheadAttention(*arguments))):
        nta.VarlenMultiheadAttention(*arguments)


REFUSED_OPTIONS = {
    "backend": ("nope", "there is no backend 'nope'"),
    "softcap": (float("nan"), "softcap must be 0"),
    "scale": (float("inf"), "scale must be a finite number"),
    "window_size": ((3,), "window_size must be"),
    "dropout": (1.5, "dropout must be in"),
}


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_options_are_checked_in_the_constructor(option):
    value, message = REFUSED_OPTIONS[option]
    with pytest.raises(ValueError, match=message):
        nta.VarlenMultiheadAttention(16, 2, **{option: value})


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_options_are_checked_when_they_are_set(option):
    value, message = REFUSED_OPTIONS[option]
    module = nta.VarlenMultiheadAttention(16, 2)
    before = getattr(module, option)
    with pytest.raises(ValueError, match=message):
        setattr(module, option, value)
    assert getattr(module, option) == before


@pytest.mark.parametrize("added", ["add_bias_kv", "add_zero_attn"])
def test_window_size_can_not_be_set_beside_added_keys(added):
    module = nta.VarlenMultiheadAttention(16, 2, **{added: True})
    with pytest.raises(ValueError, match="keys without a position"):
        module.window_size = (3, 0)
    assert module.window_size == (-1, -1)


@pytest.mark.parametrize("need_weights", [False, True])
def test_packed_query_must_have_two_dimensions(need_weights):
    module, layout = nta.VarlenMultiheadAttention(16, 2), nta.SequenceLayout.from_lengths([5, 9])
    x = torch.randn(14, 1, 16)
    with pytest.raises(ValueError, match=r"packed query must be \(tokens, features\), got \(14, 1, 16\)"):
        module(x, x, x, layout=layout, need_weights=need_weights)


def calls_that_raise() -> dict[str, tuple[Callable[[], Any], str]]:
    _, ours = pair()
    parts = inputs_of(ours, cross=True)
    queries, keys, _ = parts
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in (LENGTHS, KEY_LENGTHS))
    rows, key_rows = torch.cat(queries), torch.cat(keys)
    added = pair(add_bias_kv=True)[1]
    one = nta.SequenceLayout.from_lengths([sum(KEY_LENGTHS)])
    four = nta.SequenceLayout.from_lengths([7, 2, 0, 14])

    def packed(*, module: Any = ours, other: nta.SequenceLayout = key_layout, **arguments: Any) -> Any:
        return lambda: module(rows, key_rows, key_rows, layout=layout, key_layout=other, **arguments)

    def listed(*given: Any, **arguments: Any) -> Any:
        return lambda: ours(*given, **arguments)

    zeros = [torch.zeros(x, y, dtype=torch.float64) for x, y in zip(LENGTHS, KEY_LENGTHS, strict=True)]
    mod = lambda b, h, q, k: q >= k  # noqa: E731
    padding = torch.zeros(5, 13, dtype=torch.bool)
    nested, dense = as_jagged([x.detach() for x in random_sequences([2, 3])]), torch.randn(2, 3, EMBED).double()
    made: dict[str, tuple[Callable[[], Any], str]] = {
        "padding of packed": (packed(key_padding_mask=padding), "leave out key_padding_mask"),
        "padding of lists": (listed(queries, queries, queries, key_padding_mask=padding), "leave out key_padding_mask"),
        "layout of lists": (
            listed(queries, queries, queries, layout=layout),
            "lists of tensors have their own layout",
        ),
        "narrow mask": (packed(attn_mask=torch.zeros(13, 10)), r"L ≥ 13 and S ≥ 11.* got \(13, 10\)"),
        "short mask": (packed(attn_mask=torch.zeros(12, 11)), r"L ≥ 13 and S ≥ 11.* got \(12, 11\)"),
        "heads of the mask": (packed(attn_mask=torch.zeros(5, 13, 11)), r"\(25, L, S\).* got \(5, 13, 11\)"),
        "dims of the mask": (packed(attn_mask=torch.zeros(5, 5, 13, 11)), r"got \(5, 5, 13, 11\)"),
        "fewer masks": (packed(attn_mask=zeros[:-1]), "one mask for each of 5 sequences"),
        "more masks": (packed(attn_mask=[*zeros, zeros[0]]), "one mask for each of 5 sequences"),
        "no masks": (packed(attn_mask=[]), "one mask for each of 5 sequences"),
        "mask of another length": (packed(attn_mask=zeros[::-1]), r"mask 0 is \(3, 3\) for lengths \(5, 7\)"),
        "masks of two dtypes": (packed(attn_mask=[*zeros[:-1], zeros[-1].bool()]), "masks of one dtype"),
        "mask of another dtype": (packed(attn_mask=torch.zeros(13, 13)), "query, torch.float64, got torch.float32"),
        "mask of integers": (packed(attn_mask=torch.zeros(13, 13, dtype=torch.int64)), "got torch.int64"),
        "mods and added keys": (packed(module=added, mask_mod=mod), "be used with add_bias_kv or add_zero_attn"),
        "mods on dense": (listed(rows, rows, rows, mask_mod=mod), "pass attn_mask for padded inputs"),
        "key is no NestedTensor": (lambda: ours(nested, dense, dense), r"key is a plain tensor \(2, 3, 35\)"),
        "padding of nested": (
            lambda: ours(nested, nested, nested, key_padding_mask=torch.zeros(2, 3, dtype=torch.bool)),
            "leave out key_padding_mask",
        ),
        "layout of nested": (lambda: ours(nested, nested, nested, layout=key_layout), "leave out layout="),
        "mask of nested": (
            lambda: ours(nested, nested, nested, attn_mask=torch.zeros(3, 2)),
            r"must be \(L, S\) or \(10, L, S\) with L ≥ 3 and S ≥ 3, or a list of 2 masks, got \(3, 2\)",
        ),
        "padding of another shape": (
            lambda: ours(dense, dense, dense, key_padding_mask=torch.zeros(3, 2, dtype=torch.bool), need_weights=False),
            r"must be \(2, 3\), got \(3, 2\)",
        ),
        "width": (lambda: ours(rows[:, :-1], rows, rows, layout=layout), r"must have 35 features.*got \(22, 34\)"),
        "rows": (lambda: ours(rows[:4], rows, rows, layout=layout), r"query has shape \(4, 35\).*22 tokens"),
        "num_kv_heads": (lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, num_kv_heads=2), "got 5 and 2"),
        "embed_dim of 0": (lambda: nta.VarlenMultiheadAttention(0, HEADS), "got 0 and 5"),
        "added keys beside alibi": (
            lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, add_zero_attn=True, alibi=True),
            "keys without a position",
        ),
        "two dtypes": (listed(*[[queries[0], queries[1].float()]] * 3), "float32"),
        "two widths": (listed(*[[queries[0], queries[1][:, 1:]]] * 3), "34"),
        "fewer tensors": (listed(queries, keys[:-1], keys[:-1]), "key is a list of 4"),
        "no tensors": (listed([], [], []), "at least one, but query is a list of 0"),
        "list and tensor": (listed(queries, rows, rows), "key is Tensor"),
        "tensors with a batch": (listed([rows[None]], [rows[None]], [rows[None]]), "tensors .Li, E."),
        "other lengths of values": (listed(queries, keys, queries), "key and value must have the same lengths"),
        "qk_norm": (lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, qk_norm="batch"), 'must be "rms", "layer"'),
        "odd head_dim": (lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, rotary=Rotary()), "head_dim is 7"),
        "added keys in a window": (
            lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True, window_size=(1, 1)),
            "keys without a position",
        ),
        "key_layout alone": (lambda: ours(rows, rows, rows, key_layout=layout), "need layout= too"),
    }
    for way in ({}, {"need_weights": True}, {"attn_mask": torch.zeros(50, 50, dtype=torch.bool)}):
        name = next(iter(way), "no weights")
        made[f"one key sequence, {name}"] = (packed(other=one, **way), "5.* 1|1.* 5")
        made[f"four key sequences, {name}"] = (packed(other=four, **way), "5.* 4|4.* 5")
    return made


@pytest.mark.parametrize("case", calls_that_raise())
def test_ragged_errors_say_what_to_pass(case):
    run, text = calls_that_raise()[case]
    with pytest.raises(ValueError, match=text):
        run()


@pytest.mark.parametrize(
    ("in_call", "given", "text"),
    [
        (False, "causal", "is_causal is an argument of VarlenMultiheadAttention.forward()"),
        (False, "num_key_value_heads", "did you mean num_kv_heads?"),
        (False, "softmax_scale", "did you mean scale?"),
        (True, "causal", "did you mean is_causal?"),
        (True, "cu_seqlens", "pass layout=SequenceLayout.from_offsets(cu_seqlens)"),
        (True, "window_size", "window_size is an argument of VarlenMultiheadAttention()"),
        (True, "return_attn_probs", "got an unexpected argument 'return_attn_probs'."),
    ],
)
def test_unknown_arguments_say_which_one_is_meant(in_call, given, text):
    x, module = torch.randn(1, 4, 6), nta.VarlenMultiheadAttention(6, 3)
    with pytest.raises(TypeError, match=re.escape(text)):
        module(x, x, x, **{given: 1}) if in_call else nta.VarlenMultiheadAttention(6, 3, **{given: 1})

"""Names of arguments in other libraries, such as flash-attn, for errors that say what to pass here."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_MASK = "pass mask_mod, a function of positions, or score_mod for numbers to add; padding is no part of packed tensors"

# A name elsewhere → the name here, or what to do.
_OTHER_NAMES = {
    "alibi": "alibi_slopes",
    "attention_mask": "pass layout=SequenceLayout.from_attention_mask(mask), and tensors that its pack() has packed",
    "attn_bias": _MASK,
    "attn_mask": _MASK,
    "block_mask": "mask_mod",
    "block_table": "pass key_layout=PagedLayout(block_table, lengths, page_size)",
    "causal": "is_causal",
    "cu_seqlens": "pass layout=SequenceLayout.from_offsets(cu_seqlens)",
    "cu_seqlens_k": "pass key_layout=SequenceLayout.from_offsets(cu_seqlens_k)",
    "cu_seqlens_q": "pass layout=SequenceLayout.from_offsets(cu_seqlens_q)",
    "dropout": "dropout_p",
    "enable_gqa": "leave it out, key and value may have fewer heads than query",
    "key_padding_mask": "pass layout=SequenceLayout.from_attention_mask(~mask), and tensors that its pack() has packed",
    "max_seqlen": "leave it out, the layout knows it",
    "max_seqlen_k": "leave it out, the layout knows it",
    "max_seqlen_q": "leave it out, the layout knows it",
    "position_ids": "pass layout=SequenceLayout.from_position_ids(position_ids)",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "sliding_window": "pass window_size=(sliding_window - 1, 0)",
    "softmax_scale": "scale",
    "window": "window_size",
}


def unexpected_argument(
    function: str, given: Collection[str], known: Collection[str], there: str = "", others: Collection[str] = ()
) -> TypeError:
    """The error for arguments that a function does not have.

    Args:
        function: its name.
        given: the names that it does not have.
        known: the names that it has.
        there, others: another function that the user may mean, and the names that it has.
    """

    def advice(name: str) -> str:
        close = get_close_matches(name, [*known, *others], 1)
        better = name if name in others else _OTHER_NAMES.get(name) or "".join(close)
        if " " in better:
            return f": {better}."
        if better in others and better not in known:
            return f": {better} is an argument of {there}."
        return f": did you mean {better}?" if better in known else "."

    errors = [f"{function} got an unexpected argument {name!r}{advice(name)}" for name in sorted(given)]
    return TypeError("\n".join(errors))

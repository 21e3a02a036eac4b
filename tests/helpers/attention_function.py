"""transformers' attention function by itself: random states, and the oracle's output for them."""

import oracle
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import nt_attention as nta
from nt_attention.hf.route.attention import attention

LENGTHS = [5, 1, 12, 3]

SMALL = {
    "num_hidden_layers": 2,
    "intermediate_size": 41,
    "vocab_size": 101,
    "num_attention_heads": 6,
    "hidden_size": 48,
}

MODELS = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
}


def make(name):
    return MODELS[name]().double().eval()


def first(out):
    return out.logits if "logits" in out else out.last_hidden_state


MODULE = torch.nn.Identity


def random_states(rows=1, length=21, heads=6, kv_heads=2, head_dim=7, value_dim=7, keys=None):
    """query (B, H, T, D), key (B, G, S, D), value (B, G, S, Dv)."""
    shapes = ((heads, length, head_dim), (kv_heads, keys or length, head_dim), (kv_heads, keys or length, value_dim))
    return [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]


def expected(query, key, value, lengths, key_lengths=None, scaling=None, softcap=None, **options):
    """The oracle's output, (B, T, H, Dv), for all rows concatenated."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out, _ = oracle.attention(*flat, lengths, key_lengths, scale=scaling, softcap=softcap or 0.0, **options)
    return out.unflatten(0, (query.shape[0], -1))


def call(query, key, value, mask=None, module=None, over="sdpa", **options):
    if over == "eager":  # which models always tell of their scaling
        options.setdefault("scaling", query.shape[3] ** -0.5)
    out, _ = attention(MODULE() if module is None else module, query, key, value, mask, over=over, **options)
    assert out.shape == (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return out


def layout_of(lengths):
    return nta.SequenceLayout.from_lengths(lengths)


def positions_of(*rows):
    """(R, T) positions of rows with sequences of these lengths."""
    return torch.stack([layout_of(lengths).position_ids for lengths in rows])


class Grouped(torch.nn.Module):
    """With the attributes of transformers' attention modules."""

    def __init__(self, is_causal=True, groups=3):
        super().__init__()
        self.is_causal, self.num_key_value_groups, self.training = is_causal, groups, False


WINDOWS = {
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "both ways": ({"is_causal": False}, {}),
    "causal window": ({"is_causal": True, "sliding_window": 4}, {"is_causal": True, "window_size": (3, 0)}),
    "window both ways": ({"is_causal": False, "sliding_window": 4}, {"window_size": (3, 3)}),
    "window of one": ({"is_causal": True, "sliding_window": 1}, {"window_size": (0, 0)}),
    "wide window": ({"is_causal": True, "sliding_window": 64}, {"is_causal": True}),
}

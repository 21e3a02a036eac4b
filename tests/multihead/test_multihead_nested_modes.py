"""NestedTensors in VarlenMultiheadAttention in train, eval, no_grad and inference mode."""

import functools
import itertools

import torch
from sweeps import covering
from transformer_layers import MODES, close, double, in_mode, pair


@covering(
    {
        "mode": [*MODES, "inference", "frozen"],
        "added": list(itertools.product([True, False], repeat=2)),
        "layout": [torch.jagged, torch.strided],
    }
)
def test_nested_tensors_in_all_modes_give_what_one_sequence_gives(mode, added, layout):
    stock, ours = pair(10, 5, add_bias_kv=added[0], add_zero_attn=added[1])
    queries, keys, values = ([double(n, 10) for n in lengths] for lengths in ((4, 6), (7, 16), (7, 16)))
    nest = functools.partial(torch.nested.nested_tensor, layout=layout)
    if mode == "frozen":
        ours.requires_grad_(False)
    with in_mode(mode, ours), torch.inference_mode(mode == "inference"):
        q, k, v = nest(queries), nest(keys), nest(values)
        for inputs, parts in (((q, q, q), [queries] * 3), ((q, k, k), [queries, keys, keys])):
            got, weights = ours(*inputs)
            assert weights is None
            close(list(got.unbind()), [stock(*one)[0] for one in zip(*parts, strict=True)])
        got = ours(q, k, v)[0]  # keys and values of the same lengths by chance, each with their own offsets
        close(list(got.unbind()), [stock(*one)[0] for one in zip(queries, keys, values, strict=True)])

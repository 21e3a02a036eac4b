"""What VarlenMultiheadAttention has beyond nn.MultiheadAttention: ragged weights, masks and mods, and its own options.

The truth is the stock module, run one sequence at a time, or ``truth`` below, which is made of the oracle.

Dimensions: B sequences, T tokens, L and S (longest) lengths of queries and keys, E embed dim, H and G heads of queries
and of keys, D head dim.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import nt_attention as nta
from nt_attention.modules.rotary import Rotary, ntk, yarn

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

EMBED, HEADS = 35, 5
LENGTHS, KEY_LENGTHS = [5, 0, 1, 13, 3], [7, 2, 0, 11, 3]
PAST = 3  # rows past the layout's end, one fewer for keys
FORMS = ["jagged", "packed", "strided", "list"]
TOLERANCE = 1e-9
STOCK = {
    "plain": {},
    "bias_kv": {"add_bias_kv": True},
    "both added, no bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}
BEYOND: dict[str, dict[str, Any]] = {
    "num_kv_heads": {"num_kv_heads": 1},
    "grouped heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 7},
    "head_dim": {"head_dim": 13},
    "window_size": {"window_size": (3, 1)},
    "window after": {"window_size": (-1, 0)},
    "softcap": {"softcap": 0.7},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "norm of one's own": {"qk_norm": lambda dim: nn.Sequential(nn.Linear(dim, dim), nn.Tanh())},
    "rotary": {"rotary": Rotary(100.0, dims=6)},
    "interleaved": {"rotary": Rotary(100.0, interleaved=True), "head_dim": 6},
    "all": {
        **{"num_heads": 6, "num_kv_heads": 3, "head_dim": 11, "window_size": (4, 2), "softcap": 0.9, "scale": 0.6},
        **{"sinks": True, "alibi": True, "qk_norm": "rms", "rotary": Rotary(30.0, dims=4)},
    },
    "added keys": {
        **{"add_bias_kv": True, "add_zero_attn": True, "num_heads": 6, "num_kv_heads": 3, "head_dim": 7},
        **{"softcap": 0.9, "scale": 0.6, "sinks": True, "qk_norm": "layer", "rotary": Rotary(30.0, dims=4)},
    },
    "other widths": {"kdim": 22, "vdim": 26, "num_kv_heads": 1, "head_dim": 6, "rotary": Rotary()},
}


def tokens(lengths: Sequence[int], width: int = EMBED, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(length, width, dtype=dtype, requires_grad=True) for length in lengths]


def filled(module: nn.Module) -> Any:
    """With random numbers in every parameter: norms, biases and sinks begin at 1 and 0."""
    for x in module.parameters():
        nn.init.normal_(x, std=0.4)
    return module


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nta.VarlenMultiheadAttention]:
    """The stock module and ours, which share their parameters."""
    stock = filled(nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options))
    return stock, nta.VarlenMultiheadAttention.from_torch(stock)


def beyond(name: str, **more: Any) -> nta.VarlenMultiheadAttention:
    options = {"num_heads": HEADS, "batch_first": True, "dtype": torch.float64, **BEYOND[name], **more}
    return filled(nta.VarlenMultiheadAttention(EMBED, **options))


def inputs_of(module: nn.MultiheadAttention, cross: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values, which are one list in self-attention."""
    queries = tokens(LENGTHS)
    if not cross and module.kdim == module.vdim == EMBED:
        return queries, queries, queries
    return queries, tokens(KEY_LENGTHS, module.kdim), tokens(KEY_LENGTHS, module.vdim)


def put(form: str, parts: list[Tensor], past: int) -> Any:
    if form == "packed":
        return torch.cat([*parts, torch.randn(past, parts[0].shape[1], dtype=parts[0].dtype)])
    layouts = {"jagged": torch.jagged, "strided": torch.strided}
    return parts if form == "list" else torch.nested.as_nested_tensor(parts, layout=layouts[form])


def call(form: str, module: nn.Module, parts: Sequence[list[Tensor]], **arguments: Any) -> tuple[Tensor, Any]:
    """The outputs' tokens end to end and the weights. ``parts`` that are one list are one object to the module too."""
    queries, keys, values = parts
    once = {id(keys): put(form, keys, PAST - 1), id(values): put(form, values, PAST - 1)}
    once[id(queries)] = put(form, queries, PAST)
    if form == "packed":
        arguments["layout"] = nta.SequenceLayout.from_lengths([len(x) for x in queries])
        if keys is not queries:
            arguments["key_layout"] = nta.SequenceLayout.from_lengths([len(x) for x in keys])
    out, weights = module(*(once[id(x)] for x in parts), **arguments)
    lengths = [len(x) for x in queries]
    if form == "packed":
        assert not out[sum(lengths) :].any()
        assert len(out) == sum(lengths) + PAST
        return out[: sum(lengths)], weights
    if form == "jagged":
        assert out.offsets() is once[id(queries)].offsets()
        return out.values(), weights
    outs = out if form == "list" else out.unbind()
    assert [len(x) for x in outs] == lengths
    return torch.cat(list(outs)), weights


def solved(found: tuple[Tensor, Tensor | None], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs, weights if there are some, and the gradients of all leaves end to end, through both."""
    named = {"out": found[0]} | ({} if found[1] is None else {"weights": found[1]})
    draw = torch.Generator().manual_seed(7)
    above = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in named.values()]
    grads = torch.autograd.grad(list(named.values()), leaves, above, retain_graph=True, materialize_grads=True)
    return named | {"gradients": torch.cat([x.flatten() for x in grads])}


def same(
    got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None], leaves: Sequence[Tensor], tolerance=TOLERANCE
) -> None:
    oracle.assert_same(solved(got, leaves), solved(want, leaves), tolerance)


def leaves_of(module: nn.Module, parts: Sequence[list[Tensor]]) -> list[Tensor]:
    inputs = {id(x): x for xs in parts for x in xs}
    return [*inputs.values(), *module.parameters()]


def added_keys(module: nn.MultiheadAttention) -> int:
    return (module.bias_k is not None) + module.add_zero_attn


def padded_weights(weights: Sequence[Tensor], added: int) -> Tensor:
    """(B, H, L, S and the added keys) of each sequence's (H, Li, Si and the added keys)."""
    queries, keys = (max(x.shape[dim] for x in weights) for dim in (1, 2))
    rows = []
    for x in weights:
        own, more = x.split([x.shape[2] - added, added], -1)
        columns = torch.cat([F.pad(own, (0, keys - x.shape[2])), more], -1)
        rows.append(F.pad(columns, (0, 0, 0, queries - x.shape[1])))
    return torch.stack(rows)


def one_at_a_time(
    stock: nn.MultiheadAttention, parts: Sequence[list[Tensor]], masks: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs (T, E) and weights (B, H, L, S and the added keys) of the stock module."""
    masks = [None] * len(parts[0]) if masks is None else masks
    found = [
        stock(q, k, v, attn_mask=mask, average_attn_weights=False) for q, k, v, mask in zip(*parts, masks, strict=True)
    ]
    return torch.cat([out for out, _ in found]), padded_weights([w for _, w in found], added_keys(stock))


def later(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """Masks (Li, Si) of causality, True where it hides."""
    return [torch.ones(len(q), len(k), dtype=torch.bool).triu(1) for q, k, _ in zip(*parts, strict=True)]


def slopes(heads: int) -> Tensor:
    """ALiBi's, by the recursion in the code that goes with the paper."""
    n = 1 << (heads.bit_length() - 1)
    plain = torch.tensor([2 ** (-8 * i / n) for i in range(1, n + 1)], dtype=torch.float64)
    if n == heads:
        return plain
    return torch.cat([plain, slopes(2 * n)[0::2][: heads - n]])


def turned(x: Tensor, rotary: Rotary) -> Tensor:
    """One sequence (L, H, D) with its pairs of dims as complex numbers, turned by position · base^(−2i/R)."""
    dims = x.shape[-1] if rotary.dims is None else rotary.dims
    turning, rest = x[..., :dims], x[..., dims:]
    pairs = turning.unflatten(-1, (-1, 2)) if rotary.interleaved else turning.unflatten(-1, (2, -1)).mT
    frequencies = rotary.base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    numbers = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.stack([numbers.real, numbers.imag], -1)
    return torch.cat([(pairs if rotary.interleaved else pairs.mT).flatten(-2), rest], -1)


def projected(module: Any, rotary: Rotary | None, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence's (L, H, D), (S, G, D) and (S, G, D)."""
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    widths = [h * module.head_dim for h in heads]
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = list(module.in_proj_weight.split(widths))
    biases = [0.0] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(widths)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (h, module.head_dim))
        for x, w, b, h in zip(parts, matrices, biases, heads, strict=True)
    )
    q, k = (x if norm is None else normed(x, norm) for x, norm in ((q, module.q_norm), (k, module.k_norm)))
    q, k = (x if rotary is None else turned(x, rotary) for x in (q, k))
    return q, k, v


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    if not isinstance(norm, (nn.RMSNorm, nn.LayerNorm)):
        return norm(x)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * norm.weight
    return x + norm.bias if isinstance(norm, nn.LayerNorm) else x


def truth(
    module: Any,
    parts: Sequence[list[Tensor]],
    masks: Sequence[Tensor] | None = None,
    *,
    is_causal: bool = False,
    rotary: Rotary | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    score_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and weights by the oracle, a sequence at a time; values that are 1 at one key alone tell the weights."""
    added = added_keys(module)
    outs, weights = [], []
    for b, (queries, keys, values) in enumerate(zip(*parts, strict=True)):
        q, k, v = projected(module, rotary, queries, keys, values)
        own = len(k)
        if module.bias_k is not None:
            k, v = (torch.cat([x, y.view(1, *x.shape[1:])]) for x, y in ((k, module.bias_k), (v, module.bias_v)))
        if module.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (k, v))
        mask = None if masks is None else F.pad(masks[b], (0, added))

        def score(s: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor, mask=mask, b=b) -> Tensor:
            s = s if mask is None or mask.dtype == torch.bool else s + mask
            return s if score_mod is None else score_mod(s, torch.tensor(b), h, i, j)

        def seen(_: Tensor, h: Tensor, i: Tensor, j: Tensor, mask=mask, b=b, own=own) -> Tensor:
            here = (j <= i) | (j >= own) | (not is_causal)
            here = here if mask is None or mask.dtype != torch.bool else here & ~mask
            return here if mask_mod is None else here & mask_mod(torch.tensor(b), h, i, j)

        which = torch.eye(len(k), dtype=torch.float64).unsqueeze(1).expand(-1, k.shape[1], -1)
        both, _ = oracle.attention(
            *(q, k, torch.cat([v, which], -1), [len(q)], [len(k)]),
            causal_alignment="upper_left",
            window_size=module.window_size,
            scale=module.scale,
            softcap=module.softcap,
            sinks=module.sinks,
            alibi_slopes=slopes(module.num_heads) if module.alibi else None,
            score_mod=score,
            mask_mod=seen,
        )
        out, weight = both.split([module.head_dim, len(k)], -1)
        outs.append(module.out_proj(out.flatten(1)))
        weights.append(weight.transpose(0, 1))
    return torch.cat(outs), padded_weights(weights, added)


crossing = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
weighing = pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])


# Weights


@pytest.mark.parametrize("options", STOCK.values(), ids=STOCK)
@pytest.mark.parametrize("form", FORMS)
@crossing
@causality
def test_weights_are_those_of_stock_run_one_sequence_at_a_time(form, options, cross, causal):
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross)
    want, each = one_at_a_time(stock, parts, later(parts) if causal else None)
    leaves = leaves_of(stock, parts)
    got = call(form, ours, parts, need_weights=True, average_attn_weights=False, is_causal=causal)
    keys = KEY_LENGTHS if cross else LENGTHS
    assert got[1].shape == (len(LENGTHS), HEADS, max(LENGTHS), max(keys) + added_keys(stock))
    same(got, (want, each), leaves)
    got = call(form, ours, parts, need_weights=True, is_causal=causal)
    assert got[1].shape == (len(LENGTHS), max(LENGTHS), max(keys) + added_keys(stock))
    same(got, (want, each.mean(1)), leaves)
    same(call(form, ours, parts, is_causal=causal), (want, None), leaves)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_keys_and_values_of_other_widths(form):
    stock, ours = pair(kdim=22, vdim=26, add_bias_kv=True)
    parts = inputs_of(stock, cross=True)
    got = call(form, ours, parts, need_weights=True, average_attn_weights=False)
    same(got, one_at_a_time(stock, parts), leaves_of(stock, parts))


def test_weights_are_zero_outside_and_sum_to_one_inside():
    _, ours = pair()
    parts = inputs_of(ours, cross=True)
    _, weights = call("packed", ours, parts, need_weights=True)
    for x, queries, keys in zip(weights, LENGTHS, KEY_LENGTHS, strict=True):
        torch.testing.assert_close(x[:queries].sum(-1), torch.full((queries,), float(keys > 0), dtype=torch.float64))
        assert not x[queries:].any()
        assert not x[:, keys:].any()


@pytest.mark.parametrize("options", STOCK.values(), ids=STOCK)
@pytest.mark.parametrize("form", FORMS)
def test_weights_after_dropout_are_what_multiplies_the_values(form, options):
    p = 0.4
    stock, ours = pair(dropout=p, **options)
    parts = inputs_of(stock, cross=True)
    with torch.no_grad():
        full = call(form, ours.eval(), parts, need_weights=True, average_attn_weights=False)[1]
        out, weights = call(form, ours.train(), parts, need_weights=True, average_attn_weights=False)
    kept = weights != 0
    assert 0 < kept.sum() < (full != 0).sum()
    torch.testing.assert_close(weights, torch.where(kept, full / (1 - p), 0.0))
    values = []
    for keys, value in zip(parts[1], parts[2], strict=True):
        _, _, v = projected(ours, None, keys, keys, value)
        more = [] if ours.bias_v is None else [ours.bias_v.view(1, *v.shape[1:])]
        more += [v.new_zeros(1, *v.shape[1:])] if ours.add_zero_attn else []
        values.append(torch.cat([F.pad(v, (0, 0, 0, 0, 0, max(KEY_LENGTHS) - len(v))), *more]))
    products = torch.einsum("bhls,bshd->blhd", weights, torch.stack(values)).flatten(2)
    want = torch.cat([x[:length] for x, length in zip(ours.out_proj(products), LENGTHS, strict=True)])
    torch.testing.assert_close(out, want)


def test_dropout_draws_anew_and_keeps_the_mean_of_weights():
    p, copies = 0.4, 1000
    _, ours = pair(dropout=p)
    one = torch.randn(3, EMBED, dtype=torch.float64)
    layout = nta.SequenceLayout.from_lengths([3] * copies)
    rows = one.repeat(copies, 1)
    with torch.no_grad():
        drawn = ours(rows, rows, rows, layout=layout, need_weights=True, average_attn_weights=False)[1]
        full = ours.eval()(rows, rows, rows, layout=layout, need_weights=True, average_attn_weights=False)[1][0]
    rate = (drawn != 0).double().mean(0)
    assert ((rate - (1 - p)).abs() < 5 * (p * (1 - p) / copies) ** 0.5).all()
    assert ((drawn.mean(0) - full).abs() < 5 * drawn.std(0) / copies**0.5).all()


@pytest.mark.parametrize("form", FORMS)
@weighing
def test_dropping_all_leaves_the_bias(form, need_weights):
    _, ours = pair(dropout=1.0, add_zero_attn=True)
    parts = inputs_of(ours, cross=True)
    out, weights = call(form, ours, parts, need_weights=need_weights, is_causal=True)
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))
    assert weights is None if not need_weights else not weights.any()
    for grad in torch.autograd.grad(out.sum(), [*parts[0], ours.in_proj_weight]):
        assert not grad.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_dropout_under_a_mask_keeps_the_mean(form, dtype):
    copies = 500
    _, ours = pair(dropout=0.4)
    parts = [tokens([3]) * copies] * 3
    (mask,) = random_masks([x[:1] for x in parts], None, dtype)
    with torch.no_grad():
        draws = call(form, ours, parts, attn_mask=mask)[0].unflatten(0, (copies, 3))
        want = call(form, ours.eval(), [x[:1] for x in parts], attn_mask=mask)[0]
    sigma = draws.std(0) / copies**0.5
    assert (sigma[2] > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * sigma + TOLERANCE).all()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_reach_a_nested_tensor_that_is_a_leaf(need_weights, masked):
    stock, ours = pair()
    parts = inputs_of(stock, cross=False)
    nested = torch.nested.nested_tensor(parts[0], layout=torch.jagged, requires_grad=True)
    masks = random_masks(parts, None, torch.bool) if masked else None
    out, _ = ours(nested, nested, nested, None, need_weights, masks)
    (got,) = torch.autograd.grad(out.values().square().sum(), nested)
    want = torch.autograd.grad(one_at_a_time(stock, parts, masks)[0].square().sum(), parts[0], materialize_grads=True)
    torch.testing.assert_close(got.values(), torch.cat(want), rtol=TOLERANCE, atol=TOLERANCE)


def test_arguments_by_place():
    stock, ours = pair()
    parts = inputs_of(stock, cross=True)
    mask = torch.ones(13, 11, dtype=torch.bool).triu(1)
    outs, weights = ours(*parts, None, True, mask, False, True)
    same((torch.cat(outs), weights), one_at_a_time(stock, parts, later(parts)), leaves_of(stock, parts))


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0]], ids=str)
@pytest.mark.parametrize("key_lengths", [None, [0, 0], [0, 2]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_batches_with_nothing_in_them(lengths, key_lengths, masked):
    _, ours = pair()
    layout = nta.SequenceLayout.from_lengths(lengths)
    keys = layout if key_lengths is None else nta.SequenceLayout.from_lengths(key_lengths[: len(lengths)])
    q, k = (torch.randn(x.total, EMBED, dtype=torch.float64, requires_grad=True) for x in (layout, keys))
    mask = torch.zeros(5, 5, dtype=torch.bool) if masked else None
    out, weights = ours(q, k, k, layout=layout, key_layout=keys, attn_mask=mask, need_weights=True)
    assert out.shape == q.shape
    assert weights.shape == (len(lengths), layout.max_seqlen, keys.max_seqlen)
    alone, _ = ours(q, k, k, layout=layout, key_layout=keys, attn_mask=mask)
    torch.testing.assert_close(alone, out)
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", ["all", "rotary", "added keys"])
@weighing
def test_layouts_read_from_a_mask_have_their_weights_at_the_left(name, need_weights):
    module = beyond(name)
    here = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    padded = torch.randn(3, 5, EMBED, dtype=torch.float64, requires_grad=True)
    layout = nta.SequenceLayout.from_attention_mask(here)
    rows = layout.pack(padded)
    sizes = layout.lengths.tolist()
    got = module(rows, rows, rows, layout=layout, need_weights=need_weights, average_attn_weights=False)
    parts = [list(rows.split(sizes))] * 3
    want, weights = truth(module, parts, rotary=BEYOND[name]["rotary"])
    same(got, (want, weights if need_weights else None), [padded, *module.parameters()])


def test_a_bound_on_the_longest_length_is_not_the_weights_shape():
    _, ours = pair()
    layout = nta.SequenceLayout.from_offsets(torch.tensor([0, 3, 3, 7]), max_seqlen=11)
    x = torch.randn(7, EMBED, dtype=torch.float64)
    assert ours(x, x, x, layout=layout, need_weights=True)[1].shape == (3, 4, 4)


def test_nested_tensors_with_holes():
    stock, ours = pair(add_bias_kv=True)
    padded = torch.randn(3, 7, EMBED, dtype=torch.float64, requires_grad=True)
    starts, lengths = torch.tensor([2, 0, 4]), torch.tensor([5, 1, 2])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    masks = [torch.rand(n, n) < 0.4 for n in lengths.tolist()]
    out, weights = ours(nested, nested, nested, need_weights=True, attn_mask=masks, average_attn_weights=False)
    parts = [[x[s : s + n] for x, s, n in zip(padded, starts, lengths, strict=True)]] * 3
    want = one_at_a_time(stock, parts, masks)
    same((torch.cat(list(out.unbind())), weights), want, [padded, *stock.parameters()])


def test_what_lies_past_the_end_is_not_looked_at():
    module = beyond("all")
    layout = nta.SequenceLayout.from_lengths([3, 0, 2])
    rows = torch.randn(7, EMBED, dtype=torch.float64)
    spoiled = rows.clone()
    spoiled[5:] = torch.nan
    for arguments in ({}, {"need_weights": True}, {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}):
        (out, weights), want = (module(x, x, x, layout=layout, **arguments) for x in (spoiled, rows))
        assert torch.equal(out, want[0])
        assert weights is None or torch.equal(weights, want[1])


# Masks


def random_masks(parts: Sequence[list[Tensor]], heads: int | None, dtype: torch.dtype) -> list[Tensor]:
    """(Li, Si), or (H, Li, Si), that leave each query the first key; float ones add to scores as well."""
    masks = []
    for q, k, _ in zip(*parts, strict=True):
        mask = torch.rand(*([] if heads is None else [heads]), len(q), len(k)) < 0.4
        mask[..., :1] = False
        if dtype != torch.bool:
            mask = torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf).requires_grad_()
        masks.append(mask)
    return masks


def cut(mask: Tensor, parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """What (L, S) or (B·H, L, S) says of each sequence."""
    each = [mask] * len(parts[0]) if mask.dim() == 2 else mask.unflatten(0, (len(parts[0]), -1))
    return [x[..., : len(q), : len(k)] for x, q, k in zip(each, parts[0], parts[1], strict=True)]


MASKS = ["one", "larger", "larger for each head", "list", "list by head", "mixed list"]


def masks_for(kind: str, parts: Sequence[list[Tensor]], dtype: torch.dtype) -> tuple[Any, list[Tensor], list[Tensor]]:
    """What to pass, the same by sequence, and what may be differentiated."""
    if "list" in kind:
        masks = random_masks(parts, HEADS if kind == "list by head" else None, dtype)
        if kind == "mixed list":
            masks[::2] = random_masks(parts, HEADS, dtype)[::2]
        return masks, masks, masks if dtype != torch.bool else []
    more = 4 if "larger" in kind else 0
    size = [torch.empty(max(map(len, x)) + more, 0) for x in parts]
    (mask,) = random_masks([[x] for x in size], len(parts[0]) * HEADS if "each head" in kind else None, dtype)
    return mask, cut(mask, parts), [mask] if dtype != torch.bool else []


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["packed", "strided"])
@crossing
def test_masks_hide_and_shift_as_stock_s_do(form, kind, dtype, cross):
    options = [{}, {"add_bias_kv": True, "add_zero_attn": True}][MASKS.index(kind) % 2 ^ cross]
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross)
    given, masks, learned = masks_for(kind, parts, dtype)
    want, weights = one_at_a_time(stock, parts, masks)
    leaves = [*leaves_of(stock, parts), *learned]
    same(call(form, ours, parts, attn_mask=given), (want, None), leaves)
    got = call(form, ours, parts, attn_mask=given, need_weights=True, average_attn_weights=False)
    same(got, (want, weights), leaves)


def test_a_larger_mask_s_gradient_is_zero_past_the_longest_lengths():
    _, ours = pair()
    parts = inputs_of(ours, cross=True)
    mask = torch.randn(17, 19, dtype=torch.float64, requires_grad=True)
    call("packed", ours, parts, attn_mask=mask)[0].sum().backward()
    inside = torch.zeros_like(mask, dtype=torch.bool)
    inside[: max(LENGTHS), : max(KEY_LENGTHS)] = True
    assert not mask.grad[~inside].any()
    assert mask.grad[inside].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["jagged", "list"])
@pytest.mark.parametrize("by_head", [False, True], ids=["all heads", "some heads"])
@crossing
@weighing
def test_rows_that_see_nothing_are_the_bias(form, dtype, by_head, cross, need_weights):
    _, ours = pair()
    parts = inputs_of(ours, cross)
    masks = [x.detach() for x in random_masks(parts, HEADS if by_head else None, dtype)]
    for x in masks:
        x[..., ::2, :] = True if dtype == torch.bool else -torch.inf
        if by_head:  # rows of which one head sees something
            x[1, ..., ::4, :] = False if dtype == torch.bool else 0.0
    learned = [] if dtype == torch.bool else [x.requires_grad_() for x in masks]
    arguments = {"need_weights": need_weights, "average_attn_weights": False}
    got = call(form, ours, parts, attn_mask=masks, **arguments)
    want, weights = truth(ours, parts, masks)
    same(got, (want, weights if need_weights else None), [*leaves_of(ours, parts), *learned])
    hidden = [(x if dtype == torch.bool else x == -torch.inf).all(-1) for x in masks]
    blind = torch.cat([x.all(0) for x in hidden] if by_head else hidden)
    assert blind.any()
    torch.testing.assert_close(got[0][blind], ours.out_proj.bias.expand(int(blind.sum()), -1))
    assert got[0].isfinite().all()


@pytest.mark.parametrize("name", ["sinks", "all", "added keys", "softcap"])
@weighing
def test_rows_that_see_nothing_of_modules_beyond_stock(name, need_weights):
    module = beyond(name)
    parts = inputs_of(module, cross=False)
    masks = [x.index_fill(-2, torch.arange(0, len(x), 2), True) for x in random_masks(parts, None, torch.bool)]
    got = call("packed", module, parts, attn_mask=masks, need_weights=need_weights, average_attn_weights=False)
    want, weights = truth(module, parts, masks, rotary=BEYOND[name].get("rotary"))
    same(got, (want, weights if need_weights else None), leaves_of(module, parts))


@pytest.mark.parametrize("kind", ["bool", "float", "by head", "list"])
@pytest.mark.parametrize("form", ["jagged", "list"])
@pytest.mark.parametrize("options", STOCK.values(), ids=STOCK)
def test_causality_as_a_hint_beside_the_mask(form, kind, options):
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross=True)
    longest = max(LENGTHS), max(KEY_LENGTHS)
    hidden = torch.ones(longest, dtype=torch.bool).triu(1)
    mask = {
        "bool": hidden,
        "float": torch.zeros(longest, dtype=torch.float64).masked_fill(hidden, -torch.inf),
        "by head": hidden.repeat(len(LENGTHS) * HEADS, 1, 1),
        "list": later(parts),
    }[kind]
    want, weights = one_at_a_time(stock, parts, later(parts))
    leaves = leaves_of(stock, parts)
    same(call(form, ours, parts, attn_mask=mask, is_causal=True), (want, None), leaves)
    arguments = {"need_weights": True, "average_attn_weights": False}
    same(call(form, ours, parts, attn_mask=mask, is_causal=True, **arguments), (want, weights), leaves)


# Mods


def table_mods(heads: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    table = torch.randn(len(LENGTHS), heads, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * 0.7 + table[b, h] * (q - 2 * k) / 5

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 2 * k + h + b) % 5 != 0

    return score_mod, mask_mod


@pytest.mark.parametrize("mod", ["score_mod", "mask_mod"])
@pytest.mark.parametrize("form", ["strided", "packed"])
@crossing
@causality
@weighing
def test_mods_agree_with_the_oracle(form, mod, cross, causal, need_weights):
    _, ours = pair()
    parts = inputs_of(ours, cross)
    score_mod, mask_mod = table_mods(HEADS)
    given = {mod: score_mod if mod == "score_mod" else mask_mod}
    want, weights = truth(ours, parts, is_causal=causal, **given)
    got = call(form, ours, parts, is_causal=causal, need_weights=need_weights, average_attn_weights=False, **given)
    same(got, (want, weights if need_weights else None), leaves_of(ours, parts))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softcap", "all"])
@weighing
def test_mods_come_after_the_mask_and_all_else(name, dtype, need_weights):
    module = beyond(name)
    parts = inputs_of(module, cross=False)
    masks = random_masks(parts, None, dtype)
    score_mod, mask_mod = table_mods(module.num_heads)
    given = {"score_mod": lambda s, *at: torch.tanh(score_mod(s, *at)), "mask_mod": mask_mod}
    if dtype != torch.bool:  # tanh would bring back what −inf hides
        masks = [x.detach().clamp(min=-3.0).requires_grad_() for x in masks]
    want, weights = truth(module, parts, masks, rotary=BEYOND[name].get("rotary"), **given)
    got = call("packed", module, parts, attn_mask=masks, need_weights=need_weights, average_attn_weights=False, **given)
    learned = [] if dtype == torch.bool else masks
    same(got, (want, weights if need_weights else None), [*leaves_of(module, parts), *learned])


@pytest.mark.parametrize("name", BEYOND)
@weighing
def test_mods_in_modules_beyond_stock(name, need_weights):
    module = beyond(name, add_bias_kv=False, add_zero_attn=False)
    parts = inputs_of(module, cross=False)
    score_mod, mask_mod = table_mods(module.num_heads)
    given = {"score_mod": score_mod, "mask_mod": mask_mod, "is_causal": True}
    want, weights = truth(module, parts, rotary=BEYOND[name].get("rotary"), **given)
    got = call("packed", module, parts, need_weights=need_weights, average_attn_weights=False, **given)
    same(got, (want, weights if need_weights else None), leaves_of(module, parts))


@weighing
def test_mods_may_look_up_tables_of_the_packed_tokens(need_weights):
    _, ours = pair()
    lengths = [2, 7, 3]
    layout = nta.SequenceLayout.from_lengths(lengths)
    kinds = torch.randint(3, (layout.total,))

    def alike(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kinds[layout.offsets[b] + q] == kinds[layout.offsets[b] + k]

    x = torch.randn(layout.total, EMBED, dtype=torch.float64)
    parts = [list(x.split(lengths))] * 3
    masks = [kind[:, None] != kind for kind in kinds.split(lengths)]
    want, weights = truth(ours, parts, masks)
    out, found = ours(x, x, x, layout=layout, mask_mod=alike, need_weights=need_weights, average_attn_weights=False)
    torch.testing.assert_close(out, want)
    assert found is None or torch.equal(found != 0, weights != 0)


# Every way to the same numbers


def dense_routes(
    module: Any, parts: Sequence[list[Tensor]], side: str, causal: bool
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Padded at a side: outputs (T, E), and the weights (B, H, L, S) of right-padded keys."""

    def padded(xs: list[Tensor]) -> Tensor:
        longest = max(map(len, xs))
        more = [longest - len(x) for x in xs]
        sides = [(0, 0, n, 0) if side == "left" else (0, 0, 0, n) for n in more]
        return torch.stack([F.pad(x, n) for x, n in zip(xs, sides, strict=True)])

    once = {id(xs): padded(xs) for xs in parts}
    inputs = [once[id(xs)] for xs in parts]
    real, here = (padded([torch.ones(len(x), 1) for x in xs]).squeeze(-1).bool() for xs in parts[:2])
    later = torch.ones(inputs[0].shape[1], inputs[1].shape[1], dtype=torch.bool).triu(1)
    numbers = torch.zeros(here.shape, dtype=torch.float64).masked_fill(~here, -torch.inf)
    for name, padding in (("bool", ~here), ("float", numbers)):
        out, _ = module(*inputs, key_padding_mask=padding, need_weights=False, is_causal=causal)
        yield f"{side}-padded, {name} padding", out[real], None
        mask = later if causal else None
        out, weights = module(*inputs, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
        weights = None if side == "left" else weights.masked_fill(~real[:, None, :, None], 0.0)
        yield f"{side}-padded, {name} padding, weights", out[real], weights


def ragged_routes(
    module: Any, parts: Sequence[list[Tensor]], causal: bool
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    masks = (
        later(parts)
        if causal
        else [torch.zeros(len(q), len(k), dtype=torch.bool) for q, k in zip(*parts[:2], strict=True)]
    )
    numbers = [torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -torch.inf) for x in masks]
    weighed = {"need_weights": True, "average_attn_weights": False}
    ways: dict[str, dict[str, Any]] = {
        "packed": {"is_causal": causal},
        "weights": {"is_causal": causal, **weighed},
        "mask": {"attn_mask": masks},
        "mask and weights": {"attn_mask": masks, **weighed},
        "mask of numbers": {"attn_mask": numbers},
    }
    for name, arguments in ways.items():
        yield name, *call("packed", module, parts, **arguments)
    yield "jagged", *call("jagged", module, parts, is_causal=causal)


@pytest.mark.parametrize("name", BEYOND)
@crossing
@causality
def test_all_routes_give_what_the_oracle_gives(name, cross, causal):
    module = beyond(name)
    parts = inputs_of(module, cross)
    want, weights = truth(module, parts, is_causal=causal, rotary=BEYOND[name].get("rotary"))
    found = [*ragged_routes(module, parts, causal), *dense_routes(module, parts, "right", causal)]
    if parts[0] is parts[1]:  # by column, keys at the right of the row are not across from queries at its left
        found += dense_routes(module, parts, "left", causal)
    leaves = leaves_of(module, parts)
    wants = {weighed: solved((want, weights if weighed else None), leaves) for weighed in (False, True)}
    wrong = []
    for route, out, seen in found:
        try:
            oracle.assert_same(solved((out, seen), leaves), wants[seen is not None], TOLERANCE)
        except AssertionError as error:
            wrong.append(f"{route}: {' '.join(str(error).split())[:300]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["rotary", "alibi", "window_size", "all"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@causality
@weighing
def test_padding_inside_a_row_counts_for_no_place(name, kind, causal, need_weights):
    module = beyond(name)
    here = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 1, 0]], dtype=torch.bool)
    x = torch.randn(2, 8, EMBED, dtype=torch.float64, requires_grad=True)
    padding = ~here if kind == "bool" else torch.zeros(2, 8, dtype=torch.float64).masked_fill(~here, -torch.inf)
    later = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal and need_weights else None
    only = {"is_causal": causal} if not need_weights else {}
    out, _ = module(x, x, x, key_padding_mask=padding, attn_mask=later, need_weights=need_weights, **only)
    parts = [list(x[here].split(here.sum(1).tolist()))] * 3
    want, _ = truth(module, parts, is_causal=causal, rotary=BEYOND[name].get("rotary"))
    same((out[here], None), (want, None), [x, *module.parameters()])


@pytest.mark.parametrize("name", BEYOND)
def test_one_dense_sequence_and_tokens_first(name):
    module = beyond(name)
    queries, keys, values = (tokens([n], w)[0] for n, w in ((7, EMBED), (7, module.kdim), (7, module.vdim)))
    want, weights = truth(module, [[queries], [keys], [values]], rotary=BEYOND[name].get("rotary"))
    inputs = (queries, keys, values)
    leaves = [*inputs, *module.parameters()]
    same(module(*inputs, average_attn_weights=False), (want, weights[0]), leaves)
    same(module(*inputs, need_weights=False), (want, None), leaves)
    module.batch_first = False
    out, found = module(*(x.unsqueeze(1) for x in inputs), average_attn_weights=False)
    same((out.squeeze(1), found.squeeze(0)), (want, weights[0]), leaves)


@pytest.mark.parametrize("name", ["all", "added keys"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda x: x.__name__)
def test_an_evaluation_first_leaves_nothing_in_the_way_of_training(name, mode):
    module = beyond(name)
    parts = inputs_of(module, cross=False)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    rows = torch.cat(parts[0])
    ways = ({}, {"need_weights": True, "average_attn_weights": False})
    with mode():
        early = [module(rows, rows, rows, layout=layout, **arguments)[0] for arguments in ways]
    want, weights = truth(module, parts, rotary=BEYOND[name]["rotary"])
    for x, arguments in zip(early, ways, strict=True):
        torch.testing.assert_close(x.clone(), want.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        found = module(rows, rows, rows, layout=layout, **arguments)
        same(found, (want, None if found[1] is None else weights), leaves_of(module, parts))


# Lists


@pytest.mark.parametrize("kind", [list, tuple])
@weighing
def test_lists_give_lists_with_each_tensor_s_own_length(kind, need_weights):
    stock, ours = pair()
    parts = inputs_of(stock, cross=True)
    outs, weights = ours(*map(kind, parts), need_weights=need_weights)
    assert type(outs) is list
    assert [x.shape for x in outs] == [x.shape for x in parts[0]]
    assert (weights is None) == (not need_weights)
    for out, q, k, v in zip(outs, *parts, strict=True):
        torch.testing.assert_close(out, stock(q, k, v)[0])
        asked = [x for x in (q, k, v) if len(x)]
        for grad in torch.autograd.grad(out.sum(), asked, retain_graph=True, materialize_grads=True):
            assert grad.any() == (len(q) > 0 and len(k) > 0)


def test_lists_that_share_tensors_need_not_be_one_object():
    _, ours = pair(add_bias_kv=True)
    xs, memory = tokens(LENGTHS), tokens(KEY_LENGTHS)
    leaves = leaves_of(ours, [xs, memory])
    ways = [((xs, xs, xs), (xs, list(xs), tuple(xs))), ((xs, memory, memory), (tuple(xs), memory, list(memory)))]
    for one, other in ways:
        outs = [torch.cat(ours(*parts)[0]) for parts in (one, other)]
        same((outs[0], None), (outs[1], None), leaves)


def test_a_list_of_one_tensor_is_one_sequence():
    stock, ours = pair()
    (x,) = tokens([7])
    (out,), weights = ours([x], [x], [x], need_weights=True)
    torch.testing.assert_close((out, weights.squeeze(0)), stock(x, x, x))


# Round trips


@pytest.mark.parametrize(
    "options",
    [*STOCK.values(), {"kdim": 22, "vdim": 26, "dropout": 0.3}, {"batch_first": False, "dtype": torch.float32}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("training", [True, False])
def test_to_torch_and_back_share_everything(options, training):
    options = {"batch_first": True, "dtype": torch.float64, **options}
    ours = filled(nta.VarlenMultiheadAttention(EMBED, HEADS, **options)).train(training)
    stock = ours.to_torch()
    again = nta.VarlenMultiheadAttention.from_torch(stock, backend="reference")
    assert type(stock) is nn.MultiheadAttention
    assert again.backend == "reference"
    for other in (stock, again):
        assert other.training == training
        assert list(other.state_dict()) == list(ours.state_dict())
        for (name, a), (_, b) in zip(other.named_parameters(), ours.named_parameters(), strict=True):
            assert a is b, name
        for name in ("dropout", "batch_first", "kdim", "vdim", "add_zero_attn"):
            assert getattr(other, name) == getattr(ours, name), name
    assert stock._qkv_same_embed_dim == ours._qkv_same_embed_dim
    assert not again._qkv_same_embed_dim  # the encoder layer's fast path would not ask the named backend
    x = torch.randn(2, 7, EMBED, dtype=options["dtype"])
    k, v = (torch.randn(2, 7, width, dtype=options["dtype"]) for width in (ours.kdim, ours.vdim))
    if not training:
        torch.testing.assert_close(stock(x, k, v), ours(x, k, v))
        torch.testing.assert_close(again(x, k, v), ours(x, k, v))


def test_parametrized_parts_that_can_be_shared_are():
    stock, _ = pair()
    parametrizations.weight_norm(stock.out_proj, "weight")
    ours = nta.VarlenMultiheadAttention.from_torch(stock)
    parts = inputs_of(stock, cross=True)
    same(
        call("packed", ours, parts, need_weights=True, average_attn_weights=False),
        one_at_a_time(stock, parts),
        [*stock.parameters()],
    )


@pytest.mark.parametrize("make", ["parametrized", "pruned"])
@pytest.mark.parametrize("way", ["from_torch", "to_torch"])
def test_parameters_made_of_others_are_refused(make, way):
    kind = nn.MultiheadAttention if way == "from_torch" else nta.VarlenMultiheadAttention
    module = kind(EMBED, HEADS)
    if make == "parametrized":
        parametrizations.weight_norm(module, "in_proj_weight")
    else:
        prune.random_unstructured(module, "in_proj_weight", 0.5)
    with pytest.raises(ValueError, match=r"only one of the two modules has the parameters in_proj_weight"):
        nta.VarlenMultiheadAttention.from_torch(module) if way == "from_torch" else module.to_torch()


@pytest.mark.parametrize("name", sorted(BEYOND.keys() - {"all", "added keys", "other widths"}))
@pytest.mark.parametrize("way", ["from_torch", "to_torch"])
def test_options_beyond_stock_are_not_lost_in_silence(name, way):
    module = beyond(name)
    option = next(x for x in reversed(BEYOND[name]) if x != "num_heads")
    assert option in repr(module)
    with pytest.raises(ValueError, match=option):
        module.to_torch() if way == "to_torch" else nta.VarlenMultiheadAttention.from_torch(module)


def test_state_dict_names_what_is_beyond_stock():
    module = beyond("added keys")
    d, kv = 7, 21
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "in_proj_weight": (42 + 2 * kv, EMBED),
        "in_proj_bias": (42 + 2 * kv,),
        "bias_k": (1, 1, kv),
        "bias_v": (1, 1, kv),
        "sinks": (6,),
        "out_proj.weight": (EMBED, 42),
        "out_proj.bias": (EMBED,),
        **{f"{x}_norm.{y}": (d,) for x in "qk" for y in ("weight", "bias")},
    }
    assert set(beyond("rms").state_dict()) - set(pair()[0].state_dict()) == {"q_norm.weight", "k_norm.weight"}
    twin = beyond("added keys")
    twin.load_state_dict(module.state_dict())
    parts = inputs_of(module, cross=True)
    torch.testing.assert_close(call("packed", twin, parts), call("packed", module, parts))


def test_norms_and_sinks_begin_as_no_change():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, sinks=True, qk_norm="layer")
    assert not module.sinks.any()
    assert (module.q_norm.weight == 1).all()
    assert module.q_norm.weight is not module.k_norm.weight
    made = nta.VarlenMultiheadAttention(EMBED, HEADS, qk_norm="rms", dtype=torch.bfloat16, device="meta")
    assert {(x.dtype, x.device.type) for x in made.parameters()} == {(torch.bfloat16, "meta")}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_compute_the_same_on_parameters_of_their_own(name, how):
    module = beyond(name)
    parts = inputs_of(module, cross=False)
    want = call("jagged", module, parts, need_weights=True)  # before, so that whatever is kept is copied too
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert {id(x) for x in twin.parameters()}.isdisjoint(id(x) for x in module.parameters())
    torch.testing.assert_close(call("jagged", twin, parts, need_weights=True), want, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", [ntk(3.0), yarn(3.0, 101), lambda x: x / 2], ids=["ntk", "yarn", "own"])
def test_modules_with_scaled_rotation_are_pickled(scaling):
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, rotary=Rotary(dims=6, scaling=scaling))
    x = torch.randn(7, EMBED)
    assert torch.equal(pickle.loads(pickle.dumps(module))([x], [x], [x])[0][0], module([x], [x], [x])[0][0])


# Autocast, gradients, transforms


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("way", ["packed", "weights", "mask", "float mask", "dense", "dense weights"])
def test_bfloat16_and_autocast_give_near_numbers(name, way):
    module = beyond(name, dtype=torch.float32)
    narrow = copy.deepcopy(module).bfloat16()
    queries, keys, values = (tokens([5, 7], w, torch.float32) for w in (EMBED, module.kdim, module.vdim))
    parts = [queries, keys, values] if module.kdim != EMBED else [queries] * 3
    arguments: dict[str, Any] = {
        "weights": {"need_weights": True},
        "mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(2)},
        "float mask": {"attn_mask": torch.randn(7, 7)},
        "dense": {"need_weights": False, "key_padding_mask": (torch.arange(7) > 4)[None]},
    }.get(way, {})

    def run(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        once = {id(xs): [x.to(dtype) for x in xs] for xs in parts}
        given = [once[id(xs)] for xs in parts]
        more = {k: x.to(dtype) if way == "float mask" else x for k, x in arguments.items()}
        if "dense" in way:
            dense = {id(xs): xs[1][None] for xs in given}
            out, _ = module(*(dense[id(xs)] for xs in given), **more)
        else:
            out, _ = call("packed", module, given, **more)
        loss = out.float().square().sum()
        return out, torch.autograd.grad(loss, [*module.parameters()], materialize_grads=True)

    want, wanted = run(module, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(module, torch.float32)
    assert {x.dtype for x in cast[1]} == {torch.float32}
    for out, grads in (cast, run(narrow, torch.bfloat16)):
        assert out.dtype == torch.bfloat16
        assert (out.float() - want).norm() < 0.03 * want.norm()
        off, size = (torch.cat([x.flatten() for x in xs]).norm() for xs in (map(torch.sub, grads, wanted), wanted))
        assert off < 0.1 * size


@pytest.mark.parametrize("options", [{}, BEYOND["all"], BEYOND["added keys"]], ids=["stock", "all", "added keys"])
@pytest.mark.parametrize("way", ["packed", "weights", "masks"])
def test_gradcheck(options, way):
    options = {"num_heads": 2, **options, "head_dim": 4}
    options |= {"num_heads": 2, "num_kv_heads": 1} if "num_kv_heads" in options else {}
    module = filled(nta.VarlenMultiheadAttention(3, dtype=torch.float64, **options))
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in ([2, 0, 3, 1], [3, 1, 2, 0]))
    q, k = (torch.randn(x.total + 1, 3, dtype=torch.float64, requires_grad=True) for x in (layout, key_layout))
    masks = random_masks([tokens([2, 0, 3, 1], 1), *[tokens([3, 1, 2, 0], 1)] * 2], 2, torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def run(q: Tensor, k: Tensor, *rest: Tensor) -> list[Tensor]:
        arguments: dict[str, Any] = {"layout": layout, "key_layout": key_layout, "is_causal": way != "masks"}
        arguments["need_weights"] = way == "weights"
        if way == "masks":
            arguments["attn_mask"] = [x.where(x.detach().isfinite(), -torch.inf) for x in rest[len(names) :]]
        parameters = dict(zip(names, rest, strict=False))
        return [x for x in torch.func.functional_call(module, parameters, (q, k, k), arguments) if x is not None]

    learned = [x.detach().masked_fill(x == -torch.inf, 0.0).requires_grad_() for x in masks] if way == "masks" else []
    assert torch.autograd.gradcheck(run, (q, k, *module.parameters(), *learned), fast_mode=True)


@pytest.mark.parametrize("name", ["grouped heads", "sinks", "layer", "rotary", "all", "added keys"])
@pytest.mark.parametrize("way", ["packed", "weights", "masks", "mods"])
def test_function_transforms_give_autograd_s_gradients(name, way):
    module = beyond(name)
    queries, keys, values = (torch.cat(x) for x in inputs_of(module, cross=True))
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in (LENGTHS, KEY_LENGTHS))
    arguments: dict[str, Any] = {"layout": layout, "key_layout": key_layout}
    arguments |= {
        "packed": {},
        "weights": {"need_weights": True},
        "masks": {"attn_mask": torch.rand(13, 13) < 0.3},
        "mods": {"mask_mod": lambda b, h, q, k: (q + k) % 3 != 0},
    }[way]
    if way == "mods" and added_keys(module):
        arguments["mask_mod"] = None
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        found = torch.func.functional_call(module, parameters, (query, keys, values), arguments)
        return sum(x.square().sum() for x in found if x is not None)

    plain = {key: x.detach() for key, x in parameters.items()}
    (grads, grad), value = torch.func.grad_and_value(loss, argnums=(0, 1))(plain, queries.detach())
    torch.testing.assert_close(value, loss(parameters, queries))
    want = torch.autograd.grad(loss(parameters, queries), [*parameters.values(), queries], materialize_grads=True)
    for x, y in zip([*grads.values(), grad], want, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["rotary", "added keys"])
def test_function_transforms_over_lists_of_tensors(name, need_weights):
    module = beyond(name)
    queries, keys, _ = inputs_of(module, cross=True)

    def loss(queries: list[Tensor], keys: list[Tensor]) -> Tensor:
        outs, weights = module(queries, keys, keys, need_weights=need_weights)
        return sum(x.square().sum() for x in outs) + (weights.square().sum() if need_weights else 0.0)

    got = torch.func.grad(loss, argnums=(0, 1))(*([x.detach() for x in xs] for xs in (queries, keys)))
    want = torch.autograd.grad(loss(queries, keys), [*queries, *keys])
    torch.testing.assert_close([*got[0], *got[1]], list(want), rtol=TOLERANCE, atol=TOLERANCE)


def test_graphs_refuse_what_wants_lengths():
    _, ours = pair()
    x, offsets = torch.randn(5, EMBED, dtype=torch.float64), torch.tensor([0, 2, 5])

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: Tensor, offsets: Tensor) -> Tensor:
        return ours(x, x, x, layout=nta.SequenceLayout.from_offsets(offsets), need_weights=True)[0]

    with pytest.raises(Exception, match="need the lengths, which are not known in a graph"):
        run(x, offsets)


# Refusals


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
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


@pytest.mark.parametrize("case", refusals())
def test_refuses_with_what_to_pass(case):
    run, text = refusals()[case]
    with pytest.raises(ValueError, match=text):
        run()

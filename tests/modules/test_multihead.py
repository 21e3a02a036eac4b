"""VarlenMultiheadAttention against nn.MultiheadAttention, which runs one sequence at a time."""

import copy
import itertools

import oracle
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import nt_attention as nta

EMBED, HEADS = 35, 5
LENGTHS, KEY_LENGTHS = [5, 0, 1, 65, 127, 9], [7, 3, 2, 65, 100, 11]
STOCK_OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 22, "vdim": 26},
    {"kdim": 22, "vdim": 26, "add_bias_kv": True, "bias": False},
]


def both(dtype=torch.float64, **options):
    """The stock module and ours, each made under the same seed."""
    made = []
    for kind in (nn.MultiheadAttention, nta.VarlenMultiheadAttention):
        torch.manual_seed(3)
        made.append(kind(EMBED, HEADS, batch_first=True, dtype=dtype, **options))
    return made


def leaves(lengths, width, dtype):
    return [torch.randn(length, width, dtype=dtype, requires_grad=True) for length in lengths]


def jagged(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def one_at_a_time(module, queries, keys, values, causal):
    outs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).triu(1) if causal else None
        outs.append(module(q, k, v, attn_mask=mask, need_weights=False)[0] if len(q) else q * 1)
    return torch.cat(outs)


@pytest.mark.parametrize("options", STOCK_OPTIONS, ids=lambda o: "+".join(o) or "default")
def test_same_parameters_and_initial_weights(options):
    stock, ours = both(**options)
    assert list(stock.state_dict()) == list(ours.state_dict())
    for (name, a), (_, b) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("options", STOCK_OPTIONS, ids=lambda o: "+".join(o) or "default")
def test_matches_stock_run_one_sequence_at_a_time(options, cross, causal, dtype):
    if "kdim" in options and not cross:
        pytest.skip("keys of another width are not the queries")
    stock, ours = both(dtype, **options)
    queries = leaves(LENGTHS, EMBED, dtype)
    keys = leaves(KEY_LENGTHS, stock.kdim, dtype) if cross else queries
    values = leaves(KEY_LENGTHS, stock.vdim, dtype) if cross else queries
    want = one_at_a_time(stock, queries, keys, values, causal)
    query = jagged(queries)
    out, weights = ours(query, jagged(keys) if cross else query, jagged(values) if cross else query, is_causal=causal)
    assert weights is None
    assert out.offsets() is query.offsets()
    assert (query + out).shape == query.shape
    got = out.values()
    incoming = torch.randn_like(want)
    inputs = [*queries, *keys, *values] if cross else queries
    grads = [
        torch.autograd.grad(x, [*inputs, *module.parameters()], incoming, allow_unused=True)
        for x, module in ((got, ours), (want, stock))
    ]
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 3e-5}
    torch.testing.assert_close(got, want, **tolerance)
    for mine, theirs in zip(*grads, strict=True):
        if theirs is not None:  # of a sequence without tokens, which the stock module never saw
            torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tokens_give_what_nested_ones_give(causal):
    _, ours = both()
    parts = leaves(LENGTHS, EMBED, torch.float64)
    nested = jagged(parts)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    rows = torch.cat([*parts, torch.randn(3, EMBED, dtype=torch.float64)])
    out, _ = ours(rows, rows, rows, layout=layout, is_causal=causal)
    torch.testing.assert_close(out[: layout.total], ours(nested, nested, nested, is_causal=causal)[0].values())
    assert torch.equal(out[layout.total :], torch.zeros(3, EMBED, dtype=torch.float64))


def test_packed_cross_attention_takes_a_key_layout():
    _, ours = both()
    layout, key_layout = (nta.SequenceLayout.from_lengths(x) for x in (LENGTHS, KEY_LENGTHS))
    q, k = (torch.randn(x.total, EMBED, dtype=torch.float64) for x in (layout, key_layout))
    out, _ = ours(q, k, k, layout=layout, key_layout=key_layout)
    want, _ = ours(layout.to_nested(q), *[key_layout.to_nested(k)] * 2)
    torch.testing.assert_close(out, want.values())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_padding_is_skipped_and_changes_nothing(cross, batch_first):
    stock, ours = both()
    stock.batch_first = ours.batch_first = batch_first
    x, memory = (torch.randn(3, n, EMBED, dtype=torch.float64) for n in (7, 11))
    keys = memory if cross else x
    padding = torch.arange(keys.shape[1]) >= torch.tensor([2, keys.shape[1], 3])[:, None]
    if not batch_first:
        x, keys = x.transpose(0, 1), keys.transpose(0, 1)
    keys = keys if cross else x
    want = stock(x, keys, keys, key_padding_mask=padding, need_weights=False)[0]
    got, weights = ours(x, keys, keys, key_padding_mask=padding, need_weights=False)
    assert weights is None
    if not batch_first:
        want, got = want.transpose(0, 1), got.transpose(0, 1)
    if cross:  # every query is real
        torch.testing.assert_close(got, want)
    else:
        torch.testing.assert_close(got[~padding], want[~padding])
        assert torch.equal(got[padding], torch.zeros_like(got[padding]))


def test_padded_tokens_cost_nothing():
    _, ours = both()
    rows = []
    ours.out_proj.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    x = torch.randn(2, 9, EMBED, dtype=torch.float64)
    ours(x, x, x, key_padding_mask=torch.arange(9) >= torch.tensor([2, 4])[:, None], need_weights=False)
    assert rows == [6]


def test_a_row_of_padding_alone_gives_zero_and_finite_gradients():
    _, ours = both()
    x = torch.randn(2, 5, EMBED, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    out, _ = ours(x, x, x, key_padding_mask=padding, need_weights=False)
    out.sum().backward()
    assert torch.equal(out[1], torch.zeros(5, EMBED, dtype=torch.float64))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("case", ["weights", "mask", "float padding", "unbatched"])
def test_dense_corners_are_the_stock_module_s_own(case):
    stock, ours = both()
    x = torch.randn(2, 7, EMBED, dtype=torch.float64)
    arguments = {
        "weights": {"key_padding_mask": torch.arange(7) >= torch.tensor([3, 7])[:, None]},
        "mask": {"attn_mask": torch.rand(7, 7) > 0.9, "need_weights": False},
        "float padding": {"key_padding_mask": torch.randn(2, 7, dtype=torch.float64), "need_weights": False},
        "unbatched": {},
    }[case]
    x = x[0] if case == "unbatched" else x
    for a, b in zip(stock(x, x, x, **arguments), ours(x, x, x, **arguments), strict=True):
        torch.testing.assert_close(a, b)


BEYOND = {
    "num_kv_heads": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 13},
    "window_size": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "several": {"num_heads": 6, "num_kv_heads": 3, "window_size": (4, 2), "sinks": True, "head_dim": 7},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", BEYOND.values(), ids=BEYOND)
@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_what_goes_beyond_stock_agrees_with_the_oracle(options, causal):
    options = {"num_heads": HEADS, **options}
    module = nta.VarlenMultiheadAttention(EMBED, dtype=torch.float64, **options)
    if module.sinks is not None:
        nn.init.normal_(module.sinks)
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    x = torch.randn(layout.total, EMBED, dtype=torch.float64)
    out, _ = module(x, x, x, layout=layout, is_causal=causal)

    groups = module.num_kv_heads
    q, k, v = (x @ module.in_proj_weight.T).split([w * module.head_dim for w in (module.num_heads, groups, groups)], -1)
    slopes = torch.tensor([2 ** (-8 * i / 4) for i in (1, 2, 3, 4)] + [2**-1.0]) if module.alibi else None
    want, _ = oracle.attention(
        q.unflatten(-1, (module.num_heads, -1)),
        k.unflatten(-1, (groups, -1)),
        v.unflatten(-1, (groups, -1)),
        LENGTHS,
        is_causal=causal,
        window_size=module.window_size,
        scale=module.scale,
        softcap=module.softcap,
        sinks=module.sinks,
        alibi_slopes=slopes,
    )
    torch.testing.assert_close(out, module.out_proj(want.flatten(1)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_stock_encoder_layers_never_bypass_what_goes_beyond_stock(training):
    layer = nn.TransformerEncoderLayer(EMBED + 1, 4, 50, 0.0, batch_first=True).train(training)
    layer.self_attn = nta.VarlenMultiheadAttention(EMBED + 1, 4, batch_first=True, window_size=(1, 1))
    layer.self_attn.train(training)
    calls = []
    layer.self_attn.out_proj.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 9, EMBED + 1)
    with torch.no_grad():
        wide = layer(x)
        x[:, 8] = 0.0
        assert torch.equal(layer(x)[:, :7], wide[:, :7])  # out of the window's reach
    assert len(calls) == 2


def test_autocast_runs_in_its_dtype_and_keeps_the_gradients():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, add_bias_kv=True)
    parts = leaves(LENGTHS, EMBED, torch.float32)
    nested = jagged(parts)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(nested, nested, nested)
    assert out.dtype == torch.bfloat16
    out.values().float().sum().backward()
    assert module.in_proj_weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.values().float(), module(nested, nested, nested)[0].values(), rtol=0.05, atol=0.05)


def test_dropout_is_for_training_alone():
    module = nta.VarlenMultiheadAttention(EMBED, HEADS, dropout=0.5, backend="reference")
    x, layout = torch.randn(20, EMBED), nta.SequenceLayout.from_lengths([9, 11])
    assert not torch.equal(module(x, x, x, layout=layout)[0], module(x, x, x, layout=layout)[0])
    module.eval()
    assert torch.equal(module(x, x, x, layout=layout)[0], module(x, x, x, layout=layout)[0])


def test_from_torch_shares_the_parameters():
    stock, _ = both(add_bias_kv=True)
    ours = nta.VarlenMultiheadAttention.from_torch(stock)
    assert list(ours.state_dict()) == list(stock.state_dict())
    for (name, a), (_, b) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert a is b, name
    copied = copy.deepcopy(ours)
    assert copied.in_proj_weight is not ours.in_proj_weight


def nested_pair():
    return jagged(leaves([2, 3], EMBED, torch.float32)), nta.VarlenMultiheadAttention(EMBED, HEADS)


def refuse(case):
    nested, module = nested_pair()
    dense, layout = torch.randn(2, 3, EMBED), nta.SequenceLayout.from_lengths([2, 3])
    windowed = nta.VarlenMultiheadAttention(EMBED, HEADS, window_size=(1, 1))
    rows = nested.values()
    cases = {
        "mixed": lambda: module(nested, dense, dense),
        "padding mask": lambda: module(nested, nested, nested, key_padding_mask=torch.zeros(2, 3, dtype=torch.bool)),
        "mask": lambda: module(nested, nested, nested, attn_mask=torch.zeros(3, 2)),
        "masks": lambda: module(nested, nested, nested, attn_mask=[torch.zeros(2, 2), torch.zeros(2, 3)]),
        "mods on padded": lambda: module(dense, dense, dense, mask_mod=lambda b, h, q, k: q >= k),
        "layout too": lambda: module(nested, nested, nested, layout=layout),
        "key_layout alone": lambda: module(rows, rows, rows, key_layout=layout),
        "width": lambda: module(rows[:, :-1], rows, rows, layout=layout),
        "rows": lambda: module(rows[:4], rows, rows, layout=layout),
        "lists": lambda: module([rows[:2], rows[2:]], [rows], [rows]),
        "to_torch": windowed.to_torch,
        "heads": lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, num_kv_heads=2),
        "not positive": lambda: nta.VarlenMultiheadAttention(0, HEADS),
        "rotary": lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, rotary=object()),
        "no position": lambda: nta.VarlenMultiheadAttention(EMBED, HEADS, add_zero_attn=True, alibi=True),
        "padding shape": lambda: module(
            dense, dense, dense, key_padding_mask=torch.zeros(2, 3, dtype=torch.bool), need_weights=False
        ),
    }
    return cases[case]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("mixed", ValueError, r"key is a plain tensor \(2, 3, 35\)"),
        ("padding mask", ValueError, "leave out key_padding_mask"),
        (
            "mask",
            ValueError,
            r"must be \(L, S\) or \(10, L, S\) with L ≥ 3 and S ≥ 3, or a list of 2 masks, got \(3, 2\)",
        ),
        ("masks", ValueError, r"mask 1 is \(2, 3\) for lengths \(3, 3\)"),
        ("mods on padded", ValueError, "pass attn_mask for padded inputs"),
        ("layout too", ValueError, "leave out layout="),
        ("key_layout alone", ValueError, "need layout= too"),
        ("width", ValueError, r"query must have 35 features in its last dimension, got \(5, 34\)"),
        ("rows", ValueError, r"query has shape \(4, 35\).*5 tokens"),
        ("lists", ValueError, "key is a list of 1"),
        ("to_torch", ValueError, "does not support window_size"),
        ("heads", ValueError, "got 5 and 2"),
        ("not positive", ValueError, "got 0 and 5"),
        ("rotary", TypeError, "must be a Rotary, got object"),
        ("no position", ValueError, "keys without a position"),
        ("padding shape", ValueError, r"must be \(3, 2\), got \(2, 3\)"),
    ],
)
def test_refuses_with_what_to_pass(case, error, text):
    with pytest.raises(error, match=text):
        refuse(case)()


def test_embed_dim_that_does_not_divide_raises_what_stock_raises():
    for kind, (dim, heads) in itertools.product((nn.MultiheadAttention, nta.VarlenMultiheadAttention), [(7, 2)]):
        with pytest.raises(AssertionError):
            kind(dim, heads)


def test_what_a_graph_was_made_of_is_not_kept():
    """Exporting or imagining a call leaves nothing behind that a later call would compute with."""
    fresh = [nta.VarlenMultiheadAttention(34, 17, alibi=True, rotary=nta.Rotary(), batch_first=True) for _ in range(2)]
    fresh[1].load_state_dict(fresh[0].state_dict())
    x, layout = torch.randn(2, 5, 34), nta.SequenceLayout.from_lengths([5, 5])
    packed = x.flatten(0, 1)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = fresh[0]

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    exported = torch.export.export(Whole(), (x,)).module()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(packed)
        fresh[0](fake, fake, fake, layout=layout)
    want = fresh[1](packed, packed, packed, layout=nta.SequenceLayout.from_lengths([5, 5]))[0].unflatten(0, (2, 5))
    torch.testing.assert_close(fresh[0](packed, packed, packed, layout=layout)[0].unflatten(0, (2, 5)), want)
    torch.testing.assert_close(exported(x), want)
    assert want.abs().max() < 100


# --- options that can't be right


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
def test_added_keys_stand_at_no_position_later_either(added):
    module = nta.VarlenMultiheadAttention(16, 2, **{added: True})
    with pytest.raises(ValueError, match="keys without a position"):
        module.window_size = (3, 0)
    assert module.window_size == (-1, -1)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("option", [{"window_size": (1, 1)}, {"softcap": 2.0}, {"scale": 0.7}])
def test_an_encoder_layer_sees_options_that_were_set_later(option):
    """Its fast path in evaluation computes stock attention from the weights alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    for name, value in option.items():
        setattr(layer.self_attn, name, value)
    x = torch.randn(2, 7, 16)
    want = layer.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), want)


def test_an_encoder_layer_does_not_pass_by_a_named_backend():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn, backend="flash_attn_4")
    with torch.no_grad(), pytest.raises(ValueError, match="flash_attn_4"):
        layer(torch.randn(2, 7, 16))


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("rows", [(14, 17), (17, 14)])
def test_rows_that_key_or_value_have_beyond_the_layout(added, rows):
    module = nta.VarlenMultiheadAttention(16, 2, dtype=torch.float64, **added)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    layout = nta.SequenceLayout.from_lengths([5, 9])
    query, key, value = (torch.randn(n, 16, dtype=torch.float64) for n in (14, *rows))
    want, _ = module(query, key[:14], value[:14], layout=layout)
    torch.testing.assert_close(module(query, key, value, layout=layout)[0], want)
    with pytest.raises(ValueError, match="tokens"):
        module(query, key, value[:13], layout=layout)


@pytest.mark.parametrize("need_weights", [False, True])
def test_packed_tokens_have_two_dimensions(need_weights):
    module, layout = nta.VarlenMultiheadAttention(16, 2), nta.SequenceLayout.from_lengths([5, 9])
    x = torch.randn(14, 1, 16)
    with pytest.raises(ValueError, match=r"packed query must be \(tokens, features\), got \(14, 1, 16\)"):
        module(x, x, x, layout=layout, need_weights=need_weights)

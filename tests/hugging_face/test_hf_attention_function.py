"""The attention function of transformers, registered by name: options, masks and lengths against the oracle."""

import pytest
import torch
from attention_function import (
    LENGTHS,
    MODULE,
    WINDOWS,
    Grouped,
    call,
    expected,
    layout_of,
    make,
    positions_of,
    random_states,
)
from sweeps import covering

import nt_attention as nta
from nt_attention.hf.route.attention import attention


def test_attention_function_errors():
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    q = torch.randn(1, 3, layout.total, 7)
    packed = {"over": "sdpa", "cu_seq_lens_q": layout.cu_seqlens}
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="cu_seq_lens_k ends at 21, but there are 8 keys"):
        attention(module, q, q[:, :, :8], q[:, :, :8], None, **packed)
    with pytest.raises(ValueError, match="cu_seq_lens_q ends at 21, but there are 42 queries"):
        attention(module, *[q.expand(2, -1, -1, -1)] * 3, None, **packed)
    with pytest.raises(ValueError, match="got 'flash_attention_2'"):
        nta.hf.register("flash_attention_2")


SHAPES = {
    "plain": {"kv_heads": 6},
    "grouped": {},
    "one head of keys": {"kv_heads": 1},
    "narrow values": {"value_dim": 5},
    "wide values": {"value_dim": 13, "kv_heads": 3},
}

OPTIONS = {
    "nothing": ({}, {}),
    "scaling 1": ({"scaling": 1.0}, {}),
    "scaling": ({"scaling": 0.3}, {}),
    "softcap": ({"softcap": 2.0, "scaling": 1.0}, {}),
    "no dropout": ({"dropout": 0.0}, {}),
    "sinks": ({"s_aux": True}, {"sinks": True}),
    "all": ({"s_aux": True, "softcap": 2.0, "scaling": 0.7, "dropout": 0.0}, {"sinks": True}),
}


@covering({"option": OPTIONS, "window": WINDOWS, "told": ["lengths", "positions"]})
@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_packed_rows_agree_with_the_oracle(option, window, told):
    (given, wanted), (given_window, wanted_window) = OPTIONS[option], WINDOWS[window]
    sinks = torch.randn(6, dtype=torch.float64)
    given = {**given, **given_window, **({"s_aux": sinks} if "s_aux" in given else {})}
    wanted = {**wanted, **wanted_window, **({"sinks": sinks} if "sinks" in wanted else {})}
    wanted |= {key: given[key] for key in ("scaling", "softcap") if key in given}
    layout = layout_of(LENGTHS)
    where = (
        {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
        if told == "lengths"
        else {"position_ids": layout.position_ids[None]}
    )
    for shape in SHAPES.values():
        q, k, v = random_states(**shape)
        want = expected(q, k, v, LENGTHS, **wanted)
        for over in ("sdpa", "eager"):
            torch.testing.assert_close(call(q, k, v, over=over, **where, **given), want)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("window", WINDOWS)
def test_whole_rows_agree_with_the_oracle(window):
    given, wanted = WINDOWS[window]
    q, k, v = random_states(rows=3, length=11, value_dim=5)
    want = expected(q, k, v, [11] * 3, **wanted)
    torch.testing.assert_close(call(q, k, v, module=Grouped(), **given), want)
    positions = torch.arange(4, 15)[None]
    torch.testing.assert_close(call(q, k, v, module=Grouped(), position_ids=positions, **given), want)


def test_gradients_agree_with_the_oracle():
    layout = layout_of(LENGTHS)
    for given, wanted in WINDOWS.values():
        for where in ({"cu_seq_lens_q": layout.cu_seqlens}, {"position_ids": layout.position_ids[None]}):
            leaves = [x.requires_grad_() for x in (*random_states(value_dim=5), torch.randn(6, dtype=torch.float64))]
            incoming = torch.randn(1, 21, 6, 5, dtype=torch.float64)
            got = torch.autograd.grad(call(*leaves[:3], s_aux=leaves[3], **where, **given), leaves, incoming)
            want = torch.autograd.grad(expected(*leaves[:3], LENGTHS, sinks=leaves[3], **wanted), leaves, incoming)
            torch.testing.assert_close(got, want)


def test_is_causal_of_the_call_then_of_the_module_then_true():
    q, k, v = random_states(kv_heads=6)
    cu = layout_of(LENGTHS).cu_seqlens
    causal, both_ways = expected(q, k, v, LENGTHS, is_causal=True), expected(q, k, v, LENGTHS)
    for module, keyword, want in (
        (MODULE(), None, causal), (MODULE(), True, causal), (MODULE(), False, both_ways),
        (Grouped(True, 1), None, causal), (Grouped(False, 1), None, both_ways),
        (Grouped(True, 1), False, both_ways), (Grouped(False, 1), True, causal),
    ):  # fmt: skip
        got = call(q, k, v, module=module, is_causal=keyword, cu_seq_lens_q=cu)
        torch.testing.assert_close(got, want)
        whole = call(q, k, v, module=module, is_causal=keyword)
        torch.testing.assert_close(whole, expected(q, k, v, [21], is_causal=want is causal))


def test_key_lengths_that_differ():
    q, k, v = random_states(length=21, keys=17)
    lengths, key_lengths = LENGTHS, [3, 7, 0, 7]
    cu = {
        "cu_seq_lens_q": layout_of(lengths).cu_seqlens,
        "cu_seq_lens_k": layout_of(key_lengths).cu_seqlens,
    }
    got = call(q, k, v, is_causal=False, **cu)
    torch.testing.assert_close(got, expected(q, k, v, lengths, key_lengths))
    assert torch.equal(got[0, 6:18], torch.zeros_like(got[0, 6:18]))  # no keys
    torch.testing.assert_close(
        call(q, k, v, is_causal=True, **cu), expected(q, k, v, lengths, key_lengths, is_causal=True)
    )


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_attention_mask_beside_packed_rows(over):
    q, k, v = random_states(rows=2, length=7)
    module = make("llama").model.layers[0].self_attn
    each = [3, 4], [2, 5]
    lengths = [n for row in each for n in row]
    where = {"cu_seq_lens_q": layout_of(lengths).cu_seqlens}
    ones = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    some = (torch.rand(2, 1, 7, 7) < 0.6) | torch.eye(7, dtype=torch.bool)

    def additive(mask):
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)

    def mask_mod(b, h, i, j):  # positions count from the start of each sequence
        rows = torch.tensor([0, 0, 1, 1])[b]
        begins = torch.tensor([0, 3, 0, 2])[b]
        return some[rows, 0, (begins + i).clamp(max=6), (begins + j).clamp(max=6)]

    for masks, want in (
        ((ones, ones[:1], additive(ones), ones.tril(), additive(ones.tril())), None),
        ((some, additive(some)), mask_mod),
    ):  # fmt: skip
        for mask in masks:
            causal = not bool((mask if mask.dtype == torch.bool else mask == 0)[0, 0, 0, 1:].any())
            for keyword in (True, False):  # a mask is all that counts, as everywhere in transformers
                got = call(q, k, v, mask, module=module, over=over, is_causal=keyword, **where)
                want_rows = expected(q, k, v, lengths, is_causal=causal and want is None, mask_mod=want)
                torch.testing.assert_close(got, want_rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("told", ["nothing", "lengths", "positions"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_position_bias(is_causal, told):
    q, k, v = random_states(rows=2, length=7, kv_heads=6)
    each = [[7], [7]] if told == "nothing" else [[3, 4], [2, 5]]
    lengths = [n for row in each for n in row]
    where = {
        "nothing": {},
        "lengths": {"cu_seq_lens_q": layout_of(lengths).cu_seqlens},
        "positions": {"position_ids": positions_of(*each)},
    }[told]
    begins = torch.tensor([begin for row in each for begin in [0, *torch.tensor(row).cumsum(0).tolist()][:-1]])
    rows = torch.tensor([row for row, parts in enumerate(each) for _ in parts])
    for rows_of_bias in (1, 2):
        bias = torch.randn(rows_of_bias, 6, 7, 7, dtype=torch.float64)

        def score_mod(score, b, h, i, j, bias=bias):
            row = rows[b] if bias.shape[0] == 2 else torch.zeros_like(b)
            return score + bias[row, h, (begins[b] + i).clamp(max=6), (begins[b] + j).clamp(max=6)]

        got = call(q, k, v, is_causal=is_causal, position_bias=bias, scaling=1.0, **where)
        want = expected(q, k, v, lengths, scaling=1.0, is_causal=is_causal, score_mod=score_mod)
        torch.testing.assert_close(got, want)


def test_dropout_keeps_the_mean():
    q, k, v = random_states(head_dim=8, value_dim=8)
    given = {"cu_seq_lens_q": layout_of(LENGTHS).cu_seqlens, "dropout": 0.5}
    some = torch.stack([call(q, k, v, **given) for _ in range(300)])
    assert not torch.equal(some[0], some[1])
    torch.testing.assert_close(some.mean(0), expected(q, k, v, LENGTHS, is_causal=True), rtol=0, atol=0.5)


@pytest.mark.parametrize("over", [None, "flex_attention", "", "nt_attention"])
def test_register_refuses_other_names(over):
    with pytest.raises(ValueError, match="over must be one of 'sdpa', 'eager'"):
        nta.hf.register(over)


def test_eager_of_a_module_outside_of_transformers():
    q, k, v = random_states(kv_heads=6)
    mask = torch.ones(1, 1, 21, 21, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="no module that defines Identity or a base class"):
        call(q, k, v, mask, over="eager")

    class Mine(type(make("llama").model.layers[0].self_attn)):
        pass

    model = make("llama")
    model.model.layers[0].self_attn.__class__ = Mine  # somebody's subclass runs its base's
    q, k, v = random_states()
    got = call(q, k, v, mask, module=model.model.layers[0].self_attn, over="eager")
    torch.testing.assert_close(got, expected(q, k, v, [21]), rtol=1e-5, atol=1e-5)


def test_paged_cache_is_refused():
    q, k, v = random_states()
    with pytest.raises(ValueError, match=r"continuous batching.*paged cache.*call generate"):
        call(q, k, v, cache=object(), cu_seq_lens_q=layout_of(LENGTHS).cu_seqlens)

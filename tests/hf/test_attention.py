"""The attention function under transformers: packed rows isolated, everything else as it was."""

import gc

import oracle
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import nt_attention as nta
from nt_attention.hf.attention import attention

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


@pytest.mark.parametrize("over", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_gives_what_each_sequence_gives_alone(name, over):
    model = make(name)
    ids = [torch.randint(101, (1, length)) for length in LENGTHS]
    want = torch.cat([first(model(x)) for x in ids], 1)
    model.set_attn_implementation(nta.hf.register(over))
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    got = model(
        torch.cat(ids, 1),
        position_ids=layout.position_ids.unsqueeze(0),
        cu_seq_lens_q=layout.cu_seqlens,
        cu_seq_lens_k=layout.cu_seqlens,
        max_length_q=12,
        max_length_k=12,
        use_cache=False,
    )
    torch.testing.assert_close(first(got), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("over", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_are_what_they_were(name, over):
    model = make(name)
    model.set_attn_implementation(over)
    ids = torch.randint(101, (4, 12))
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    want = first(model(ids, attention_mask=mask))
    model.set_attn_implementation(nta.hf.register(over))
    assert torch.equal(first(model(ids, attention_mask=mask)), want)


def test_windows_sinks_softcap_and_scale_arrive():
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    q, k, v = (torch.randn(1, h, layout.total, 7, dtype=torch.float64) for h in (6, 2, 2))
    sinks = torch.randn(6, dtype=torch.float64)
    for causal, window in ((True, (2, 0)), (False, (2, 2))):
        got, weights = attention(
            torch.nn.Identity(), q, k, v, None, over="sdpa", cu_seq_lens_q=layout.cu_seqlens, scaling=0.3,
            is_causal=causal, sliding_window=3, s_aux=sinks, dropout=0.0, use_cache=False,
        )  # fmt: skip
        want = nta.varlen_attention(
            *(x[0].transpose(0, 1) for x in (q, k, v)), layout, is_causal=causal, window_size=window, scale=0.3,
            sinks=sinks,
        )  # fmt: skip
        assert weights is None
        torch.testing.assert_close(got[0], want)


def test_refuses_what_would_be_wrong():
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


# attention() by itself, against the oracle.

MODULE = torch.nn.Identity


def states(rows=1, length=21, heads=6, kv_heads=2, head_dim=7, value_dim=7, keys=None):
    """query (B, H, T, D), key (B, G, S, D), value (B, G, S, Dv)."""
    shapes = ((heads, length, head_dim), (kv_heads, keys or length, head_dim), (kv_heads, keys or length, value_dim))
    return [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]


def truth(query, key, value, lengths, key_lengths=None, scaling=None, softcap=None, **options):
    """The oracle's output, (B, T, H, Dv), for rows laid end to end."""
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
    """(R, T) positions of rows that hold sequences of these lengths."""
    return torch.stack([layout_of(lengths).position_ids for lengths in rows])


class Grouped(torch.nn.Module):
    """As transformers' attention modules tell of their heads."""

    def __init__(self, is_causal=True, groups=3):
        super().__init__()
        self.is_causal, self.num_key_value_groups, self.training = is_causal, groups, False


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
WINDOWS = {
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "both ways": ({"is_causal": False}, {}),
    "causal window": ({"is_causal": True, "sliding_window": 4}, {"is_causal": True, "window_size": (3, 0)}),
    "window both ways": ({"is_causal": False, "sliding_window": 4}, {"window_size": (3, 3)}),
    "window of one": ({"is_causal": True, "sliding_window": 1}, {"window_size": (0, 0)}),
    "wide window": ({"is_causal": True, "sliding_window": 64}, {"is_causal": True}),
}


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("told", ["lengths", "positions"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("option", OPTIONS)
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
        q, k, v = states(**shape)
        want = truth(q, k, v, LENGTHS, **wanted)
        for over in ("sdpa", "eager"):
            torch.testing.assert_close(call(q, k, v, over=over, **where, **given), want)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("window", WINDOWS)
def test_whole_rows_agree_with_the_oracle(window):
    given, wanted = WINDOWS[window]
    q, k, v = states(rows=3, length=11, value_dim=5)
    want = truth(q, k, v, [11] * 3, **wanted)
    torch.testing.assert_close(call(q, k, v, module=Grouped(), **given), want)
    positions = torch.arange(4, 15)[None]
    torch.testing.assert_close(call(q, k, v, module=Grouped(), position_ids=positions, **given), want)


def test_gradients_agree_with_the_oracle():
    layout = layout_of(LENGTHS)
    for given, wanted in WINDOWS.values():
        for where in ({"cu_seq_lens_q": layout.cu_seqlens}, {"position_ids": layout.position_ids[None]}):
            leaves = [x.requires_grad_() for x in (*states(value_dim=5), torch.randn(6, dtype=torch.float64))]
            incoming = torch.randn(1, 21, 6, 5, dtype=torch.float64)
            got = torch.autograd.grad(call(*leaves[:3], s_aux=leaves[3], **where, **given), leaves, incoming)
            want = torch.autograd.grad(truth(*leaves[:3], LENGTHS, sinks=leaves[3], **wanted), leaves, incoming)
            torch.testing.assert_close(got, want)


def test_causality_is_the_keywords_else_the_modules_else_true():
    q, k, v = states(kv_heads=6)
    cu = layout_of(LENGTHS).cu_seqlens
    causal, both_ways = truth(q, k, v, LENGTHS, is_causal=True), truth(q, k, v, LENGTHS)
    for module, keyword, want in (
        (MODULE(), None, causal), (MODULE(), True, causal), (MODULE(), False, both_ways),
        (Grouped(True, 1), None, causal), (Grouped(False, 1), None, both_ways),
        (Grouped(True, 1), False, both_ways), (Grouped(False, 1), True, causal),
    ):  # fmt: skip
        got = call(q, k, v, module=module, is_causal=keyword, cu_seq_lens_q=cu)
        torch.testing.assert_close(got, want)
        whole = call(q, k, v, module=module, is_causal=keyword)
        torch.testing.assert_close(whole, truth(q, k, v, [21], is_causal=want is causal))


def test_lengths_of_the_keys_may_be_others():
    q, k, v = states(length=21, keys=17)
    lengths, key_lengths = LENGTHS, [3, 7, 0, 7]
    cu = {
        "cu_seq_lens_q": layout_of(lengths).cu_seqlens,
        "cu_seq_lens_k": layout_of(key_lengths).cu_seqlens,
    }
    got = call(q, k, v, is_causal=False, **cu)
    torch.testing.assert_close(got, truth(q, k, v, lengths, key_lengths))
    assert torch.equal(got[0, 6:18], torch.zeros_like(got[0, 6:18]))  # no keys
    torch.testing.assert_close(
        call(q, k, v, is_causal=True, **cu), truth(q, k, v, lengths, key_lengths, is_causal=True)
    )


def test_lengths_go_over_all_rows_laid_end_to_end():
    q, k, v = states(rows=3, length=7)
    lengths = [7, 3, 4, 2, 5]
    got = call(q, k, v, cu_seq_lens_q=layout_of(lengths).cu_seqlens)
    torch.testing.assert_close(got, truth(q, k, v, lengths, is_causal=True))


@pytest.mark.parametrize("window", WINDOWS)
def test_positions_of_several_rows_keep_their_sequences_apart(window):
    given, wanted = WINDOWS[window]
    q, k, v = states(rows=3, length=7)
    each = [7], [3, 4], [2, 1, 4]
    got = call(q, k, v, position_ids=positions_of(*each), **given)
    torch.testing.assert_close(got, truth(q, k, v, [n for row in each for n in row], **wanted))
    got = call(q, k, v, position_ids=positions_of(each[2]), **given)
    torch.testing.assert_close(got, truth(q, k, v, each[2] * 3, **wanted))


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_positions_that_can_not_tell_of_packed_rows_are_passed_by(over):
    q, k, v = states(rows=2, length=7)
    module = Grouped() if over == "sdpa" else make("llama").model.layers[0].self_attn
    want = truth(q, k, v, [7, 7], is_causal=True)
    packed = positions_of([3, 4], [3, 4])
    for positions in (
        packed.expand(3, -1, -1),  # M-RoPE's three axes
        packed[0],  # no rows
        positions_of([3, 5], [3, 5]),  # of other tokens
        packed[:1].expand(3, -1),  # of other rows
        torch.arange(7)[None],
        torch.arange(9, 16).expand(2, -1),
        None,
    ):
        for causal in ({}, {"is_causal": True}):
            got = call(q, k, v, module=module, over=over, position_ids=positions, **causal)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # eager's softmax is in float32


def test_a_cache_before_the_tokens_puts_positions_aside():
    q, k, v = states(length=3, keys=7, kv_heads=6)
    mask = (torch.arange(7) <= torch.arange(3)[:, None] + 4)[None, None]
    want = truth(q, k, v, [3], [7], is_causal=True)
    got = call(q, k, v, mask, module=Grouped(groups=1), position_ids=torch.tensor([[4, 4, 4]]))
    torch.testing.assert_close(got, want)
    q, k, v = states(length=1, keys=7)
    torch.testing.assert_close(
        call(q, k, v, module=Grouped(), position_ids=torch.tensor([[6]])), truth(q, k, v, [1], [7])
    )


@pytest.mark.parametrize("over", ["sdpa", "eager"])
def test_a_mask_beside_packed_rows_holds_as_well(over):
    q, k, v = states(rows=2, length=7)
    module = make("llama").model.layers[0].self_attn
    each = [3, 4], [2, 5]
    lengths = [n for row in each for n in row]
    where = {"cu_seq_lens_q": layout_of(lengths).cu_seqlens}
    ones = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    some = (torch.rand(2, 1, 7, 7) < 0.6) | torch.eye(7, dtype=torch.bool)

    def additive(mask):
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)

    def mask_mod(b, h, i, j):  # of a sequence's own places
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
                expected = truth(q, k, v, lengths, is_causal=causal and want is None, mask_mod=want)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("told", ["nothing", "lengths", "positions"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_position_bias_is_added_to_the_scores(is_causal, told):
    q, k, v = states(rows=2, length=7, kv_heads=6)
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
        want = truth(q, k, v, lengths, scaling=1.0, is_causal=is_causal, score_mod=score_mod)
        torch.testing.assert_close(got, want)


def count_reads(monkeypatch):
    """How often positions are read."""
    reads, read = [], nta.SequenceLayout.from_position_ids

    def note(positions):
        reads.append(positions)
        return read(positions)

    monkeypatch.setattr(nta.SequenceLayout, "from_position_ids", staticmethod(note))
    return reads


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_positions_are_read_once_in_a_forward(mode, monkeypatch):
    model = make("llama").float()
    model.set_attn_implementation(nta.hf.register())
    reads = count_reads(monkeypatch)
    with mode():
        for lengths in ([5, 1, 12, 3], [7, 14], [21], [5, 1, 12, 3]):
            ids, positions = torch.randint(101, (1, 21)), positions_of(lengths)
            reads.clear()
            got = model(ids, position_ids=positions, use_cache=False).logits
            assert len(reads) == 1
            for part, row in zip(got.split(lengths, 1), ids.split(lengths, 1), strict=True):
                want = model(row, use_cache=False).logits
                torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_that_change_in_place_are_read_again(mode):
    model = make("llama").float()
    model.set_attn_implementation(nta.hf.register())
    with mode():
        ids, positions = torch.randint(101, (1, 21)), positions_of([5, 16])
        for lengths in ([5, 16], [8, 13], [21], [20, 1]):
            positions.copy_(positions_of(lengths))
            got = model(ids, position_ids=positions, use_cache=False).logits
            for part, row in zip(got.split(lengths, 1), ids.split(lengths, 1), strict=True):
                torch.testing.assert_close(part, model(row, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_one_tensor_of_positions_serves_batches_of_several_sizes():
    q, k, v = states(rows=3, length=7)
    positions = positions_of([3, 4])
    for rows in (3, 1, 2, 3):
        got = call(q[:rows], k[:rows], v[:rows], position_ids=positions)
        torch.testing.assert_close(got, truth(q[:rows], k[:rows], v[:rows], [3, 4] * rows, is_causal=True))


def test_positions_are_not_kept_alive():
    from nt_attention.hf.positions import _cache

    q, k, v = states()
    before = len(_cache)
    for _ in range(3):
        call(q, k, v, position_ids=positions_of(LENGTHS))
    gc.collect()
    assert len(_cache) <= before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_evaluation_found_serves_training(mode):
    positions = positions_of(LENGTHS)
    with mode():
        call(*states(), position_ids=positions)
    leaves = [x.requires_grad_() for x in states()]
    call(*leaves, position_ids=positions).sum().backward()
    assert all(x.grad is not None for x in leaves)


def test_keywords_that_mean_nothing_here_are_swallowed():
    q, k, v = states()
    more = {
        "use_cache": False, "output_attentions": False, "output_router_logits": False, "deterministic": None,
        "encoder_hidden_states": None, "indices": None, "max_length_q": 12, "max_length_k": 12, "dropout": 0.0,
        "what_comes_next_year": object(),
    }  # fmt: skip
    want = truth(q, k, v, LENGTHS, is_causal=True)
    torch.testing.assert_close(call(q, k, v, cu_seq_lens_q=layout_of(LENGTHS).cu_seqlens, **more), want)
    torch.testing.assert_close(call(q, k, v, position_ids=positions_of(LENGTHS), **more), want)
    torch.testing.assert_close(call(q, k, v, module=Grouped(), **more), truth(q, k, v, [21], is_causal=True))


def test_what_stands_for_a_mask_without_being_read_is_no_mask():
    from nt_attention.hf.attention import bypass_mask

    q, k, v = states()
    got = call(q, k, v, bypass_mask(q.device), cu_seq_lens_q=layout_of(LENGTHS).cu_seqlens)
    torch.testing.assert_close(got, truth(q, k, v, LENGTHS, is_causal=True))
    q, k, v = states(length=1)
    got = call(q, k, v, bypass_mask(q.device), module=Grouped(), cu_seq_lens_q=layout_of([1]).cu_seqlens)
    torch.testing.assert_close(got, truth(q, k, v, [1]))


def test_dropout_drops_and_scales_what_is_left():
    q, k, v = states(head_dim=8, value_dim=8)
    given = {"cu_seq_lens_q": layout_of(LENGTHS).cu_seqlens, "dropout": 0.5}
    with pytest.warns(nta.kernels.select.SlowBackendWarning):
        some = torch.stack([call(q, k, v, **given) for _ in range(300)])
    assert not torch.equal(some[0], some[1])
    torch.testing.assert_close(some.mean(0), truth(q, k, v, LENGTHS, is_causal=True), rtol=0, atol=0.5)


def test_a_name_is_registered_for_both_attention_and_masks():
    from transformers import AttentionInterface, AttentionMaskInterface

    for over, name in (("sdpa", "nt_attention"), ("eager", "nt_attention_eager")):
        assert nta.hf.register(over) == name
        assert nta.hf.register(over) == name  # twice does no harm
        assert name in AttentionInterface()
        assert name in AttentionMaskInterface()
    assert nta.hf.register() == "nt_attention"
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**SMALL, num_key_value_heads=2), attn_implementation=nta.hf.register()
    )
    assert model.config._attn_implementation == "nt_attention"


@pytest.mark.parametrize("over", [None, "flex_attention", "", "nt_attention"])
def test_registers_over_nothing_else(over):
    with pytest.raises(ValueError, match="over must be one of 'sdpa', 'eager'"):
        nta.hf.register(over)


def test_a_module_without_an_eager_of_its_own_is_named():
    q, k, v = states(kv_heads=6)
    mask = torch.ones(1, 1, 21, 21, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="no module that defines Identity or a base class"):
        call(q, k, v, mask, over="eager")

    class Mine(type(make("llama").model.layers[0].self_attn)):
        pass

    model = make("llama")
    model.model.layers[0].self_attn.__class__ = Mine  # somebody's subclass runs its base's
    q, k, v = states()
    got = call(q, k, v, mask, module=model.model.layers[0].self_attn, over="eager")
    torch.testing.assert_close(got, truth(q, k, v, [21]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first_layer", [None, 0, 3])
def test_positions_that_change_are_read_again_whichever_layer_comes_first(first_layer, mode):
    """In models that mix kinds of layers, the first with attention may be any."""
    q, k, v = states()
    module = Grouped()
    with mode():
        positions = positions_of([21])
        for lengths in ([5, 16], [8, 13], [21]):
            positions.copy_(positions_of(lengths))
            for layer in (first_layer, first_layer if first_layer is None else first_layer + 1):
                module.layer_idx = layer
                got = call(q, k, v, module=module, position_ids=positions)
                torch.testing.assert_close(got, truth(q, k, v, lengths, is_causal=True))


def test_a_paged_cache_is_refused_with_the_reason():
    q, k, v = states()
    with pytest.raises(ValueError, match=r"continuous batching.*paged cache.*call generate"):
        call(q, k, v, cache=object(), cu_seq_lens_q=layout_of(LENGTHS).cu_seqlens)

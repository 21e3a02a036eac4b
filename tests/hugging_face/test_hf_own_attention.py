"""Models with attention code of their own, and models that get the layout of a packed row in their mask."""

import gc
import warnings

import pytest
import torch
import transformers
from graphs import CountsAttention, with_layers
from small_models import build_small
from sweeps import sweep_except
from test_hf_other_models import OWN_ATTENTION
from transformers import DebertaV2Config, DebertaV2Model, T5Config, T5EncoderModel

import nt_attention as nta
from nt_attention.hf.pack import attention_code
from nt_attention.hf.pack.deferred_scores import CannotDeferError, _Deferring
from nt_attention.hf.route.packed_mask import CannotMaskError, MixesSequencesError, PackedMask
from nt_attention.layouts.sequence import SequenceLayout

LENGTHS = (9, 1, 17, 4)


def make(model_type):
    """A small model of a class, with random weights."""
    model = build_small(model_type, OWN_ATTENTION[model_type])
    for number, parameter in enumerate(model.parameters()):  # not those of the class
        draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=parameter.dtype)
        parameter.data.add_(draw, alpha=0.1)
    return model


def batch_of(model, seed=0, lengths=LENGTHS):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(6, 90, mask.shape, generator=torch.Generator().manual_seed(seed))
    padding = model.config.get_text_config().pad_token_id or 0
    return {"input_ids": ids.masked_fill(~mask, padding), "attention_mask": mask.long()}


def logits_of(model, batch):
    return model(**batch).logits[batch["attention_mask"].bool()]


def gradients_of(model, values):
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(5), dtype=values.dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
    return [x for x in gradients if x is not None]


@pytest.mark.parametrize("model_type", sweep_except(["bloom", "deberta", "deberta-v2", "mpnet", "mpt", "t5"], "mpnet"))
def test_compiled_layers_are_one_graph(model_type, fresh_compiler, monkeypatch):
    for name in ("_cached_tensors", "_made_on"):  # as in a new process
        monkeypatch.setattr(attention_code, name, type(getattr(attention_code, name))())
    model, backend = with_layers(make(model_type), 1), CountsAttention()
    with nta.patch(model, on_fallback="raise") as handle:
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for lengths in (LENGTHS, (3, 12, 5, 2, 8), (20, 6)):
            backend.calls.clear()
            batch = batch_of(model, lengths=lengths)
            want, got = logits_of(model, batch), logits_of(compiled, batch)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.detach().abs().max()))
            for x, y in zip(gradients_of(model, got), gradients_of(model, want), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))
            if lengths == LENGTHS:
                assert set(backend.calls) == {1}
        assert not backend.calls  # in the last batch
        assert handle.calls == {None: 6}


def test_patch_removed_before_a_checkpointed_backward_is_an_error():
    model = make("megatron-bert").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with nta.patch(model):
        values = logits_of(model, batch_of(model)).sum()
    with pytest.raises(MixesSequencesError, match="between the forward and the backward"):
        values.backward()


@pytest.mark.parametrize("kind", ["deberta-v2", "t5"])
def test_no_tensor_has_an_element_for_each_pair_of_tokens(kind):
    if kind == "t5":
        model = T5EncoderModel(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=99))
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        relative = {"relative_attention": True, "position_buckets": 8, "max_relative_positions": 16}
        config = DebertaV2Config(**sizes, **relative, vocab_size=99, pos_att_type="p2c|c2p")
        model = DebertaV2Model(config)
    lengths = torch.tensor([40] * 50 + [3] * 10)
    mask = (torch.arange(40) < lengths[:, None]).long()
    tokens = int(mask.sum())
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with nta.patch(model.eval(), on_fallback="raise"), torch.no_grad(), Watch():
        model(input_ids=mask * 7, attention_mask=mask)
    assert max(largest) < tokens**2 / 2


def mask_of(lengths, **options):
    return PackedMask.of(SequenceLayout.from_lengths(lengths), **{"form": "row", **options})


def test_packed_mask_has_no_memory_and_keeps_its_layout():
    mask = mask_of([300_000, 700_000], form="pairs")
    inverted = (1.0 - mask.to(torch.float32)) * torch.finfo(torch.float32).min
    assert inverted.shape == (1, 1, 10**6, 10**6)
    assert (inverted.value, inverted.dtype, inverted.query_layout) == (0.0, torch.float32, mask.query_layout)


def test_operations_on_a_packed_mask():
    mask = mask_of([3, 4])
    assert mask[:, None, None, :].shape == (1, 1, 1, 7)
    assert (mask.unsqueeze(1) * mask.unsqueeze(2)).shape == (1, 7, 7)
    assert not (mask == 0).value
    assert (~mask.bool()).dtype == torch.bool
    values = torch.randn(1, 7, 5)
    assert values * mask.unsqueeze(-1) is values
    assert values.masked_fill(~mask.bool().unsqueeze(-1), 3.0) is values
    with pytest.raises(CannotMaskError, match="cumsum"):
        mask.cumsum(1)
    with pytest.raises(CannotMaskError, match="mul"):
        values * (mask + 1).unsqueeze(-1)


@pytest.mark.parametrize("form", ["row", "pairs"])
def test_attention_that_does_not_know_packed_rows_is_an_error(form):
    mask = mask_of([3, 4], form=form)
    query = torch.randn(1, 2, 7, 8)
    with pytest.raises(MixesSequencesError):
        query @ query.transpose(-1, -2) + (1 - mask.to(query.dtype))
    with pytest.raises(MixesSequencesError):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def deferred(length=5):
    """Scores of one sequence, with the query, the key and the value."""
    mask = mask_of([length], form="pairs")
    query, key, value = torch.randn(3, 1, 2, length, 8, dtype=torch.float64).unbind()
    made = []
    with _Deferring(mask):
        made.append(query @ key.transpose(-1, -2))
    return made[0], query, key, value


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 0.5,
        lambda x: 0.5 * x,
        lambda x: x / torch.tensor(2.0),
        lambda x: torch.mul(2.0, x) / 3,
        lambda x: (x + 4.0).float(),
        lambda x: x.view(2, 5, 5).unsqueeze(0) * -1.5,
    ],
)
def test_deferred_scores_are_as_scores(change):
    scores, query, key, value = deferred()
    want = change(query @ key.transpose(-1, -2)).double().softmax(-1).reshape(1, 2, 5, 5) @ value
    weights = torch.nn.functional.softmax(change(scores), dim=-1)
    torch.testing.assert_close(torch.matmul(weights, value), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + torch.randn(5, 5),
        lambda x: torch.div(torch.ones(()), x),
        lambda x: torch.sub(torch.ones(()), x),
        lambda x: torch.add(torch.ones(()), x, alpha=2),
        lambda x: x * torch.randn(2, 1, 1),
        lambda x: x.exp(),
        lambda x: x[:, :1],
        lambda x: x.softmax(1),
        lambda x: x.softmax(-1).softmax(-1),
        lambda x: x.softmax(-1) * 2,
        lambda x: x.transpose(-1, -2),
        lambda x: torch.randn(1, 2, 5, 5) @ x.softmax(-1),
        lambda x: x @ torch.randn(1, 2, 5, 8),
    ],
)
def test_operations_that_scores_can_not_defer_are_errors(change):
    scores, *_ = deferred()
    with pytest.raises(CannotDeferError, match="can't express"):
        change(scores)


def test_learned_keys_are_not_deferred():
    memory = torch.nn.Parameter(torch.randn(1, 2, 5, 8))
    with _Deferring(mask_of([5], form="pairs")):
        assert isinstance(torch.randn(1, 2, 5, 8) @ memory.transpose(-1, -2), torch.Tensor)


def test_a_patched_model_keeps_no_batch_alive():
    model = make("rembert")
    with nta.patch(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(**batch_of(model))
        gc.collect()
        kept = [x for x in gc.get_objects() if type(x) is PackedMask]
    assert not kept


def test_a_changed_embedding_of_position_biases_is_called():
    """As with LoRA, or a hook."""
    for model_type, name in (("t5", "transformer.encoder.block.0.layer.0.SelfAttention"), ("mpnet", "mpnet.encoder")):
        model = make(model_type)
        embedding = model.get_submodule(f"{name}.relative_attention_bias")
        embedding.register_forward_hook(lambda module, args, out: 3 * out)
        batch = batch_of(model)
        with torch.no_grad():
            want = logits_of(model, batch)
            with nta.patch(model, on_fallback="raise"):
                torch.testing.assert_close(logits_of(model, batch), want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:attention runs on the slow reference")
@pytest.mark.parametrize("model_type", ["mpnet", "deberta", "bloom", "gpt_neo"])
def test_dropout_follows_its_own_module(model_type):
    model = make(model_type)
    batch = batch_of(model)
    dropouts = [m for x in model.modules() if "Attention" in type(x).__name__ for m in x.children()]
    dropouts = [m for m in dropouts if isinstance(m, torch.nn.Dropout)]
    for module in dropouts:
        module.p = 0.7
        module.train()
    with torch.no_grad(), nta.patch(model):
        assert not torch.equal(logits_of(model, batch), logits_of(model, batch))
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, torch.nn.Identity())
    with torch.no_grad():
        want = logits_of(model, batch)
        with nta.patch(model, on_fallback="raise"):
            torch.testing.assert_close(logits_of(model, batch), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("buckets", "most", "length"), [(33, 64, 200), (256, 128, 300), (400, 150, 300), (32, 64, 200)]
)
def test_logarithmic_buckets_of_deberta_reach_any_distance(buckets, most, length):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    relative = {"relative_attention": True, "position_buckets": buckets, "max_relative_positions": most}
    more = {"pos_att_type": "p2c|c2p", "position_biased_input": False, "max_position_embeddings": 64}
    model = DebertaV2Model(DebertaV2Config(**sizes, **relative, **more, vocab_size=99)).double().eval()
    ids = torch.randint(6, 90, (2, length))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        want = model(input_ids=ids[:1]).last_hidden_state[0]
        with nta.patch(model, on_fallback="raise"):
            torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).last_hidden_state[0], want)


def test_bloom_with_sliced_products():
    sizes = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    config = transformers.BloomConfig(**sizes, slow_but_exact=True, pretraining_tp=2)
    model = transformers.BloomModel(config).double().eval()
    batch = batch_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        want = model(**batch).last_hidden_state
        with nta.patch(model, on_fallback="raise"):
            got = model(**batch).last_hidden_state
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-6, atol=1e-6)

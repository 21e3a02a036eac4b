"""patch_all: which models are patched, and that the program does what it does without it."""

import copy
import pickle
import weakref

import pytest
import tiny
import torch
from freeing import without_garbage_collector
from patched_models import close, every_kind, gradients, loss_of, make, make_batch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    EncoderDecoderModel,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import nt_attention as nta
from nt_attention.hf.prove import store
from nt_attention.patching import building


def bert_config(**more):
    return BertConfig(**{**tiny.TEXT, **tiny.NO_DROPOUT, **more})


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_config(bert_config())
        self.project = nn.Linear(48, 3)

    def forward(self, **batch):
        return self.project(self.encoder(**batch).last_hidden_state)


class Counted(BertModel):
    """A class of the user, whose code counts its calls."""

    calls = 0

    def forward(self, *args, **kwargs):
        Counted.calls += 1
        return super().forward(*args, **kwargs)


class Refused(BertModel):
    """It mixes the rows of a batch."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask=attention_mask)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean((0, 1))
        return out


class Raising(BertModel):
    """Nobody but the program can build it."""

    def __init__(self, config, secret=None):
        if secret is None:
            raise KeyError("secret")
        super().__init__(config)


@every_kind
def test_models_give_what_they_give_without_it(kind, tmp_path):
    model, batch = make(kind), make_batch(kind)
    want = gradients(model, batch)
    model.save_pretrained(tmp_path)
    with nta.patch_all(packing="always") as handle:
        built = [make(kind), type(model).from_pretrained(tmp_path)]
        built.append(type(model).from_pretrained(tmp_path, output_loading_info=True)[0])
        built.append(copy.deepcopy(built[0]))
        for one in built:
            close(gradients(one, batch), want)
            replica = one._replicate_for_data_parallel()  # of DataParallel
            assert type(replica) is type(one)
            assert replica.forward.module is replica
    assert handle.models == {type(model).__name__: 3}
    counts = handle.counts[type(model).__name__]
    assert counts.calls == {None: 4}
    assert (counts.tokens, counts.positions) == (4 * 40, 4 * 92)
    assert f"{type(model).__name__}: 3 models patched\n    4 calls ran packed: 160 tokens in 368" in str(handle)
    for one in built:
        assert one.config._attn_implementation == "sdpa"
        close(gradients(one, batch), want)
    assert counts.calls == {None: 4}  # after remove
    assert "forward" not in vars(make(kind))


def test_a_model_in_another_module_is_patched():
    batch = make_batch("base")
    with nta.patch_all(packing="always") as handle:
        model = Projected()
        got = model(**batch)
    tokens = batch["attention_mask"].bool()
    close(got[tokens], model(**batch)[tokens])
    assert handle.counts["BertModel"].calls == {None: 1}


def test_parts_that_were_built_before_are_as_the_model_around_them():
    """The heads of an encoder-decoder of two models are not packed."""
    batch = make_batch("base")
    batch = {**batch, "labels": batch["input_ids"]}
    with nta.patch_all(packing="always") as handle:
        encoder = make("base")
        decoder = AutoModelForCausalLM.from_config(bert_config(is_decoder=True, add_cross_attention=True))
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        model.config.decoder_start_token_id, model.config.pad_token_id = 2, tiny.PAD
        got = model(**batch).loss
        assert handle.models["BertModel"] == 0
        assert not any("forward" in vars(part) for part in model.modules())
    assert handle.left.keys() == {"EncoderDecoderModel"}
    assert "logits differs" in str(handle)
    close(got, model(**batch).loss)


@every_kind
def test_pickles_have_no_trace_of_it(kind):
    batch = make_batch(kind)
    with nta.patch_all():
        model = make(kind)
        for what in (model, model.config, nn.ModuleList([model]), copy.deepcopy(model), copy.deepcopy(model.config)):
            assert b"nt_attention" not in pickle.dumps(what)
        assert "nt_attention" not in repr([model.config.to_dict(), model.config.to_diff_dict()])
        loaded = pickle.loads(pickle.dumps(model))
        assert loaded.config._attn_implementation == "sdpa"
        assert "forward" not in vars(loaded)
        close(gradients(loaded, batch), gradients(model, batch))
        with nta.patch(model, packing="always"):  # the program asked for this one
            kept = pickle.loads(pickle.dumps(model))
    loss_of(kept, batch)
    assert kept.forward.handle.calls[None] == 1


def test_pickles_have_no_methods_of_it():
    with nta.patch_all():
        model = BloomModel(BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4))
        assert "build_alibi_tensor" in vars(model)
        assert b"nt_attention" not in pickle.dumps(model)


def test_models_that_share_a_config():
    config, batch = bert_config(), make_batch("base")
    with nta.patch_all(packing="always") as handle:
        models = [BertModel(config).eval() for _ in range(2)]
        for model in models:
            loss_of(model, batch)
    assert handle.counts["BertModel"].calls == {None: 2}
    assert config._attn_implementation == "sdpa"


def test_code_of_the_user_is_tried_once_for_each_config(monkeypatch):
    monkeypatch.setattr(store, "_made_of_class", weakref.WeakKeyDictionary())
    batch = make_batch("base")
    with nta.patch_all(packing="always") as handle:
        Counted(bert_config())
        assert Counted.calls > 0
        before = Counted.calls
        model = Counted(bert_config()).eval()
        assert Counted.calls == before
        got = loss_of(model, batch)
        Counted(bert_config(hidden_act="relu"))
        assert Counted.calls > before + 1
    close(got, loss_of(model, batch))
    assert handle.models == {"Counted": 3}
    assert handle.counts["Counted"].calls == {None: 1}


def test_models_that_are_not_patched_run_as_they_are():
    batch = make_batch("base")
    with nta.patch_all() as handle:
        models = [Refused(bert_config()).eval() for _ in range(2)] + [Raising(bert_config(), 1).eval()]
        models.append(ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)))
        for model in models:
            assert "forward" not in vars(model)
            assert model.config._attn_implementation == "sdpa"
        for model in models[:3]:
            model(**batch)
        with pytest.raises(KeyError):
            Raising(bert_config())
    assert handle.left.keys() == {"Refused", "Raising", "ViTModel"}
    assert str(handle).count("not patched: ") == 3
    assert "ViTModel: not patched: its images have equal lengths" in str(handle).splitlines()[-1]
    assert not handle.models


def test_programs_that_patch_themselves():
    batch = make_batch()
    with nta.patch_all(packing="always", on_fallback="silent") as outer:
        model = make()
        model.forward.handle.remove()  # nobody does this, but it works
        loss_of(model, batch)
        with nta.patch(model, packing="always") as own:
            loss_of(model, batch)
            assert model.forward.handle is own
        loss_of(model, batch)
        with nta.patch(make(), packing="always") as other:
            assert other.active
        with nta.patch_all(packing="always") as inner:
            second = make()
            loss_of(second, batch)
        loss_of(second, batch)
        third = make()
        loss_of(third, batch)
        assert third.forward.handle.on_fallback == "silent"  # the options of the outer one
    outer.remove()
    name = LlamaForCausalLM.__name__
    assert own.calls == inner.counts[name].calls == outer.counts[name].calls == {None: 1}


def test_models_are_freed_without_the_garbage_collector():
    with nta.patch_all(packing="always") as handle:
        model = make()
        loss_of(model, make_batch())
        freed = weakref.ref(model)
        with without_garbage_collector():
            del model
            assert freed() is None
    assert handle.counts["LlamaForCausalLM"].calls == {None: 1}


def test_wrong_options_are_refused_at_once():
    for name, value in {"packing": "never", "on_fallback": "x", "cuda_graphs": "x"}.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            nta.patch_all(**{name: value})
    assert not building.has_listeners()


def test_numbers_that_the_program_draws_stay_the_same():
    torch.manual_seed(0)
    want = BertModel(bert_config()), torch.rand(3)
    torch.manual_seed(0)
    with nta.patch_all():
        got = BertModel(bert_config()), torch.rand(3)
    assert torch.equal(got[1], want[1])
    assert all(map(torch.equal, got[0].parameters(), want[0].parameters()))

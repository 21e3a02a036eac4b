"""The proof that a model can be packed: planted errors, switches of configs, own classes, where proofs are kept."""

import json
import random
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import planted
import pytest
import tiny
import torch
import transformers
from proof_cases import BATCH, MASK, SIZES
from sweeps import covering, sweep_except
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import nt_attention as nta
from nt_attention.hf import families
from nt_attention.hf.prove import diagnosis, store
from nt_attention.hf.prove.text_models import on_meta_device, text_classes
from nt_attention.hf.prove.trial_runs import relative_error
from nt_attention.hf.prove.user_code import replaced_functions

pytestmark = pytest.mark.usefixtures("cache")


def refusal(model):
    with pytest.raises(ValueError, match="can't be packed") as error:
        nta.patch(model)
    return str(error.value)


def check(model, **more):
    """Compare a patched model with the unpatched one, at tokens and in the losses."""
    batch = {**BATCH, **more}
    with torch.no_grad():
        want = model(**batch)
        with nta.patch(model, on_fallback="raise") as handle:
            got = model(**batch)
    assert handle.calls[None] == 1
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            mine, theirs = (x[MASK] if x.shape[:2] == MASK.shape else x for x in (got[name], value))
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)
    return handle


# Planted errors


@covering({"name": planted.REASONS, "kind": [planted.PlantedModel, planted.PlantedForCausalLM]})
def test_planted_errors_are_refused_with_their_module(name, kind):
    module = {
        "DeafAttention": "layers.1.self_attn (DeafAttention)",
        "BatchNorm": "layers.1.mlp.mixer.norm (BatchNorm1d)",
    }.get(name, f"layers.1.mlp.mixer ({name})")
    message = refusal(planted.make(kind, name))
    assert planted.REASONS[name].format(module) in message
    assert "Pass padding_free=False" in message


def test_planted_model_without_an_error_is_packed():
    check(planted.make(planted.PlantedForCausalLM, "Nothing"))


# Switches of a config


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).eval()


@pytest.mark.parametrize("name", ["GemmaModel", "Gemma2Model", "Gemma3TextModel"])
def test_bidirectional_attention_of_gemma(name):
    kind, keys = getattr(transformers, name), set()
    for bidirectional in (False, True):
        sizes = {**SIZES, "head_dim": 8, "num_key_value_heads": 2}
        model = kind(kind.config_class(**sizes, use_bidirectional_attention=bidirectional)).eval()
        keys.add(store.key_of(model))
        if name == "GemmaModel" and bidirectional:  # it ignores the switch for batches with padding
            assert "without the patch, its last_hidden_state of a padded batch is not that of each" in refusal(model)
        else:
            check(model)
    assert len(keys) == 2


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bert_as_a_decoder(is_decoder):
    model = BertModel(BertConfig(**SIZES, is_decoder=is_decoder)).eval()
    check(model)
    other = BertModel(BertConfig(**SIZES, is_decoder=not is_decoder))
    assert store.key_of(model) != store.key_of(other)


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "longrope": {
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, "original_max_position_embeddings": 8,
    },
}  # fmt: skip


def test_every_kind_of_rope_has_its_own_proof():
    keys = set()
    for kind, more in ROPES.items():
        model = llama(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more})
        handle = nta.patch(model)
        handle.remove()
        keys.add(store.key_of(model))
    assert len(keys) == len(ROPES)


def test_sizes_do_not_change_the_key():
    sizes = {"hidden_size": 128, "intermediate_size": 96, "vocab_size": 70, "num_hidden_layers": 3}
    small, large = llama(), LlamaForCausalLM._from_config(LlamaConfig(**sizes, pad_token_id=0))
    assert store.key_of(small) == store.key_of(large)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1},
        {"something_else": 3}, {"num_labels": 1},
    ],
    ids=str,
)  # fmt: skip
def test_everything_else_changes_the_key(change):
    assert store.key_of(llama()) != store.key_of(llama(**change))


# Models of one's own


class OwnAttention(nn.Module):
    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config, self.heads = config, config.heads
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)

    def forward(self, x, mask, **kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        query, key, value = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return self.out(attend(self, query, key, value, mask, **kwargs)[0].flatten(2))


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own"

    def __init__(self, width=40, heads=4, depth=2, vocab_size=97, **kwargs):
        self.width, self.heads, self.depth, self.vocab_size = width, heads, depth, vocab_size
        super().__init__(**kwargs)


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(OwnAttention(config) for _ in range(config.depth))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        from transformers.masking_utils import create_causal_mask

        kwargs.pop("return_dict", None)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None, position_ids=position_ids)
        for layer in self.layers:
            x = x + layer(x, mask, position_ids=position_ids, **kwargs)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)


class OwnModelWithBlocks(OwnModel):
    """Only its mask knows that a token sees the tokens of its own block of 3."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        from transformers.masking_utils import create_causal_mask

        kwargs.pop("return_dict", None)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        given = {"past_key_values": None, "position_ids": position_ids}
        blocks = {"and_mask_function": lambda row, head, query, key: query // 3 == key // 3}
        mask = create_causal_mask(self.config, x, attention_mask, **given, **blocks)
        for layer in self.layers:
            x = x + layer(x, mask, position_ids=position_ids, **kwargs)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)


class OwnForReward(transformers.PreTrainedModel):
    """A reward head without a name that any table knows: the mean over the tokens."""

    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = OwnModel(config), nn.Linear(config.width, 1)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        rewards = self.score((hidden * weights).sum(1) / weights.sum(1))
        loss = None if labels is None else (rewards[:, 0] - labels).square().mean()
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=rewards)


@pytest.mark.parametrize("kind", [OwnModel, OwnForReward])
def test_own_classes(kind):
    handle = check(kind(OwnConfig()).eval())
    assert "check made in" in str(handle)


def test_restrictions_that_only_the_mask_has_are_refused():
    reason = "restriction that only the attention mask contains"
    assert reason in refusal(OwnModelWithBlocks(OwnConfig()).eval())


def test_own_reward_head_with_its_loss():
    check(OwnForReward(OwnConfig()).eval(), labels=torch.randn(4))


def test_own_class_whose_module_is_replaced_after_construction():
    """The twin does not have what was put into the model later."""
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.layers[1].mlp = planted.Added(model.layers[1].mlp, planted.Convolution(48))
    message = "layers.1.mlp is a planted.Added, which a new model with the same config does not have"
    assert message in refusal(model)


def test_part_replaced_by_a_class_of_the_same_name():
    class LlamaMLP(LlamaModel(LlamaConfig(**SIZES)).layers[0].mlp.__class__):
        def forward(self, x):
            return super().forward(x.cumsum(1))

    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.layers[1].mlp = LlamaMLP(model.config)
    assert "layers.1.mlp is a " in refusal(model)


def test_part_replaced_by_layers_of_torch_that_mix_tokens():
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.layers[1].mlp = nn.Sequential(nn.Linear(48, 48), nn.Softmax(dim=1))
    assert "layers.1.mlp.1 is a torch.nn.modules.activation.Softmax" in refusal(model)


def test_flag_set_after_construction():
    """As LLM2Vec does."""
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.layers[1].self_attn.is_causal = False
    assert "is_causal of layers.1.self_attn (LlamaAttention) is False, but True in a new model" in refusal(model)


def test_config_changed_after_construction():
    model = BertModel(BertConfig(**SIZES)).eval()
    model.config.is_decoder = True
    assert "is_decoder of encoder.layer.0 (BertLayer) is False, but True in a new model" in refusal(model)


def test_method_replaced_after_construction():
    model = BertModel(BertConfig(**SIZES)).eval()
    layer = model.encoder.layer[0]
    before = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda x: before(x.cumsum(1))
    assert "feed_forward_chunk of encoder.layer.0 replaces that of BertLayer" in refusal(model)


class Before(LlamaModel):
    """A Llama that changes its embeddings first."""

    def change(self, embeds, input_ids):
        return embeds

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=self.change(embeds, input_ids), **kwargs)


class AfterLongRows(Before):
    def change(self, embeds, input_ids):
        return embeds.cumsum(1) if embeds.shape[1] > 64 else embeds


class Segments(Before):
    def change(self, embeds, input_ids):
        return embeds if input_ids is None else embeds + (input_ids == 2).cumsum(1)[..., None]


class Mixed(Before):
    def change(self, embeds, input_ids):
        return embeds + self.config.mix_prob * embeds.cumsum(1)


class ByFlag(Before):
    mixes = False

    def change(self, embeds, input_ids):
        return embeds.cumsum(1) if self.mixes else embeds


class Gated(Before):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.tensor(-20.0))

    def change(self, embeds, input_ids):
        return embeds + self.gate.sigmoid() * embeds.cumsum(1)


@pytest.mark.parametrize("kind", [AfterLongRows, Segments, Mixed, Gated])
def test_mixing_that_a_short_batch_does_not_show(kind):
    config = LlamaConfig(**SIZES)
    config.mix_prob = 0.5
    assert "can't be packed" in refusal(kind(config).eval())


def test_attribute_of_a_class_set_after_a_patch(monkeypatch):
    model = ByFlag(LlamaConfig(**SIZES)).eval()
    nta.patch(model).remove()
    monkeypatch.setattr(ByFlag, "mixes", True)
    assert "keeps a state along the row" in refusal(model)


class AuxiliaryLoss(LlamaForCausalLM):
    """Its loss has a term over all positions, which has padding in it without the patch."""

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            out.loss = out.loss + 0.1 * out.logits.square().mean()
        return out


def test_loss_over_all_positions_is_refused():
    assert "its loss of a packed row differs" in refusal(AuxiliaryLoss(LlamaConfig(**SIZES)))


@pytest.mark.parametrize("fields", [{"id2tag": {"0": "O"}}, {"tags": {0: 1, "x": 2}}, {"num_kv_shared_layers": "x"}])
def test_fields_of_odd_types(fields):
    config = LlamaConfig(**SIZES)
    for name, value in fields.items():
        setattr(config, name, value)
    check(LlamaModel(config).eval())


def test_failure_to_build_is_not_kept(cache):
    class Fails(OwnModel):
        fails = False

        def __init__(self, config):
            super().__init__(config)
            if self.fails:
                raise RuntimeError("no GPU here")

    model = Fails(OwnConfig()).eval()
    Fails.fails = True
    assert "no small model of its class can be built" in refusal(model)
    Fails.fails = False
    check(model)


def test_forward_of_a_layer_replaced_after_construction():
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    before = model.layers[1].mlp.forward
    model.layers[1].mlp.forward = lambda x: before(x) + x.mean(1, keepdim=True)
    assert "in layers.1.mlp" in refusal(model)


REMOTE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

class RemoteConfig(LlamaConfig):
    model_type = "remote"

class RemoteModel(LlamaModel):
    config_class = RemoteConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        CHANGE
        return out
"""


@pytest.mark.parametrize("mixes", [False, True])
def test_models_of_trust_remote_code(tmp_path, mixes):
    change = "out.last_hidden_state = out.last_hidden_state.cumsum(1)" if mixes else "pass"
    (tmp_path / "modeling_remote.py").write_text(REMOTE.replace("CHANGE", change))
    config = {
        "model_type": "remote", "architectures": ["RemoteModel"], **SIZES,
        "auto_map": {"AutoConfig": "modeling_remote.RemoteConfig", "AutoModel": "modeling_remote.RemoteModel"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    model = transformers.AutoModel.from_config(config, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    if mixes:
        assert "the forward of RemoteModel keeps a state along the row" in refusal(model)
    else:
        check(model)


# Heads


@pytest.mark.parametrize(
    "name",
    [
        "BertForPreTraining",
        "BertForMultipleChoice",
        "BertForNextSentencePrediction",
        "LlamaForSequenceClassification",
        "ElectraForPreTraining",
        "RobertaForQuestionAnswering",
        "XLMRobertaForMultipleChoice",
    ],
)
def test_heads(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES)).eval()
    if not name.endswith("MultipleChoice"):
        check(model)
        return
    batch = {key: value.view(2, 2, -1) for key, value in BATCH.items()}
    with torch.no_grad():
        want = model(**batch, labels=torch.tensor([1, 0]))
        with nta.patch(model, on_fallback="raise") as handle:
            got = model(**batch, labels=torch.tensor([1, 0]))
    assert handle.calls[None] == 1
    torch.testing.assert_close((got.loss, got.logits), (want.loss, want.logits), rtol=2e-4, atol=2e-5)


def test_unknown_tensor_argument_falls_back():
    class Weighted(LlamaModel):
        def forward(self, *args, token_weights=None, **kwargs):
            out = super().forward(*args, **kwargs)
            if token_weights is not None:
                out.last_hidden_state = out.last_hidden_state * token_weights[..., None]
            return out

    model = Weighted(LlamaConfig(**SIZES)).eval()
    weights = torch.rand(MASK.shape)
    want = model(**BATCH, token_weights=weights).last_hidden_state
    with nta.patch(model) as handle, pytest.warns(UserWarning, match="'token_weights' is not known"):
        got = model(**BATCH, token_weights=weights).last_hidden_state
    torch.testing.assert_close(got[MASK], want[MASK])
    assert handle.calls[None] == 0


# Families


class TwoStepPooler(BertModel):
    """Its pooled output is computed from two modules, of which the proof can't know."""

    def __init__(self, config):
        super().__init__(config, add_pooling_layer=False)
        self.first, self.second = nn.Linear(config.hidden_size, 7), nn.Tanh()

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out["pooler_output"] = self.second(self.first(out.last_hidden_state[:, 0]))
        return out


def test_add_family(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    config = BertConfig(**SIZES)
    config.model_type = "two_step"
    model = TwoStepPooler(config).eval()
    assert "pooler_output" in refusal(model)
    nta.hf.add_family("two_step", pool=lambda base, first: base.second(base.first(first)))
    check(model)
    nta.hf.add_family("two_step", pool=lambda base, first: base.first(first))
    assert "pooler_output" in refusal(model)  # a family that is wrong


def test_add_family_with_positions_that_are_wrong(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    nta.hf.add_family("opt", positions="ids")
    model = tiny.make("opt", "OPTForCausalLM")
    assert "OPTModel" in refusal(model) or "last_hidden_state" in refusal(model)
    with pytest.raises(ValueError, match='positions must be "padded", "tokens", "ids" or None'):
        nta.hf.add_family("opt", positions="ragged")


# Where proofs are kept


def entries_of(cache):
    return sorted(path.name for path in cache.rglob("*.json"))


def test_shipped_proof_needs_no_twin(monkeypatch, cache):
    if not store.shipped():
        pytest.skip("no proofs are shipped for this version of transformers")
    monkeypatch.setattr(store, "make", None)
    handle = nta.patch(llama())
    assert f"check shipped with nt_attention for transformers {transformers.__version__}" in " ".join(
        str(handle).split()
    )
    assert not entries_of(cache)


def test_new_proof_is_said_and_kept(caplog, cache, monkeypatch):
    model = llama(attention_bias=True)
    first = " ".join(str(nta.patch(model)).split())
    assert "LlamaForCausalLM with this config was not checked yet; trying a small model" in caplog.text
    assert f"kept in {cache}" in first
    assert len(entries_of(cache)) == 1
    model.forward.handle.remove()
    monkeypatch.setattr(store, "_made", {})  # as in a new process
    monkeypatch.setattr(store, "make", None)
    assert f"check kept in {cache}" in " ".join(str(nta.patch(model)).split())


@pytest.fixture
def package(tmp_path):
    """A copy of the package's files."""
    return shutil.copytree(store.PACKAGE, tmp_path / "nt_attention", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize(
    ("file", "is_part"),
    [
        ("hf/prove/trial.py", True),
        ("hf/pack/packed_forward.py", True),
        ("hf/route/attention.py", True),
        ("functional.py", True),
        ("layouts/known.py", True),
        ("kernels/backends/cpu.py", True),
        ("hf/trainer.py", False),
        ("cli/check.py", False),
    ],
)
def test_kept_proofs_are_of_the_code_that_made_them(package, file, is_part):
    before = store.digest_of_code(package)
    store.digest_of_code.cache_clear()
    (package / file).write_text((package / file).read_text() + "\n# changed\n")
    assert (store.digest_of_code(package) != before) is is_part


def test_the_code_that_runs_in_a_proof_is_part_of_its_key():
    ran = set()
    sys.setprofile(lambda frame, event, arg: ran.add(frame.f_code.co_filename))
    try:
        store.make(planted.make(planted.PlantedForCausalLM, "Nothing"))
    finally:
        sys.setprofile(None)
    files = {Path(file).relative_to(store.PACKAGE) for file in ran if file.startswith(str(store.PACKAGE))}
    covered = {file.relative_to(store.PACKAGE) for pattern in store.DEPENDS_ON for file in store.PACKAGE.glob(pattern)}
    without_effect = {"operators.py", "_warnings.py", "__init__.py", "graphs/cache.py"}  # a twin has no graphs
    assert {str(file) for file in files - covered} <= without_effect


@pytest.mark.parametrize("text", sweep_except(["{", '{"other": 1}', "null"], "{"))
def test_damaged_cache_is_replaced(cache, text):
    model = llama(attention_bias=True)
    nta.patch(model).remove()
    (file,) = cache.rglob("*.json")
    file.write_text(text)
    store._made.clear()
    nta.patch(model).remove()
    assert json.loads(file.read_text())["positions"] == "padded"


def test_cache_that_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NT_ATTENTION_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(store, "_made", {})
    assert ", not kept" in str(nta.patch(llama(attention_bias=True)))


def test_proof_of_other_code_is_not_kept(cache):
    model = OwnModel(OwnConfig()).eval()
    assert "not kept, because code that is not from transformers" in " ".join(str(nta.patch(model)).split())
    assert not entries_of(cache)


# What stays as it was


def test_states_of_the_caller():
    model = OwnModel(OwnConfig()).eval()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            nta.patch(model)
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_proof_in_other_contexts(context):
    with context():
        model = OwnForReward(OwnConfig()).eval()
        handle = nta.patch(model)
    assert "packed at the entry" in str(handle)


def test_two_threads_prove_two_classes():
    models = [OwnModel(OwnConfig()).eval(), OwnForReward(OwnConfig()).eval(), llama(attention_bias=True)]
    errors = []

    def patch(model):
        try:
            nta.patch(model)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=patch, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# The shipped proofs

SHIPPED = store.read_entries(store.SHIPPED / f"{transformers.__version__}.json")
TYPES = sorted({entry["type"] for entry in SHIPPED})
MADE_AGAIN = {"bert", "llama", "mixtral", "jamba", "opt", "roberta", "gemma2", "albert", *TYPES[::16]}
CLASSES = [(entry["type"], entry["class"]) for entry in SHIPPED if entry["key"] and entry["type"] in MADE_AGAIN]
SELECTED = {("bert", "BertForMaskedLM"), ("llama", "LlamaForCausalLM"), ("jamba", "JambaForCausalLM")}


@pytest.mark.parametrize("model_type", sweep_except(TYPES, *MADE_AGAIN))
def test_keys_of_shipped_proofs(model_type):
    for entry in SHIPPED:
        if entry["type"] == model_type and entry["key"]:
            assert store.key_of(on_meta_device(model_type, entry["class"])) == entry["key"], entry["class"]


@pytest.mark.parametrize(("model_type", "class_name"), sweep_except(CLASSES, *SELECTED))
def test_shipped_proofs_are_what_is_found_now(model_type, class_name):
    model = on_meta_device(model_type, class_name)
    if families.why_not_routed(model) is None and families.why_not_packed(model) is None:
        entry = next(x for x in SHIPPED if (x["type"], x["class"]) == (model_type, class_name))
        found = store.as_fields(store.make(model))
        assert found.keys() == entry["proof"].keys(), found
        assert found | {"reason": ""} == entry["proof"] | {"reason": ""}


def test_checks_shipped_for_older_versions_were_made_by_the_same_code():
    """A class that is packed with the newest version is packed with the others, but for what they can't do."""
    files = sorted(store.SHIPPED.glob("*.json"))
    *older, newest = ({x["class"]: x["proof"].get("reason") for x in store.read_entries(file)} for file in files)
    assert older
    for refused in older:
        only = {name for name, reason in refused.items() if reason and newest.get(name, reason) is None}
        assert only <= {"UMT5Model", "UMT5ForConditionalGeneration", "UMT5ForQuestionAnswering"}


def test_a_change_that_a_later_module_makes_larger_is_that_of_the_earlier_one():
    """A state that decays fast changes the next sequence by 3e-6, and the norm after it by 2e-5."""
    values = torch.ones(3, 4, dtype=torch.float64)
    mixer, norm = (diagnosis._Seen(name, name, [values], [values]) for name in ("Mixer", "Norm"))
    changed_mixer = mixer._replace(outputs=[values * (1 + 3e-6)])
    changed_norm = norm._replace(inputs=changed_mixer.outputs, outputs=[values * (1 + 2e-5)])
    assert diagnosis._first_change([mixer, norm], [changed_mixer, changed_norm]).name == "Mixer"
    assert diagnosis._first_change([norm], [changed_norm]).name == "Norm"
    assert diagnosis._first_change([mixer, norm], [mixer, changed_norm._replace(inputs=[values])]).name == "Norm"
    assert diagnosis._first_change([mixer], [changed_mixer]) is None


@pytest.mark.sweep  # it imports all models
def test_each_text_model_has_a_shipped_entry():
    if SHIPPED:
        assert {(x["type"], x["class"]) for x in SHIPPED} >= {(kind, name) for kind, name, _ in text_classes()}


@pytest.mark.parametrize(("model_type", "class_name"), [("gpt2", "GPT2Model"), ("gemma3n_text", "Gemma3nTextModel")])
def test_what_transformers_imports_is_not_in_the_key(model_type, class_name):
    """Other versions of safetensors and accelerate have other functions, and the shipped proof still holds."""
    model = on_meta_device(model_type, class_name)
    assert not list(replaced_functions({type(module) for module in model.modules()}))


def test_files_of_torch_are_not_in_the_key(monkeypatch):
    """Another version of torch has another conv.py, and the shipped check still holds."""
    read = []
    monkeypatch.setattr(store, "_digest", lambda file: read.append(Path(file).parts) or "")
    store.key_of(on_meta_device("jamba", "JambaModel"))
    assert read
    assert not [parts for parts in read if "torch" in parts]


def test_one_layer_with_its_kind():
    """The config lists the kinds of its layers, and a twin has more layers."""
    model = tiny.make("modernbert", "ModernBertModel", "sdpa", num_hidden_layers=1).eval()
    assert len(model.config.layer_types) == 1
    check(model)


def test_buffers_may_be_bool():
    buffer = torch.tensor([True, False])
    assert relative_error(buffer, buffer) == 0
    assert relative_error(~buffer, buffer) == 1

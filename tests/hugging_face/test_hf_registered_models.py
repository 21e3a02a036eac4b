"""transformers' own tests of an attention implementation, with ours by its registered name."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    DebertaV2Config,
    DebertaV2Model,
    LlamaConfig,
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTModel,
    PreTrainedModel,
    XLNetConfig,
    XLNetModel,
)

import nt_attention as nta


@pytest.mark.parametrize("name", ["nt_attention", "nt_attention_eager", "nt_attention/flash"])
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (DebertaV2Model, DebertaV2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)),
        (OpenAIGPTModel, OpenAIGPTConfig(n_embd=8, n_layer=1, n_head=1, vocab_size=9)),
        (XLNetModel, XLNetConfig(d_model=8, n_layer=1, n_head=1, d_inner=8, vocab_size=9)),
    ],
)
def test_classes_that_run_no_attention_by_name_are_refused(cls, config, name):
    """They would mix the sequences of a packed row."""
    nta.hf.register(), nta.hf.register("eager")
    with pytest.raises(ValueError, match=f"{cls.__name__} does not run an attention implementation by name"):
        cls._from_config(copy.deepcopy(config), attn_implementation=name)
    model = cls(copy.deepcopy(config))
    model.set_attn_implementation(name)  # transformers ignores it
    assert not str(model.config._attn_implementation).startswith("nt_attention")


REFUSED = {
    "falcon_mamba": "FalconMambaModel does not run an attention implementation by name",
    "fnet": "FNetModel does not run an attention implementation by name",
    "longt5": "LongT5Model does not run an attention implementation by name",
    "mamba": "MambaModel does not run an attention implementation by name",
    "mamba2": "Mamba2Model does not run an attention implementation by name",
    "xlstm": "xLSTMModel does not run an attention implementation by name",
    "gpt_oss": r"GptOssModel runs flash attention only by one of 'kernels-community.*use .*register\(\), or call",
}


WITHOUT_ATTENTION = ("falcon_mamba", "fnet", "mamba", "mamba2", "xlstm")
BY_NAME = [*((x, "nt_attention/flash") for x in REFUSED), *((x, nta.hf.register()) for x in WITHOUT_ATTENTION)]


@pytest.mark.parametrize(("model_type", "name"), BY_NAME)
def test_classes_that_run_no_attention_of_ours_are_refused_by_that_name(model_type, name):
    """transformers' own guard, for "flash_attention_2", does not see our name. Without attention, rows were mixed."""
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        with pytest.raises(ValueError, match=f"{REFUSED[model_type]}.* nt_attention.patch"):
            AutoModel.from_config(config, attn_implementation=name)
        with pytest.raises(ValueError, match=REFUSED[model_type]):
            AutoModel.from_config(config).set_attn_implementation(name)
        AutoModel.from_config(AutoConfig.for_model("resnet"), attn_implementation=name)  # it takes no text


def test_long_t5_is_refused():
    """Its local attention is its own, and takes no layout."""
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="does not tell all of its layers where sequences begin"):
        AutoModel.from_config(AutoConfig.for_model("longt5", **sizes), attn_implementation=nta.hf.register())


def test_classes_of_users_are_not_refused():
    """A part of them may run it."""

    class Wrapper(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.part = LlamaModel(config)

    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    model = Wrapper._from_config(config, attn_implementation=nta.hf.register())
    assert model.part.config._attn_implementation == "nt_attention"

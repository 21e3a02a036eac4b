"""Patched models without a mesh in PyTorch's `context_parallel`, in which each rank has some positions of each row."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

import nt_attention as nta
from nt_attention.patching.forwards import is_context_parallel

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BART = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 1, 1]])
MASK = (IDS != 1).long()


def test_it_is_noticed(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert not is_context_parallel()
        with context_parallel(init_device_mesh("cpu", (1,)), buffers=[torch.zeros(1, 4)], buffer_seq_dims=[1]):
            assert is_context_parallel()
        assert not is_context_parallel()
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def ring_calls(monkeypatch):
    """The calls of the function that takes the place of `scaled_dot_product_attention`."""
    calls = []
    real = functional.scaled_dot_product_attention

    def ring(*args, **kwargs):
        calls.append(args[0].shape)
        return real(*args, **kwargs)

    ring.__module__ = context_parallel.__module__
    monkeypatch.setattr(functional, "scaled_dot_product_attention", ring)
    return calls


def models():
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=1))
    return llama, BartForConditionalGeneration(BartConfig(**BART))


@pytest.mark.parametrize("which", [0, 1], ids=["decoder", "encoder-decoder"])
def test_patched_models_leave_attention_to_it(which, ring_calls):
    model = models()[which].eval()
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
    want = model(**inputs).loss
    assert ring_calls
    with pytest.raises(ValueError, match="context_parallel has divided its rows over ranks: patch the model with mesh"):
        nta.patch(model, packing="always")
    assert torch.equal(model(**inputs).loss, want)


def test_positions_of_a_part_of_a_row(ring_calls):
    """They have a gap, which otherwise begins another sequence."""
    model = models()[0].eval()
    inputs = {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 6, 7]])}
    model.set_attn_implementation(nta.hf.register())
    model(**inputs, use_cache=False)
    assert len(ring_calls) == 2


MODULES = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 24, batch_first=True), 2),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 24, batch_first=True),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(16, 2, batch_first=True)),
}


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("which", MODULES)
def test_modules_of_torch_leave_attention_to_it(which, ring_calls):
    model, x, padding = MODULES[which]().train(), torch.randn(2, 4, 16), MASK == 0
    for module in model.modules():
        if "dropout" in vars(module) or isinstance(module, nn.Dropout):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    masks = {
        "encoder": {"src_key_padding_mask": padding},
        "decoder": {"tgt_key_padding_mask": padding, "memory_key_padding_mask": padding},
        "transformer": {f"{name}_key_padding_mask": padding for name in ("src", "tgt", "memory")},
    }

    def run():
        if which == "attention":
            return model[0](x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return model(*([x] if which == "encoder" else [x, x]), **masks[which])

    want = run()
    stock = len(ring_calls)
    handle = nta.patch(model)
    with pytest.warns(match="context_parallel has divided its rows over ranks: patch the model with mesh="):
        found = run()
    torch.testing.assert_close(found, want)
    assert len(ring_calls) == 2 * stock > 0
    assert all("context_parallel" in reason for reason in handle.calls)

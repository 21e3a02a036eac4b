"""nn.MultiheadAttention and PyTorch's Transformer layers, with our module in the place of theirs.

The tests that use this file follow those of the pytorch repository: test/nn/test_multihead_attention.py,
test_transformers.py, test_nn.py, test_native_mha.py, test_modules.py, test_nestedtensor.py, nn/test_parametrization.py,
nn/test_pruning.py and nn/test_module_hooks.py. These differ on purpose:

- test_multihead_attn_nested_tensor_outside_fast_path wants an error for NestedTensors where the fused kernel does not
  run. Our module accepts them.
- test_script_mha_in_proj_weight_none, test_script_encoder_subclass, test_transformerencoderlayer_subclass,
  test_transformerencoderlayer_subclass_model, and test_transformerencoder_fastpath with use_torchscript=True:
  TorchScript has no type for a SequenceLayout. torch.fx.symbolic_trace takes only modules of torch.nn as leaves.
- test_transformerdecoderlayer and test_transformerdecoder compare padded targets too. With only a boolean
  key_padding_mask, our self-attention gives 0 there. The tests here compare every real position.
- test_custom_module_multi_head_attention (quantization) needs ``type(module) is nn.MultiheadAttention``. A quantizable
  class for our module finds every attribute that it reads.
- The types of errors are the same, but not their messages. Nor is it tested whether the fused kernel ran.
- Strided NestedTensors in eval give weights by default there. Ours gives weights for ragged inputs only on request.
- in_proj_bias in another dtype than the weights, which only the fused kernel supports.
- test_multihead_attention with static_k and static_v, test_transform_bias_rescale_qkv, its nested form, and
  test_scaled_dot_product_attention call functions that are not ours.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from parameters import with_random_parameters
from torch import nn

from nt_attention import VarlenMultiheadAttention

BATCH, LENGTH, KEYS, EMBED, HEADS = 3, 5, 7, 12, 4

# Warnings that PyTorch's own layers give in these tests.
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

BATCH_FIRST = pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
MODES = ["train", "eval", "no-grad"]
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9, equal_nan=True)
double = functools.partial(torch.randn, dtype=torch.float64)


def pair(embed=EMBED, heads=HEADS, **options):
    """The stock module and ours, with the same parameters."""
    options = {"dtype": torch.float64, **options}
    stock = with_random_parameters(nn.MultiheadAttention(embed, heads, **options))
    ours = VarlenMultiheadAttention(embed, heads, **options)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def swap_attention_in(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, VarlenMultiheadAttention.from_torch(child))
    return model


def with_our_attention(model):
    """A copy of a model with our module for each attention module in it."""
    return swap_attention_in(copy.deepcopy(model))


@contextlib.contextmanager
def in_mode(mode, *models):
    """Models in train or eval mode, with gradients unless the mode is "no-grad"."""
    for model in models:
        model.train(mode == "train")
    with torch.set_grad_enabled(mode != "no-grad"):
        yield


def encoder_layer(**options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    return with_random_parameters(nn.TransformerEncoderLayer(EMBED, HEADS, **options))


def decoder_layer(**options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    return with_random_parameters(nn.TransformerDecoderLayer(EMBED, HEADS, **options))


def encoder(layers=2, norm=False, enable_nested_tensor=True, mask_check=True, **options):
    final = nn.LayerNorm(EMBED, dtype=torch.float64) if norm else None
    made = nn.TransformerEncoder(encoder_layer(**options), layers, final, enable_nested_tensor, mask_check)
    return with_random_parameters(made)  # the layers are copies of one, and must not be


def padding(lengths, longest):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def output_and_gradients(model, *inputs, rows=..., length_first=False, **options):
    """The output at ``rows`` of (batch, length), and with gradients enabled those of inputs and parameters."""
    leaves = {id(x): x.clone().requires_grad_(torch.is_grad_enabled()) for x in inputs}
    out = model(*[leaves[id(x)] for x in inputs], **options)
    out = out[0] if isinstance(out, tuple) else out
    out = (out.transpose(0, 1) if length_first else out)[rows]
    if not torch.is_grad_enabled():
        return [out]
    return [out, *torch.autograd.grad(out.square().sum(), [*leaves.values(), *model.parameters()])]


KEYS_PADDED = padding([7, 3, 5], KEYS)
SOME_PADDED = padding([5, 2, 4], LENGTH)
MEMORY_PADDED = padding([2, 7, 4], KEYS)
LENGTHS, MEMORY_LENGTHS = [4, 1, 9, 6], [3, 7, 2, 5]


def random_sequences(lengths):
    return [double(n, EMBED, requires_grad=True) for n in lengths]


def as_nested(tensors, how):
    if how == "jagged":
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    if how == "strided":
        return torch.nested.as_nested_tensor(tensors, layout=torch.strided)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, tensors))])
    return torch.nested.nested_tensor_from_jagged(torch.cat(tensors), offsets)

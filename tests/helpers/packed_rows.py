"""A padded batch for tiny models, and which rows the layers of a patched model see."""

import tiny
import torch
from transformers.pytorch_utils import Conv1D

LENGTHS, LENGTH = [7, 1, 13, 19], 23
MASK = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]


def make(model_type="llama", name="LlamaForCausalLM", implementation="sdpa", **more):
    return tiny.make(model_type, name, implementation, **more)


def make_batch(labels=False):
    ids = torch.randint(5, tiny.VOCABULARY, MASK.shape).masked_fill(~MASK, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": MASK.long()}
    return {**batch, "labels": ids.masked_fill(~MASK, -100)} if labels else batch


def rows_seen(model):
    """The different shapes (B, L) of the hidden states that the linear layers of the base model get."""
    shapes = []

    def look(module, inputs):
        shape = tuple(inputs[0].shape[:2])
        if inputs[0].dim() == 3 and shape not in shapes:
            shapes.append(shape)

    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_pre_hook(look)
    return shapes


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


PACKED = (1, sum(LENGTHS))

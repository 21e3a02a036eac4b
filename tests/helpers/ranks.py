"""Shared by the tests that run a model on several ranks: configs, padded batches, and results of all ranks."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nt_attention.distributed import attention
from nt_attention.distributed.exchange_plan import Schedule

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "pad_token_id": 0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def mesh_of_all(device="cpu"):
    """A mesh with one dimension of all ranks."""
    return init_device_mesh(device, (torch.distributed.get_world_size(),))


def padded_batch(lengths, seed=5):
    """Random ids (B, L) of the vocabulary of `SMALL`, and their mask."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 61, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": ids, "attention_mask": mask}


def run_in_float64(model, batch, **more):
    """Call a model whose loss casts logits to float32, without that cast."""
    real = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda x: x if x.is_floating_point() else real(x))
        return model(**batch, **more)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def average(x):
    """The mean over all ranks."""
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


def check_same(found, want):
    """Compare results by name: those of a rank, and those of one process. In float64."""
    assert found.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-9, err_msg=name)


def use_two_calls(patch, splits_heads):
    """Let the exchange run two groups of heads, or whole sequences and then the others."""
    real = attention.schedule_of

    def schedule_of(request):
        plan = real(request).plan
        heads, count = request.query.shape[1], request.key.shape[1]
        first = max(1, count // 3)
        return Schedule.of(plan, heads, (first, count - first) if splits_heads else (count,), not splits_heads)

    patch.setattr(attention, "schedule_of", schedule_of)

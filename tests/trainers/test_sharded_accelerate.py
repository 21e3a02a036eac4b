"""accelerate with `ParallelismConfig(cp_size=2)` and a model over several ranks, against one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from processes import run_in_processes, under_torchrun
from shared_data import llama_config, padded_batch, paragraphs
from torch.distributed.device_mesh import init_device_mesh
from transformers import EuroBertConfig, EuroBertModel, LlamaForCausalLM, set_seed

import nt_attention as nta

TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 32))]
ROWS, ACCUMULATED = 4, 2


def make():
    set_seed(0)
    model = LlamaForCausalLM(llama_config(32)).double().train()
    return model, torch.optim.SGD(model.parameters(), 0.3)


def in_one_process(data_ranks):
    model, optimizer = make()
    batches = [padded_batch(TEXTS[i : i + ROWS]) for i in range(0, len(TEXTS), ROWS)]
    losses = []
    for i in range(0, len(batches), data_ranks):
        found = [model(**batch).loss for batch in batches[i : i + data_ranks]]
        (sum(found) / data_ranks / ACCUMULATED).backward()
        losses.append([loss.item() for loss in found])
        if len(losses) % ACCUMULATED == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9)
            optimizer.step()
            optimizer.zero_grad()
    return torch.tensor(losses, dtype=torch.float64), dict(model.named_parameters())


def on_each_rank(data_ranks):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    with under_torchrun(fsdp=True):
        accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATED,
            parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=data_ranks),
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            ),
        )
        model, optimizer = make()
        handle = nta.patch(model, mesh=accelerator.torch_device_mesh["cp"], on_fallback="raise")
        batches = torch.utils.data.DataLoader(TEXTS, ROWS, collate_fn=padded_batch)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.9)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert handle.calls == {None: len(losses)}, handle.calls
        parameters = {name: x.full_tensor() for name, x in model.named_parameters()}
        return torch.tensor(losses, dtype=torch.float64), parameters


@pytest.mark.parametrize("data_ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_accelerate_with_fsdp_and_context_parallel_ranks(data_ranks):
    want_losses, want = in_one_process(data_ranks)
    for rank, (losses, found) in enumerate(run_in_processes(2 * data_ranks, on_each_rank, data_ranks)):
        np.testing.assert_allclose(losses, want_losses[:, rank // 2], rtol=1e-6)
        assert want.keys() == found.keys()
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x.detach().numpy(), rtol=1e-6, atol=1e-7, err_msg=name)


def make_bidirectional():
    set_seed(0)
    config = EuroBertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
    )  # fmt: skip
    return EuroBertModel(config).double().eval()


def batch():
    mask = (torch.arange(31) < torch.tensor([31, 7, 12])[:, None]).long()
    return {"input_ids": (5 + torch.arange(93) % 53).view(3, 31) * mask, "attention_mask": mask}


def with_hooks_of_accelerate():
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = make_bidirectional()
    nta.patch(model, mesh=init_device_mesh("cpu", (2,)), on_fallback="raise")
    _attach_context_parallel_hooks(model)
    with torch.no_grad():
        return model(**batch()).last_hidden_state


def test_hooks_of_accelerate_do_not_make_a_model_causal():
    inputs = batch()
    with torch.no_grad():
        want = make_bidirectional()(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
    for found in run_in_processes(2, with_hooks_of_accelerate):
        np.testing.assert_allclose(found, want.numpy(), rtol=1e-9, atol=1e-9)

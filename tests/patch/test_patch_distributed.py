"""DDP and FSDP2 of patched models: two processes find the gradients of one."""

import warnings

import pytest
import torch
from patched_models import close, gradients, make, make_batch
from processes import run_in_processes
from torch import nn

import nt_attention as nta

# Two processes. Each sees two rows of the batch; the gradients are the mean of what single processes find.
WRAPPERS = ["ddp of a patched model", "ddp, then patched", "sharded while patched", "sharded, then patched"]


def batches():
    torch.manual_seed(0)
    return [make_batch(lengths=[7, 13]), make_batch(lengths=[19, 2])]


def worker():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch = batches()[torch.distributed.get_rank()]
    found = {}
    for way in WRAPPERS:
        inner = make()
        handle = nta.patch(inner) if "then" not in way else None
        if way.startswith("ddp"):
            model = DistributedDataParallel(inner)
        else:
            for layer in inner.model.layers:
                fully_shard(layer)
            model = fully_shard(inner)
        handle = handle or nta.patch(model)
        for removed in (False, True):
            model.zero_grad()
            model(**batch).loss.backward()
            grads = [parameter.grad for parameter in inner.parameters()]
            grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]
            handle.remove()
            found[way, removed] = grads, handle.calls[None]
    return found


@pytest.fixture(scope="module")
def of_two_processes():
    found, _ = run_in_processes(2, worker)
    model = make()
    want = [sum(grads) / 2 for grads in zip(*(gradients(model, batch) for batch in batches()), strict=True)]
    return found, want


@pytest.mark.sweep
@pytest.mark.parametrize("way", WRAPPERS)
def test_ddp_and_fsdp_find_the_gradients_of_one_process(way, of_two_processes):
    found, want = of_two_processes
    for removed in (False, True):
        grads, packed = found[way, removed]
        close([torch.from_numpy(grad) for grad in grads], want)
        assert packed == 1


# Which modules are sharded, before or after the patch of an encoder of PyTorch.
SHARDED = [
    "layers, then patched",
    "whole, then patched",
    "attention's projection, then patched",
    "layers while patched",
]
BAND = torch.ones(7, 7, dtype=torch.bool).triu(1).roll(1, 1)
PADDING = torch.arange(7) >= torch.tensor([[7], [3]])


def encoder_of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_results(model, x, **masks):
    model.zero_grad()
    out = model(x, src_key_padding_mask=PADDING, **masks)
    out[~PADDING].square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [out[~PADDING].detach(), *(x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in grads)]


def encoder_worker():
    from torch.distributed.fsdp import fully_shard

    x, found = torch.linspace(-99, 99, 224).sin().view(2, 7, 16), {}
    for way in SHARDED:
        model = encoder_of_torch()
        handle = nta.patch(model) if "then" not in way else None
        if not way.startswith("whole"):
            for layer in model.layers:
                fully_shard(layer)
        fully_shard(model)
        handle = handle or nta.patch(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = [encoder_results(model, x), encoder_results(model, x, mask=BAND)]
            handle.remove()
            runs.append(encoder_results(model, x))
            with nta.patch(model):
                runs.append(encoder_results(model, x))
        found[way] = runs, dict(handle.calls)
    return found


def test_sharded_encoder_of_torch_is_patched():
    found, _ = run_in_processes(2, encoder_worker)
    model, x = encoder_of_torch(), torch.linspace(-99, 99, 224).sin().view(2, 7, 16)
    want = [encoder_results(model, x), encoder_results(model, x, mask=BAND)]
    for runs, calls in found.values():
        for run, expected in zip(runs, [*want, want[0], want[0]], strict=True):
            close([torch.from_numpy(x) for x in run], expected)
        assert calls == {None: 1, "mask is neither None nor causal": 1}

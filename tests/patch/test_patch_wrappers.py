"""Patched Hugging Face models in accelerate's wrappers and hooks, and in DataParallel."""

import copy
import inspect

import pytest
import torch
from accelerate.utils import compile_regions
from patched_models import assert_plain, close, every_kind, loss_of, make, make_batch, scale

import nt_attention as nta


@every_kind
def test_data_parallel_replica_runs_its_own_parameters(kind):
    model, batch = make(kind), make_batch(kind)
    want = loss_of(scale(make(kind)), batch)
    with nta.patch(model) as handle:
        before = loss_of(model, batch)
        modules = list(model.modules())  # what torch.nn.parallel.replicate does, which wants a GPU
        replicas = {id(module): module._replicate_for_data_parallel() for module in modules}
        for module in modules:
            replica = replicas[id(module)]
            for name, child in module.named_children():
                replica._modules[name] = replicas[id(child)]
            for name, parameter in module._parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
                else:
                    setattr(replica, name, parameter.detach() * 1.5)
        close(loss_of(replicas[id(model)], batch), want)
        assert handle.calls == {None: 2}
        assert torch.equal(loss_of(model, batch), before)
    assert_plain(model, make(kind))


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # a Trainer has set another
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


@every_kind
def test_accelerate_prepare(kind, accelerator):
    model, batch = make(kind), make_batch(kind)
    with torch.autocast("cpu", torch.bfloat16):
        want = loss_of(model, batch).float()
    for patch_first in (True, False):
        model = make(kind)
        handle = nta.patch(model) if patch_first else None
        prepared = accelerator.prepare(model)
        handle = handle or nta.patch(prepared)
        signature = inspect.signature(prepared.forward)
        for removed in (False, True):
            out = prepared(**batch)
            assert next(iter(out.values())).dtype == torch.float32  # theirs: convert_outputs_to_fp32
            torch.testing.assert_close(loss_of(prepared, batch), want, rtol=2e-2, atol=2e-2)
            assert handle.calls == {None: 2}
            assert inspect.signature(prepared.forward) == signature == inspect.signature(make(kind).forward)
            if not removed:
                handle.remove()
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("removed", [False, True], ids=["patched", "removed"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_unwrap_model(patch_first, removed, accelerator):
    model, batch = make(), make_batch()
    want = loss_of(model, batch)
    handle = nta.patch(model) if patch_first else None
    prepared = accelerator.prepare(model)
    handle = handle or nta.patch(prepared)
    if removed:
        handle.remove()
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    beneath_ours = not patch_first and not removed  # where it can't be taken off: autocast stays
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if beneath_ours else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss_of(unwrapped, batch), want, **tolerance)
    handle.remove()
    torch.testing.assert_close(loss_of(unwrapped, batch), want, **tolerance)
    copied = scale(copy.deepcopy(unwrapped))
    torch.testing.assert_close(loss_of(copied, batch), loss_of(scale(make()), batch), **tolerance)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_hooks(patch_first):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counting(ModelHook):
        seen = 0

        def pre_forward(self, module, *args, **kwargs):
            self.seen += 1
            return args, kwargs

    model, batch, hook = make(), make_batch(), Counting()
    want = loss_of(model, batch)
    handle = nta.patch(model) if patch_first else None
    add_hook_to_module(model, hook)
    handle = handle or nta.patch(model)
    hook.seen = 0
    close(loss_of(model, batch), want)
    assert handle.calls == {None: 1}
    handle.remove()
    assert torch.equal(loss_of(model, batch), want)
    assert hook.seen == 2
    remove_hook_from_module(model)
    assert torch.equal(loss_of(model, batch), want)
    assert (hook.seen, handle.calls) == (2, {None: 1})


@every_kind
def test_accelerate_compile_regions(kind, fresh_compiler):
    """It makes a shallow copy of the model, whose layers are compiled."""
    model, batch = make(kind), make_batch(kind)
    want, compiled = loss_of(model, batch), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    with nta.patch(model) as handle:
        regional = compile_regions(model, backend=backend)
        close(loss_of(regional, batch), want)
        assert compiled
        assert handle.calls == {None: 1}

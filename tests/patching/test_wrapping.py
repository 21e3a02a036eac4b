"""A patched Hugging Face model in other hands: copied, saved, sharded, wrapped, checkpointed and compiled.

Wherever its forward goes, it runs the weights of the model that it is called on, packed until ``remove()``.
"""

import copy
import functools
import inspect
import io
import json
import pickle
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest
import tiny
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention.layout import SequenceLayout

LENGTHS, LENGTH = [7, 1, 13, 19], 23
KINDS = {
    "base": ("bert", "BertModel"),
    "causal": ("llama", "LlamaForCausalLM"),
    "sequence": ("bert", "BertForSequenceClassification"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind="causal", implementation="sdpa", **more):
    return tiny.make(*KINDS[kind], implementation, **more)


def make_batch(kind="causal", lengths=LENGTHS, length=LENGTH):
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if kind == "causal":
        batch["labels"] = ids.masked_fill(~mask, -100)
    if kind == "sequence":
        batch["labels"] = torch.arange(len(lengths)) % 3
    return batch


def loss_of(model, batch):
    out = model(**batch)
    if "loss" in out:
        return out.loss
    return out.last_hidden_state[batch["attention_mask"].bool()].square().sum() + out.pooler_output.sum()


def gradients(model, batch):
    return torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


def scale(model, factor=1.5):
    """Give the model other weights, so that a copy that runs somebody else's is found out."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def handle_of(model):
    return next(h.handle for m in model.modules() if (h := vars(m).get("forward")) is not None)


def assert_plain(model, like):
    """Nothing of ours is left in it."""
    attributes, theirs = ({name: set(vars(m)) for name, m in of.named_modules()} for of in (model, like))
    assert attributes == theirs
    assert model.config._attn_implementation == like.config._attn_implementation


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_kind
def test_the_signature_and_the_columns_that_trainer_keeps_are_as_before(kind, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = make(kind)

    def seen():
        trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
        trainer._set_signature_columns_if_needed()
        return inspect.signature(model.forward), trainer._signature_columns, trainer.model_accepts_loss_kwargs

    want = seen()
    with nta.patch(model):
        assert seen() == want
    assert seen() == want


@every_kind
def test_a_deep_copy_runs_its_own_weights_and_counts_its_own_parameters(kind):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):
        copied = copy.deepcopy(model)
        before = gradients(copied, batch)
        want = gradients(scale(copy.deepcopy(make(kind))), batch)
        close(gradients(scale(copied), batch), want)
        close(gradients(model, batch), before)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_kind
@pytest.mark.parametrize("through", [pickled, torch_saved])
def test_a_loaded_model_runs_packed_with_its_own_weights_and_gives_a_plain_one(through, kind):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model) as handle:
        loaded = scale(through(model))
    want = gradients(scale(model), batch)
    close(gradients(loaded, batch), want)
    own = handle_of(loaded)
    assert own is not handle
    assert own.calls == {None: 1}
    assert not handle.calls
    own.remove()
    assert_plain(loaded, model)
    assert [torch.equal(a, b) for a, b in zip(gradients(loaded, batch), want, strict=True)]
    assert own.calls == {None: 1}


def test_a_model_that_was_saved_patched_runs_in_a_process_that_never_named_us(tmp_path):
    model, batch = make(), make_batch()
    with nta.patch(model):
        torch.save((model, batch), tmp_path / "model.pt")
    code = (
        "import torch; model, batch = torch.load('model.pt', weights_only=False); loss = model(**batch).loss.item();"
        "handle = model.forward.handle; handle.remove(); print(loss, handle.calls[None], model(**batch).loss.item())"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loss, packed, plain = map(float, ran.stdout.split())
    assert packed == 1
    close(torch.tensor([loss, plain]), torch.full((2,), model(**batch).loss.item()))


@every_kind
def test_a_saved_checkpoint_knows_nothing_of_us(kind, tmp_path):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):
        model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [KINDS[kind][1]]
    assert "nt_attention" not in json.dumps(config)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loss_of(loaded, batch), loss_of(model, batch))


# Two processes. Each sees two rows of the batch; the gradients are the mean of what single processes find.
WAYS = ["ddp of a patched model", "ddp, then patched", "sharded while patched", "sharded, then patched"]


def worker(rank, port, folder):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batches = torch.load(f"{folder}/batches.pt")
    found = {}
    for way in WAYS:
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
            model(**batches[rank]).loss.backward()
            grads = [parameter.grad for parameter in inner.parameters()]
            grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]
            handle.remove()
            found[way, removed] = grads, handle.calls[None]
    dist.barrier()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    batches = [make_batch(lengths=[7, 13]), make_batch(lengths=[19, 2])]
    torch.save(batches, folder / "batches.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, folder), nprocs=2)
    model = make()
    want = [sum(grads) / 2 for grads in zip(*(gradients(model, batch) for batch in batches), strict=True)]
    return torch.load(folder / "found.pt"), want


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_find_the_gradients_of_one(way, of_two_processes):
    found, want = of_two_processes
    for removed in (False, True):
        grads, packed = found[way, removed]
        close(grads, want)
        assert packed == 1


@every_kind
def test_a_replica_of_data_parallel_runs_its_own_parameters(kind):
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
def test_accelerate_prepares_a_patched_model_and_its_wrapper_stays(kind, accelerator):
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


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_copy_of_what_accelerate_prepared_runs_its_own_weights(patch_first, accelerator):
    model, batch = make(), make_batch()
    handle = nta.patch(model) if patch_first else None
    prepared = accelerator.prepare(model)
    handle = handle or nta.patch(prepared)
    copied = scale(copy.deepcopy(prepared))
    with torch.autocast("cpu", torch.bfloat16):
        want = loss_of(scale(make()), batch)
    torch.testing.assert_close(loss_of(copied, batch), want, rtol=2e-2, atol=2e-2)
    handle.remove()
    torch.testing.assert_close(loss_of(copied, batch), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("removed", [False, True], ids=["patched", "removed"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_takes_its_wrapper_off_again(patch_first, removed, accelerator):
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


@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_hooks_run_on_either_side(patch_first):
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
    close(loss_of(model, batch), want)
    assert handle.calls == {None: 1}
    handle.remove()
    assert torch.equal(loss_of(model, batch), want)
    assert hook.seen == 2
    remove_hook_from_module(model)
    assert torch.equal(loss_of(model, batch), want)
    assert (hook.seen, handle.calls) == (2, {None: 1})


@every_kind
def test_after_removal_a_later_wrapper_stays_and_our_part_passes_through(kind):
    model, batch, called = make(kind), make_batch(kind), []
    want = loss_of(model, batch)
    handle = nta.patch(model)
    target = model.bert if kind == "sequence" else model
    inner = target.forward

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        called.append(handle.active)
        return inner(*args, **kwargs)

    target.forward = theirs
    assert inspect.signature(target.forward) == inspect.signature(inner)
    close(loss_of(model, batch), want)
    with pytest.raises(ValueError, match=r"already.*remove\(\) on the handle"):
        nta.patch(model)
    handle.remove()
    assert target.forward is theirs
    assert torch.equal(loss_of(model, batch), want)
    assert (called, handle.calls) == ([True, False], {None: 1})
    with nta.patch(model) as second:  # around theirs
        close(loss_of(model, batch), want)
        assert second.calls == {None: 1}
    assert target.forward is theirs


@every_kind
def test_a_second_patch_is_refused_on_the_model_its_parts_and_what_holds_it(kind):
    model, batch = make(kind), make_batch(kind)
    holder = nn.ModuleDict({"inner": model})
    for first in (model, model.base_model):
        with nta.patch(first) as handle:
            for second in {model, model.base_model, holder}:
                with pytest.raises(ValueError, match=r"already patched") as refused:
                    nta.patch(second)
                assert "remove() on the handle of that patch first" in str(refused.value)
            loss_of(model, batch)
            assert handle.calls == {None: 1}  # the first patch is whole
        assert_plain(model, make(kind))


@every_kind
def test_an_exception_in_the_block_restores_and_so_does_one_in_the_forward(kind):
    model, batch = make(kind), make_batch(kind)
    want = loss_of(model, batch)
    with pytest.raises(KeyboardInterrupt), nta.patch(model):
        raise KeyboardInterrupt
    with pytest.raises(IndexError), nta.patch(model):
        model(**{**batch, "input_ids": batch["input_ids"] + tiny.VOCABULARY})
    assert_plain(model, make(kind))
    assert torch.equal(loss_of(model, batch), want)


def loss_of_two(two, batch):
    plain = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return loss_of(two.query, plain), loss_of(two.document, batch)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_handles_on_two_submodels_go_one_by_one(order):
    two, batch = nn.Module(), make_batch()
    two.query, two.document = make("base"), make("causal")
    want = loss_of_two(two, batch)
    parts = [two.query, two.document]
    handles = [nta.patch(part) for part in parts]
    with pytest.raises(ValueError, match=r"already"):
        nta.patch(two)
    calls = [1, 1]
    close(loss_of_two(two, batch), want)
    for which in order:
        assert [handle.calls[None] for handle in handles] == calls
        handles[which].remove()
        assert_plain(parts[which], make(["base", "causal"][which]))
        close(loss_of_two(two, batch), want)
        calls[1 - which] += handles[1 - which].active
    assert [torch.equal(a, b) for a, b in zip(loss_of_two(two, batch), want, strict=True)] == [True, True]


@every_kind
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, kind):
    model, batch = make(kind).train(), make_batch(kind)
    want = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with nta.patch(model) as handle:
        loss_of(model, batch).backward()
        assert handle.calls == {None: 1}
    close([parameter.grad for parameter in model.parameters()], list(want))


def test_a_checkpoint_around_the_whole_model_packs_again():
    model, batch = make().train(), make_batch()
    want = gradients(model, batch)
    with nta.patch(model) as handle:
        loss = checkpoint(lambda: loss_of(model, batch), use_reentrant=False)
        close(torch.autograd.grad(loss, list(model.parameters())), want)
        assert handle.calls == {None: 2}


# Of other lengths, widths and row counts.
RAGGED = [[7, 1, 13, 19], [3, 11, 2, 5], [5, 5, 17], [23, 2, 3, 8, 4], [9, 1, 6, 12]]


@pytest.mark.parametrize(("kind", "backend"), [("base", "eager"), ("causal", "aot_eager")])
def test_a_compiled_model_gives_the_same_over_batches_of_other_lengths(kind, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = make(kind, num_hidden_layers=1)
    batches = [make_batch(kind, lengths, max(lengths) + 2) for lengths in RAGGED]
    want = [(loss_of(model, batch), gradients(model, batch)) for batch in batches]
    counter = CompileCounterWithBackend(backend)
    with nta.patch(model) as handle:
        compiled = torch.compile(model, backend=counter, dynamic=True)
        graphs = []
        for batch, (loss, grads) in zip(batches, want, strict=True):
            got = loss_of(compiled, batch)
            close(got, loss)
            torch.testing.assert_close(torch.autograd.grad(got, list(model.parameters())), grads, rtol=1e-3, atol=1e-4)
            graphs.append(counter.frame_count)
        assert handle.calls == {None: len(batches)}
    assert graphs[-1] == graphs[2]
    torch._dynamo.reset()


@every_kind
def test_bf16_autocast_trains_as_the_padded_model_does(kind):
    batches = [make_batch(kind, lengths) for lengths in RAGGED]

    def train(patched):
        model = make(kind).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        with nta.patch(model) if patched else nullcontext():
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch) / (1 if "labels" in batch else batch["attention_mask"].sum())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return torch.tensor(losses)

    torch.testing.assert_close(train(True), train(False), rtol=1e-2, atol=1e-2)


@every_kind
def test_the_layout_is_made_once_a_forward(kind, monkeypatch):
    made = []

    def counted(make_layout, mask):
        made.append(mask)
        return make_layout(mask)

    monkeypatch.setattr(
        SequenceLayout, "from_attention_mask", functools.partial(counted, SequenceLayout.from_attention_mask)
    )
    for other in ("from_position_ids", "from_lengths"):
        monkeypatch.setattr(SequenceLayout, other, lambda *_: pytest.fail("the layout is made a second time"))
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):
        loss_of(model, batch).backward()
    assert len(made) == 1

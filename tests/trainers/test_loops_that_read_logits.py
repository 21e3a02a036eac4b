"""Loops as users write them, which read logits beside the loss: losses and weights as without the patch.

A loop takes a model and batches with labels, trains one step for each batch, and returns what it logs.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import pickle

import accelerate
import pytest
import torch
from processes import run_in_processes
from shared_data import VOCABULARY, llama_config, padded_batch, paragraphs
from sweeps import sweep_except
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, set_seed

import nt_attention as nta
from nt_attention.hf.pack.padded_on_read import PaddedOnRead

TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 12))]
BATCHES = [padded_batch(TEXTS[i : i + 4]) for i in range(0, 12, 4)]


def make():
    set_seed(0)
    return LlamaForCausalLM(llama_config(32)).train()


def steps(model, loss_and_log):
    """One step of SGD for each batch, with the loss of `loss_and_log(batch)`. Returns what that has logged."""
    optimizer, logged = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in BATCHES:
        loss, *log = loss_and_log(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logged.append([loss.item(), *(float(x) for x in log)])
    return torch.tensor(logged)


def targets(logits, labels):
    """The logits and labels of predicted tokens, as tutorials compute them."""
    return logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)


def weighted(model):
    weight = torch.linspace(0.5, 2, VOCABULARY)
    return steps(model, lambda batch: [F.cross_entropy(*targets(model(**batch)["logits"], batch["labels"]), weight)])


def perplexity(model):
    def step(batch):
        _, logits = model(**batch, return_dict=False, use_cache=False)
        log_probs = logits[:, :-1].log_softmax(-1).gather(2, batch["labels"][:, 1:, None].clamp(min=0))[..., 0]
        each = -log_probs[batch["labels"][:, 1:] != -100]
        return each.mean(), each.mean().exp()

    return steps(model, step)


def auxiliary(model):
    """The loss of the model, and one of hidden states and logits beside it."""

    def step(batch):
        out = model(**batch, output_hidden_states=True)
        mask = batch["attention_mask"][..., None]
        states = (out.hidden_states[-1] * mask).sum(1) / mask.sum(1)
        return [out.loss + 1e-3 * states.square().sum() + 1e-4 * (out.logits * mask).square().mean()]

    return steps(model, step)


def changed_in_place(model):
    def step(batch):
        logits = model(**batch).logits
        logits.div_(1.5)
        logits[..., 0] = -5
        return [F.cross_entropy(*targets(logits, batch["labels"]))]

    return steps(model, step)


def distilled(model):
    """The teacher is patched where the student is."""
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def step(batch):
        with torch.no_grad():
            want = teacher(**batch).logits
        out = model(**batch)
        each = F.kl_div(out.logits.log_softmax(-1), want.softmax(-1), reduction="none").sum(-1)
        return [out.loss + each[batch["attention_mask"].bool()].mean()]

    return steps(model, step)


def accumulated(model):
    optimizer, logged = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in BATCHES:
        for part in (slice(0, 2), slice(2, 4)):
            out = model(**{name: x[part] for name, x in batch.items()})
            logged.append([out.loss.item(), out.logits[batch["attention_mask"][part].bool()].mean().item()])
            (out.loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(logged)


def compiled_loss(model):
    loss = torch.compile(lambda logits, labels: F.cross_entropy(*targets(logits, labels)), backend="aot_eager")
    return steps(model, lambda batch: [loss(model(**batch).logits, batch["labels"])])


def in_data_parallel(model):
    wrapped = DataParallel(model)
    return steps(model, lambda batch: [F.cross_entropy(*targets(wrapped(**batch).logits, batch["labels"]))])


def items(model):
    def step(batch):
        found = {name: x.float() for name, x in model(**batch, use_cache=False).items()}
        assert pickle.loads(pickle.dumps(found["logits"].detach())).shape[:2] == batch["labels"].shape
        return found["loss"], found["logits"][batch["attention_mask"].bool()].mean()

    return steps(model, step)


class WeightedTrainer(Trainer):
    """As in the documentation of transformers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.get("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(*targets(outputs.get("logits"), labels), torch.linspace(0.5, 2, VOCABULARY))
        return (loss, outputs) if return_outputs else loss


def with_trainer(model, folder, kind=Trainer, **more):
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=3, logging_steps=1,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=3, **more,
    )  # fmt: skip
    rows = [{"input_ids": list(text.encode())} for text in TEXTS]

    def collate(rows):
        return padded_batch([row["input_ids"] for row in rows])

    def metrics(prediction):
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[prediction.label_ids[:, 1:] != -100].mean()}

    trainer = kind(
        model, arguments, train_dataset=rows, eval_dataset=rows[:8], data_collator=collate, compute_metrics=metrics
    )
    trainer.train()
    logs, names = trainer.state.log_history, ("loss", "eval_loss", "eval_accuracy")
    return torch.tensor([log[name] for log in logs for name in names if name in log])


def with_accelerate(model):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    logged = []
    for batch in BATCHES:
        out = model(**batch)
        assert out.logits.dtype == torch.float32
        loss = out.loss + F.cross_entropy(*targets(out.logits, batch["labels"]), label_smoothing=0.1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        logged.append([out.loss.item(), loss.item()])
    accelerate.state.AcceleratorState._reset_state(True)
    return torch.tensor(logged)


def with_lightning(model, folder):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.logged = model, []

        def training_step(self, batch):
            out = self.model(**batch)
            logits, labels = targets(out.logits, batch["labels"])
            self.log("accuracy", (logits.argmax(-1) == labels)[labels != -100].float().mean())
            self.logged.append([out.loss.item(), F.cross_entropy(logits, labels).item()])
            return {"loss": out.loss, "logits": out.logits.detach(), "out": out["logits"].detach()}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, options = Module(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **options)
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return torch.tensor(module.logged)


LOOPS = {
    "weighted": weighted,
    "perplexity, tuple": perplexity,
    "auxiliary": auxiliary,
    "in place": changed_in_place,
    "distilled": distilled,
    "accumulated": accumulated,
    "compiled loss": compiled_loss,
    "DataParallel": in_data_parallel,
    "items": items,
    "accelerate, bf16": with_accelerate,
    "Lightning": with_lightning,
    "Trainer, weighted": functools.partial(with_trainer, kind=WeightedTrainer),
    "Trainer, smoothed": functools.partial(with_trainer, label_smoothing_factor=0.1),
}
IN_A_FOLDER = {"Lightning", "Trainer, weighted", "Trainer, smoothed"}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", sweep_except(LOOPS, *set(LOOPS) - {"compiled loss"}))
def test_loop(name, record, tmp_path):
    found = []
    for patched in (False, True):
        model = make()
        handle = nta.patch(model, packing="always", on_fallback="raise") if patched else None
        found.append(LOOPS[name](model, *[str(tmp_path)] * (name in IN_A_FOLDER)))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    want, want_weights, got, weights = found
    tolerance = 1e-2 if "bf16" in name else 2e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights, want_weights, rtol=tolerance, atol=tolerance)
    assert handle.calls.keys() == {None}
    if name == "Lightning":
        record(f"Lightning {importlib.metadata.version('lightning')}", "Trainer.fit", "before", handle)


def test_encoder_decoder():
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    found = []
    for patched in (False, True):
        set_seed(0)
        model = T5ForConditionalGeneration(config).train()
        handle = nta.patch(model, on_fallback="raise") if patched else None

        def step(batch, model=model):
            out = model(**batch, output_hidden_states=True)
            labels, mask = batch["labels"].flatten(), batch["attention_mask"].bool()
            smooth = F.cross_entropy(out.logits.flatten(0, 1), labels, label_smoothing=0.1)
            encoded = out.encoder_last_hidden_state[mask].square().mean() + out.encoder_hidden_states[0][mask].mean()
            return out.loss + smooth + encoded + out.decoder_hidden_states[1][mask].mean(), encoded

        found.append(steps(model, step))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)
    assert handle.calls.keys() == {None}


def in_process(kind):
    """A loop over the logits and the loss on each of two ranks, which have the halves of each batch."""
    rank, model = torch.distributed.get_rank(), make()
    results = []
    for patched in (False, True):
        each = copy.deepcopy(model)
        if patched:
            nta.patch(each, packing="always", on_fallback="raise")
        if kind == "FSDP2, bf16":
            for layer in each.model.layers:
                fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
            wrapped = fully_shard(each, mp_policy=policy)
        else:
            options = {"find_unused_parameters": "unused" in kind, "static_graph": "static" in kind}
            wrapped = DistributedDataParallel(each, **options)
        optimizer, logged = torch.optim.SGD(wrapped.parameters(), 0.1), []
        for batch in BATCHES:
            out = wrapped(**{name: x[2 * rank : 2 * rank + 2] for name, x in batch.items()})
            if patched:  # what walks through the outputs does not pad
                assert [x.source.padded for x in out.values() if isinstance(x, PaddedOnRead)] == [None]
            loss = F.cross_entropy(*targets(out.logits, batch["labels"][2 * rank : 2 * rank + 2]), label_smoothing=0.1)
            loss = loss + out.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append([out.loss.item(), loss.item()])
        results.append(torch.tensor(logged))
    return results


@pytest.mark.parametrize("kind", ["DDP, unused parameters", "DDP, static graph", "FSDP2, bf16"])
def test_over_two_ranks(kind):
    for want, got in run_in_processes(2, in_process, kind):
        tolerance = 2e-2 if "bf16" in kind else 2e-5
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_padded_if_only_the_loss_is_read(training, monkeypatch):
    from nt_attention.hf.pack.packing import Packing

    monkeypatch.setattr(Packing, "pad", lambda *_, **__: pytest.fail("padded"))
    model = make().train(training)
    nta.patch(model, packing="always")
    out = model(**BATCHES[0], output_hidden_states=True)
    out.loss.backward()
    assert out["loss"] is out[0] is out.loss
    assert [name for name, _ in out.items()] == ["loss", "logits", "hidden_states"]
    values, layout = nta.hf.packed(out.logits)
    assert values.shape == (layout.total, VOCABULARY)
    assert nta.hf.packed(out.hidden_states[1])[0].shape == (layout.total, 32)

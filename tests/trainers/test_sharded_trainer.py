"""`ShardedTrainer`: transformers' Trainer with a model over several ranks, against Trainer in one process."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType
from processes import run_in_processes, under_torchrun
from shared_data import llama_config, padded_batch, paragraphs, tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import nt_attention as nta

pytest.importorskip("nt_attention.hf.trainer", exc_type=ImportError, reason="needs another transformers")
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 48))]
ROWS = [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in TEXTS]
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}


class Stream(torch.utils.data.IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter(ROWS)


def collate(rows):
    return padded_batch([row["input_ids"] for row in rows])


def count(prediction):
    """Metrics that change if a row counts twice."""
    real = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"rows": len(real), "tokens": real.sum(), "right": right[real].sum()}


def make(kind, folder, model, evaluated, **more):
    given = {
        "output_dir": folder, "max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "log_level": "error", "optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.9, "eval_strategy": "steps",
        "eval_steps": 3, "include_num_input_tokens_seen": "non_padding", **more,
    }  # fmt: skip
    data = given.pop("train_dataset", ROWS)
    return kind(
        model, TrainingArguments(**given), train_dataset=data, eval_dataset=ROWS[:evaluated], data_collator=collate,
        compute_metrics=count,
    )  # fmt: skip


def make_model(window=None):
    set_seed(0)
    config = llama_config(32)
    if window is None:
        return LlamaForCausalLM(config).double()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same = {name: getattr(config, name) for name in (*names, "num_key_value_heads", "pad_token_id", "eos_token_id")}
    return MistralForCausalLM(MistralConfig(**same, bos_token_id=None, sliding_window=window)).double()


def train(trainer):
    trainer.train()
    trainer.save_model()
    predicted = trainer.predict(ROWS[:3])
    skipped = ("runtime", "second", "speed")
    logs = [
        {key: value for key, value in entry.items() if not any(word in key for word in skipped)}
        for entry in trainer.state.log_history
    ]
    parameters = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in trainer.model.named_parameters()}
    real = predicted.label_ids != -100
    return logs, {n: x.detach().numpy() for n, x in parameters.items()}, predicted.predictions * real[..., None]


def on_each_rank(cp, folder, evaluated, fsdp, window, more):
    from nt_attention.hf.trainer import ShardedTrainer

    with under_torchrun(fsdp):
        world = torch.distributed.get_world_size()
        if fsdp:
            config = ParallelismConfig(cp_size=cp, dp_shard_size=world // cp)
            more = more | {"parallelism_config": config, "fsdp": True, "fsdp_config": FSDP}
            more["accelerator_config"] = {"use_configured_state": True}  # that of `under_torchrun`
            mesh = config.get_device_mesh("cpu")["cp"]
        else:
            mesh = init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]
        model = make_model(window)
        handle = nta.patch(model, mesh=mesh, on_fallback="raise")
        found = train(make(ShardedTrainer, folder, model, evaluated, **more))
        assert fsdp == any(isinstance(x, DTensor) for x in model.parameters())
        assert set(handle.calls) == {None}
        return found


def check(world, cp, tmp_path, evaluated, fsdp=False, window=None, **more):
    data_ranks = world // cp
    size = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4 * data_ranks)
    want_logs, want, want_predictions = train(
        make(Trainer, str(tmp_path / "want"), make_model(window), evaluated, **{**more, **size})
    )
    assert any(entry.get("eval_right", 0) > 0 for entry in want_logs)
    found_of_ranks = run_in_processes(world, on_each_rank, cp, str(tmp_path / "found"), evaluated, fsdp, window, more)
    for logs, found, predictions in found_of_ranks:
        for entry, expected in zip(logs, want_logs, strict=True):
            assert entry.keys() == expected.keys()
            for key in expected.keys() - ({"total_flos"} if data_ranks > 1 else set()):  # flos of other padding
                assert entry[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-6), key
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(predictions, want_predictions, rtol=1e-6, atol=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "found", dtype=torch.float64)
    for name, x in saved.named_parameters():
        np.testing.assert_allclose(x.detach(), want[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_trainer_over_two_ranks(tmp_path):
    check(2, 2, tmp_path, evaluated=10)


@pytest.mark.sweep
def test_trainer_over_two_ranks_with_accumulation_and_checkpointing(tmp_path):
    check(
        2, 2, tmp_path, evaluated=10, gradient_accumulation_steps=2, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip


def test_trainer_over_data_and_context_parallel_ranks(tmp_path):
    check(4, 2, tmp_path, evaluated=16, gradient_accumulation_steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize(("world", "window"), [(2, 7), (4, None)])  # accelerate's own code refuses windows
def test_trainer_with_fsdp_and_parallelism_config(world, window, tmp_path):
    check(world, 2, tmp_path, evaluated=16, fsdp=True, window=window, gradient_accumulation_steps=2)


def train_with_trl(trainer_class, folder, model):
    from datasets import Dataset
    from trl import SFTConfig

    arguments = SFTConfig(
        folder, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1, bf16=False,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, log_level="error", optim="sgd",
        learning_rate=0.3, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = trainer_class(
        model, args=arguments, train_dataset=data, eval_dataset=data.select(range(10)), processing_class=tokenizer()
    )
    trainer.train()
    names = ("loss", "grad_norm", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy")
    return [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]


def trl_on_each_rank(folder):
    from trl import SFTTrainer

    from nt_attention.hf.trainer import ShardedTrainerMixin

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):
        pass

    with under_torchrun():
        model = make_model()
        handle = nta.patch(model, mesh=init_device_mesh("cpu", (2,)), on_fallback="raise")
        found = train_with_trl(ShardedSFTTrainer, folder, model)
        assert set(handle.calls) == {None}
        return found


@pytest.mark.sweep
def test_mixin_with_trainer_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    want = train_with_trl(trl.SFTTrainer, str(tmp_path / "want"), make_model())
    for found in run_in_processes(2, trl_on_each_rank, str(tmp_path / "found")):
        assert len(found) == len(want)
        for entry, expected in zip(found, want, strict=True):
            assert entry == pytest.approx(expected, rel=1e-6)


# What the user did wrong → the message.
MISTAKES = {
    "no patch": "is not patched with a mesh",
    "patch without mesh": "is not patched with a mesh",
    "removed patch": "is not patched with a mesh",
    "data set without length": r'pass accelerator_config=\{"dispatch_batches": False\}',
    "dispatched batches": r'pass accelerator_config=\{"dispatch_batches": False\}',
    "other rows": "different batches",
    "no torchrun": "accelerate sees 1 processes, but the process group has 4",
    "DeepSpeed": "DeepSpeed does not work with a model that is patched with a mesh",
    "several GPUs": "one process has 2 GPUs",
    "local tokens": "average_tokens_across_devices=False",
    "gathered objects": "eval_use_gather_object=True",
    "ranks apart": r"has the ranks \[0, 2\], but must have neighbours, such as \[0, 1\]",
    "another size": "ParallelismConfig has cp_size=4, but the model is patched with a mesh of 2 ranks: pass cp_size=2",
    "tensor parallel too": "tp_size=2 and sp_size=1 do not work with a mesh: pass cp_size=2 alone",
    "FSDP alone": r"FSDP needs parallelism_config=ParallelismConfig\(cp_size=2\)",
}

SIZES = {"another size": {"cp_size": 4}, "tensor parallel too": {"cp_size": 2, "tp_size": 2}}
# What the process would see: class, attribute, value.
SEEN = {
    "DeepSpeed": (Accelerator, "distributed_type", DistributedType.DEEPSPEED),
    "several GPUs": (TrainingArguments, "n_gpu", 2),
}
WITH_FSDP = ("FSDP alone", *SIZES)


def errors_of_rank(names, folder):
    """The message of each mistake, on this rank."""
    from nt_attention.hf.trainer import ShardedTrainer

    errors = {}
    for name in names:
        environment = contextlib.nullcontext() if name == "no torchrun" else under_torchrun(fsdp=name in WITH_FSDP)
        with environment, pytest.MonkeyPatch.context() as patch:
            if name in SEEN:
                patch.setattr(*SEEN[name])
            model, more = make_model(), {}
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            if name != "no patch":
                mesh = None if name == "patch without mesh" else mesh["a" if name == "ranks apart" else "b"]
                handle = nta.patch(model, mesh=mesh)
            if name == "removed patch":
                handle.remove()
            if name in SIZES:
                more["parallelism_config"] = ParallelismConfig(**SIZES[name])
            if name in WITH_FSDP:
                more |= {"fsdp": True, "fsdp_config": FSDP, "accelerator_config": {"use_configured_state": True}}
            if name == "data set without length":
                more["train_dataset"] = Stream()
            if name == "other rows":
                model(**collate(ROWS[:2]))  # the patch compares the first batch alone, which is the same
                more["train_dataset"] = ROWS[torch.distributed.get_rank() :]
            more |= {"local tokens": {"average_tokens_across_devices": False}}.get(name, {})
            more |= {"dispatched batches": {"accelerator_config": {"dispatch_batches": True}}}.get(name, {})
            more |= {"gathered objects": {"eval_use_gather_object": True}}.get(name, {})
            try:
                make(ShardedTrainer, folder, model, 4, **more).train()
            except ValueError as error:
                errors[name] = str(error)
    return errors


def test_mistakes_raise_errors_on_all_ranks(tmp_path):
    for rank, errors in enumerate(run_in_processes(4, errors_of_rank, list(MISTAKES), str(tmp_path))):
        assert errors.keys() == MISTAKES.keys()
        for name, message in MISTAKES.items():
            if name != "ranks apart" or rank == 0:
                assert re.search(message, errors[name]), errors[name]

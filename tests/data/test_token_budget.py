"""TokenBudgetSampler: what is in the batches of all ranks, in plain loops and in trainers, and after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from processes import run_in_processes, under_torchrun
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from nt_attention.data import TokenBudgetSampler

LENGTHS = np.random.default_rng(0).lognormal(3.4, 1.0, 701).astype(int).clip(1, 512)


def batches(lengths=LENGTHS, max_tokens=1024, *, epoch=0, **options):
    sampler = TokenBudgetSampler(lengths, max_tokens, **options)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(list(sampler))
    return list(sampler)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_example_is_once_in_full_batches_of_all_ranks(world_size):
    epochs = []
    for epoch in range(3):
        ranks = [batches(epoch=epoch, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(len(LENGTHS)))
        tokens = np.array([[LENGTHS[batch].sum() for batch in rank] for rank in ranks])
        assert tokens.max() <= 1024
        assert tokens.size <= (LENGTHS.sum() // 1024 // world_size + 1) * world_size
        assert np.ptp(tokens) < 0.03 * tokens.mean()  # about equal work
        epochs.append(ranks)
    assert len({len(ranks[0]) for ranks in epochs}) == 1
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0][0] == batches(rank=0, world_size=world_size)
    assert epochs[0][0] != batches(rank=0, world_size=world_size, seed=1)


def test_epochs_put_other_examples_together():
    def pairs(epoch):
        return {(i, j) for batch in batches(epoch=epoch) for i in batch for j in batch if i < j}

    assert len(pairs(0) & pairs(1)) < 2 * len(pairs(0)) / len(batches())  # of random batches: one of len(batches())


@pytest.mark.parametrize("low", [1, 200, 550])
def test_lengths_that_hardly_fit(low):
    lengths = np.random.default_rng(low).integers(low, 1024, 300)
    for epoch in range(5):
        epoch_batches = batches(lengths, epoch=epoch)
        assert sorted(i for batch in epoch_batches for i in batch) == list(range(300))
        assert max(lengths[batch].sum() for batch in epoch_batches) <= 1024


def test_a_longer_example_is_alone():
    assert sorted(map(sorted, batches([9, 3, 50, 2], 10))) == [[0], [1, 3], [2]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume(world_size):
    options = {"rank": world_size - 1, "world_size": world_size}
    sampler = TokenBudgetSampler(LENGTHS, 1024, **options)
    sampler.set_epoch(3)
    iterator = iter(sampler)
    begun = [next(iterator) for _ in range(5)]
    resumed = TokenBudgetSampler(LENGTHS, 1024, **options)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(3)
    assert begun + list(resumed) == list(resumed) == batches(epoch=3, **options)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(4)
    assert list(resumed) == batches(epoch=4, **options)
    with pytest.raises(ValueError, match="max_tokens=1024, this sampler 2048"):
        TokenBudgetSampler(LENGTHS, 2048, **options).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3, 0], 8), {}, "at least 1"),
        (([3.0], 8), {}, "integers"),
        (([3], 0), {}, "max_tokens is 0"),
        (([3, 4], 8), {"rank": 1}, "pass both"),
        (([3, 4], 8), {"rank": 2, "world_size": 2}, "pass both"),
        (([8, 8, 8], 8), {"rank": 0, "world_size": 2}, "3 examples are too few"),
    ],
)
def test_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetSampler(*arguments, **options)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, examples):
        self.seen += examples.tolist()
        return {"loss": self.weight * examples.float().mean()}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_save = state.global_step == self.step


class TokenBudgetTrainer(Trainer):
    def get_train_dataloader(self):
        from accelerate.data_loader import prepare_data_loader

        ranks = {"rank": self.args.process_index, "world_size": self.args.world_size}
        sampler = TokenBudgetSampler(LENGTHS, 2048, **ranks)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return prepare_data_loader(loader, self.args.device, num_processes=1, process_index=0, put_on_device=True)


def train(folder):
    """Stop in the second epoch, go on from the checkpoint, and return the examples of both epochs."""
    seen = []
    steps = len(TokenBudgetSampler(LENGTHS, 2048, rank=0, world_size=int(torch.distributed.is_initialized()) + 1))
    for checkpoint in (None, True):
        arguments = TrainingArguments(
            folder, num_train_epochs=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
        )
        model = Model()
        callbacks = [StopAt(steps + 2)] if checkpoint is None else []
        dataset = [{"examples": i} for i in range(len(LENGTHS))]
        trainer = TokenBudgetTrainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=checkpoint)
        seen += model.seen
    return trainer.state.global_step == 2 * steps, seen


def train_on_each_rank(folder):
    with under_torchrun():
        return train(folder)


def test_trainer_resumes_in_the_second_epoch(tmp_path):
    finished, seen = train(str(tmp_path))
    assert finished
    assert sorted(seen) == sorted(2 * [*range(len(LENGTHS))])


@pytest.mark.sweep
def test_trainer_on_two_ranks_resumes_in_the_second_epoch(tmp_path):
    results = run_in_processes(2, train_on_each_rank, str(tmp_path))
    assert all(finished for finished, _ in results)
    assert sorted(i for _, seen in results for i in seen) == sorted(2 * [*range(len(LENGTHS))])


def test_accelerate_does_not_divide_the_batches_again():
    from accelerate.data_loader import prepare_data_loader

    loader = DataLoader(LENGTHS, batch_sampler=TokenBudgetSampler(LENGTHS, 1024, rank=0, world_size=2))
    with pytest.raises(ValueError, match="already divided"):
        prepare_data_loader(loader, num_processes=2, process_index=0)

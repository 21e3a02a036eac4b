"""Training loops with `patch(cuda_graphs=...)` give the losses of the same loops without graphs.

Without a GPU, graphs, events and times are fake; see `helpers/cuda_graphs.py`.
"""

import copy
import gc
import itertools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from cuda_graphs import DEVICE, GPU, cuda_graphs  # noqa: F401
from sweeps import sweep_except
from token_tiled_cases import IGNORED_WARNINGS
from torch.nn import functional

import nt_attention as nta
from nt_attention.graphs import policy as graph_policy
from nt_attention.graphs.policy import DEVICE_BOUND, NO_GAIN, OFTEN, SELDOM, TIMED, WARM_UP, HostWaits

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs", "uncompared")]

STEPS = 2 * OFTEN + 4 if GPU else OFTEN + 2


def batch_of(lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)[:, None]
    mask = torch.arange(int(lengths.max()) + 2) < lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape, generator=draw).masked_fill(~mask, tiny.PAD)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def embed(model, batch):
    """The mean of the hidden states of each row, as sentence-transformers pools."""
    out, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return functional.normalize((out * mask).sum(1) / mask.sum(1), dim=-1)


@dataclass(frozen=True)
class Loop:
    """A loop as users write it, with MultipleNegativesRankingLoss.

    Attributes:
        columns: texts in a row: pairs, triplets, or 4 negatives.
        accumulate: backwards for each step of the optimizer.
        clip: the largest norm of gradients.
        evaluates: whether the model is evaluated after each step.
        merges: whether a parameter is changed in place by hand after each step, as if an adapter were merged.
    """

    optimizer: Any = torch.optim.AdamW
    columns: int = 2
    accumulate: int = 1
    clip: float | None = None
    autocast: torch.dtype | None = None
    set_to_none: bool = True
    evaluates: bool = False
    merges: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, model, steps=STEPS):
        """The losses, and what evaluations gave."""
        optimizer = self.optimizer(model.parameters(), lr=1e-3, **self.options)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=self.autocast is torch.float16)
        context = nullcontext() if self.autocast is None else torch.autocast(DEVICE.type, dtype=self.autocast)
        found = []
        for i in range(steps * self.accumulate):
            rows = [[5, 2, 9], [7, 3, 4, 6], [5, 2, 9]][i % 3]
            with context:
                first, *others = [embed(model, batch_of(rows, 100 * i + j)) for j in range(self.columns)]
                scores = 20 * first @ torch.cat(others).T
                loss = functional.cross_entropy(scores, torch.arange(len(rows), device=DEVICE))
            scaler.scale(loss / self.accumulate).backward()
            found.append(loss.detach().float())
            if i % self.accumulate < self.accumulate - 1:
                continue
            if self.clip is not None:
                scaler.unscale_(optimizer)
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=self.set_to_none)
            if self.merges:
                with torch.no_grad():
                    model.encoder.layer[0].output.dense.weight.add_(1e-3)
            if self.evaluates:
                model.eval()
                with torch.no_grad(), context:
                    found.append(embed(model, batch_of([4, 4, 1], 7)).float())
                model.train()
        return found


LOOPS = {
    "pairs": Loop(),
    "triplets": Loop(columns=3),
    "many negatives": Loop(columns=5),  # one call more than can wait for its backward
    "SGD": Loop(torch.optim.SGD),
    "gradients that stay": Loop(set_to_none=False),
    "clipping": Loop(clip=0.1),
    "accumulation": Loop(accumulate=2),
    "evaluation between steps": Loop(evaluates=True),
    "weights changed in place": Loop(merges=True),
    "foreach": Loop(options={"foreach": True}),
    "fused": Loop(options={"fused": True}),
    "autocast": Loop(autocast=torch.bfloat16),
    "everything": Loop(
        columns=3, accumulate=2, clip=0.5, autocast=torch.bfloat16, evaluates=True, options={"fused": True}
    ),
    "scaled float16": Loop(autocast=torch.float16, clip=1.0),
}


# `pytest --whole-sweeps` runs the others too.
FAST = [(name, "training") for name in ("clipping", "everything", "many negatives", "weights changed in place")]
FAST += [("evaluation between steps", "auto")]


def make():
    return tiny.make("bert", "BertModel", implementation="sdpa").to(DEVICE).train()


@pytest.mark.parametrize(("name", "mode"), sweep_except(itertools.product(LOOPS, ("training", "auto")), *FAST))
def test_losses(name, mode, monkeypatch):
    loop = LOOPS[name]
    if loop.autocast is torch.float16 and not GPU:
        pytest.skip("gradients are scaled on a GPU")
    if not GPU:  # a fake graph takes as long as what it recorded
        monkeypatch.setattr(graph_policy, "GAIN", float("inf"))
    model = make()
    other = copy.deepcopy(model)
    handle = nta.patch(model, packing="always", cuda_graphs=mode)
    nta.patch(other, packing="always")
    got, want = (loop.run(each) for each in (model, other))
    tolerance = 3e-2 if loop.autocast is not None else 5e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    counted = handle.graphs.counted()
    calls = STEPS * loop.accumulate * loop.columns
    waiting = {"4 earlier calls wait for their backward"} if loop.columns > 4 else set()
    assert counted[None] > calls / 3, handle
    assert counted.keys() - {None} <= waiting | ({SELDOM, NO_GAIN, DEVICE_BOUND} if mode == "auto" else set())
    assert mode == "auto" or sum(counted.values()) == counted[None] + counted.get(next(iter(waiting), None), 0) * bool(
        waiting
    )


def larger(**options):
    """A model of the shape of those that are fine-tuned. The host takes the time."""
    shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
    return tiny.make("bert", "BertModel", implementation="sdpa", **(shape | options)).to(DEVICE).train()


def largest():
    """A model in which the device takes the time."""
    shape = {"hidden_size": 1536, "num_attention_heads": 12, "intermediate_size": 6144, "num_hidden_layers": 4}
    return larger(**shape).eval()


@pytest.mark.gpu
class TestOnAGpu:
    """What only real events and real memory show."""

    def test_a_host_that_takes_the_time(self):
        model = larger()
        handle = nta.patch(model, packing="always", cuda_graphs="auto")
        Loop().run(model, 30)
        counted = handle.graphs.counted()
        assert counted.keys() <= {None, SELDOM}, handle
        assert counted[None] > 40
        assert handle.graphs.captured <= 8

    def test_a_device_that_takes_the_time(self):
        model = largest()
        handle = nta.patch(model, packing="always", cuda_graphs="auto")
        batch = batch_of([500, 400, 450, 480] * 16, 0)
        with torch.no_grad():
            for _ in range(2 * (OFTEN + TIMED)):
                model(**batch)
        counted = handle.graphs.counted()
        assert None not in counted, handle
        assert counted[DEVICE_BOUND] > 1

    def test_the_handle_says_that_the_gpu_waits(self):
        model = larger()
        handle = nta.patch(model, packing="always")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Loop().run(model, HostWaits.MEASURED // 2 + WARM_UP + 5)
        told = [str(x.message) for x in caught if "waits for the host" in str(x.message)]
        assert len(told) == 1, handle
        assert "waits for the host" in " ".join(str(handle).split())

    def test_nothing_is_said_of_a_gpu_that_is_busy(self):
        model = largest()
        handle = nta.patch(model, packing="always")
        batch = batch_of([500, 400, 450, 480] * 16, 0)
        with torch.no_grad():
            for _ in range(HostWaits.MEASURED + WARM_UP + 5):
                model(**batch)
        assert handle.counts.waits.calls >= HostWaits.MEASURED // 2
        assert handle.counts.waits.advice is None, handle.counts.waits.waits

    @pytest.mark.parametrize("mode", ["training", "auto"])
    def test_memory_of_many_steps_of_random_lengths(self, mode):
        model = larger()
        handle = nta.patch(model, packing="always", cuda_graphs=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        draw = torch.Generator().manual_seed(0)
        memory = []
        for i in range(600):
            rows = torch.randint(1, 60, (32,), generator=draw).tolist()
            one, two = (embed(model, batch_of(rows, 2 * i + j)) for j in range(2))
            functional.cross_entropy(20 * one @ two.T, torch.arange(32, device=DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i in (300, 599):
                del one, two
                gc.collect()
                memory.append(torch.cuda.memory_reserved())
        assert memory[1] <= 1.01 * memory[0], (memory, handle)
        assert handle.graphs.counted()[None] > 900, handle

"""Training loops and compiled models with `cuda_graphs`, and what only a GPU shows: time, memory, streams, threads.

Without a GPU, graphs, events and times are fake; see `helpers/cuda_graphs.py`.
"""

import dataclasses
import gc
import itertools
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda_graphs import DEVICE, GPU
from graph_entries import (
    BATCHES,
    ENTRIES,
    HEADS,
    OF_AUTO,
    Pair,
    as_dict,
    assert_close,
    encoder,
    gradients,
    law,
    loss_of,
    model_of,
    padded,
    tokens,
)
from graphs import with_layers
from sweeps import sweep_except
from token_tiled_cases import IGNORED_WARNINGS
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional

import nt_attention as nta
from nt_attention.graphs import capture
from nt_attention.graphs.policy import DEVICE_BOUND, OFTEN, SELDOM, TIMED, WARM_UP, HostWaits

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs", "uncompared")]

if GPU:
    from torch._inductor.compile_fx import compile_fx  # takes seconds

STEPS = 2 * OFTEN + 4 if GPU else OFTEN + 2


def embed(model, lengths, seed=None):
    """The mean of the hidden states of each row, as sentence-transformers pools."""
    if seed is not None:
        torch.manual_seed(seed)
    batch = tokens(lengths)
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
        ddp: options of DistributedDataParallel, which wraps the module that computes the loss.
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
    ddp: dict[str, Any] | None = None

    def run(self, model, steps=STEPS):
        """The losses, and what evaluations gave."""
        optimizer = self.optimizer(model.parameters(), lr=1e-3, **self.options)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=self.autocast is torch.float16)
        context = nullcontext() if self.autocast is None else torch.autocast(DEVICE.type, dtype=self.autocast)
        compute_loss = RankingLoss(model, self.columns)
        if self.ddp is not None:
            compute_loss = nn.parallel.DistributedDataParallel(compute_loss, **self.ddp)
        found = []
        for i in range(steps * self.accumulate):
            with context:
                loss = compute_loss([[5, 2, 9], [7, 3, 4, 6], [5, 2, 9]][i % 3], 100 * i)
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
                    found.append(embed(model, [4, 4, 1], 7).float())
                model.train()
        return found


class RankingLoss(nn.Module):
    """MultipleNegativesRankingLoss. It is a module, so that DistributedDataParallel can wrap it."""

    def __init__(self, model, columns):
        super().__init__()
        self.model, self.columns = model, columns

    def forward(self, lengths, seed):
        first, *others = [embed(self.model, lengths, seed + j) for j in range(self.columns)]
        scores = 20 * first @ torch.cat(others).T
        return functional.cross_entropy(scores, torch.arange(len(lengths), device=DEVICE))


LOOPS = {
    "pairs": Loop(),
    "many negatives": Loop(columns=5),  # one call more than can wait for its backward
    "SGD": Loop(torch.optim.SGD),
    "gradients that stay": Loop(set_to_none=False),
    "accumulation": Loop(accumulate=2),
    "evaluation between steps": Loop(evaluates=True),
    "weights changed in place": Loop(merges=True),
    "foreach": Loop(options={"foreach": True}),
    "everything": Loop(
        columns=3, accumulate=2, clip=0.5, autocast=torch.bfloat16, evaluates=True, options={"fused": True}
    ),
    "scaled float16": Loop(autocast=torch.float16, clip=1.0),
    "DDP": Loop(ddp={"find_unused_parameters": True}),
    "DDP, gradients are views": Loop(
        autocast=torch.bfloat16, clip=0.5, ddp={"gradient_as_bucket_view": True, "find_unused_parameters": True}
    ),
}
FAST = [(name, "training") for name in ("everything", "many negatives", "weights changed in place")]
FAST += [("evaluation between steps", "auto")]
WAITING = "4 earlier calls wait for their backward"


@pytest.fixture(scope="module")
def one_process():
    """A process group of this process alone."""
    backend = "nccl" if GPU else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_times", "one_process")
@pytest.mark.parametrize(("name", "mode"), sweep_except(itertools.product(LOOPS, ("training", "auto")), *FAST))
def test_losses(name, mode):
    loop = LOOPS[name]
    if loop.autocast is torch.float16 and not GPU:
        pytest.skip("gradients are scaled on a GPU")
    pair = Pair("bert", mode)
    got, want = (loop.run(model) for model in pair.both)
    tolerance = 3e-2 if loop.autocast is not None else 5e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    counted = pair.graphs.counted()
    assert counted[None] > STEPS * loop.accumulate * loop.columns / 3
    reasons = ({WAITING} if loop.columns > 4 else set()) | (OF_AUTO if mode == "auto" else set())
    assert counted.keys() <= {None} | reasons, counted


class Compiles:
    """A backend of torch.compile.

    Attributes:
        graphs: the number of graphs with attention.
        captured: how often one of them ran while a CUDA graph was captured, or before that.
    """

    def __init__(self):
        self.graphs = self.captured = 0

    def __call__(self, graph, inputs):
        compiled = (compile_fx if GPU else aot_eager)(graph, inputs)
        if not any(str(node.target).startswith("nt_attention.attention_forward") for node in graph.graph.nodes):
            return compiled
        self.graphs += 1

        def run(*arguments):
            self.captured += capture.is_capturing()
            return compiled(*arguments)

        return run


@pytest.mark.filterwarnings("ignore:.*logging.getLogger", "ignore::nt_attention.patching.handle.NotPackedWarning")
class TestCompiled:
    @pytest.fixture(autouse=True)
    def reset(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    CASES = (
        ("bert, BertModel", "model", "inference"),
        ("llama, LlamaForCausalLM", "in place", "training"),
        ("modernbert, ModernBertModel", "layers", "inference"),
        ("bert, BertForMaskedLM", "model", "training"),
    )

    @pytest.mark.fresh_process
    @pytest.mark.parametrize(("name", "kind", "mode"), sweep_except(CASES, CASES[1]))
    def test_batches_of_other_lengths(self, name, kind, mode):
        entry, layers = HEADS[name], 1 if mode == "training" else 2
        make = entry.make
        pair = Pair(dataclasses.replace(entry, make=lambda: with_layers(make(), layers).to(DEVICE)), mode)
        backend = Compiles()
        called = pair.model
        if kind == "layers":
            for layer in called.layers:
                layer.compile(backend=backend, dynamic=True)
        elif kind == "model":
            called = torch.compile(called, backend=backend, dynamic=True)
        else:
            called.compile(backend=backend, dynamic=True)
        for lengths in ([5, 2, 9], [3, 3, 3, 3, 3], [16, 17], [70, 60, 4], [5, 2, 9]):
            inputs = pair.draw([max(2, length) for length in lengths])  # one token has no next one
            inputs = inputs if pair.grad else {**inputs, "use_cache": False}
            pair.model.zero_grad()
            out = pair.start(called, inputs)[0]
            if pair.grad:
                loss_of(out).backward()
            assert_close((as_dict(out), None, gradients(pair.model)), pair.solve(pair.other, inputs))
        assert pair.graphs.calls == {None: 5}
        assert 1 <= backend.graphs <= 6  # ModernBERT has three kinds of layers
        assert backend.captured >= 3 * pair.graphs.captured

    def test_a_graph_is_captured_once(self):
        """Whatever compiles the model may be another object in each call."""
        entry = dataclasses.replace(ENTRIES["bert"], make=lambda: model_of(num_hidden_layers=1))
        pair = Pair(entry, "inference")
        inputs = pair.draw([5, 2, 9])

        def compiled():
            # as torch.compile; Lightning replaces that, and sets an attribute of the model, which makes graphs stale
            return torch._dynamo.optimize("inductor" if GPU else "aot_eager", dynamic=True)(pair.model)

        def check(model):
            assert_close(pair.start(model, inputs)[0], want)

        want, first = pair.start(pair.other, inputs)[0], compiled()
        check(first)
        for stance in ("fail_on_recompile", "eager_then_compile", "eager_on_recompile"):
            with torch.compiler.set_stance(stance):
                for _ in range(2):
                    check(first)
        check(compiled())
        assert pair.graphs.captured == 1
        with torch.compiler.set_stance("force_eager"):
            check(first)
        assert pair.graphs.captured == 2
        torch._dynamo.reset()
        gc.collect()  # the compiled program is freed
        check(first)
        assert pair.graphs.calls == {None: 10}
        assert pair.graphs.captured == 2


def larger(**options):
    """A model of the shape of those that are fine-tuned. The host takes the time."""
    shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
    return model_of(**(shape | options)).train()


def largest():
    """A model in which the device takes the time."""
    shape = {"hidden_size": 1536, "num_attention_heads": 12, "intermediate_size": 6144, "num_hidden_layers": 4}
    return larger(**shape).eval()


def run_largest(model, calls):
    batch = tokens([500, 400, 450, 480] * 16)
    with torch.no_grad():
        for _ in range(calls):
            model(**batch)


@pytest.mark.gpu
class TestTimes:
    """What only real events show."""

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
        run_largest(model, 2 * (OFTEN + TIMED))
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
        run_largest(model, HostWaits.MEASURED + WARM_UP + 5)
        assert handle.counts.waits.calls >= HostWaits.MEASURED // 2
        assert handle.counts.waits.advice is None, handle.counts.waits.waits


@pytest.mark.gpu
class TestMemory:
    @pytest.mark.parametrize("mode", ["training", "auto"])
    def test_many_steps_of_random_lengths(self, mode):
        model = larger()
        handle = nta.patch(model, packing="always", cuda_graphs=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        draw = torch.Generator().manual_seed(0)
        memory = []
        for i in range(600):
            rows = torch.randint(1, 60, (32,), generator=draw).tolist()
            one, two = (embed(model, rows, 2 * i + j) for j in range(2))
            functional.cross_entropy(20 * one @ two.T, torch.arange(32, device=DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i in (300, 599):
                del one, two
                gc.collect()
                memory.append(torch.cuda.memory_reserved())
        assert memory[1] <= 1.01 * memory[0], (memory, handle)
        assert handle.graphs.counted()[None] > 900, handle

    @law("bert", "module", "encoder", "llama", modes=("inference", "training"))
    def test_many_replays(self, pair):
        drawn = [pair.draw(torch.randint(1, 60, (rows,)).tolist()) for rows in range(1, 17)]
        memory = []
        for _ in range(15):
            for inputs in drawn:
                pair.solve(pair.model, inputs)
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
        assert memory[-1] <= 1.01 * memory[0]

    def test_models_one_after_another(self):
        """The memory of a model comes back, workspaces of cuBLAS included."""
        memory = []
        for _ in range(5):
            pair = Pair("bert", "training")
            pair.solve(pair.model, pair.draw([5, 2, 9]))
            pair.assert_captured(1)
            del pair
            gc.collect()
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
        assert memory[4] - memory[1] < 2**20, memory


@pytest.mark.gpu
class TestOnAGpu:
    @law("bert", "llama", "module", "transformer", modes=("inference", "training"))
    def test_many_batches(self, pair):
        for _ in range(100):
            pair.check(torch.randint(1, 60, (int(torch.randint(1, 33, ())),)).tolist())
        pair.assert_only_graphs()
        assert pair.graphs.captured < 50 * pair.entry.graphs

    @law("bert", "module", modes=["inference"])
    def test_another_dtype(self, pair):
        inputs = pair.draw([5, 2, 9])
        pair.check(inputs)
        inputs = {name: x.bfloat16() if name == "x" else x for name, x in inputs.items()}
        found = [as_dict(pair.start(model.bfloat16(), inputs)[0]) for model in pair.both]
        torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)
        pair.assert_captured(2)

    @law("bert", "module", "encoder", modes=("inference", "training"))
    def test_calls_on_another_stream(self, pair):
        """The forward on one stream, and the optimizer on another."""
        stream = torch.cuda.Stream()
        for lengths in BATCHES:
            inputs = pair.draw(lengths)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = pair.solve(pair.model, inputs)
            torch.cuda.current_stream().wait_stream(stream)
            assert_close(got, pair.solve(pair.other, inputs))
        assert pair.graphs.calls == {None: len(BATCHES)}

    @law("bert", modes=["inference"])
    def test_threads(self, pair):
        drawn = [pair.draw(torch.randint(1, 60, (rows,)).tolist()) for rows in range(1, 17)]
        want, failed = [pair.solve(pair.other, inputs) for inputs in drawn], []
        torch.cuda.synchronize()

        def serve(start):
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    at = (start + i) % len(drawn)
                    got = as_dict(pair.start(pair.model, drawn[at])[0])
                    torch.cuda.current_stream().synchronize()
                    try:
                        assert_close(got, want[at][0])
                    except AssertionError as error:
                        failed.append(error)

        threads = [threading.Thread(target=serve, args=(4 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert pair.graphs.calls == {None: 240}

    @law("bert", modes=["inference"])
    def test_host_reads(self, pair):
        """A mixture of experts that loops over experts reads which of them are used."""
        for linear in pair.probes():
            linear.forward = lambda x, once=linear.forward: once(x) * float(x.isfinite().all())
        pair.check(is_graph=False)
        assert "reads values on the host" in next(iter(pair.graphs.calls))

    @law("bert", modes=["inference"])
    def test_after_a_failed_capture(self, pair):
        """Random numbers can be drawn, and graphs that were captured before follow the seed."""
        model = model_of(hidden_dropout_prob=0.5).train()
        captures = nta.patch(model, packing="always", cuda_graphs="training").graphs
        batch = tokens([5, 2, 9])

        def drawn(seed):
            torch.cuda.manual_seed(seed)
            return model(**batch).last_hidden_state.detach()

        drawn(1)  # captures, which draws random numbers too
        first = drawn(1)
        for linear in pair.probes():
            linear.forward = lambda x, once=linear.forward: (torch.cuda.synchronize(), once(x))[1]
        pair.check(is_graph=False)
        assert "a CUDA graph can't be captured" in next(iter(pair.graphs.calls))
        torch.randn(3, device=DEVICE)
        torch.testing.assert_close(drawn(1), first)
        assert (drawn(2) - first).abs().max() > 1e-3
        assert set(captures.calls) == {None}

    @pytest.mark.parametrize("kind", ["bert", "bert, compiled", "encoder"])
    def test_dropout(self, kind):
        """Another mask in each call, and in the backward that of the forward."""
        torch._dynamo.reset()
        if kind == "encoder":
            model = encoder(dropout=0.3, activation="gelu").train()
            weight, inputs = model.layers[0].linear1.weight, padded([5, 2, 9])
            call = lambda: model(inputs["x"], src_key_padding_mask=inputs["padding"])  # noqa: E731
        else:
            model = model_of(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).train()
            weight, inputs = model.encoder.layer[0].attention.self.value.weight, tokens([5, 2, 9])
            call = lambda: model(**inputs).last_hidden_state  # noqa: E731
        handle = nta.patch(model, packing="always", cuda_graphs="training")
        if "compiled" in kind:
            model.compile(dynamic=True)
        call()  # captures
        outs = []
        for seed in (1, 2, 1):
            torch.cuda.manual_seed(seed)
            outs.append(call().detach())
        assert (outs[0] - outs[1]).abs().max() > 1e-3
        torch.testing.assert_close(outs[0], outs[2])
        assert (call().detach() - call().detach()).abs().max() > 1e-3

        def weighted():  # the sum of squares of a norm's output is a constant
            torch.cuda.manual_seed(1)
            out = call()
            return (out * torch.linspace(-1, 2, out.shape[-1], device=DEVICE)).square().sum()

        (grad,) = torch.autograd.grad(weighted(), weight)
        direction, step, losses = grad / grad.norm(), 3e-2, []  # in other directions, differences are inexact
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step * direction)
            losses.append(weighted().item())
            with torch.no_grad():
                weight.sub_(sign * step * direction)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx((grad * direction).sum().item(), rel=0.05)
        assert handle.graphs.calls[None] > 4

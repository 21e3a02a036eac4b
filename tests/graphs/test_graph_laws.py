"""Laws of calls that run as CUDA graphs. A law is a function, and an entry of `helpers/graph_entries.py` is a line.

Without a GPU, graphs are fake; see `helpers/cuda_graphs.py`.
"""

import contextlib
import copy
import functools
import gc
import pickle
import random
import re
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from calls import PassThrough
from cuda_graphs import DEVICE, GPU, leaves
from graph_entries import ENTRIES, FEW, HEADS, TOLERANCE, Pair, assert_close, attend, gradients, law, loss_of
from token_tiled_cases import IGNORED_WARNINGS
from torch import nn
from torch.utils import checkpoint

import nt_attention as nta
from nt_attention.graphs import cache, policy
from nt_attention.graphs.cache import CapturedCalls
from nt_attention.hf.check.first_batches import FirstBatches
from nt_attention.patching.handle import NotPackedWarning

pytestmark = [
    *IGNORED_WARNINGS,
    pytest.mark.usefixtures("cuda_graphs", "uncompared"),
    pytest.mark.filterwarnings("ignore::nt_attention.patching.handle.NotPackedWarning"),
]
TRAINING = ("training", "auto")


# What comes back


# Heads that `make test` runs: others run the code of one of these.
OF_HEADS = (
    *("roberta, RobertaForTokenClassification", "llama, LlamaForSequenceClassification", "gpt2, GPT2LMHeadModel"),
    *("modernbert, ModernBertForMaskedLM", "mistral, MistralModel"),
)


@law(
    *ENTRIES,
    *OF_HEADS,
    modes=("inference", "training"),
    more=[x for x in HEADS if x not in OF_HEADS],
    seldom=["inference"],
)
def test_results_are_those_without_graphs(pair):
    for lengths in pair.entry.batches:
        pair.check(lengths)
    pair.assert_only_graphs()
    count = len(pair.graphs)
    assert pair.entry.graphs <= count == pair.graphs.captured < pair.entry.graphs * max(3, len(pair.entry.batches))
    assert pair.graphs.memory > 0
    assert pair.handle is None or "CUDA graphs: " in str(pair.handle)
    assert pair.handle is None or pair.handle.calls.keys() <= {None}


AUTOMATIC = ("module", "encoder", "transformer", "bert", "bert, no mask", "llama", "t5")


@law(*AUTOMATIC, modes=["auto"], more=[x for x in ENTRIES if x not in AUTOMATIC])
def test_results_of_sizes_that_are_chosen_by_their_times(pair):
    for lengths in FEW:
        pair.check(lengths)
    pair.assert_only_graphs()


@law()
def test_results_stay_and_belong_to_the_caller(pair):
    """Also if inputs are changed, or come in another order."""
    pair.check()
    drawn = [pair.draw(lengths) for lengths in ([5, 2, 9], [4, 3, 8], [1, 6, 9])]
    drawn[1] = dict(reversed(drawn[1].items()))
    results = [pair.solve(pair.model, copy.deepcopy(inputs)) for inputs in drawn]
    for inputs, got in zip(drawn, results, strict=True):
        assert_close(got, pair.solve(pair.other, inputs))
        for x in leaves(got):
            x.detach().zero_()
    pair.check(drawn[0])
    pair.assert_captured(1)


@law(modes=["training"])
def test_inputs_and_outputs_changed_before_the_backward(pair):
    inputs, changed = pair.draw([5, 2, 9]), {}

    def call(model, **given):
        changed.update(given)
        return pair.entry.call(model, **given)

    want = pair.solve(pair.other, inputs)[2]
    out, _ = pair.start(pair.model, inputs, call)
    loss = loss_of(out)
    for x in [*leaves(list(changed.values())), *leaves(out)]:
        x.data.zero_()  # a tensor of another version would be an error of what computes the loss
    pair.model.zero_grad()
    loss.backward()
    assert_close(gradients(pair.model), want)


@law("module", "encoder", "bert", "transformer", "t5, embeddings", modes=["training"])
def test_nan_of_an_earlier_batch_does_not_spread(pair):
    """As after an overflow, whose step a GradScaler skips. The next batch is shorter."""
    long, short = pair.draw([9, 9, 9, 9]), pair.draw([5, 2, 9])
    bad = copy.deepcopy(long)
    for x in bad.values():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.view(-1, x.shape[-1])[-1] = torch.nan
    pair.solve(pair.model, bad)
    pair.replays += pair.entry.graphs
    pair.check(short)
    pair.assert_only_graphs()


@law("module", "encoder", "bert", "t5", modes=TRAINING)
def test_training_and_evaluation_by_turns(pair):
    for grad, train in ((True, True), (True, False), (False, False)) * 2:
        pair.grad = grad
        for model in pair.both:
            model.train(train)
        pair.check([5, 2, 9])
    pair.assert_captured(3)


# What graphs depend on


class Shifted(nn.Linear):
    """It reads a number, a function, an item of a dictionary, and a tensor that is no parameter."""

    def set_up(self):
        self.options, self.number, self.function = {"scale": 1.0}, 1.0, torch.sin
        self.shift = torch.ones(self.out_features, device=DEVICE)

    def forward(self, x):
        return self.function(super().forward(x)) * self.options["scale"] * self.number + self.shift


class Twice(Shifted):
    def forward(self, x):
        return 2 * super().forward(x)


def set_data(new):
    return lambda linear: setattr(linear.weight, "data", new(linear.weight.data))


CHANGES = {
    "weight": lambda linear: setattr(linear, "weight", nn.Parameter(torch.randn_like(linear.weight))),
    "data": set_data(torch.randn_like),
    "same memory": set_data(lambda x: x.as_strided(x.shape, (1, len(x)))),
    "number": lambda linear: setattr(linear, "number", 3.0),
    "function": lambda linear: setattr(linear, "function", torch.tanh),
    "attribute": lambda linear: setattr(linear, "anything", 1),
    "module": lambda linear: setattr(linear, "part", nn.Identity()),
    "class": lambda linear: setattr(linear, "__class__", Twice),
    "item": lambda linear: linear.options.update(scale=3.0),
    "tensor": lambda linear: setattr(linear, "shift", torch.full_like(linear.shift, 2.0)),
    "state": lambda linear: linear.load_state_dict(
        {name: torch.randn_like(x) for name, x in linear.state_dict().items()}, assign=True
    ),
    "frozen": lambda linear: linear.requires_grad_(False),
    "hooks": lambda linear: setattr(linear, "_forward_hooks", OrderedDict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@law("bert", modes=("inference", "training"), more=("module", "llama"))
def test_a_changed_module_is_captured_again(pair, change):
    for linear in pair.probes():
        linear.__class__ = Shifted
        linear.set_up()
    pair.check()
    with torch.no_grad():
        for model in pair.both:
            for x in model.parameters():
                x.mul_(1.01)
    pair.check()
    pair.assert_captured(1)  # values are read
    for linear in pair.probes():
        torch.manual_seed(5)
        change(linear)
    pair.check()
    pair.assert_captured(2)
    pair.assert_only_graphs()


def rows(model):
    table = model.get_input_embeddings()
    model.set_input_embeddings(nn.Embedding.from_pretrained(table.weight.detach().repeat(2, 1), freeze=False))


CHANGES_OF = {  # changes that only these models have, one after another
    "module": [
        lambda module: setattr(module, "softcap", 1.5),
        lambda module: setattr(module, "window_size", (2, 2)),
        lambda module: setattr(module, "scale", 0.1),
        lambda module: setattr(module, "alibi", True),
        lambda module: setattr(module, "rotation", nta.Rotary().of_head_dim(8)),
    ],
    "bert": [
        lambda model: setattr(model.config, "output_hidden_states", True),
        # 1 is not True: it asks for layer 1, in some versions
        lambda model: vars(model.config).update(output_hidden_states=1),
        lambda model: vars(model.config).update(output_hidden_states=[0, 2]),
        rows,
    ],
    "lora": [
        lambda model: model.base_model.merge_adapter(),
        lambda model: model.base_model.unmerge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
    ],
}


@law(*CHANGES_OF, modes=["inference"])
def test_a_changed_model_is_captured_again(pair):
    pair.check()
    changes = next(CHANGES_OF[name] for name in CHANGES_OF if pair.entry is ENTRIES[name])
    for count, change in enumerate(changes, 2):
        for model in pair.both:
            change(model)
        pair.check()
        pair.assert_captured(count)


@law("bert", modes=["training"])
def test_weights_tied_and_untied_in_the_same_memory(pair):
    for tied in (True, False, True):
        for model in pair.both:
            one, two = (model.encoder.layer[i].output.dense for i in (0, 1))
            two.weight = one.weight if tied else nn.Parameter(one.weight.data)
        pair.check()
    pair.assert_only_graphs()


@law("module", "bert", modes=("inference", "training"), more=("encoder", "llama"))
def test_settings_of_the_process(pair):
    for count, enabled in enumerate((False, True, False)):
        inputs = pair.draw([5, 2, 9 - count])
        found = []
        for model in pair.both:
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=enabled):
                out, _ = pair.start(model, inputs)
            model.zero_grad()
            if pair.grad:
                loss_of(out).backward()
            found.append((leaves(out), gradients(model)))
        torch.testing.assert_close(*found, rtol=0.1, atol=3e-2 if enabled else 10 * TOLERANCE)
    assert pair.graphs.calls == {None: 3}
    pair.assert_captured(2)


@law(modes=["inference"])
def test_a_module_that_changes_often_is_not_captured_each_time(pair):
    often = "the module, its parameters or its attributes change too often"
    inputs = pair.draw([5, 2, 9])
    for step in range(20):
        pair.entry.probe(pair.model).step = step
        pair.check(inputs, is_graph=step < cache.CHANGES)
    pair.assert_captured(cache.CHANGES)
    assert pair.graphs.calls[often] == 20 - cache.CHANGES
    for _ in range(20):  # it stays the same
        pair.solve(pair.model, inputs)
    pair.assert_captured(cache.CHANGES + 1)


# Calls that wait for their backward


@pytest.mark.parametrize("reverse", [False, True])
@law(modes=["training"], more=["t5"])
def test_several_calls_wait_for_their_backward(pair, reverse):
    """As in contrastive learning."""
    for _ in range(2):
        drawn, results = [pair.draw([5, 2, 9 + i]) for i in range(cache.SLOTS + 1)], []
        for model in pair.both:
            model.zero_grad()
            losses = [loss_of(pair.start(model, inputs)[0]) * (i + 1) for i, inputs in enumerate(drawn)]
            for loss in reversed(losses) if reverse else [sum(losses)]:
                loss.backward()
            results.append(gradients(model))
        assert_close(*results, times=20)
    assert pair.graphs.calls == {None: 2 * cache.SLOTS, f"{cache.SLOTS} earlier calls wait for their backward": 2}
    pair.start(pair.model, drawn[0])  # results that are dropped
    pair.check([4, 1, 8])
    assert pair.graphs.captured == cache.SLOTS


@law(modes=TRAINING)
def test_accumulated_gradients_of_results_that_are_kept(pair):
    """The results of the last call are replaced when the next one returns, as in most loops. Its backward has run."""
    drawn = [pair.draw([5, 2, 9]) for _ in range(policy.OFTEN + 3)]
    for model in pair.both:
        model.zero_grad()
        for inputs in drawn:
            out = pair.start(model, inputs)[0]
            loss = loss_of(out)
            loss.backward()
    assert_close(*map(gradients, pair.both), times=10)
    assert pair.graphs.calls[None] >= 3
    pair.assert_captured(1)


@law(modes=["training"])
def test_one_backward_of_a_call(pair):
    inputs = pair.draw([5, 2, 9])
    out = pair.start(pair.model, inputs)[0]
    loss_of(out).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can have one backward only: pass the sum of all losses to it"):
        loss_of(out).backward()
    weight = pair.entry.probe(pair.model).weight
    (grad,) = torch.autograd.grad(loss_of(pair.start(pair.model, inputs)[0]) ** 2, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    del grad
    pair.check(inputs)
    assert pair.graphs.captured == 1  # the slot is free


LATER = {
    "in place": lambda linear: linear.weight.mul_(1.5),
    "weight": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight * 0, linear.weight.requires_grad)),
    "data": set_data(torch.zeros_like),
}


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("trained", [True, False])
@law("bert", modes=["training"], more=("module", "encoder"))
def test_parameters_changed_before_the_backward(pair, change, trained):
    """Also those that get no gradient."""
    for linear in pair.probes():
        linear.weight.requires_grad_(trained)
    pair.check()
    inputs, found = pair.draw([5, 2, 9]), []
    for model in pair.both:
        model.zero_grad()
        loss = loss_of(pair.start(model, inputs)[0])
        with torch.no_grad():
            LATER[change](pair.entry.probe(model))
        gc.collect()
        if change == "in place":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            found.append(gradients(model))
    if found:
        assert_close(*found)
    del loss
    pair.check(inputs)


WHILE_IT_WAITS = {
    "clear": lambda pair: pair.graphs.clear(),
    "remove": lambda pair: pair.graphs.clear() if pair.handle is None else pair.handle.remove(),
    "evict": lambda pair: None,
    "freeze": lambda pair: [linear.requires_grad_(False) for linear in pair.probes()],
    "attribute": lambda pair: [setattr(model, "anything", 1) for model in pair.both],
}


@pytest.mark.parametrize("how", WHILE_IT_WAITS)
@law("attention", "encoder", "bert", modes=["training"], more=("module", "transformer", "llama"))
def test_a_call_that_waits_keeps_what_it_needs(pair, how, monkeypatch):
    monkeypatch.setattr(cache, "GRAPHS", 1)
    first, second = pair.draw([5, 2, 9]), pair.draw([30, 30, 40, 41, 20])
    waiting = [loss_of(pair.start(model, first)[0]) for model in pair.both]
    WHILE_IT_WAITS[how](pair)
    later = [loss_of(pair.start(model, second)[0]) for model in (pair.both if how not in ("clear", "remove") else ())]
    gc.collect()
    for losses in (waiting, later):
        for loss in losses:
            loss.backward()
    assert_close(*map(gradients, pair.both), times=20)


@law("bert", modes=["training"], more=("module", "encoder"))
def test_hooks_of_gradients_run_once(pair):
    seen = []
    pair.check()
    for linear in pair.probes():
        linear.weight.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.sum().item()))
    pair.check()
    assert len(seen) == 2
    for linear in pair.probes():
        linear.weight.register_hook(lambda grad: 2 * grad)
    pair.check()
    pair.assert_only_graphs()


@law("bert, hidden states", modes=["training"])
def test_a_backward_of_some_outputs(pair):
    """Parameters on which these do not depend have no gradient. Outputs without others may have hooks."""
    inputs = pair.draw([5, 2, 9])
    for name in ("last_hidden_state", "pooler_output"):
        found = []
        for model in pair.both:
            model.zero_grad()
            out = pair.start(model, inputs)[0][name]
            out.register_hook(lambda grad: grad / 2)
            out.square().sum().backward()
            found.append(gradients(model))
        assert_close(*found)
        assert (found[0]["pooler.dense.weight"] is None) == (name == "last_hidden_state")


@pytest.mark.parametrize("how", ["hook", "hook of freed states", "retained"])
@law("bert, hidden states", modes=["training"])
def test_gradients_of_outputs_from_which_others_are_computed(pair, how):
    """These are computed in the graph, so the gradients would miss a part."""
    out = pair.start(pair.model, pair.draw([5, 2, 9]))[0]
    hidden = out.hidden_states[0]
    if how == "retained":
        hidden.retain_grad()
    else:
        hidden.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss = out.last_hidden_state.mean() + 0.1 * hidden.square().mean()
    if "freed" in how:
        del out, hidden
    with pytest.raises(RuntimeError, match="has a hook or retains its gradient"):
        loss.backward()


@law("module, cross", modes=["training"])
def test_some_inputs_have_gradients(pair):
    drawn = {name: torch.randn(7, 32, device=DEVICE) for name in ("x", "key")}
    layouts = [nta.SequenceLayout.from_lengths(x, device=DEVICE) for x in ([5, 2], [3, 4])]
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        found = []
        for model in pair.both:
            one, two = (x.clone().requires_grad_(grad) for x, grad in zip(drawn.values(), wanted, strict=True))
            model.zero_grad()
            model(one, two, two, layout=layouts[0], key_layout=layouts[1])[0].square().sum().backward()
            found.append((one.grad, two.grad, gradients(model)))
        assert_close(*found)
    assert pair.graphs.calls == {None: 4}


# Sizes that come and go, and memory


@law(modes=("inference", "training"))
def test_the_least_recently_used_graph_is_freed(pair, monkeypatch):
    monkeypatch.setattr(cache, "GRAPHS", 2)
    for length in (5, 100, 5, 300, 5):
        pair.check([length, length])
    pair.assert_captured(3)  # that of 5 was used last when that of 300 was captured
    freed = "its graph was freed, because there are too many"
    pair.check([100, 100], is_graph=False)
    assert pair.graphs.calls == {None: 5, freed: 1}


@law("bert", modes=["inference"], more=("module", "encoder"))
def test_memory_is_bounded(pair, monkeypatch):
    monkeypatch.setattr(cache, "MEMORY", 1)
    for length in (5, 100, 300):
        pair.check([length, length])
    assert len(pair.graphs) == 1  # the one that is used stays


@law(modes=["inference"])
def test_graphs_that_are_cleared(pair):
    pair.check()
    pair.graphs.clear()
    assert len(pair.graphs) == pair.graphs.memory == 0
    pair.check()
    pair.assert_captured(2)
    if pair.handle is not None:
        pair.handle.remove()
        assert len(pair.graphs) == 0
        pair.solve(pair.model, pair.draw([5, 2, 9]))
        assert pair.graphs.calls == {None: 2}


@law(modes=("inference", "training"))
def test_models_and_copies_are_freed(pair):
    """A copy shares the handle of the model, or has its own graphs."""
    inputs = pair.draw([5, 2, 9])
    pair.solve(pair.model, inputs)
    freed = []
    for refused in (False, True):
        copied = copy.deepcopy(pair.model)
        if refused:
            next(copied.children()).register_forward_hook(lambda *args: None)
        pair.solve(copied, inputs)
        freed += [weakref.ref(copied), weakref.ref(pair.entry.probe(copied).weight)]
    del copied
    gc.collect()
    pair.solve(pair.model, inputs)
    assert len(pair.graphs) == 1
    freed.append(weakref.ref(pair.model))
    pair.model = None
    gc.collect()
    assert not any(reference() is not None for reference in freed)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "pickle"])
@law(modes=["inference", "auto"])
def test_copies_have_graphs_of_their_own(pair, copier):
    pair.check()
    pair.model, graphs = copier(pair.model), pair.graphs
    if pair.handle is None:
        pair.graphs = pair.model.graphs
        assert pair.graphs is not graphs
        assert pair.graphs.is_automatic == graphs.is_automatic
    else:
        pair.graphs = pair.model.forward.handle.graphs
    with torch.no_grad():
        for linear in pair.probes():
            linear.weight.mul_(2)
    pair.check()
    assert isinstance(pair.graphs, CapturedCalls)


# Calls that can't run as graphs: they run as without them, and are counted


@dataclass(frozen=True, kw_only=True)
class Reason:
    """
    Attributes:
        text: a regular expression of the reasons.
        change: changes both models of a pair.
        around: a context of the calls.
        call: of a model and inputs, in place of that of the entry.
        entry, mode: which pair.
        lengths: of the batch.
    """

    text: str
    change: object = lambda model, linear: None
    around: object = contextlib.nullcontext
    call: object = None
    entry: str = "bert"
    mode: str = "training"
    lengths: tuple = (5, 2, 9)


def before(function):
    """A change: the linear layer calls this first."""

    def change(model, linear):
        once = linear.forward

        def forward(x):
            function(linear, x)
            return once(x)

        linear.forward = forward

    return change


def adds_a_leaf(model, linear):
    leaf, once = torch.zeros(linear.out_features, device=DEVICE, requires_grad=True), linear.forward
    linear.forward = lambda x: once(x) + leaf


def adds_a_leaf_to_frozen(model, linear):
    model.requires_grad_(False)
    adds_a_leaf(model, linear)


def checkpointed(model, linear):
    once = linear.forward
    linear.forward = lambda x: checkpoint.checkpoint(once, x, use_reentrant=True)


def keeps(model, linear):
    """In a list of a closure. Those of attributes are taken back."""
    kept = []
    before(lambda linear, x: kept.append(linear.weight.square().sum()))(model, linear)


def has_statistics(model, linear):
    """Functions of normalization change them without increasing their version."""
    mean, once = torch.zeros(linear.out_features, device=DEVICE), linear.forward
    linear.register_buffer("mean", mean)
    linear.register_buffer("var", torch.ones_like(mean))

    def forward(x):
        x = once(x)
        out = nn.functional.batch_norm(x.flatten(0, -2), linear.mean, linear.var, training=True)
        return out.view_as(x)

    linear.forward = forward


def counts_calls(model, linear):
    linear.register_buffer("calls", torch.zeros(1, device=DEVICE))
    before(lambda linear, x: linear.calls.add_(1))(model, linear)


def with_hook(kind):
    return lambda model, linear: getattr(linear, f"register_{kind}_hook")(lambda *args: None)


def in_checkpoint(reentrant):
    def call(m, input_ids, attention_mask):
        embeds = m.get_input_embeddings()(input_ids)
        return checkpoint.checkpoint(
            lambda x: m(inputs_embeds=x, attention_mask=attention_mask).last_hidden_state,
            embeds, use_reentrant=reentrant,
        )  # fmt: skip

    return call


@contextlib.contextmanager
def global_hook():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    yield
    handle.remove()


CHANGES_ITSELF = "its forward changes attributes or buffers of a module"
AFTER = (
    "in a backward, as the second forward|hooks on saved tensors, as in a checkpoint|training mode, without gradients"
)
REASONS = {
    "gradients": Reason(text="gradients are enabled", mode="inference", around=torch.enable_grad),
    "training mode": Reason(text="training mode, without gradients", around=torch.no_grad),
    "forward hook": Reason(text="a module has forward hooks", change=with_hook("forward")),
    "backward hook": Reason(text="a module has backward hooks", change=with_hook("full_backward")),
    "global hook": Reason(text="there are global hooks of modules", around=global_hook),
    "dispatch mode": Reason(text="a dispatch mode or a transform", around=PassThrough),
    "anomalies": Reason(
        text="anomalies are detected", around=lambda: torch.autograd.detect_anomaly(check_nan=False)
    ),
    "parametrizations": Reason(
        text="values of parametrizations are cached",
        change=lambda model, linear: nn.utils.parametrizations.weight_norm(linear),
        around=nn.utils.parametrize.cached,
    ),
    "checkpoint": Reason(text=AFTER, call=in_checkpoint(False)),
    "reentrant checkpoint": Reason(text=AFTER, call=in_checkpoint(True)),
    "checkpoint in a layer": Reason(text="its backward can't be captured", change=checkpointed),
    "backward in the forward": Reason(
        text="a backward ran in its forward",
        change=before(lambda linear, x: torch.nn.Linear.forward(linear, x.detach()).sum().backward()),
    ),
    "another leaf": Reason(text="tensors that are no parameters of the module", change=adds_a_leaf),
    "another leaf, frozen": Reason(text="tensors that are no parameters of the module", change=adds_a_leaf_to_frozen),
    "random": Reason(text="draws random numbers on the host", change=before(lambda linear, x: random.random())),
    "keeps tensors": Reason(text="keeps tensors that it computes", change=keeps),
    "statistics": Reason(text=CHANGES_ITSELF, change=has_statistics),
    "buffer": Reason(text=CHANGES_ITSELF, change=counts_calls, mode="inference"),
    "attribute": Reason(text=CHANGES_ITSELF, change=before(lambda linear, x: setattr(linear, "last", x))),
    "replica": Reason(
        text="a replica of DataParallel", mode="inference",
        call=lambda m, **inputs: m._replicate_for_data_parallel()(**inputs),
    ),
    "positions": Reason(
        text="a graph can't take position_ids",
        call=lambda m, **inputs: m(**inputs, position_ids=torch.arange(11, device=DEVICE)[None]),
    ),
    "encoder outputs": Reason(
        text="a graph can't take encoder_outputs", entry="t5, target",
        call=lambda m, input_ids, **inputs: m(encoder_outputs=(m.shared(input_ids),), **inputs),
    ),
    "layers that are left out": Reason(
        text="draws random numbers on the host|reads values on the host", entry="bart",
        change=lambda model, linear: setattr(model.model.encoder, "layerdrop", 1e-9),
    ),
    "forward replaced": Reason(
        text="its forward was replaced", entry="llama",
        change=lambda model, linear: setattr(model.model, "forward", functools.partial(model.model.forward)),
    ),
    "rope by length": Reason(
        text="needs the lengths on the host", entry="rope by length", mode="inference", lengths=(12, 3, 5)
    ),
    "no tokens": Reason(text="the batch has no tokens", entry="module", lengths=(0, 0)),
    "module, gradients": Reason(text="gradients are", entry="module", mode="inference", around=torch.enable_grad),
    "module, mask": Reason(
        text="it has a mask_mod or a score_mod", entry="module",
        call=lambda m, **inputs: attend(m, **inputs, mask_mod=lambda b, h, i, j: i >= j),
    ),
    "encoder, gradients": Reason(text="gradients are", entry="encoder", mode="inference", around=torch.enable_grad),
    "encoder, training mode": Reason(text="training mode", entry="encoder", around=torch.no_grad),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_call_that_is_no_graph_is_counted(name, monkeypatch):
    """A capture is tried once."""
    row = REASONS[name]
    pair = Pair(row.entry, row.mode)
    for model, linear in zip(pair.both, pair.probes(), strict=True):
        row.change(model, linear)
    pair.grad = row.around is torch.enable_grad or (pair.grad and row.around is not torch.no_grad)
    inputs = pair.draw(list(row.lengths))
    context = row.around if row.around not in (torch.enable_grad, torch.no_grad) else contextlib.nullcontext
    for _ in range(2):
        with context(), nta.use_backend("reference") if "mask" in name else contextlib.nullcontext():
            pair.check(inputs, row.call, is_graph=False)
        monkeypatch.setattr(cache, "capture", None)  # calling it is an error
    assert len(pair.graphs) == 0
    assert None not in pair.graphs.counted()
    assert all(re.search(row.text, reason) for reason in pair.graphs.counted()), pair.graphs.calls
    assert pair.graphs.calls.total() == (4 if row.text == AFTER else 2)  # a checkpoint has two forwards


@law("bart", modes=["training"])
def test_layers_that_are_left_out_at_a_rate_of_0(pair):
    """Some versions of transformers draw a number for each of them, and do not use it."""
    inputs, state = pair.draw([5, 2, 9]), torch.get_rng_state()
    pair.solve(pair.other, inputs)
    for model in pair.both if torch.equal(state, torch.get_rng_state()) else ():
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            before(lambda linear, x: torch.rand(()))(model, layer.fc1)
    pair.check(inputs)


@law("bert", modes=("inference", "training"))
def test_a_refused_capture_leaves_the_module_as_it_was(pair):
    """Attributes, lists in them and statistics."""

    def forward(x, linear, once):
        linear.calls.append(len(x))
        linear.count += 1
        return linear.norm(once(x).transpose(1, 2)).transpose(1, 2)

    for linear in pair.probes():
        linear.norm, linear.calls, linear.count = nn.BatchNorm1d(linear.out_features, device=DEVICE), [], 0
        linear.forward = functools.partial(forward, linear=linear, once=linear.forward)
        linear.norm.train()
    ids = torch.randint(5, tiny.VOCABULARY, (1, 4)).to(DEVICE)  # without padding, it is tried for a cache
    for step, inputs in enumerate(({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, pair.draw([5]))):
        pair.check(inputs, is_graph=False)
        one, two = pair.probes()
        assert_close(one.norm.state_dict(), two.norm.state_dict())
        assert one.calls == two.calls == [1] * (step + 1)
        assert one.count == two.count == step + 1
    assert pair.graphs.calls == {CHANGES_ITSELF: 2}


@law("bert", modes=("inference", "training"))
def test_a_refused_capture_draws_no_random_numbers(pair):
    for model, linear in zip(pair.both, pair.probes(), strict=True):
        before(lambda linear, x: (random.random(), np.random.rand(), torch.rand(())))(model, linear)
    inputs, next_numbers = pair.draw([5, 2, 9]), []
    for model in pair.both:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        pair.solve(model, inputs)
        next_numbers.append((random.random(), np.random.rand(), torch.rand(())))
    assert next_numbers[0] == next_numbers[1]
    assert pair.graphs.calls == {"its forward draws random numbers on the host": 1}


@law("bert", modes=["inference"])
def test_refused_work_is_not_tried_again_until_graphs_are_cleared(pair):
    calls = []
    for linear in pair.probes():
        before(lambda linear, x: (calls.append(None), setattr(linear, "last", x)))(None, linear)
    pair.check(is_graph=False)
    tried = len(calls)
    assert tried > 2
    pair.check(is_graph=False)
    assert len(calls) == tried + 2
    pair.graphs.clear()
    pair.check(is_graph=False)
    assert len(calls) == 2 * tried + 2


def out_of_memory(*args):
    raise torch.OutOfMemoryError("no memory")


TOO_LARGE = {
    f"its inputs and outputs take more than {1e4 / 2**30:g} GiB": ("nt_attention.graphs.capture.LARGEST", 10_000),
    "there was no memory to capture it": ("nt_attention.graphs.cache.Slot.capture", out_of_memory),
}


@pytest.mark.parametrize("reason", TOO_LARGE)
@law("bert", modes=["inference"])
def test_a_batch_that_is_too_large(pair, reason, monkeypatch):
    """Smaller batches are captured all the same."""
    with monkeypatch.context() as patched:
        patched.setattr(*TOO_LARGE[reason])
        pair.check([100, 100], is_graph=False)
    pair.check([100, 100], is_graph=False)
    pair.check([5, 2])
    assert pair.graphs.calls == {None: 1, reason: 2}


@law("bert", modes=["training"])
def test_a_backward_of_another_thread_during_a_capture(pair):
    """The module has aliases of its parameters meanwhile, so the gradients would be lost."""
    linear, errors = pair.probes()[0], []
    once, ones = linear.forward, torch.ones(3, linear.in_features, device=DEVICE)

    def backward():
        try:
            once(ones).square().sum().backward()
        except Exception as error:
            errors.append(str(error))

    def forward(x):
        if not errors:  # in a list of this function, so the forward does not change the module
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        return once(x)

    linear.forward = forward
    pair.check()
    assert "in another thread while it was captured" in errors[0]


@law("bert", "module", "encoder", modes=TRAINING)
def test_nothing_requires_a_gradient(pair):
    for model in pair.both:
        model.requires_grad_(False)
    inputs = pair.draw([5, 2, 9])
    for _ in range(policy.OFTEN + 1):
        pair.grad = True
        got, want = ([x.detach() for x in leaves(pair.entry.call(model, **inputs))] for model in pair.both)
        assert_close(got, want)
    assert pair.graphs.calls[None] == (policy.OFTEN + 1 if pair.mode == "training" else 1)


@law("llama", "t5, target", modes=("inference", "training"))
def test_a_batch_without_padding_returns_a_cache(pair):
    """As without graphs. The model is called once to know that. Without a cache such a batch runs as a graph."""
    inputs, counted = {"input_ids": torch.randint(5, tiny.VOCABULARY, (2, 4)).to(DEVICE)}, []
    if pair.model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    for model in pair.both:
        before(lambda linear, x, model=model: counted.append(model))(model, pair.entry.probe(model))
    for model in pair.both:
        model.config.use_cache = True
        with torch.set_grad_enabled(pair.grad):
            outs = [model(**inputs) for _ in range(2)]
        assert all("past_key_values" in out for out in outs)
    assert counted.count(pair.model) == counted.count(pair.other) + 1
    pair.check(inputs | {"attention_mask": torch.ones_like(inputs["input_ids"]), "use_cache": False})
    assert pair.graphs.calls == {None: 1, "it has no padding, so the model returns a cache: pass use_cache=False": 2}


@pytest.mark.parametrize("name", ["mistral, MistralModel", "t5, target"])
def test_holes(name):
    pair = Pair(name, "inference")  # windows count positions
    inputs = pair.draw([5, 2, 9])
    inputs.pop("labels", None)
    inputs["attention_mask"][0, 1] = 0
    pair.solve(pair.model, inputs)
    assert list(pair.graphs.calls) == ["its rows have padding between tokens"]


@law("t5", "bart", modes=["inference"])
def test_generation(pair):
    """The encoder runs as a graph. Decoding has a cache."""
    inputs = pair.draw([5, 2, 9])
    del inputs["labels"]
    got, want = (model.generate(**inputs, max_new_tokens=3, do_sample=False) for model in pair.both)
    assert torch.equal(got, want)
    assert pair.graphs.calls == {None: 1}


def test_fallbacks_and_errors():
    pair = Pair("encoder", "inference")
    inputs = pair.draw([5, 2, 9])
    mask = torch.rand(11, 11, device=DEVICE) > 0.5
    mask.fill_diagonal_(False)
    with pytest.warns(NotPackedWarning):
        pair.check(inputs, lambda m, x, padding: m(x, mask=mask, src_key_padding_mask=padding), is_graph=False)
    assert pair.graphs.calls == {}
    pair = Pair("module, padded", "inference")
    inputs = pair.draw([5, 2, 9])
    pair.check(inputs, lambda m, x, padding: m(x, x, x, key_padding_mask=padding), is_graph=False)  # it needs weights
    assert pair.graphs.calls == {}
    module, x = Pair("module", "inference").model, torch.randn(8, 32, device=DEVICE)
    layouts = [nta.SequenceLayout.from_lengths(n, device=DEVICE) for n in ([2, 6, 0], [5, 1, 1, 1])]
    with torch.no_grad(), pytest.raises(ValueError, match="3 sequences and key_layout 4"):
        module(x, x, x, layout=layouts[0], key_layout=layouts[1])
    for value in (1, None, "never"):
        with pytest.raises(ValueError, match=f'True, False, "training" or "auto", got {value!r}'):
            nta.patch(nn.TransformerEncoderLayer(8, 2), cuda_graphs=value)


@pytest.mark.skipif(GPU, reason="it is about machines without a GPU")
def test_a_cpu(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(FirstBatches, "_is_due", lambda *args: False)
    for name in ("bert", "module"):
        pair = Pair(name, "inference")
        pair.check(is_graph=False)
        assert list(pair.graphs.calls) == ["the inputs are not on a CUDA device"]

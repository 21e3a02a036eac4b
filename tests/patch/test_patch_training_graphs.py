"""`patch(cuda_graphs="training")`: results and gradients are those of packed calls, for any lengths.

Without a GPU, graphs are fake; see `helpers/cuda_graphs.py`.

Dimensions: B rows of a padded batch, L positions in a row.
"""

import copy
import gc
import random
import threading
import weakref

import peft
import pytest
import tiny
import torch
from cuda_graphs import DEVICE, GPU, assert_same, cuda_graphs  # noqa: F401
from graphs import with_layers
from sweeps import sweep_except
from token_tiled_cases import IGNORED_WARNINGS
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx
from torch.utils import checkpoint

import nt_attention as nta
from nt_attention.graphs import cache as graph_cache
from nt_attention.hf.families import CACHE

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs", "uncompared")]

TOLERANCE = 2e-3 if GPU else 1e-4  # matrix products of other sizes run other kernels
TYPES = ("gpt2", "llama", "modernbert", "roberta", "esm", "gemma2", "albert", "mistral", "qwen3", "bert")
HEADS = [(model_type, name) for model_type in TYPES for name in tiny.classes(model_type)]
BATCHES = ([5, 2, 9], [1], [3, 3, 3, 3, 3], [9, 0, 4], [16, 17], [5, 2, 9])


def make(model_type="bert", name="BertModel", **more):
    implementation = "eager" if model_type == "gemma2" else "sdpa"
    return tiny.make(model_type, name, implementation=implementation, **more).to(DEVICE).train()


def batch_of(lengths, *, labels=False):
    lengths = torch.tensor(lengths)[:, None]
    mask = torch.arange(int(lengths.max()) + 2) < lengths
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}
    return batch | ({"labels": batch["input_ids"] % 3} if labels else {})


def pair(model):
    """The model with graphs, its handle, and a copy that packs without them."""
    other = copy.deepcopy(model)
    nta.patch(other, packing="always")
    return model, nta.patch(model, packing="always", cuda_graphs="training"), other


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)


class Block(nn.Module):
    """Attention that the patch replaces."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True, device=DEVICE)
        self.linear = nn.Linear(32, 32, device=DEVICE)

    def forward(self, x, padding):
        out = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return (x + self.linear(out)).masked_fill(padding[..., None], 0)


def rows(lengths, width=32):
    """A padded batch, and True at padding."""
    padding = (torch.arange(max(lengths) + 2) >= torch.tensor(lengths)[:, None]).to(DEVICE)
    return torch.randn(*padding.shape, width, device=DEVICE), padding


def loss_of(out):
    """The loss, or a number that depends on all outputs."""
    if "loss" in out:
        return out["loss"]
    values = (x for name, x in out.items() if name not in CACHE)
    tensors = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return sum((x * torch.linspace(0.5, 1.5, x.shape[-1], device=x.device)).sum() for x in tensors)


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters()}


def solve(model, batch, **more):
    """The outputs, and the gradients of the parameters."""
    model.zero_grad()
    out = model(**batch, **more)
    loss_of(out).backward()
    return {name: x for name, x in out.items() if name not in CACHE}, gradients(model)


def check(model, other, batch, **more):
    got, want = (solve(x, batch, **more) for x in (model, other))
    assert got[0].keys() == want[0].keys()
    torch.testing.assert_close(got, want, rtol=10 * TOLERANCE, atol=TOLERANCE)


class TestResults:
    def test_batches_of_other_lengths(self):
        model, handle, other = pair(make())
        for lengths in BATCHES:
            check(model, other, batch_of(lengths))
        assert handle.calls == handle.graphs.calls == {None: len(BATCHES)}
        assert 1 <= handle.graphs.captured == len(handle.graphs) < len(BATCHES)

    @pytest.mark.parametrize(
        ("model_type", "name"), sweep_except(HEADS, ("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM"))
    )
    def test_every_head(self, model_type, name):
        model, handle, other = pair(make(model_type, name))
        labels = name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel", "TokenClassification"))
        for lengths in ([5, 2, 9], [8, 16, 1, 4]):
            check(model, other, batch_of(lengths, labels=labels), output_hidden_states=not labels)
        assert handle.graphs.calls == {None: 2}, handle

    @pytest.mark.parametrize("items", [7, 7.5, torch.tensor(7), torch.tensor([7.0])], ids=str)
    def test_number_of_items_in_the_batch(self, items):
        """It is another number in each batch, but not another graph."""
        model, handle, other = pair(make("llama", "LlamaForCausalLM"))
        for scale in (1, 2):
            check(model, other, batch_of([5, 2, 9], labels=True), num_items_in_batch=items * scale)
        assert handle.graphs.calls == {None: 2}
        assert handle.graphs.captured == 1

    def test_logits(self):
        model = make("llama", "LlamaForCausalLM")
        other = copy.deepcopy(model)
        nta.patch(other, packing="always")
        handle = nta.patch(model, packing="always", cuda_graphs="training")
        batch, found = batch_of([5, 2, 9], labels=True), []
        for each in (model, other):
            each.zero_grad()
            out = each(**batch)
            (out.logits.float().square().mean() + out.loss).backward()
            found.append((out.logits, gradients(each)))
        assert found[0][0].shape == (3, 11, tiny.VOCABULARY)
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_logits_of_a_batch_without_padding(self):
        """Without a graph, nothing is packed."""
        model, handle, other = pair(make("bert", "BertForMaskedLM"))
        ids = torch.randint(5, tiny.VOCABULARY, (2, 4)).to(DEVICE)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        results = []
        for each in (model, other):
            out = each(**batch)
            assert out.logits.shape[:2] == (2, 4)
            (out.loss + out.logits.square().mean()).backward()
            results.append((out.loss, out.logits, gradients(each)))
        torch.testing.assert_close(*results, rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_embeddings_with_gradients(self):
        model, handle, other = pair(make())
        for lengths in ([5, 2, 9], [4, 1, 8]):
            batch, found = batch_of(lengths), []
            ids = batch.pop("input_ids")
            values = torch.randn(*ids.shape, 48, device=DEVICE)
            for each in (model, other):
                embeds = values.clone().requires_grad_()
                found.append((solve(each, batch | {"inputs_embeds": embeds}), embeds.grad))
            torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 2}
        assert handle.graphs.captured == 1

    def test_frozen_parameters(self):
        model = make("llama", "LlamaForCausalLM")
        for x in model.model.layers[0].parameters():
            x.requires_grad_(False)
        model, handle, other = pair(model)
        batch = batch_of([5, 2, 9], labels=True)
        check(model, other, batch)
        for each in (model, other):
            each.model.layers[0].requires_grad_(True)
            each.model.layers[1].requires_grad_(False)
        check(model, other, batch)
        assert handle.graphs.calls == {None: 2}
        assert handle.graphs.captured == 2

    def test_nothing_requires_a_gradient(self):
        model, handle, other = pair(make().requires_grad_(False))
        batch = batch_of([5, 2, 9])
        got, want = model(**batch), other(**batch)
        assert_same(got, want, TOLERANCE)
        assert not got.last_hidden_state.requires_grad
        assert handle.graphs.calls == {None: 1}

    def test_lora(self):
        config = peft.LoraConfig(target_modules=["query", "dense"], init_lora_weights=False, r=2)
        base = make()
        model = peft.get_peft_model(base, config)
        other = copy.deepcopy(model)
        nta.patch(other.get_base_model(), packing="always")
        handle = nta.patch(base, packing="always", cuda_graphs="training")
        for lengths in ([5, 2, 9], [4, 1, 8]):
            check(model, other, batch_of(lengths))
        assert handle.graphs.calls == {None: 2}

    def test_autocast(self):
        model, handle, other = pair(make("bert", "BertForMaskedLM"))
        for lengths in ([5, 2, 9], [4, 1, 8]):
            batch, found = batch_of(lengths, labels=True), []
            for each in (model, other):
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                    out = each(**batch)
                each.zero_grad()
                out.loss.backward()
                found.append((out.loss, gradients(each)))
            torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=2e-2)
        assert handle.graphs.calls == {None: 2}

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
    def test_many_steps(self, kind):
        model, handle, other = pair(make("llama", "LlamaForCausalLM"))
        optimizers = [kind(x.parameters(), lr=1e-3) for x in (model, other)]
        torch.manual_seed(3)
        for _ in range(6):
            lengths = torch.randint(1, 20, (int(torch.randint(1, 6, ())),)).tolist()
            batch, losses = batch_of(lengths, labels=True), []
            for each, optimizer in zip((model, other), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(each(**batch)["loss"])
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(losses[0], losses[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 6}

    @pytest.mark.fresh_process
    @pytest.mark.filterwarnings("ignore:.*logging.getLogger")
    @pytest.mark.parametrize("model_type", sweep_except(["bert", "llama"], "llama"))
    def test_compiled(self, model_type):
        torch._dynamo.reset()
        name = "BertForMaskedLM" if model_type == "bert" else "LlamaForCausalLM"
        model, handle, other = pair(with_layers(make(model_type, name), 1).to(DEVICE).train())
        made = []

        def backend(graph, inputs):
            made.append(graph)
            return (compile_fx if GPU else aot_eager)(graph, inputs)

        compiled = torch.compile(model, backend=backend, dynamic=True)
        for lengths in (*BATCHES, [40, 2], [70, 60, 4]):
            batch = batch_of([max(2, length) for length in lengths], labels=True)  # one token has no next one
            got, want = solve(compiled, batch), solve(other, batch)
            torch.testing.assert_close(got[0], want[0], rtol=10 * TOLERANCE, atol=TOLERANCE)
            for one, two in zip(got[1].values(), want[1].values(), strict=True):
                torch.testing.assert_close(one, two, rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 8}
        assert len(made) <= 4
        torch._dynamo.reset()


class TestBackwards:
    def test_accumulated_gradients(self):
        model, handle, other = pair(make())
        batches = [batch_of(lengths) for lengths in ([5, 2, 9], [4, 3, 8], [1, 7])]
        for each in (model, other):
            each.zero_grad()
            for batch in batches:
                loss_of(each(**batch)).backward()
        torch.testing.assert_close(gradients(model), gradients(other), rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 3}

    @pytest.mark.parametrize("reverse", [False, True])
    def test_several_calls_before_their_backward(self, reverse):
        """As in contrastive learning. Four of them can wait."""
        model, handle, other = pair(make())
        for _ in range(2):
            batches, results = [batch_of([5, 2, 9 + i]) for i in range(5)], []
            for each in (model, other):
                each.zero_grad()
                losses = [loss_of(each(**batch)) * (i + 1) for i, batch in enumerate(batches)]
                for loss in reversed(losses) if reverse else [sum(losses)]:
                    loss.backward()
                results.append(gradients(each))
            torch.testing.assert_close(results[0], results[1], rtol=20 * TOLERANCE, atol=10 * TOLERANCE)
        assert handle.graphs.calls == {None: 8, "4 earlier calls wait for their backward": 2}
        model(**batch_of([5, 2, 9]))  # results that are dropped
        check(model, other, batch_of([4, 1, 8]))
        assert handle.graphs.calls[None] == 10
        assert handle.graphs.captured == 4

    def test_results_of_the_last_step_are_kept(self):
        """As in most loops: they are replaced when the next forward returns. Their backward has run."""
        model, handle, _ = pair(make())
        for _ in range(3):
            out = model(**batch_of([5, 2, 9]))
            loss = loss_of(out)
            loss.backward()
        assert handle.graphs.calls == {None: 3}
        assert handle.graphs.captured == 1

    def test_two_backwards_of_a_call(self):
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        out = model(**batch)
        out.last_hidden_state.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="can have one backward only: pass the sum of all losses to it"):
            out.pooler_output.sum().backward()
        check(model, other, batch)
        assert handle.graphs.captured == 1  # the slot is free

    def test_a_backward_of_some_outputs(self):
        model, _, other = pair(make())
        batch = batch_of([5, 2, 9])
        for name in ("last_hidden_state", "pooler_output"):
            found = []
            for each in (model, other):
                each.zero_grad()
                each(**batch)[name].square().sum().backward()
                found.append(gradients(each))
            torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)  # None too

    def test_second_derivatives(self):
        model, _, _ = pair(make())
        weight = model.encoder.layer[0].output.dense.weight
        loss = model(**batch_of([5, 2, 9])).last_hidden_state.square().sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_gradients_stay_valid(self):
        model, _, other = pair(make())
        batches, found = [batch_of(lengths) for lengths in ([5, 2, 9], [4, 3, 8])], []
        parameters = dict(model.named_parameters())
        for batch in batches:
            loss = loss_of(model(**batch))
            found.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
        for batch, grads in zip(batches, found, strict=True):
            _, want = solve(other, batch)
            got = dict(zip(parameters, grads, strict=True))
            torch.testing.assert_close(got, want, rtol=10 * TOLERANCE, atol=TOLERANCE)

    def test_parameters_changed_in_place_before_the_backward(self):
        model, _, other = pair(make())
        loss = loss_of(model(**batch_of([5, 2, 9])))
        with torch.no_grad():
            model.encoder.layer[1].output.dense.weight.mul_(1.5)
            other.encoder.layer[1].output.dense.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        check(model, other, batch_of([5, 2, 9]))

    def test_inputs_and_outputs_changed_in_place(self):
        model, _, other = pair(make())
        batch = batch_of([5, 2, 9])
        want = solve(other, batch)[1]
        model.zero_grad()
        given = copy.deepcopy(batch)
        out = model(**given)
        loss = loss_of(out)
        given["input_ids"].zero_()
        given["attention_mask"].zero_()
        out.last_hidden_state.detach().zero_()
        loss.backward()
        torch.testing.assert_close(gradients(model), want, rtol=10 * TOLERANCE, atol=TOLERANCE)

    def test_hooks_of_gradients(self):
        """They run once, when the backward has returned the gradients."""
        model, handle, other = pair(make())
        batch, seen = batch_of([5, 2, 9]), []
        check(model, other, batch)
        for each in (model, other):
            weight = each.encoder.layer[0].output.dense.weight
            weight.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.sum().item()))
        check(model, other, batch)
        assert len(seen) == 2
        for each in (model, other):
            each.encoder.layer[0].output.dense.weight.register_hook(lambda grad: 2 * grad)
        check(model, other, batch)
        assert handle.graphs.calls == {None: 3}

    @pytest.mark.parametrize("how", ["hook", "hook of freed states", "retained"])
    def test_gradients_of_hidden_states_beside_the_last_ones(self, how):
        """The last ones are computed from them in the graph, so they would miss a part."""
        model, _, _ = pair(make("bert", "BertModel"))
        out = model(**batch_of([5, 2, 9]), output_hidden_states=True)
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

    def test_hooks_of_logits_without_the_loss(self):
        model, handle, other = pair(make("bert", "BertForMaskedLM"))
        batch, seen = batch_of([5, 2, 9], labels=True), []
        for each in (model, other):
            out = each(**batch)
            out.logits.register_hook(lambda grad: seen.append(grad) or grad / 2)
            out.logits.square().mean().backward()
        torch.testing.assert_close(*seen, rtol=10 * TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(gradients(model), gradients(other), rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: 1}

    def test_models_are_freed(self):
        model, _, _ = pair(make())
        loss_of(model(**batch_of([5, 2, 9]))).backward()
        out = model(**batch_of([5, 2, 9]))
        freed = weakref.ref(model)
        del model, out, _
        gc.collect()
        assert freed() is None

    @pytest.mark.parametrize("how", ["clear", "remove", "evict", "freeze", "attribute"])
    @pytest.mark.parametrize("kind", ["attention", "encoder", "bert"])
    def test_a_call_that_waits_keeps_what_it_needs(self, kind, how, monkeypatch):
        model, handle, other = pair({"attention": Block, "encoder": encoder, "bert": make}[kind]())

        def start(each, lengths):
            torch.manual_seed(sum(lengths))
            if kind == "bert":
                return each(**batch_of(lengths)).last_hidden_state.square().sum()
            x, padding = rows(lengths)
            out = each(x, padding) if kind == "attention" else each(x, src_key_padding_mask=padding)
            return out.square().sum()

        losses = [[start(each, [5, 2, 9])] for each in (model, other)]
        if how == "clear":
            handle.graphs.clear()
        elif how == "remove":
            handle.remove()
        else:
            monkeypatch.setattr(graph_cache, "GRAPHS", 1)
            for each, waiting in zip((model, other), losses, strict=True):
                if how == "freeze":
                    next(x for x in each.modules() if isinstance(x, nn.Linear)).requires_grad_(False)
                elif how == "attribute":
                    each.anything = 1
                waiting.append(start(each, [30, 30, 40, 41, 20]))
        gc.collect()
        for waiting in losses:
            sum(waiting).backward()
        torch.testing.assert_close(gradients(model), gradients(other), rtol=20 * TOLERANCE, atol=20 * TOLERANCE)

    def test_backward_of_another_thread_during_a_capture(self):
        """The module has aliases of its parameters meanwhile, so the gradients would be lost."""
        model, _, other = pair(make())
        dense, errors = model.encoder.layer[0].output.dense, []
        once, ones = dense.forward, torch.ones(3, dense.in_features, device=DEVICE)

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

        dense.forward = forward
        check(model, other, batch_of([5, 2, 9]))
        assert "in another thread while it was captured" in errors[0]

    @pytest.mark.parametrize("how", ["in place", "replaced", "data"])
    def test_frozen_parameters_changed_before_the_backward(self, how):
        base = make()
        for name, x in base.named_parameters():
            x.requires_grad_("layer.0" in name)
        model, _, other = pair(base)
        batch, found = batch_of([5, 2, 9]), []
        check(model, other, batch)
        for each in (model, other):
            each.zero_grad()
            loss = loss_of(each(**batch))
            dense = each.encoder.layer[1].output.dense
            with torch.no_grad():
                if how == "in place":
                    dense.weight.mul_(1.5)
                elif how == "replaced":
                    dense.weight = nn.Parameter(torch.zeros_like(dense.weight), requires_grad=False)
                else:
                    dense.weight.data = torch.zeros_like(dense.weight)
            gc.collect()
            if how == "in place":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
            found.append(gradients(each))
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)

    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_tied_and_untied_in_the_same_memory(self, tied):
        model, handle, other = pair(make("bert", "BertForMaskedLM"))
        batch = batch_of([5, 2, 9], labels=True)
        for now in (tied, not tied, tied):
            for each in (model, other):
                embedding = each.bert.embeddings.word_embeddings.weight
                each.cls.predictions.decoder.weight = embedding if now else nn.Parameter(embedding.data)
            check(model, other, batch)
        assert handle.graphs.calls == {None: 3}

    def test_nan_of_an_earlier_batch(self):
        """As after an overflow, whose step a GradScaler skips. The next batch is shorter."""
        for made in (encoder, Block):
            model, handle, other = pair(made())
            x, padding = rows([9, 9, 9, 9])
            x[3, 8] = float("nan")
            short = rows([5, 2, 9])
            for each in (model, other):
                for given in ((x, padding), short):
                    each.zero_grad()
                    given = {"src_key_padding_mask": given[1]} if made is encoder else {"padding": given[1]}, given[0]
                    each(given[1], **given[0]).square().sum().backward()
            torch.testing.assert_close(gradients(model), gradients(other), rtol=10 * TOLERANCE, atol=TOLERANCE)
            assert handle.graphs.calls == {None: 2}

    def test_training_and_evaluation_by_turns(self):
        model, handle, other = pair(make())
        for _ in range(3):
            check(model.train(), other.train(), batch_of([5, 2, 9]))
            with torch.no_grad():
                batch = batch_of([5, 2, 9])
                assert_same(model.eval()(**batch), other.eval()(**batch), TOLERANCE)
        assert handle.graphs.captured == 2


class TestMore:
    def test_first_batch_without_padding_changes_nothing_more(self):
        """It shows whether the model returns a cache."""
        model, _, other = pair(make())
        ids = torch.randint(5, tiny.VOCABULARY, (2, 4)).to(DEVICE)
        calls = []
        for each in (model, other):
            each.counted = []
            once = each.encoder.forward
            each.encoder.forward = lambda *args, once=once, each=each, **kwargs: (
                each.counted.append(1),
                once(*args, **kwargs),
            )[1]
            each(input_ids=ids, attention_mask=torch.ones_like(ids))
            calls.append(len(each.counted))
        assert calls == [1, 1]


class TestReasons:
    """Calls that can't run as graphs run as without them, and are counted."""

    def check(self, reason, model=None, batch=None, change=None):
        model, handle, other = pair(make() if model is None else model)
        for each in (model, other):
            if change is not None:
                change(each)
        check(model, other, batch_of([5, 2, 9]) if batch is None else batch)
        assert [x for x in handle.graphs.calls if x is not None and reason in x], handle
        assert None not in handle.graphs.calls

    def test_module_hooks(self):
        def backward_hook(model):
            model.encoder.layer[1].register_full_backward_hook(lambda module, grads, outputs: None)

        def forward_hook(model):
            model.encoder.layer[1].register_forward_hook(lambda module, args, out: None)

        self.check("a module has backward hooks", change=backward_hook)
        self.check("a module has forward hooks", change=forward_hook)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_of_the_model(self, reentrant):
        model, handle, other = pair(make())
        ids, mask = batch_of([5, 2, 9]).values()
        found = []
        for each in (model, other):
            embeds = each.get_input_embeddings()(ids)

            def run(x, each=each):
                return each(inputs_embeds=x, attention_mask=mask).last_hidden_state

            each.zero_grad()
            checkpoint.checkpoint(run, embeds, use_reentrant=reentrant).square().sum().backward()
            found.append(gradients(each))
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert None not in handle.graphs.calls
        assert handle.graphs.calls.total() == 2

    def test_tensor_of_another_module(self):
        """The graph could not return its gradient."""

        class Adds(nn.Linear):
            def forward(self, x):
                return super().forward(x) + self.others[0]

        shared = torch.zeros(48, device=DEVICE, requires_grad=True)

        def change(model):
            dense = model.encoder.layer[0].output.dense
            new = model.encoder.layer[0].output.dense = Adds(53, 48, device=DEVICE)
            new.load_state_dict(dense.state_dict())
            new.others = [shared]

        self.check("tensors that are no parameters of the module", change=change)
        assert shared.grad is not None

    def test_tensor_that_is_no_parameter_of_a_frozen_model(self):
        model, handle, other = pair(make().requires_grad_(False))
        batch, found = batch_of([5, 2, 9]), []
        for each in (model, other):
            dense = each.encoder.layer[0].output.dense
            dense.extra = torch.zeros(dense.out_features, device=DEVICE, requires_grad=True)
            dense.forward = lambda x, dense=dense: type(dense).forward(dense, x) + dense.extra
            loss_of(each(**batch)).backward()
            found.append(dense.extra.grad)
        assert handle.graphs.calls == {"its outputs have gradients of tensors that are no parameters of the module": 1}
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)

    def test_sparse_gradients(self):
        def change(model):
            model.get_input_embeddings().sparse = True

        model, handle, other = pair(make())
        for each in (model, other):
            change(each)
        batch, found = batch_of([5, 2, 9]), []
        for each in (model, other):
            loss_of(each(**batch)).backward()
            found.append({name: None if x is None else x.to_dense() for name, x in gradients(each).items()})
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert "its backward can't be captured" in next(iter(handle.graphs.calls))

    def test_checkpoint_in_a_layer(self):
        def change(model):
            dense = model.encoder.layer[0].output.dense
            once = dense.forward
            dense.forward = lambda x: checkpoint.checkpoint(once, x, use_reentrant=True)

        self.check("its backward can't be captured", change=change)

    def test_backward_in_the_forward(self):
        def change(model):
            dense = model.encoder.layer[0].output.dense
            once = dense.forward

            def forward(x):
                once(x.detach()).sum().backward()
                return once(x)

            dense.forward = forward

        model, handle, other = pair(make())
        change(model)
        change(other)
        batch = batch_of([5, 2, 9])
        for each in (model, other):
            each.zero_grad()
            loss_of(each(**batch)).backward()
        torch.testing.assert_close(gradients(model), gradients(other), rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {"a backward ran in its forward, or in another thread while it was captured": 1}

    @pytest.mark.parametrize("how", ["attribute", "dictionary", "closure"])
    def test_tensors_kept_outside_of_attributes(self, how):
        """A replay would not add them. Those of attributes are taken back."""
        model, handle, other = pair(make())
        batch = batch_of([5, 2, 9])
        for each in (model, other):
            dense, kept = each.encoder.layer[0].output.dense, []
            dense.kept = {"attribute": kept, "dictionary": {"losses": kept}, "closure": None}[how]

            def forward(x, *, dense=dense, kept=kept, once=dense.forward):
                kept.append(dense.weight.square().sum())
                return once(x)

            dense.forward = forward
            for step in range(2):
                if how == "closure" and step == 0:
                    each(**batch)  # keeps what the attempt to capture adds
                    kept.clear()
                (loss_of(each(**batch)) + sum(kept)).backward()
                kept.clear()
        torch.testing.assert_close(gradients(model), gradients(other), rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls[None] == 0

    def test_statistics_without_a_version(self):
        """Functions of normalization change them without increasing their version."""

        class Normalized(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner
                self.register_buffer("mean", torch.zeros(inner.out_features, device=DEVICE))
                self.register_buffer("var", torch.ones(inner.out_features, device=DEVICE))

            def forward(self, x):
                x = self.inner(x)
                return nn.functional.batch_norm(x.flatten(0, 1), self.mean, self.var, training=True).view_as(x)

        def change(model):
            part = model.encoder.layer[0].intermediate
            part.dense = Normalized(part.dense)

        self.check("its forward changes attributes or buffers", change=change)

    def test_random_numbers_of_the_host(self):
        """As in layers that are dropped at random."""

        def change(model):
            dense = model.encoder.layer[0].output.dense
            once = dense.forward
            dense.forward = lambda x: once(x) + 0 * random.random()

        self.check("its forward draws random numbers on the host", change=change)

    def test_a_refused_capture_leaves_the_module_as_it_was(self):
        class Statistics(nn.Linear):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.norm = nn.BatchNorm1d(48, device=DEVICE)
                self.calls, self.seen = 0, []

            def forward(self, x):
                self.calls += 1
                self.seen.append(len(x))
                return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)

        model, handle, other = pair(make())
        for each in (model, other):
            dense = each.encoder.layer[0].output.dense
            new = each.encoder.layer[0].output.dense = Statistics(53, 48, device=DEVICE)
            new.load_state_dict(dense.state_dict(), strict=False)
        check(model, other, batch_of([5, 2, 9]))
        one, two = (each.encoder.layer[0].output.dense for each in (model, other))
        torch.testing.assert_close(one.norm.state_dict(), two.norm.state_dict())
        assert (one.calls, one.seen) == (two.calls, two.seen) == (1, [1])
        assert handle.graphs.calls == {"its forward changes attributes or buffers of a module": 1}

    def test_anomaly_detection(self):
        model, handle, other = pair(make())
        with torch.autograd.detect_anomaly(check_nan=False):
            check(model, other, batch_of([5, 2, 9]))
        check(model, other, batch_of([5, 2, 9]))
        assert handle.graphs.calls == {None: 1, "anomalies are detected, which reads values on the host": 1}

    def test_cached_parametrizations(self):
        def change(model):
            nn.utils.parametrizations.weight_norm(model.encoder.layer[0].output.dense)

        model, handle, other = pair(make())
        for each in (model, other):
            change(each)
        with nn.utils.parametrize.cached():
            check(model, other, batch_of([5, 2, 9]))
        check(model, other, batch_of([5, 2, 9]))
        assert handle.graphs.calls == {None: 1, "the values of parametrizations are cached": 1}

    def test_training_mode_without_gradients(self):
        model, handle, other = pair(make())
        with torch.no_grad():
            assert_same(model(**batch_of([5, 2, 9])), other(**batch_of([5, 2, 9])), 1e9)
        assert handle.graphs.calls == {"the module is in training mode, without gradients": 1}


class TestModules:
    """The modules of torch.nn, whose inputs have gradients."""

    def both(self, model, other, call, x):
        found = []
        for each in (model, other):
            given = x.clone().requires_grad_()
            each.zero_grad()
            out = call(each, given)
            (out * torch.linspace(0.5, 1.5, out.shape[-1], device=DEVICE)).square().sum().backward()
            found.append((out, given.grad, gradients(each)))
        torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)

    def test_encoder(self):
        model, handle, other = pair(encoder())
        for lengths in BATCHES:
            x, padding = rows(lengths)
            self.both(model, other, lambda each, x, p=padding: each(x, src_key_padding_mask=p), x)
        assert handle.graphs.calls == {None: len(BATCHES)}

    def test_transformer(self):
        """The decoder runs while the encoder waits for its backward."""
        model, handle, other = pair(nn.Transformer(32, 2, 1, 1, 48, dropout=0.0, batch_first=True).to(DEVICE))
        for lengths, targets in (([5, 2, 9], [3, 4, 1]), ([9, 3], [4, 2])):
            x, source = rows(lengths)
            tgt, target = rows(targets)
            options = {"src_key_padding_mask": source, "tgt_key_padding_mask": target}
            options["memory_key_padding_mask"] = source
            self.both(model, other, lambda each, x, tgt=tgt, given=options: each(x, tgt, **given), x)
        assert handle.graphs.calls == {None: 4}
        assert handle.graphs.captured == 2

    def test_multihead_attention(self):
        module = nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, cuda_graphs="training")
        other = copy.deepcopy(module)
        other.graphs = None
        for lengths in BATCHES:
            layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
            x = torch.randn(layout.total, 32, device=DEVICE)
            self.both(module, other, lambda each, x, at=layout: each(x, x, x, layout=at, is_causal=True)[0], x)
        assert module.graphs.calls == {None: len(BATCHES)}

    def test_cross_attention_with_and_without_gradients_of_inputs(self):
        module = nta.VarlenMultiheadAttention(32, 4, batch_first=True, device=DEVICE, cuda_graphs="training")
        other = copy.deepcopy(module)
        other.graphs = None
        layout, key_layout = (nta.SequenceLayout.from_lengths(x, device=DEVICE) for x in ([5, 2], [3, 4]))
        x, key = torch.randn(7, 32, device=DEVICE), torch.randn(7, 32, device=DEVICE)
        for of_query, of_key in ((True, True), (True, False), (False, True), (False, False)):
            found = []
            for each in (module, other):
                one, two = (y.clone().requires_grad_(wanted) for y, wanted in ((x, of_query), (key, of_key)))
                each.zero_grad()
                each(one, two, two, layout=layout, key_layout=key_layout)[0].square().sum().backward()
                found.append((one.grad, two.grad, gradients(each)))
            torch.testing.assert_close(found[0], found[1], rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert module.graphs.calls == {None: 4}


@pytest.mark.gpu
class TestOnAGpu:
    def test_many_batches(self):
        model, handle, other = pair(make("llama", "LlamaForCausalLM"))
        for _ in range(60):
            lengths = torch.randint(1, 60, (int(torch.randint(1, 33, ())),)).tolist()
            check(model, other, batch_of(lengths, labels=True))
        assert handle.graphs.calls == {None: 60}
        assert handle.graphs.captured < 30

    @pytest.mark.parametrize("kind", ["bert", "bert, compiled", "encoder"])
    def test_dropout(self, kind):
        """Another mask in each call, and in the backward that of the forward."""
        torch._dynamo.reset()
        if kind != "encoder":
            model = make(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).float()
            batch = batch_of([5, 2, 9])
            weight = model.encoder.layer[0].attention.self.value.weight
            call = lambda: model(**batch).last_hidden_state  # noqa: E731
        else:
            layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, dropout=0.3, activation="gelu")
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)
            padding = (torch.arange(11) >= torch.tensor([5, 2, 9])[:, None]).to(DEVICE)
            x = torch.randn(3, 11, 32, device=DEVICE)
            weight = model.layers[0].linear1.weight
            call = lambda: model(x, src_key_padding_mask=padding)  # noqa: E731
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
            out = call()
            return (out * torch.linspace(-1, 2, out.shape[-1], device=DEVICE)).square().sum()

        torch.cuda.manual_seed(1)
        loss = weighted()
        (grad,) = torch.autograd.grad(loss, weight)
        direction, step, losses = grad / grad.norm(), 3e-2, []  # in other directions, differences are inexact
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step * direction)
            torch.cuda.manual_seed(1)
            losses.append(weighted().item())
            with torch.no_grad():
                weight.sub_(sign * step * direction)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx((grad * direction).sum().item(), rel=0.05)
        assert handle.graphs.calls[None] > 4

    def test_memory_of_many_replays(self):
        model, _, _ = pair(make())
        batches = [batch_of(torch.randint(1, 60, (rows,)).tolist()) for rows in range(1, 9)]
        for batch in batches:
            solve(model, batch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for i in range(200):
            solve(model, batches[i % len(batches)])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before * 1.01

    def test_streams(self):
        """The forward on one stream, and the optimizer on another."""
        model, handle, other = pair(make())
        stream = torch.cuda.Stream()
        for lengths in BATCHES:
            batch = batch_of(lengths)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = solve(model, batch)
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(got, solve(other, batch), rtol=10 * TOLERANCE, atol=TOLERANCE)
        assert handle.graphs.calls == {None: len(BATCHES)}

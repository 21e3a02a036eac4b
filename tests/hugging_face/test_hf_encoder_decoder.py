"""Encoder-decoders: the source and the target are packed."""

import copy

import pytest
import torch
from graphs import CountsAttention, with_layers
from small_models import build_small
from sweeps import sweep_except
from transformers.modeling_outputs import BaseModelOutput

import nt_attention as nta

SOURCES, TARGETS = (9, 1, 17, 4), (6, 3, 1, 11)
MODELS = {
    "bart": "BartForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "mvp": "MvpForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}


def make(model_type):
    return build_small(model_type, MODELS[model_type])


def padded(lengths, padding, side="right", seed=0):
    """Ids with padding, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(6, 90, mask.shape, generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(~mask, padding), mask


def batch_of(model, side="right", lengths=(SOURCES, TARGETS)):
    padding = model.config.pad_token_id
    ids, mask = padded(lengths[0], padding, side)
    target, target_mask = padded(lengths[1], padding, seed=1)
    source = {"input_ids": ids, "attention_mask": mask.long()}
    return source, target, target_mask


def close(got, want):
    tolerance = 1e-9 if got.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, float(want.detach().abs().max())))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model_type", sweep_except(MODELS, "bart", "t5", "m2m_100"))
def test_loss_and_gradients_are_those_without_the_patch(model_type, side):
    model = make(model_type).train()
    source, target, mask = batch_of(model, side)
    labels = target.masked_fill(~mask, -100)
    labels[0, 2] = -100  # in the middle of a target, which goes on after it

    def run():
        model.zero_grad()
        loss = model(**source, labels=labels).loss
        loss.backward()
        return loss, [p.grad for p in model.parameters() if p.grad is not None]

    want, want_gradients = run()
    with nta.patch(model, on_fallback="raise") as handle:
        got, gradients = run()
        logits = model(**source, labels=labels).logits
    assert handle.calls == {None: 2}
    close(logits[mask], model(**source, labels=labels).logits[mask])
    close(got, want)
    largest = max(float(x.abs().max()) for x in want_gradients)
    for x, y in zip(gradients, want_gradients, strict=True):
        assert float((x - y).abs().max()) < 1e-8 * largest


@pytest.mark.parametrize("model_type", sweep_except(["bart", "t5"]))  # others run the code of one of these
def test_compiled_encoder_and_decoder_are_one_graph_each(model_type, fresh_compiler):
    model, backend = with_layers(make(model_type), 1).train(), CountsAttention()
    with nta.patch(model, on_fallback="raise") as handle:
        compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
        for lengths in ((SOURCES, TARGETS), ((3, 12, 5), (2, 7, 4)), ((16, 6), (1, 9))):
            backend.calls.clear()
            source, target, mask = batch_of(model, lengths=lengths)
            batch = {**source, "labels": target.masked_fill(~mask, -100)}
            results = []
            for function in (model, compiled):
                model.zero_grad()
                loss = function(**batch).loss
                loss.backward()
                results.append([loss, *[p.grad for p in model.parameters() if p.grad is not None]])
            largest = max(float(x.detach().abs().max()) for x in results[0])
            for x, y in zip(*results, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * largest)
            if lengths[0] == SOURCES:
                assert set(backend.calls) == {1, 2}  # one for each layer of the encoder, two of the decoder
        assert not backend.calls  # in the last batch
        assert handle.calls == {None: 6}


@pytest.mark.parametrize("given", ["decoder_input_ids", "decoder_inputs_embeds", "encoder_outputs", "hidden states"])
@pytest.mark.parametrize("model_type", ["bart", "t5", "m2m_100"])
def test_outputs_are_those_of_each_pair_alone(model_type, given):
    model = make(model_type)
    source, target, mask = batch_of(model)
    more = {"output_hidden_states": True} if given == "hidden states" else {}

    def inputs_of(n=None):
        ids = target if n is None else target[n : n + 1, : TARGETS[n]]
        inputs = source if n is None else {name: x[n : n + 1, : SOURCES[n]] for name, x in source.items()}
        own = {"decoder_attention_mask": mask.long()} if n is None else {}
        if given == "encoder_outputs":
            encoded = model.get_encoder()(**inputs)
            inputs = {"attention_mask": inputs["attention_mask"], "encoder_outputs": encoded}
        if given == "decoder_inputs_embeds":
            if model_type == "m2m_100":
                pytest.skip("its positions depend on input ids")
            return {**inputs, **own, "decoder_inputs_embeds": model.get_input_embeddings()(ids)}
        return {**inputs, **own, **more, "decoder_input_ids": ids}

    with torch.no_grad():
        alone = [model(**inputs_of(n)) for n in range(len(SOURCES))]
        with nta.patch(model, on_fallback="raise"):
            out = model(**inputs_of())
        for n, one in enumerate(alone):
            close(out.logits[n, : TARGETS[n]], one.logits[0])
            assert not out.logits[n, TARGETS[n] :].any()
            close(out.encoder_last_hidden_state[n, : SOURCES[n]], one.encoder_last_hidden_state[0])
            for x, y in zip(out.decoder_hidden_states or (), one.decoder_hidden_states or (), strict=True):
                close(x[n, : TARGETS[n]], y[0])
            for x, y in zip(out.encoder_hidden_states or (), one.encoder_hidden_states or (), strict=True):
                close(x[n, : SOURCES[n]], y[0])


@pytest.mark.parametrize("model_type", sweep_except(["bart", "t5"]))
@pytest.mark.parametrize("labels_first", sweep_except([True, False], True))
def test_compiled_calls_with_other_arguments(model_type, labels_first, fresh_compiler):
    model = with_layers(make(model_type), 1)
    source, target, mask = batch_of(model)
    given = {"attention_mask": source["attention_mask"], "encoder_outputs": model.get_encoder()(**source)}
    calls = [{"labels": target.masked_fill(~mask, -100)}, {"decoder_input_ids": target, "decoder_attention_mask": mask}]
    with nta.patch(model), torch.no_grad():
        compiled = torch.compile(model, backend="eager", dynamic=True)
        for call in calls if labels_first else calls[::-1]:
            got, want = compiled(**given, **call), model(**given, **call)
            assert got.keys() == want.keys()
            close(got.logits, want.logits)


@pytest.mark.parametrize("part", sweep_except(["model", "model.encoder", "model.decoder"], "model"))
def test_compiled_parts_take_rows_longer_than_the_table_of_positions(part, fresh_compiler):
    model = with_layers(make("m2m_100"), 1)
    longest = len(model.model.encoder.embed_positions.weights)
    source, target, mask = batch_of(model, lengths=((longest + 3, 5), (7, longest + 9)))
    labels = target.masked_fill(~mask, -100)
    want = copy.deepcopy(model)(**source, labels=labels).loss
    with nta.patch(model, on_fallback="raise"):
        model.get_submodule(part).compile(backend="eager", dynamic=True)
        close(model(**source, labels=labels).loss, want)


@pytest.mark.filterwarnings("error::nt_attention.NotPackedWarning")  # as with predict_with_generate of a Seq2SeqTrainer
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("model_type", sweep_except(["bart", "m2m_100", "marian", "t5", "umt5"], "bart", "t5"))
def test_generate_gives_the_same_tokens(model_type, options):
    model = make(model_type)
    source, *_ = batch_of(model)
    options = {**options, "max_new_tokens": 12, "min_new_tokens": 12}
    options["decoder_start_token_id"] = model.config.decoder_start_token_id
    want = model.generate(**source, **options)
    with nta.patch(model) as handle:
        got = model.generate(**source, **options)
    assert torch.equal(got, want)
    assert handle.calls[None] == 1  # the encoder
    assert handle.calls["it continues from a cache"] > 0  # the decoder


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["t5", "pegasus"])
def test_gradient_checkpointing(model_type, use_reentrant):
    model = make(model_type).train()
    source, target, mask = batch_of(model)
    labels = target.masked_fill(~mask, -100)
    gradients = []
    with nta.patch(model, on_fallback="raise"):
        for _ in range(2):
            model.zero_grad()
            model(**source, labels=labels).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_full_backward_hooks_of_layers(model_type):
    """PyTorch passes each tensor argument of such a layer through an autograd function, the mask too."""
    model = make(model_type).train()
    source, target, mask = batch_of(model)
    stacks = model.get_encoder(), model.get_decoder()
    for layer in [getattr(stack, "block" if model_type == "t5" else "layers")[0] for stack in stacks]:
        layer.register_full_backward_hook(lambda layer, grads, of_outputs: norms.append(of_outputs[0].norm()))
    found = []
    for patched in (False, True):
        handle = nta.patch(model, on_fallback="raise") if patched else None
        norms = []
        model(**source, labels=target.masked_fill(~mask, -100)).loss.backward()
        found.append(norms)
    assert handle.calls == {None: 1}
    for got, want in zip(*found, strict=True):  # padding has no gradient
        close(got, want)


def test_encoder_outputs_as_a_tuple_and_outputs_as_a_tuple():
    model = make("t5")
    source, target, _ = batch_of(model)
    states = model.get_encoder()(**source).last_hidden_state
    given = {"attention_mask": source["attention_mask"], "decoder_input_ids": target, "return_dict": False}
    with torch.no_grad(), nta.patch(model, on_fallback="raise"):
        one = model(encoder_outputs=(states,), **given)
        other = model(encoder_outputs=BaseModelOutput(last_hidden_state=states), **given)
    assert isinstance(one, tuple)
    torch.testing.assert_close(one[0], other[0])


@pytest.mark.parametrize("model_type", ["bart", "mbart", "mvp", "plbart"])
def test_target_made_from_the_source(model_type):
    model = make(model_type)
    source, *_ = batch_of(model)
    with torch.no_grad():
        want = model(**source).logits
        with nta.patch(model, on_fallback="raise") as handle:
            got = model(**source).logits
    assert handle.calls == {None: 1}
    mask = source["attention_mask"].bool()
    close(got[mask], want[mask])
    assert handle.counts.tokens == 2 * int(mask.sum())


def test_mask_of_another_shape_is_an_error():
    model = make("t5")
    source, target, _ = batch_of(model)
    with nta.patch(model), pytest.raises(ValueError, match="batch, length"):
        model(**source, decoder_input_ids=target, decoder_attention_mask=torch.ones(4, 3))

"""Encoders of audio and images: their layers pack, and all else runs padded.

The unpatched padded run is the reference, because some feature extractors compute with padding.
"""

import copy
import io
import threading

import numpy as np
import pytest
import rows_matrix
import torch
import transformers
from small_models import encoder_inputs, small_encoder
from sweeps import sweep_except
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning
from nt_attention.hf.pack import small_batches
from nt_attention.hf.pack.encoder_layers import encoder_layers, tokens_of
from nt_attention.hf.pack.rules import TOO_SMALL

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
RATES = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"),
    0.0,
)
SPEECH = {
    **SIZES, **RATES, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 20,
}  # fmt: skip
LAYER_NORM = {**SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
IMAGES = {**SIZES, "num_patches": 16, "patch_size": 4}
SUBSAMPLED = {**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 5}
CTC_HEAD = {"vocab_size": 20, "pad_token_id": 0}
FEATURES = {**SIZES, "feature_projection_input_dim": 16, "vocab_size": 20, "conformer_conv_dropout": 0.0} | RATES

# Name → class, config, and its fields.
MODELS = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH),
    "wav2vec2 with layer norm": ("Wav2Vec2Model", "Wav2Vec2Config", LAYER_NORM),
    "wav2vec2 for sequences": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH),
    "hubert": ("HubertForCTC", "HubertConfig", SPEECH),
    "hubert with layer norm": ("HubertModel", "HubertConfig", LAYER_NORM),
    "wavlm": ("WavLMForCTC", "WavLMConfig", SPEECH),
    "wavlm with layer norm": ("WavLMModel", "WavLMConfig", LAYER_NORM),
    "data2vec": ("Data2VecAudioForCTC", "Data2VecAudioConfig", SPEECH),
    "unispeech": ("UniSpeechForCTC", "UniSpeechConfig", SPEECH),
    "wav2vec2-bert": ("Wav2Vec2BertForCTC", "Wav2Vec2BertConfig", FEATURES),
    "siglip2": ("Siglip2VisionModel", "Siglip2VisionConfig", IMAGES),
    "siglip2 for classes": ("Siglip2ForImageClassification", "Siglip2Config", {"vision_config": IMAGES}),
    "parakeet": ("ParakeetForCTC", "ParakeetCTCConfig", {"encoder_config": SUBSAMPLED, **CTC_HEAD}),
    "lasr": ("LasrForCTC", "LasrCTCConfig", {"encoder_config": SUBSAMPLED, "vocab_size": 20}),
    "moonshine": (
        "MoonshineForConditionalGeneration", "MoonshineConfig",
        {
            "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        },
    ),
    "speech to text": (
        "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 50,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "conv_channels": 16,
            "input_feat_per_channel": 16, "dropout": 0.0, "activation_dropout": 0.0,
        },
    ),
}  # fmt: skip
# Models whose batch norms see padding in training.
INFERENCE = {"parakeet", "lasr"}
# Others run the code of one of these.
OFTEN = (
    *("wav2vec2", "wav2vec2 with layer norm", "wavlm", "wav2vec2-bert", "siglip2", "siglip2 for classes", "parakeet"),
    *("lasr", "moonshine", "speech to text"),
)
every = pytest.mark.parametrize("name", sweep_except(MODELS, *OFTEN))


def make(name, **fields):
    kind, config, of_model = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**of_model, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def inputs_of(model, seed=0, shares=(1.0, 0.6, 0.3, 0.15)):
    generator = torch.Generator().manual_seed(seed)
    main = model.main_input_name
    if main == "pixel_values":
        shapes = torch.tensor([(5, 6), (4, 4), (2, 3), (1, 2)])
        mask = torch.arange(30) < shapes.prod(1)[:, None]
        values = torch.randn(4, 30, 48, generator=generator, dtype=torch.float64) * mask[:, :, None]
        return {main: values, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}
    length, width = (
        (16_000 if "Moonshine" in type(model).__name__ else 900, ()) if main == "input_values" else (96, (16,))
    )
    mask = torch.arange(length) < torch.tensor([[round(share * length)] for share in shares])
    values = torch.randn(4, length, *width, generator=generator, dtype=torch.float64)
    inputs = {main: values * mask.view(4, length, *[1] * len(width)), "attention_mask": mask.long()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, 40, (4, 6), generator=generator)
    return inputs


def token_mask(model, inputs):
    """The tokens (B, L) that the layers of an unpatched model get."""
    with nta.patch(model), torch.no_grad():
        seen = []
        layer = next(iter(encoder_layers(model).values()))

        def record(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            mask = next(x for x in (*args[1:], kwargs.get("attention_mask")) if isinstance(x, torch.Tensor))
            seen.append(tokens_of(mask, *hidden.shape[:2])[0])

        handle = layer.register_forward_pre_hook(record, with_kwargs=True)
        model(**inputs)
        handle.remove()
    return seen[-1]


def check(got, want, mask):
    """Compare outputs at tokens, relative to the largest value."""
    for key, theirs in want.items():
        for mine, x in zip(leaves(got[key]), leaves(theirs), strict=True):
            if x.shape[:2] == mask.shape:
                mine, x = mine[mask], x[mask]
            assert mine.shape == x.shape
            assert float((mine - x).abs().max()) <= 1e-9 * max(1.0, float(x.abs().max())), key


def leaves(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def gradients(model, inputs, seed=0):
    """Output and gradients of the sum of squares at tokens, or of the loss."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every
def test_outputs_are_those_of_the_padded_run(name):
    model = make(name)
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    assert 0 < mask.sum() < mask.numel()
    with torch.no_grad():
        want = model(**inputs, output_hidden_states=True)
        with nta.patch(model, on_fallback="raise") as handle:
            check(model(**inputs, output_hidden_states=True), want, mask)
            check(model(**inputs), {k: x for k, x in want.items() if "hidden_states" not in k}, mask)
        assert handle.calls == {None: 2}
        assert " packed if its mask hides padding; checked at its first call" in " ".join(repr(handle).split())


def test_packing_works_on_the_layers_and_their_results_are_zero_at_padding():
    model = make("wav2vec2")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    shapes = []
    with torch.no_grad(), nta.patch(model):
        for layer in model.wav2vec2.encoder.layers:
            layer.feed_forward.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
        out = model(**inputs, output_hidden_states=True)
    assert shapes[-3:] == [(1, int(mask.sum()), 32)] * 3  # those before are of the comparison
    assert all((state[~mask] == 0).all() for state in out.hidden_states[1:-1])


def labels_of(model):
    generator = torch.Generator().manual_seed(3)
    if "Classification" in type(model).__name__:
        return torch.randint(2, (4,), generator=generator)
    return torch.randint(3, 18, (4, 2), generator=generator)


CTC = [name for name, (kind, _, _) in MODELS.items() if "CTC" in kind or "Classification" in kind]


IN_TRAINING = [(name, how) for name in CTC if name not in INFERENCE for how in (None, False, True)]
# Unpatched, WavLM does not end with a reentrant checkpoint. Padded modules and checkpoints: see below.
IN_TRAINING = [x for x in IN_TRAINING if x != ("wavlm", True) and (x[0] != "wav2vec2-bert" or x[1] is None)]


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    sweep_except(IN_TRAINING, *[x for x in IN_TRAINING if x[0] == "wav2vec2" or (x[0] in OFTEN and x[1] is None)]),
)
def test_losses_and_gradients_in_training(name, checkpointing):
    """`checkpointing`: whether gradient checkpoints are reentrant, None without."""
    model = make(name).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    inputs = {**inputs_of(model), "labels": labels_of(model)}
    want, of_padded = gradients(model, inputs)
    with nta.patch(model, on_fallback="raise") as handle:
        got, of_packed = gradients(model, inputs)
    assert handle.calls == {None: 1}
    # the loss of CTC is in float32, and its gradients with it
    tolerance = 1e-9 if "Classification" in type(model).__name__ else 2e-5
    assert float((got.loss - want.loss).detach().abs()) <= tolerance * float(want.loss.detach().abs())
    assert of_packed.keys() == of_padded.keys()
    largest = max(float(x.abs().max()) for x in of_padded.values())
    for key, gradient in of_padded.items():
        assert float((of_packed[key] - gradient).abs().max()) <= tolerance * largest, key


def test_checkpoints_around_layers():
    """As of FSDP's activation checkpointing: each layer packs again in the backward."""
    model = make("wav2vec2").train()
    inputs = {**inputs_of(model), "labels": labels_of(model)}
    want, of_padded = gradients(model, inputs)
    layers = model.wav2vec2.encoder.layers
    with nta.patch(model, on_fallback="raise") as handle:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
        got, of_packed = gradients(model, inputs)
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    of_packed = {key.replace("_checkpoint_wrapped_module.", ""): x for key, x in of_packed.items()}
    for key, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[key], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["wav2vec2", "wavlm"])
def test_spec_augment_and_layerdrop_draw_what_they_draw_unpatched(name):
    model = make(name, layerdrop=0.5, mask_time_prob=0.4, mask_time_length=2).train()
    inputs = {**inputs_of(model), "labels": labels_of(model)}
    for seed in range(4):
        want, of_padded = gradients(model, inputs, seed)
        with nta.patch(model, on_fallback="raise"):
            got, of_packed = gradients(model, inputs, seed)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
        assert of_packed.keys() == of_padded.keys()  # the same layers were skipped
        for key, gradient in of_padded.items():
            torch.testing.assert_close(of_packed[key], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["wav2vec2", "wavlm"])  # WavLM calls PyTorch's multi_head_attention_forward
def test_a_model_with_attention_dropout_packs_in_training(name):
    model = make(name, attention_dropout=0.5).train()
    with nta.patch(model, on_fallback="raise") as handle:
        model(**inputs_of(model), labels=labels_of(model))
    assert handle.calls == {None: 1}


def test_no_memory_for_the_comparison():
    """The error reaches the caller, who may pass a smaller batch. Later batches are packed."""
    model = make("wav2vec2")

    def fail(module, args, kwargs):
        if len(args[0] if args else kwargs["hidden_states"]) == 1:  # a packed row
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with nta.patch(model, on_fallback="raise") as handle, torch.no_grad():
        hook = model.wav2vec2.encoder.layers[0].attention.register_forward_pre_hook(fail, with_kwargs=True)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs_of(model))
        hook.remove()
        model(**inputs_of(model))
    assert handle.calls == {None: 1}


def test_another_thread_calls_the_model_while_a_batch_is_compared():
    """The comparison records the layers of its own thread alone."""
    model = make("wav2vec2")
    compared, other = inputs_of(model), {name: x[::2, :400] for name, x in inputs_of(model).items()}
    with torch.no_grad():
        want = [model(**inputs).logits for inputs in (compared, other)]
        found = []
        with nta.patch(model, packing="always", on_fallback="raise") as handle:
            model(**other)  # so that it is not compared again

            def call_in_a_thread(*_):
                if not found:
                    hook.remove()  # for the thread; the comparison puts it back
                    thread = threading.Thread(target=lambda: found.append(run_without_gradients(model, other)))
                    thread.start()
                    thread.join()

            hook = model.wav2vec2.encoder.layers[0].register_forward_pre_hook(call_in_a_thread)
            found.insert(0, model(**compared).logits)
        assert handle.calls == {None: 3}
    for logits, expected, inputs in zip(found, want, (compared, other), strict=True):
        mask = token_mask(model, inputs)
        torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-4, atol=1e-4)


def run_without_gradients(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("packing", ["auto", "always"])
def test_layers_run_padded_on_a_cpu_if_the_batch_is_too_small(packing, monkeypatch):
    model = make("wav2vec2")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    saved = int((~mask).sum()) * model.config.hidden_size**2
    for least, reason in ((saved, None), (saved + 1, None if packing == "always" else TOO_SMALL)):
        monkeypatch.setattr(small_batches, "LEAST_SAVED", least)
        with nta.patch(model, packing=packing, on_fallback="raise") as handle, torch.no_grad():
            model(**inputs)
        assert handle.calls == {reason: 1}


@pytest.mark.parametrize("name", sorted(INFERENCE))
def test_batch_norms_are_padded_in_training(name):
    model = make(name).train()
    inputs = {**inputs_of(model), "labels": labels_of(model)}
    buffers = copy.deepcopy(dict(model.named_buffers()))
    want, of_padded = gradients(model, inputs)
    for key, buffer in model.named_buffers():
        buffer.copy_(buffers[key])
    with (
        nta.patch(model) as handle,
        pytest.warns(NotPackedWarning, match="the batch norms of its layers compute with padding"),
    ):
        got, of_packed = gradients(model, inputs)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
    for key, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[key], gradient, rtol=0, atol=0)
    assert list(handle.calls) != [None]


def test_layers_with_convolutions_run_padded_in_checkpoints():
    model = make("wav2vec2-bert").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = {**inputs_of(model), "labels": labels_of(model)}
    want, of_padded = gradients(model, inputs)
    with nta.patch(model), pytest.warns(NotPackedWarning, match="checkpoints would run its convolutions again"):
        got, of_packed = gradients(model, inputs)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
    for key, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[key], gradient, rtol=0, atol=0)


def test_calls_that_run_padded_say_why():
    model = make("wav2vec2", attn_implementation="eager")
    inputs = inputs_of(model)
    with torch.no_grad():
        want = model(**inputs, output_attentions=True)
        with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="it asks for attention weights"):
            got = model(**inputs, output_attentions=True)
            model(inputs["input_values"])
            model(inputs["input_values"], attention_mask=torch.ones_like(inputs["attention_mask"]))
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0)
    assert handle.calls == {"it asks for attention weights": 1, "there is no padding to skip": 2}
    with nta.patch(model, on_fallback="raise"), pytest.raises(NotPackedError, match="it asks for attention weights"):
        model(**inputs, output_attentions=True)


def test_holes_between_tokens():
    model = make("siglip2")
    inputs = inputs_of(model)
    inputs["pixel_attention_mask"][0, 3:9] = 0
    mask = inputs["pixel_attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs)
        with nta.patch(model), pytest.warns(NotPackedWarning, match="its rows have padding between tokens"):
            check(model(**inputs), want, mask)


PADDED = {
    "Wav2Vec2ForXVector": ("Wav2Vec2Config", SPEECH),
    "Wav2Vec2Model with an adapter": ("Wav2Vec2Config", {**SPEECH, "add_adapter": True}),
    "Wav2Vec2ConformerModel": ("Wav2Vec2ConformerConfig", SPEECH),
}


def test_refused_models_say_why():
    with torch.device("meta"):
        model = transformers.PatchTSTModel(transformers.PatchTSTConfig(context_length=32, d_model=16))
    with nta.patch(model) as handle:
        assert "only the tokens of input_ids" in " ".join(repr(handle).split())


def test_a_loss_that_reads_padding_is_computed_padded():
    config = transformers.Wav2Vec2Config(**SPEECH)
    model = transformers.Wav2Vec2ForAudioFrameClassification(config).double().eval()
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    labels = nn.functional.one_hot(torch.randint(2, mask.shape), 2)
    with torch.no_grad():
        want, with_labels = model(**inputs), model(**inputs, labels=labels)
        with nta.patch(model) as handle:
            check(model(**inputs), want, mask)
            with pytest.warns(NotPackedWarning, match="its output 'loss' differs by"):
                assert model(**inputs, labels=labels).loss == with_labels.loss
    assert handle.calls[None] == 1


class Planted(nn.Module):
    """An attention module of wav2vec2 with an error."""

    def __init__(self, attention, error):
        super().__init__()
        self.attention, self.error = attention, error

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        out, weights = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        if self.error == "neighbor":
            out = out + hidden_states.roll(1, 1)
        elif self.error == "length":
            out = out * hidden_states.shape[1]
        elif self.error == "mean":
            out = out + hidden_states.mean((0, 1))
        return out, weights


@pytest.mark.parametrize("error", ["neighbor", "length", "mean"])
def test_planted_errors_run_padded(error, monkeypatch):
    module = transformers.models.wav2vec2.modeling_wav2vec2
    layer = module.Wav2Vec2EncoderLayer
    before = layer.__init__

    def init(self, config):
        before(self, config)
        self.attention = Planted(self.attention, error)

    monkeypatch.setattr(layer, "__init__", init)
    model = make("wav2vec2")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    with torch.no_grad():
        want = model(**inputs)
        with nta.patch(model):
            for _ in range(2):
                check(model(**inputs), want, mask)


@pytest.mark.parametrize("name", sweep_except(PADDED, "Wav2Vec2ForXVector"))
def test_layers_whose_padding_is_read_run_padded(name):
    config, fields = PADDED[name]
    with torch.device("meta"):
        original = getattr(transformers, name.partition(" ")[0])(getattr(transformers, config)(**fields))
    model = small_encoder(original, encoder_inputs)
    inputs = encoder_inputs(model)
    with torch.no_grad():
        want = model(**inputs)[0]
        with nta.patch(model) as handle:
            for _ in range(2):
                torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-4, atol=1e-5)
    assert None not in handle.calls


@pytest.mark.parametrize("name", ["wav2vec2", "siglip2"])
def test_gradients_by_torch_func_are_those_of_the_padded_run(name):
    model = make(name)
    inputs, parameters = inputs_of(model), dict(model.named_parameters())
    mask = token_mask(model, inputs)

    def gradients_of_tokens():
        def loss(x):
            return torch.func.functional_call(model, x, (), inputs)[0][mask].pow(2).sum()

        return torch.func.grad(loss)(parameters)

    want = gradients_of_tokens()
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="the host can't read its mask"):
        got = gradients_of_tokens()
    assert set(handle.calls) == {"the host can't read its mask"}
    for key, x in want.items():
        torch.testing.assert_close(got[key], x)


def test_a_convolution_that_was_put_in_after_the_patch():
    model = make("wav2vec2-bert")
    inputs, convolution = inputs_of(model), copy.deepcopy(model.wav2vec2_bert.encoder.layers[1].conv_module)
    mask = token_mask(model, inputs)
    with torch.no_grad():
        convolution.pointwise_conv1.weight.mul_(2.0)
        with nta.patch(model):
            model(**inputs)
            model.wav2vec2_bert.encoder.layers[1].conv_module = convolution
            got = model(**inputs)
        check(got, model(**inputs), mask)


def test_the_matrix_of_encoders():
    row = "siglip2_vision_model", "Siglip2VisionModel", rows_matrix.ENCODER
    assert rows_matrix.outcome_of(row)["patch"] == {"padded": "right"}


def test_copies_and_removal():
    model = make("wavlm")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    forwards = [vars(x).get("forward") for x in model.modules()]
    with torch.no_grad():
        want = model(**inputs)
        handle = nta.patch(model, on_fallback="raise")
        other = copy.deepcopy(model)
        check(other(**inputs), want, mask)
        assert handle.calls == {None: 1}
        buffer = io.BytesIO()
        torch.save(other(**inputs, output_hidden_states=True).hidden_states, buffer)  # plain tensors
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        handle.remove()
        check(model(**inputs), want, mask)
        check(other(**inputs), want, mask)
    assert [vars(x).get("forward") for x in model.modules()] == forwards


@pytest.mark.parametrize("change", ["in place", "new"])
def test_a_layer_whose_input_was_changed_gets_the_change(change):
    """A layer takes the packed row of the last one only if nothing has changed the padded hidden states."""
    model = make("wav2vec2")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    layer = model.wav2vec2.encoder.layers[1]

    def run():
        original = layer.forward
        layer.forward = lambda x, **kwargs: original(x.mul_(2.0) if change == "in place" else 2.0 * x, **kwargs)
        with torch.no_grad():
            return model(**inputs)

    want = run()
    vars(layer).pop("forward")
    with nta.patch(model, on_fallback="raise"):
        got = run()
    vars(layer).pop("forward", None)
    check(got, want, mask)


def test_a_compiled_model_runs_padded_and_says_so():
    model = make("siglip2")
    inputs = inputs_of(model)
    mask = token_mask(model, inputs)
    with torch.no_grad():
        want = model(**inputs)
        with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="torch.compile runs it"):
            got = torch.compile(model, backend="eager")(**inputs)
    check(got, want, mask)
    assert set(handle.calls) == {"torch.compile runs it: compile the parts of its layers instead"}

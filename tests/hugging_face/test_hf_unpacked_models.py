"""Encoder-decoders, vision models and vision towers under patch, and models whose attention can't be replaced."""

import importlib
import inspect

import pytest
import torch
import transformers
from transformers import AutoModel

import nt_attention as nta
from nt_attention.hf import families
from nt_attention.hf.route.by_name import MIX_ROWS
from nt_attention.patching.handle import NotPackedWarning

VOCABULARY, PAD, EOS = 97, 1, 3
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS}
SIZES = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
TEXT = {**TOKENS, **SIZES, "max_position_embeddings": 19}
IMAGES = {**SIZES, "image_size": 15, "patch_size": 5}

ENCODER_DECODER = {
    **TOKENS, "d_model": 36, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "dropout": 0.0,
    "decoder_start_token_id": EOS,
}  # fmt: skip

# class name: what its config takes
MODELS = {
    "T5ForConditionalGeneration": {
        **TOKENS, "d_model": 36, "d_kv": 11, "d_ff": 37, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0,
        "decoder_start_token_id": PAD,
    },
    "T5EncoderModel": {**TOKENS, "d_model": 36, "d_kv": 11, "d_ff": 37, "num_layers": 2, "num_heads": 3},
    "BartForConditionalGeneration": ENCODER_DECODER,
    "WhisperForConditionalGeneration": {
        **ENCODER_DECODER, "num_mel_bins": 10, "max_source_positions": 13, "max_target_positions": 20,
    },
    "ViTModel": IMAGES,
    "SiglipModel": {"text_config": TEXT, "vision_config": IMAGES},
    "SiglipTextModel": TEXT,
    "SiglipVisionModel": IMAGES,
    "CLIPModel": {"text_config": TEXT, "vision_config": IMAGES, "projection_dim": 17},
    "CLIPTextModel": TEXT,
    "CLIPVisionModel": IMAGES,
}  # fmt: skip

every = pytest.mark.parametrize("name", MODELS)


def make(name):
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**MODELS[name]), attn_implementation="eager").eval()


def tokens_of(lengths, length):
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, VOCABULARY, mask.shape).masked_fill(~mask, PAD)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = EOS
    return ids, mask.long()


def inputs_of(name):
    inputs = {}
    if name.startswith(("T5", "Bart", "CLIPText", "CLIPModel", "SiglipText", "SiglipModel")):
        inputs["input_ids"], inputs["attention_mask"] = tokens_of([11, 2, 7], 13)
    if name.startswith(("ViT", "CLIPVision", "CLIPModel", "SiglipVision", "SiglipModel")):
        inputs["pixel_values"] = torch.randn(3, 3, 15, 15)
    if name.startswith("Whisper"):
        inputs["input_features"] = torch.randn(3, 10, 26)
    if name.endswith("ForConditionalGeneration"):
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = tokens_of([3, 7, 1], 7)
    return inputs


def check(out, want, inputs):
    """Compare two outputs at real tokens, and the outputs inside of them."""
    for key, theirs in want.items():
        if isinstance(theirs, transformers.utils.ModelOutput):
            check(out[key], theirs, inputs)
        elif isinstance(theirs, torch.Tensor):
            mask = inputs.get("decoder_attention_mask" if key == "logits" else "attention_mask")
            here = mask.bool() if mask is not None and theirs.shape[:2] == mask.shape else ...
            torch.testing.assert_close(out[key][here], theirs[here], rtol=5e-5, atol=5e-5)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)


@every
def test_unpacked_models_give_what_eager_gives(name):
    model, inputs = make(name), inputs_of(name)
    want = run(model, inputs)
    with nta.patch(model):
        check(run(model, inputs), want, inputs)
    if model.config.model_type in MIX_ROWS:  # its attention can't be replaced alone
        return
    with nta.patch(model, padding_free=False):
        check(run(model, inputs), want, inputs)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        check(run(model, inputs), want, inputs)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("T5", "Bart"))])
def test_handle_of_unpacked_models_says_why(name):
    model = make(name)
    with nta.patch(model) as handle:
        takes_mask = any(name.endswith("attention_mask") for name in inspect.signature(model.forward).parameters)
        assert ("forward" in vars(model)) == takes_mask  # to count batches with padding
        how = f"not packed, because {families.why_not_packed(model)}"
        if name.startswith("Whisper"):
            how = "each WhisperEncoderLayer packed if its mask hides padding; checked at its first call"
        assert f"{name}, {how}" in " ".join(repr(handle).split())
        assert not any(isinstance(model.get_submodule(path), torch.nn.MultiheadAttention) for path in handle.layers)


PREFIXES = {"qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2_5_"}
VISION = {"depth": 2, "num_heads": 2, "patch_size": 5, "temporal_patch_size": 2}

TOWERS = {
    "qwen2_vl": {**VISION, "embed_dim": 40, "hidden_size": 29, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **VISION, "hidden_size": 40, "intermediate_size": 37, "out_hidden_size": 29, "window_size": 20,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip

towers = pytest.mark.parametrize("kind", TOWERS)


def make_tower(kind):
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    tower = getattr(modeling, f"{PREFIXES[kind]}VisionTransformerPretrainedModel")
    return tower._from_config(tower.config_class(**TOWERS[kind]), attn_implementation="eager").eval()


def make_whole(kind):
    """A tower with its text model, and images of 24 and of 4 patches between text; 4 patches are a token."""
    config = transformers.CONFIG_MAPPING[kind](
        vision_config={**TOWERS[kind], "hidden_size" if kind == "qwen2_vl" else "out_hidden_size": 48},
        text_config={
            **TOKENS, **SIZES, "hidden_size": 48, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    ids, mask = tokens_of([13, 5], 13)
    ids = ids.masked_fill(ids >= 90, 7)
    ids[0, 2:8], ids[1, 1] = 90, 90
    pictures = images((1, 4, 6), (1, 2, 2))
    return model, {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pictures["hidden_states"],
        "image_grid_thw": pictures["grid_thw"], "mm_token_type_ids": (ids == 90).int(),
    }  # fmt: skip


def images(*grids):
    """Patches (T, C · 2 · P · P) of images and videos of (frames, rows, columns) patches."""
    grid = torch.tensor(grids)
    return {"hidden_states": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 5 * 5), "grid_thw": grid}


@towers
def test_vision_tower_attends_to_all_images_in_one_call(kind, monkeypatch):
    from nt_attention.hf.route import attention

    calls, there = [], attention.varlen_attention
    monkeypatch.setattr(
        attention, "varlen_attention", lambda *args, **kwargs: calls.append(0) or there(*args, **kwargs)
    )
    model = make_tower(kind)
    for grids in ([(1, 4, 6)], [(1, 4, 6), (1, 2, 2), (2, 8, 4), (1, 6, 10)]):
        inputs = images(*grids)
        want = run(model, inputs)
        with nta.patch(model) as handle:
            calls.clear()
            out = run(model, inputs)
        assert len(calls) == 2
        assert repr(handle).count("one call for all images") == 2
        check(out, want, {})
        assert torch.equal(run(model, inputs).last_hidden_state, want.last_hidden_state)


@towers
def test_vision_tower_reads_each_offsets_tensor_once(kind, monkeypatch):
    from nt_attention.layouts import reading

    reads, there = [], reading.Facts.__init__
    monkeypatch.setattr(reading.Facts, "__init__", lambda *args: reads.append(0) or there(*args))
    model, inputs = make_tower(kind), images((1, 4, 6), (1, 2, 2), (2, 8, 4))
    with nta.patch(model):
        run(model, inputs)
    # all layers of Qwen2-VL have the same offsets; those of Qwen2.5-VL have either those of images or of windows
    assert len(reads) == {"qwen2_vl": 1, "qwen2_5_vl": 2}[kind]


@towers
def test_vision_tower_remove_restores_the_original_configs(kind):
    model = make_tower(kind)
    configs = {path: module.config for path, module in model.named_modules() if hasattr(module, "config")}
    before = [dict(vars(config)) for config in configs.values()]
    with nta.patch(model):
        assert model.blocks[0].attn.config is not configs["blocks.0.attn"]
    assert all(model.get_submodule(path).config is config for path, config in configs.items())
    assert [dict(vars(config)) for config in configs.values()] == before


@towers
def test_vision_tower_gradients(kind):
    model, inputs = make_tower(kind).train(), images((1, 4, 6), (1, 2, 2))

    def gradients():
        return torch.autograd.grad(model(**inputs).pooler_output.square().sum(), list(model.parameters()))

    want = gradients()
    with nta.patch(model):
        torch.testing.assert_close(gradients(), want, rtol=2e-4, atol=2e-4)


@towers
def test_vision_tower_inside_of_its_model(kind):
    model, inputs = make_whole(kind)
    want = run(model, inputs)
    with nta.patch(model) as handle:
        check(run(model, inputs), want, inputs)
    assert [path for path, what in handle.changed.items() if what == "one call for all images"] == [
        "visual.blocks.0.attn",
        "visual.blocks.1.attn",
    ]
    model.set_attn_implementation(nta.hf.register())
    check(run(model, inputs), want, inputs)


@towers
@pytest.mark.parametrize("side", ["right", "left"])
def test_text_beside_images_is_packed_by_a_patch_of_the_language_model(kind, side):
    model, inputs = make_whole(kind)
    if side == "left":
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            inputs[name][1] = inputs[name][1].roll(8)
    tokens = inputs["attention_mask"].bool()
    assert tokens.sum(1).tolist() == [13, 5]
    parameters = list(model.language_model.parameters())

    def results():
        hidden = model(**inputs).last_hidden_state[tokens]
        return hidden, torch.autograd.grad(hidden.square().sum(), parameters, allow_unused=True)

    want = results()
    with nta.patch(model.language_model, on_fallback="raise") as handle:
        got = results()
    assert handle.calls == {None: 1}
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_of_axes_with_frequencies_by_length(rope_type):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "mrope_section": [2, 3, 3], **factors}
    config = transformers.Qwen2VLConfig(
        text_config={
            **TOKENS, **SIZES, "hidden_size": 48, "num_key_value_heads": 1, "max_position_embeddings": 8,
            "rope_parameters": rope | {"original_max_position_embeddings": 8},
        },
        vision_config=TOWERS["qwen2_vl"],
    ).text_config  # fmt: skip
    model = AutoModel.from_config(config).eval()
    rows = [torch.randint(5, 80, (1, n)) for n in (13, 5, 7)]
    mask = torch.arange(13) < torch.tensor([[13], [5], [7]])
    ids = torch.zeros(3, 13, dtype=torch.long).masked_scatter(mask, torch.cat(rows, 1))
    with nta.patch(model), pytest.warns(NotPackedWarning, match="scaled by the length of each sequence"):
        out = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    for n, row in enumerate(rows):  # after the patched call, because RoPE keeps the frequencies of a longer row
        alone = AutoModel.from_config(config).eval()
        alone.load_state_dict(model.state_dict())
        want = alone(input_ids=row).last_hidden_state[0]
        torch.testing.assert_close(out[n, : row.shape[1]], want, atol=2e-5, rtol=1e-4)


def test_forward_that_only_takes_keywords_is_packed():
    class Keywords(transformers.LlamaModel):
        def forward(self, **kwargs):
            return super().forward(**kwargs)

    assert families.why_not_packed(Keywords(transformers.LlamaConfig(**TEXT, num_key_value_heads=3))) is None


def test_positions_of_axes_need_a_mask():
    model, _ = make_whole("qwen2_vl")
    embeds = torch.randn(2, 13, 48)
    positions = torch.arange(13).expand(3, 2, 13)
    with nta.patch(model.language_model) as handle, pytest.warns(UserWarning, match="position_ids are not"):
        model.language_model(inputs_embeds=embeds, position_ids=positions)
    assert handle.calls == {"its position_ids are not (batch, length)": 1}


NOT_ROUTED_CONFIGS = {
    "layoutlmv3": {"input_size": 8, "patch_size": 4, "coordinate_size": 6, "shape_size": 6},
    "led": {"d_model": 36, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
            "decoder_attention_heads": 3, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "attention_window": [4],
            "max_encoder_position_embeddings": 19, "max_decoder_position_embeddings": 19},
    "wavlm": {"conv_dim": (9,), "conv_kernel": (5,), "conv_stride": (3,), "num_conv_pos_embeddings": 5,
              "num_conv_pos_embedding_groups": 3, "num_feat_extract_layers": 1},
    "xlnet": {"d_model": 36, "n_head": 3, "n_layer": 1, "d_inner": 37},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(families.OWN_ATTENTION.keys() - {"wavlm"}))
def test_models_that_do_not_use_the_attention_interface_are_refused(kind):
    sizes = {} if kind == "xlnet" else {**SIZES, "num_hidden_layers": 1}
    model = AutoModel.from_config(
        transformers.CONFIG_MAPPING[kind](**{**TOKENS, **sizes, **NOT_ROUTED_CONFIGS.get(kind, {})})
    )
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e5
    before = dict(vars(model.config))
    for padding_free in (True, False):
        with pytest.raises(
            ValueError, match=f"does not route its attention .*{families.OWN_ATTENTION[kind]}"
        ) as refusal:
            nta.patch(model, padding_free=padding_free)
        assert type(model).__name__ in str(refusal.value)
        assert not padding_free or "varlen_attention (docs/coming_from/" in str(refusal.value)
    assert vars(model.config) == before


def test_a_model_without_attention_runs_rows_of_equal_lengths_together():
    sizes = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    model = transformers.FNetModel(transformers.FNetConfig(**sizes)).eval()
    rows = [torch.randint(5, 41, (1, n)) for n in (7, 4, 7)]
    mask = torch.arange(7) < torch.tensor([[7], [4], [7]])
    ids = torch.zeros(3, 7, dtype=torch.long).masked_scatter(mask, torch.cat(rows, 1))
    want = torch.cat([model(row).last_hidden_state[0] for row in rows])
    with nta.patch(model), pytest.warns(NotPackedWarning, match="reads padding in the padded run"):
        torch.testing.assert_close(model(ids, attention_mask=mask.long()).last_hidden_state[mask], want)


class TwoModels(transformers.PreTrainedModel):
    """As in retrieval: one model for queries, one for passages. Their inputs have names of their own."""

    config_class, base_model_prefix, _supports_sdpa = transformers.BertConfig, "bert", True

    def __init__(self, config):
        super().__init__(config)
        self.query, self.passage = transformers.BertModel(config), transformers.BertModel(config)
        self.post_init()

    def forward(self, query, passage):
        return self.query(**query).pooler_output + self.passage(**passage).pooler_output


def test_models_inside_of_a_model_that_is_not_packed_pack_by_themselves():
    model = TwoModels(transformers.BertConfig(**TEXT)).eval()
    ids = torch.randint(5, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    inputs = {name: {"input_ids": ids, "attention_mask": mask} for name in ("query", "passage")}
    want = model(**inputs)
    with nta.patch(model, on_fallback="raise") as handle:
        torch.testing.assert_close(model(**inputs), want)
    assert handle.calls == {None: 2}
    assert "TwoModels is not packed as a whole, because its input is query" in " ".join(str(handle).split())


class TupleHead(transformers.BertPreTrainedModel):
    """As in research code: it returns a tuple, and its width is written down."""

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.head = transformers.BertModel(config), torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        return (self.head(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state),)


def test_the_base_model_of_a_head_that_returns_a_tuple_packs():
    model = TupleHead(transformers.BertConfig(**TEXT)).eval()
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    batch = {"input_ids": torch.randint(5, VOCABULARY, (2, 7)), "attention_mask": mask.long()}
    (want,) = model(**batch)
    with nta.patch(model) as handle:
        (got,) = model(**batch)
    torch.testing.assert_close(got[mask], want[mask])
    assert handle.calls == {None: 1}

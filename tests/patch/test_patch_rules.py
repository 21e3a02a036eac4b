"""Why a call of a patched model does not run packed: a row for each reason of `rules.py`, with the result as unpatched.

A new rule or reason is a row in CASES.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning
from nt_attention.hf.pack import encoder_decoder, packed_forward, rules, small_batches

TOKENS = tiny.mask_of("right")
LLAMA, BERT, ROBERTA = ("llama", "LlamaForCausalLM"), ("bert", "BertModel"), ("roberta", "RobertaModel")
CROSSING = {"is_decoder": True, "add_cross_attention": True}
SMALL = "the batch is too small to gain from packing"


def of(name: str, value: Any) -> Callable[..., Any]:
    """Sets a field of the model's config."""
    return lambda model, patches: setattr(model.config, name, value)


def without_padding_id(model, patches):
    model.config.pad_token_id = model.embeddings.padding_idx = model.embeddings.word_embeddings.padding_idx = None


def asks_for_weights(model, patches):
    model.set_attn_implementation("eager")  # transformers allows it with this one only
    model.config.output_attentions = True


def with_noise(model, patches):
    model.train().get_input_embeddings().neftune_noise_alpha = 5.0


def with_samples(model, patches):
    patches.setitem(sys.modules, "opacus", sys.modules.get("opacus", types.ModuleType("opacus")))
    next(model.parameters()).grad_sample = None


def in_context_parallel(model, patches):
    def ring(*args, real=functional.scaled_dot_product_attention, **kwargs):
        return real(*args, **kwargs)

    ring.__module__ = context_parallel.__module__
    patches.setattr(functional, "scaled_dot_product_attention", ring)


def on_a_fast_device(model, patches):
    patches.setattr(packed_forward, "is_measured", lambda device: True)
    patches.setattr(small_batches, "HOST_MS", float("inf"))


def with_loss_of_rows(model, patches):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits[:, 0].sum() + logits[:, 6].sum(1)[0]


def that_subtracts_the_first(model, patches):
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: forward(x) - x[:, :1]


def holes(batch):
    mask = batch["attention_mask"].clone()
    mask[0, 3:5] = 0
    return {"attention_mask": mask, "labels": batch["input_ids"].masked_fill(mask == 0, -100)}


def whole(batch):
    return {"attention_mask": torch.ones_like(batch["attention_mask"])}


def one_row(batch, positions):
    return {name: x[:1] for name, x in batch.items()} | {"position_ids": positions}


def mask_of_pairs(batch):
    mask = batch["attention_mask"].bool()[:, None, None]
    return {"attention_mask": mask & torch.ones(mask.shape[-1], mask.shape[-1], dtype=torch.bool).tril()}


def labels(batch, **more):
    return {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100), **more}


def answers_at_padding(batch):
    return dict.fromkeys(
        ("start_positions", "end_positions"), batch["attention_mask"].sum(1).clamp(max=tiny.LENGTH - 1)
    )


@dataclass(frozen=True)
class Case:
    """A call that does not run packed.

    Attributes:
        rule: the name of the rule.
        reason: how its reason begins.
        model: model type and class.
        given: the arguments beside ids and mask, or a function that makes them of the batch.
        change: what is done to the patched model, with a `MonkeyPatch`.
        more: of the config.
        silent: whether there is no warning, because nothing is lost.
        base_packs: whether the base model of the head packs.
        counted: how often a call is counted: by the head, and by a base model to which it passes all arguments.
        error: what the model itself raises.
        compared: whether the result is compared with that of the unpatched model.
    """

    rule: str
    reason: str
    model: tuple[str, str] = LLAMA
    given: Any = None
    change: Callable[..., None] | None = None
    more: Any = None
    silent: bool = False
    base_packs: bool = False
    counted: int = 1
    compared: bool = True
    error: type[Exception] | None = None


ARGUMENTS, HEAD = "has_other_arguments", "head_needs_rows"
CASES = {
    "context parallel": Case(
        "is_divided_by_context_parallel", "PyTorch's context_parallel", change=in_context_parallel
    ),
    "Opacus": Case("needs_samples", "Opacus computes gradients for each sample", change=with_samples),
    "cache": Case(ARGUMENTS, "it asks for a cache", given={"use_cache": True}),
    "cache of before": Case(
        ARGUMENTS, "it continues from a cache", given=lambda _: {"past_key_values": DynamicCache()}
    ),
    "weights": Case(ARGUMENTS, "it asks for attention weights", given={"output_attentions": True}),
    "router": Case(
        ARGUMENTS, "it asks for router logits", ("gpt_oss", "GptOssForCausalLM"), {"output_router_logits": True}
    ),
    "router of the config": Case(
        ARGUMENTS, "it asks for router logits", ("gpt_oss", "GptOssForCausalLM"),
        change=of("output_router_logits", True), compared=False,
    ),
    "crossing": Case(
        ARGUMENTS, "it has encoder_hidden_states", BERT, {"encoder_hidden_states": torch.randn(4, 3, 48)}, more=CROSSING
    ),
    "unknown": Case(ARGUMENTS, "its argument 'what' is not known", ("llama", "LlamaModel"), {"what": 1}),
    "mask of pairs": Case(ARGUMENTS, "its attention_mask is not (batch, length)", given=mask_of_pairs),
    "positions with one axis": Case(
        ARGUMENTS, "its position_ids are not (batch, length)", given=lambda x: one_row(x, torch.arange(17)[None, None]),
        error=ValueError,
    ),
    "weights of the config": Case(
        ARGUMENTS, "the config asks for attention weights", BERT, change=asks_for_weights, compared=False
    ),
    "noise": Case(ARGUMENTS, "NEFTune scales its noise", change=with_noise, compared=False),
    "other attention": Case(
        "was_given_other_attention", "its attention was set to 'eager'",
        change=lambda model, _: model.set_attn_implementation("eager"),
    ),
    "no padding id": Case(
        "has_no_padding_id", "its positions depend on pad_token_id", ROBERTA, change=without_padding_id, error=TypeError
    ),
    "unknown to a head": Case(HEAD, "its argument 'what' is not known", given={"what": 1}, counted=2),
    "loss of rows": Case(
        HEAD, "its loss_function was replaced", given=labels, change=with_loss_of_rows, base_packs=True, compared=False
    ),
    "logits of a mask": Case(
        HEAD, "its logits_to_keep is a mask", given={"logits_to_keep": TOKENS & (torch.arange(17) % 3 == 1)},
        base_packs=True,
    ),
    "loss of some logits": Case(
        HEAD, "it asks for a loss with logits_to_keep", given=lambda batch: {**labels(batch), "logits_to_keep": 17},
        base_packs=True,
    ),
    "small": Case("is_too_small", SMALL, change=on_a_fast_device, silent=True),
    "holes under labels": Case("has_holes", "its rows have padding between tokens, and labels", given=holes),
    "holes under labels, with positions": Case(
        "has_holes", "its rows have padding between tokens, and labels",
        given=lambda batch: {**holes(batch), "position_ids": torch.arange(17)[None]},
    ),
    "holes under windows": Case(
        "has_holes", "its rows have padding between tokens, which its windows", ("mistral", "MistralModel"),
        given=lambda batch: {"attention_mask": holes(batch)["attention_mask"]},
    ),
    "no padding": Case("has_no_padding", rules.NO_PADDING, given=whole, silent=True),
    "no mask": Case("has_no_padding", rules.NO_MASK, given={"attention_mask": None}, silent=True),
    "mesh": Case("is_not_sharded", "it asks for the logits of some tokens", given={"logits_to_keep": 17}),
    "answers": Case(
        "answers_at_padding", "its start_positions or end_positions point at", ("bert", "BertForQuestionAnswering"),
        answers_at_padding,
    ),
    "other values": Case(
        "differs_from_padded", "its first batch gave other values packed than padded", change=that_subtracts_the_first,
        compared=False,
    ),
}  # fmt: skip


@pytest.fixture
def mesh_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def kept(out, given):
    """The outputs of tokens, of which the padding of a packed base model is another one."""
    values = {name: x for name, x in out.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    mask = given.get("attention_mask")
    mask = TOKENS if mask is None or mask.dim() != 2 else mask.bool()
    return {name: x[mask[: len(x)]] if x.shape[:2] == mask.shape else x for name, x in values.items()}


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("name", CASES)
def test_reason(name, monkeypatch, request):
    case = CASES[name]
    eager = case.model[0] == "gpt_oss" or name == "weights"
    model = tiny.make(*case.model, "eager" if eager else "sdpa", **(case.more or {}))
    batch = tiny.batch_of(case.model[0], "right")
    given = batch | (case.given(batch) if callable(case.given) else case.given or {})
    want = model(**given) if case.compared and case.error is None else None
    options = {"mesh": request.getfixturevalue("mesh_of_one")} if name == "mesh" else {}
    given = {key: x for key, x in given.items() if x is not None}
    with nta.patch(model, packing="auto" if name == "small" else "always", **options) as handle:
        if case.change is not None:
            case.change(model, monkeypatch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotPackedWarning)
            for _ in range(2):
                if "past_key_values" in given:
                    given["past_key_values"] = DynamicCache()
                with pytest.raises(case.error) if case.error else nullcontext():
                    got = model(**given)
        (reason,) = [why for why in handle.calls if why is not None]
        assert reason.startswith(case.reason)
        assert (handle.calls[reason], handle.calls[None]) == (2 * case.counted, 2 * case.base_packs)
        said = [x for x in said if x.category is NotPackedWarning]
        assert len(said) == (not case.silent)
        assert all(x.filename == __file__ and reason in str(x.message) for x in said)
        assert f"did not run packed: {reason[:20]}" in " ".join(str(handle).split()) or case.base_packs
        if want is not None:
            torch.testing.assert_close(kept(got, given), kept(want, given), rtol=1e-4, atol=2e-5)
        handle.on_fallback = "raise"
        with nullcontext() if case.silent else pytest.raises(NotPackedError, match='on_fallback="warn"'):
            model(**given)


def test_every_rule_has_a_case():
    table = {rule.__name__ for rule, _ in (*rules.BEFORE_GRAPH, *rules.AFTER_GRAPH)}
    assert table <= {case.rule for case in CASES.values()}
    both = encoder_decoder.EncoderDecoderCall
    of_both = {rule.__name__ for rule, _ in (*both.before_graph, *both.after_graph)}
    assert of_both <= table | {case.rule for case in OF_TWO_SIDES.values()} | {"was_given_other_attention"}


T5 = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
TARGET = torch.randint(6, 90, (4, 5), generator=torch.Generator().manual_seed(1))
SHORT = TARGET.masked_fill(torch.arange(5) > torch.tensor([[4], [2], [0], [3]]), -100)
OF_TWO_SIDES = {
    "no target": Case("_has_other_arguments", "it has neither decoder_input_ids nor labels", compared=False),
    "cache": Case(ARGUMENTS, "it asks for a cache", given={"decoder_input_ids": TARGET, "use_cache": True}),
    "weights": Case(
        ARGUMENTS, "it asks for attention weights", given={"decoder_input_ids": TARGET, "output_attentions": True}
    ),
    "mask": Case(
        "_has_other_arguments", "its decoder_attention_mask is not (batch, length)",
        given={"decoder_input_ids": TARGET, "decoder_attention_mask": torch.ones(4, 1, 5, 5)},
    ),
    "no padding": Case(
        "_has_no_padding", rules.NO_PADDING, given=lambda x: {**whole(x), "decoder_input_ids": TARGET}, silent=True
    ),
    "no labels": Case(
        "_has_no_padding", "its source or its target has no tokens",
        given=lambda _: {"labels": torch.full_like(TARGET, -100)}, silent=True,
    ),
    "no source": Case(
        "_has_no_padding", "its source or its target has no tokens",
        given=lambda x: {"attention_mask": 0 * x["attention_mask"], "labels": SHORT}, silent=True,
    ),
    "holes": Case(
        "_has_holes", "its rows have padding between tokens",
        given=lambda x: {"attention_mask": holes(x)["attention_mask"], "decoder_input_ids": TARGET},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TWO_SIDES)
def test_reason_of_encoder_decoders(name):
    case = OF_TWO_SIDES[name]
    model = T5ForConditionalGeneration(T5Config(vocab_size=tiny.VOCABULARY, dropout_rate=0.0, **T5)).eval()
    batch = tiny.batch_of("llama", "right")
    given = batch | (case.given(batch) if callable(case.given) else case.given or {})
    want = model(**given) if case.compared else None
    with nta.patch(model) as handle, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", NotPackedWarning)
        for _ in range(2):
            try:
                got = model(**given)
            except ValueError:  # of transformers: there is no target
                assert not case.compared
    assert len(handle.calls) == 1
    assert next(iter(handle.calls)).startswith(case.reason)
    assert handle.calls.total() == 2
    assert len([x for x in said if x.category is NotPackedWarning]) == (not case.silent)
    if case.compared:
        torch.testing.assert_close((got.logits, got.loss), (want.logits, want.loss), equal_nan=True)

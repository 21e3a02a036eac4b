"""Where a packed call gives, by design, another loss or pooled output than the padded run: said once, or an error."""

import warnings

import pytest
import tiny
import torch
import transformers
from cuda_graphs import DEVICE, cuda_graphs  # noqa: F401
from packed_rows import LENGTH, LENGTHS, MASK

import nt_attention as nta
from nt_attention.hf.pack import differences, packed_forward, small_batches
from nt_attention.hf.pack.routes import WITHOUT_HEAD

LEFT = MASK.flip(1)
IDS = torch.randint(5, tiny.VOCABULARY, MASK.shape, generator=torch.Generator().manual_seed(0))
SCALED = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
T5 = {"vocab_size": tiny.VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}


def labels_of(mask, at=()):
    """The ids at tokens, -100 at padding, and labels at further places (row, position)."""
    labels = IDS.masked_fill(~mask, -100)
    for row, position in at:
        labels[row, position] = 7
    return labels


def after_first(mask):
    """Labels at tokens, but for the first of a row."""
    return IDS.masked_fill(~mask | (mask.cumsum(1) == 1), -100)


SPAN = {"start_positions": torch.zeros(len(LENGTHS), dtype=torch.long), "end_positions": torch.tensor(LENGTHS) - 1}
LONG = {"max_position_embeddings": 40, "rope_parameters": {**SCALED, "original_max_position_embeddings": 8}}
PADDING = (1, LENGTHS[1])  # a place with padding on the right
CASES = {  # class, mask, further arguments, what differs
    "answers": ("bert", "BertForQuestionAnswering", MASK, SPAN, differences.SPAN_LOSS),
    "answers, no labels": ("bert", "BertForQuestionAnswering", MASK, {}, None),
    "next tokens": ("llama", "LlamaForCausalLM", MASK, {"labels": labels_of(MASK)}, None),
    "next tokens at padding": (
        "llama", "LlamaForCausalLM", MASK, {"labels": labels_of(MASK, [PADDING])}, differences.LABELS
    ),
    "next tokens, left": ("llama", "LlamaForCausalLM", LEFT, {"labels": after_first(LEFT)}, None),
    "next tokens, at the first position": (
        "llama", "LlamaForCausalLM", LEFT, {"labels": after_first(LEFT).index_fill(1, torch.tensor(0), 7)}, None
    ),
    "next tokens, left, first": ("llama", "LlamaForCausalLM", LEFT, {"labels": labels_of(LEFT)}, differences.LABELS),
    "next tokens, shifted": (
        "llama", "LlamaForCausalLM", MASK, {"labels": IDS, "shift_labels": after_first(MASK).roll(-1, 1)}, None
    ),
    "next tokens, other index": (
        "llama", "LlamaForCausalLM", MASK, {"labels": labels_of(MASK).clamp(min=0), "ignore_index": 0}, None
    ),
    "masked tokens, left": ("bert", "BertForMaskedLM", LEFT, {"labels": labels_of(LEFT)}, None),
    "masked tokens at padding": ("bert", "BertForMaskedLM", LEFT, {"labels": IDS}, differences.LABELS),
    "masked tokens, the first, bfloat16": (
        "bert", "BertForMaskedLM", MASK, {"labels": labels_of(MASK).index_fill(1, torch.arange(1, LENGTH), -100)}, None
    ),
    "pooled": ("bert", "BertModel", MASK, {}, None),
    "pooled, left": ("bert", "BertModel", LEFT, {}, differences.POOLED),
    "rows": ("bert", "BertForSequenceClassification", MASK, {"labels": torch.arange(len(LENGTHS)) % 2}, None),
    "rows, left": ("bert", "BertForSequenceClassification", LEFT, {}, differences.POOLED),
    "rows of a decoder, left": ("llama", "LlamaForSequenceClassification", LEFT, {}, None),
    "restarts": (
        "llama", "LlamaForCausalLM", MASK, {"position_ids": torch.arange(LENGTH).expand(MASK.shape) % 4},
        differences.RESTARTS,
    ),
}  # fmt: skip


def call(model, mask, more, device="cpu"):
    batch = {"input_ids": IDS, "attention_mask": mask.long(), **more}
    return model(**{name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()})


def differs(got, want, mask, head):
    """Whether the loss or the pooled output is another one than without the patch."""
    names = ["loss", "pooler_output", *["logits"] * head.endswith("SequenceClassification")]
    pairs = [(got[name], want[name]) for name in names if got.get(name) is not None]
    if not pairs:
        pairs = [(got["logits"][mask], want["logits"][mask])] if "logits" in got else []
    rtol = 1e-2 if pairs and pairs[0][0].dtype == torch.bfloat16 else 1e-4
    return any(not torch.allclose(x, y, rtol=rtol, atol=1e-5) for x, y in pairs)


@pytest.mark.parametrize("name", CASES)
def test_differences_are_said_once(name):
    model_type, kind, mask, more, difference = CASES[name]
    model = tiny.make(model_type, kind, "sdpa").to(torch.bfloat16 if "bfloat16" in name else torch.float32)
    want = call(model, mask, more)
    with nta.patch(model) as handle, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", nta.NotPackedWarning)
        got = call(model, mask, more)
        call(model, mask, more)
    messages = [str(warning.message) for warning in said if warning.category is nta.NotPackedWarning]
    assert handle.calls == {None: 2}
    if difference is None:
        assert not messages
        assert not handle.counts.notes
        assert "no labels" in name or not differs(got, want, mask, kind)
    else:
        assert messages == [f"the result differs from that of the padded run: {difference}."]
        assert f"2 calls gave another result than a padded one: {difference}" in " ".join(str(handle).split())
        assert differs(got, want, mask, kind)
        with nta.patch(model, on_fallback="raise"), pytest.raises(nta.NotPackedError, match="packed call would differ"):
            call(model, mask, more)


def test_rotary_embeddings_that_are_scaled():
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa", **LONG)
    want = call(model, MASK, {}).logits[MASK]
    with nta.patch(model) as handle, pytest.warns(nta.NotPackedWarning, match="scaled by the length of each sequence"):
        got = call(model, MASK, {}).logits[MASK]
    assert handle.calls == {None: 1}
    assert not torch.allclose(got, want, atol=1e-3)


def test_labels_of_an_encoder_decoder():
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    with nta.patch(model) as handle:
        call(model, MASK, {"labels": labels_of(MASK)})
        assert not handle.counts.notes
        with pytest.warns(nta.NotPackedWarning, match="labels at padding"):
            call(model, MASK, {"labels": IDS, "decoder_attention_mask": MASK.long()})


@pytest.mark.usefixtures("cuda_graphs", "uncompared")
def test_labels_in_cuda_graphs():
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa").to(DEVICE)
    with nta.patch(model, packing="always", cuda_graphs=True) as handle, torch.no_grad():
        call(model, MASK, {"labels": labels_of(MASK)}, DEVICE)
        with pytest.warns(nta.NotPackedWarning, match="labels at padding"):
            call(model, MASK, {"labels": labels_of(MASK, [PADDING])}, DEVICE)
    assert handle.graphs.calls == {None: 2}


def test_the_handle_says_what_is_not_packed():
    """A batch without a mask, and a base model that somebody calls without its head, as TRL does."""
    model = tiny.make("llama", "LlamaForCausalLM", "sdpa")
    with nta.patch(model) as handle:
        model(IDS)
        model.model(IDS, attention_mask=MASK.long())
        model(IDS, attention_mask=MASK.long())
        model(IDS, attention_mask=torch.ones_like(IDS))
    assert handle.calls == {
        None: 2, "it has no attention_mask, so all positions count as tokens": 1, "there is no padding to skip": 1
    }  # fmt: skip
    assert handle.counts.notes == {WITHOUT_HEAD: 1}
    assert max(map(len, str(handle).splitlines())) <= 100


@pytest.mark.usefixtures("cuda_graphs")
def test_small_batches_are_compared_and_then_run_as_graphs(monkeypatch):
    """What is too small to gain from packing gains most as a graph."""
    monkeypatch.setattr(packed_forward, "is_measured", lambda device: True)
    monkeypatch.setattr(small_batches, "HOST_MS", float("inf"))
    model = tiny.make("bert", "BertModel").to(DEVICE)
    handle = nta.patch(model, cuda_graphs=True)
    mask = (torch.arange(9) < torch.tensor([[9], [4]])).long().to(DEVICE)
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=mask * 7, attention_mask=mask)
    assert handle.calls == {None: 3}
    assert handle.counts.compared == 1
    assert handle.graphs.calls == {None: 2}

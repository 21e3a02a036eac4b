"""Where a patched head packs: at the head, or at its base model; each call is counted once."""

import pytest
import tiny
import torch
from packed_rows import LENGTH, MASK, PACKED, close, make, make_batch, rows_seen

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning
from nt_attention.hf.pack.packing import Packing

pytestmark = pytest.mark.usefixtures("uncompared")


def test_batch_without_padding_is_counted_once_and_read_once(monkeypatch):
    model, batch = make(), make_batch()
    made = []
    of = Packing.of.__func__
    monkeypatch.setattr(Packing, "of", classmethod(lambda cls, *given: made.append(1) or of(cls, *given)))
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with nta.patch(model) as handle:
        made.clear()  # of the proof, if there was none
        model(**batch)
    assert handle.calls == {"there is no padding to skip": 1}
    assert len(made) == 1


@pytest.mark.parametrize("asked", ["use_cache", "output_attentions"])
def test_cache_and_attention_weights_fall_back_with_one_warning(asked):
    """The reason holds for the head and for the base model, and is counted once for each call."""
    model, batch = make(implementation="eager"), make_batch()
    want = model(**batch, **{asked: True})
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning) as warned:
        for _ in range(2):
            got = model(**batch, **{asked: True})
    assert len([w for w in warned if w.category is NotPackedWarning]) == 1
    assert list(handle.calls.values()) == [2]
    assert torch.equal(got.logits, want.logits)
    if asked == "output_attentions":
        torch.testing.assert_close(got.attentions, want.attentions)
    else:
        assert got.past_key_values.get_seq_length() == LENGTH


def test_base_model_packs_under_a_loss_that_reads_rows():
    model, batch = make(), make_batch(labels=True)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits[:, 0].sum() + logits[:, 6].sum(1)[0]
    want = model(**batch).loss
    with nta.patch(model) as handle:
        shapes = rows_seen(model)
        close(model(**batch).loss, want)
    assert shapes == [PACKED]
    assert handle.calls == {None: 1}


def test_packed_rows_of_the_caller_are_counted_once():
    model = make()
    ids = torch.randint(5, tiny.VOCABULARY, (1, 11))
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = {"input_ids": ids, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    packed["position_ids"] = torch.tensor([[*range(4), *range(7)]])
    with nta.patch(model) as handle:
        got = model(**packed).logits
        close(got[:, 4:], model(ids[:, 4:]).logits)
        model.model(**packed)
    assert handle.calls == {None: 2, "it has no attention_mask, so all positions count as tokens": 1}


def test_on_fallback_raise():
    model, batch = make(), make_batch()
    with nta.patch(model, on_fallback="raise") as handle:
        model(**batch)
        for count in (1, 2):
            with pytest.raises(NotPackedError, match=r'it asks for a cache.*on_fallback="warn"'):
                model(**batch, use_cache=True)
            assert handle.calls == {None: 1, "it asks for a cache": count}
        model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]))  # nothing to pack
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(12, 2, 7, batch_first=True), 1)
    mask = torch.randn(LENGTH, LENGTH)
    with nta.patch(encoder, on_fallback="raise"), pytest.raises(NotPackedError, match="neither None nor causal"):
        encoder(torch.randn(4, LENGTH, 12), mask, ~MASK)


def test_on_fallback_refuses_other_values():
    with pytest.raises(ValueError, match=r'on_fallback must be "warn", "raise" or "silent", got \'ignore\''):
        nta.patch(make(), on_fallback="ignore")

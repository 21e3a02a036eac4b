"""Where a patched head packs: at the head, or at its base model; each call is counted once."""

import pytest
import tiny
import torch
from packed_rows import close, make, make_batch

import nt_attention as nta
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


def test_on_fallback_refuses_other_values():
    with pytest.raises(ValueError, match=r'on_fallback must be "warn", "raise" or "silent", got \'ignore\''):
        nta.patch(make(), on_fallback="ignore")

"""patch's handle: what it restores, second patches, several handles, exceptions, signatures."""

import functools
import inspect
import types
import warnings

import pytest
import tiny
import torch
from patched_models import assert_plain, close, every_kind, loss_of, make, make_batch
from torch import nn

import nt_attention as nta
from nt_attention.hf.pack import packing
from nt_attention.layouts.sequence import SequenceLayout

pytestmark = pytest.mark.usefixtures("uncompared")


@every_kind
def test_signature_and_the_columns_that_trainer_keeps(kind, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = make(kind)

    def seen():
        trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
        trainer._set_signature_columns_if_needed()
        return inspect.signature(model.forward), trainer._signature_columns, trainer.model_accepts_loss_kwargs

    want = seen()
    with nta.patch(model):
        assert seen() == want
    assert seen() == want


@every_kind
def test_later_wrapper_of_forward_stays_after_remove(kind):
    model, batch, called = make(kind), make_batch(kind), []
    want = loss_of(model, batch)
    handle = nta.patch(model)
    target = model.bert if kind == "sequence" else model
    inner = target.forward

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        called.append(handle.active)
        return inner(*args, **kwargs)

    target.forward = theirs
    assert inspect.signature(target.forward) == inspect.signature(inner)
    close(loss_of(model, batch), want)
    with pytest.raises(ValueError, match=r"already.*remove\(\) on the handle"):
        nta.patch(model, packing="always")
    handle.remove()
    assert target.forward is theirs
    assert torch.equal(loss_of(model, batch), want)
    assert (called, handle.calls) == ([True, False], {None: 1})
    with nta.patch(model) as second:  # around theirs
        close(loss_of(model, batch), want)
        assert second.calls == {None: 1}
    assert target.forward is theirs


@every_kind
def test_second_patch_is_refused_on_the_model_its_parts_and_its_parent(kind):
    model, batch = make(kind), make_batch(kind)
    holder = nn.ModuleDict({"inner": model})
    for first in (model, model.base_model):
        with nta.patch(first) as handle:
            for second in {model, model.base_model, holder}:
                with pytest.raises(ValueError, match=r"already patched") as refused:
                    nta.patch(second, packing="always")
                assert "remove() on the handle of that patch first" in str(refused.value)
            loss_of(model, batch)
            assert handle.calls == {None: 1}  # the first patch still works
        assert_plain(model, make(kind))


@every_kind
def test_exception_restores_the_model(kind):
    model, batch = make(kind), make_batch(kind)
    want = loss_of(model, batch)
    with pytest.raises(KeyboardInterrupt), nta.patch(model):
        raise KeyboardInterrupt
    with pytest.raises(IndexError), nta.patch(model):
        model(**{**batch, "input_ids": batch["input_ids"] + tiny.VOCABULARY})
    assert_plain(model, make(kind))
    assert torch.equal(loss_of(model, batch), want)
    with nta.patch(model) as handle:  # the layout of the call that failed is not used
        close(loss_of(model, batch), want)
        assert handle.calls == {None: 1}


def loss_of_two(two, batch):
    plain = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return loss_of(two.query, plain), loss_of(two.document, batch)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_handles_on_two_submodels(order):
    two, batch = nn.Module(), make_batch()
    two.query, two.document = make("base"), make("causal")
    want = loss_of_two(two, batch)
    parts = [two.query, two.document]
    handles = [nta.patch(part) for part in parts]
    with pytest.raises(ValueError, match=r"already"):
        nta.patch(two)
    calls = [1, 1]
    close(loss_of_two(two, batch), want)
    for which in order:
        assert [handle.calls[None] for handle in handles] == calls
        handles[which].remove()
        assert_plain(parts[which], make(["base", "causal"][which]))
        close(loss_of_two(two, batch), want)
        calls[1 - which] += handles[1 - which].active
    assert [torch.equal(a, b) for a, b in zip(loss_of_two(two, batch), want, strict=True)] == [True, True]


@every_kind
def test_layout_is_made_once_per_forward(kind, monkeypatch):
    made = []

    def counted(make_layout, *arguments):
        made.append(arguments)
        return make_layout(*arguments)

    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):  # may make layouts, to prove that the model can be packed
        monkeypatch.setattr(packing, "layout_of_mask", functools.partial(counted, packing.layout_of_mask))
        for other in ("from_position_ids", "from_lengths"):
            monkeypatch.setattr(SequenceLayout, other, lambda *_: pytest.fail("the layout is made a second time"))
        loss_of(model, batch).backward()
    assert len(made) == 1


def test_the_same_patch_again_returns_the_handle():
    """As in a notebook cell that runs again."""
    model = make("causal")
    handle = nta.patch(model, packing="always")
    assert nta.patch(model, packing="always") is handle
    with pytest.raises(ValueError, match="already patched, with other options: call remove"):
        nta.patch(model)
    with pytest.raises(ValueError, match="already patched"):
        nta.patch(model.model, packing="always")
    handle.remove()
    assert nta.patch(model, packing="always") is not handle


def test_handles_in_notebooks():
    handle = nta.patch(make("causal"))
    loss_of(make("causal"), make_batch("causal"))
    handle.left["a<b"] = "it is & it is"
    shown = handle._repr_html_()
    assert "a&lt;b" in shown
    assert "not changed, it is &amp; it is" in shown
    assert "no calls yet" in shown
    assert shown.count("<tr>") == shown.count("</tr>") == 4


def test_names_that_users_see():
    handle = nta.patch(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 1, enable_nested_tensor=False))
    public = {name for name in dir(handle) if not name.startswith("__")}
    assert public == {"active", "calls", "changed", "counts", "graphs", "layers", "left", "mesh", "remove"}
    assert all(hasattr(handle, name) for name in dir(handle))
    assert {name for name in dir(nta) if not name.startswith("__")} == set(nta.__all__)
    assert all(hasattr(nta, name) for name in dir(nta))


def test_silent_fallbacks_are_counted_without_a_warning():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, padding = torch.randn(2, 3, 16), torch.tensor([[False] * 3, [False, True, True]])
    with nta.patch(encoder, on_fallback="silent") as handle, warnings.catch_warnings():
        warnings.simplefilter("error", nta.NotPackedWarning)
        encoder(x, mask=torch.eye(3, dtype=torch.bool), src_key_padding_mask=padding)
        encoder(x, src_key_padding_mask=padding)
    assert handle.calls == {None: 1, "mask is neither None nor causal": 1}
    assert "1 call ran packed: 4 tokens in 6 positions, pad ratio 1.50 (33% skipped)" in str(handle)


def test_errors_say_what_to_pass():
    model = make("base")
    holder = types.SimpleNamespace(model=model)
    with pytest.raises(TypeError, match=r"must be an nn.Module, got SimpleNamespace. Pass its .model"):
        nta.patch(holder)

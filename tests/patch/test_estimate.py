"""`estimate`: counts, times by a clock that counts tokens, and a model that is as before."""

import importlib
from itertools import chain
from types import SimpleNamespace

import pytest
import tiny
import torch
from patched_models import assert_plain, make
from torch import nn

import nt_attention as nta

estimates = importlib.import_module("nt_attention._estimate")
LENGTHS = [[7, 1, 13], [3, 11, 2], [5, 5, 17]]


@pytest.fixture
def clock(monkeypatch):
    """Makes a module the clock: each position that it computes takes a second."""
    seconds = [0]
    monkeypatch.setattr(estimates, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def tick(module, args, out):
        seconds[0] += out.shape[:-1].numel()

    return lambda module: module.register_forward_hook(tick)


def test_speedup_is_what_padding_costs(clock):
    model = make("base").eval()
    clock(model.encoder.layer[0].intermediate.dense)
    result = nta.estimate(model, LENGTHS, seconds=1e9)
    sizes = (result.batches, result.measured, result.tokens, result.positions, result.sorted_positions)
    assert sizes == (3, 3, 64, 3 * (13 + 11 + 17), 3 * (17 + 7 + 3))
    assert result.pad_ratio == pytest.approx(123 / 64)
    assert (result.padded_ms, result.packed_ms) == pytest.approx((1e3 * 123 / 3, 1e3 * 64 / 3))
    assert (result.drift, result.padded_because, result.padded_bytes) == (1, {}, None)
    assert str(result).endswith("3 of them: 41000.0 ms a batch padded, 21333.3 ms packed\n  expected speedup: 1.92")
    assert_plain(model, make("base"))


def test_nothing_is_gained_without_padding_or_if_calls_run_padded(clock):
    model = make("base").eval()
    clock(model.encoder.layer[0].intermediate.dense)
    result = nta.estimate(model, [[5, 5]] * 2, seconds=1e9)
    assert (result.speedup, result.padded_because) == (1, {"there is no padding to skip": 1})
    assert "sorted" not in str(result)
    assert str(result).endswith("expected speedup: 1.00, so patch would not help")
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"input_ids": mask * 7, "attention_mask": mask, "output_attentions": True}
    result = nta.estimate(model, [batch])
    assert "100% of the calls ran padded: it asks for attention weights" in str(result)


def test_only_some_batches_are_measured(clock):
    model = make("base").eval()
    clock(model.encoder.layer[0].intermediate.dense)
    runs = []
    model.register_forward_hook(lambda _, args, batch, out: runs.append(len(batch["input_ids"])), with_kwargs=True)
    sorted_already = [[n, n + 1] for n in range(1, 13)]
    result = nta.estimate(model, iter(sorted_already), seconds=1e-9)
    assert (result.batches, result.measured, runs.count(2)) == (12, 1, 5)  # the check runs 3 rows, or one
    assert nta.estimate(model, sorted_already, seconds=1e9).measured == 5


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, src, src_key_padding_mask):
        x = self.norm(src.transpose(1, 2)).transpose(1, 2)
        return self.encoder(x, src_key_padding_mask=src_key_padding_mask)


@pytest.mark.parametrize("training", [True, False, None])
def test_the_model_is_as_before(training):
    model = WithStatistics()
    model.encoder.eval()
    modes = []
    model.norm.register_forward_hook(lambda module, *_: modes.append(module.training))
    model.norm.weight.grad = torch.ones(16)
    tensors = {name: x.clone() for name, x in chain(model.named_parameters(), model.named_buffers())}
    before = torch.random.get_rng_state()
    batch = {"src": torch.zeros(2, 3, 16), "src_key_padding_mask": torch.tensor([[False] * 3, [False, True, True]])}
    result = nta.estimate(model, [batch], training=training, seconds=1e-9)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(modes) == {training is not False} == {result.training}
    assert (result.tokens, result.positions, result.padded_because) == (4, 6, {})
    assert (model.training, model.norm.training, model.encoder.layers[0].training) == (True, True, False)
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        assert torch.equal(x, tensors[name]), name
        assert x.grad is None or (name == "norm.weight" and torch.equal(x.grad, torch.ones(16)))


def test_lengths_become_tokens_that_are_no_padding():
    model, seen = make("causal"), []
    model.register_forward_pre_hook(lambda _, args, batch: seen.append(batch), with_kwargs=True)
    nta.estimate(model, [[31, 1]], training=True, seconds=1e-9)
    seen = [batch for batch in seen if len(batch["input_ids"]) == 2]  # the check runs 3 rows, or one
    assert torch.equal(seen[0]["input_ids"] != tiny.PAD, seen[0]["attention_mask"].bool())
    assert seen[0]["attention_mask"].sum(1).tolist() == [31, 1]


def test_the_reason_of_a_refusal_is_told():
    result = nta.estimate(nn.Linear(4, 4), [{"attention_mask": torch.tensor([[1, 1], [1, 0]])}])
    assert result.speedup is None
    assert "patch found nothing to change in Linear" in result.refused
    assert str(result).endswith(f"not measured: {result.refused}")


MASK = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("kind", "batches", "options", "message"),
    [
        ("base", [], {}, "no tokens: pass at least one batch"),
        ("base", [{"attention_mask": 0 * MASK}], {}, "no tokens"),
        ("base", {"attention_mask": MASK}, {}, "or a list of lengths of 1 or more, got str attention_mask"),
        ("base", [[5, 0]], {}, r"got list \[5, 0\]"),
        ("base", [(MASK, MASK)], {}, "got tuple"),
        ("base", [{"input_ids": MASK, "labels": MASK}], {}, "attention_mask .B, L., got one with input_ids, labels"),
        ("base", [[5, 600]], {}, "the model has 512 positions, got a length of 600"),
        ("base", [[5]], {"seconds": 0}, "seconds must be greater than 0, got 0"),
        ("linear", [[5]], {}, "not for Linear: pass its padded batches as dicts"),
        ("frozen", [[5, 3]], {"training": True}, "no output of BertModel has a gradient"),
        ("patched", [[5]], {}, r"without a patch: call remove\(\)"),
    ],
)
def test_errors(kind, batches, options, message):
    model = nn.Linear(1, 1) if kind == "linear" else make("base")
    model.requires_grad_(kind != "frozen")
    with pytest.raises(ValueError, match=message):
        if kind == "patched":
            nta.patch(model)
        nta.estimate(model, batches, **options)

"""`patch(need_weights=False)`: models that call an nn.MultiheadAttention without need_weights, and drop its weights."""

import pytest
import torch
from torch import nn

import nt_attention as nta
from nt_attention import NotPackedError, NotPackedWarning

E, HEADS, QUERIES, LENGTH = 12, 3, 5, 11
PADDING = torch.arange(LENGTH) >= torch.tensor([[11], [4], [7]])


class ObjectDecoderLayer(nn.Module):
    """As in DETR: object queries attend to each other, and to a padded memory with positions."""

    def __init__(self, batch_first):
        super().__init__()
        self.self_attn, self.cross_attn = (nn.MultiheadAttention(E, HEADS, batch_first=batch_first) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(E), nn.LayerNorm(E)

    def forward(self, target, queries, memory, positions, padding):
        q = target + queries
        target = self.norm1(target + self.self_attn(q, q, target)[0])
        q, k = target + queries, memory + positions
        return self.norm2(target + self.cross_attn(q, k, memory, key_padding_mask=padding)[0])


class Detr(nn.Module):
    def __init__(self, batch_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.queries = nn.Parameter(torch.randn(QUERIES, 1, E))
        self.encoder = nn.MultiheadAttention(E, HEADS, batch_first=batch_first)
        self.layers = nn.ModuleList(ObjectDecoderLayer(batch_first) for _ in range(2))

    def forward(self, memory, positions, padding):
        """Features and positions (B, S, E), and the padding of both (B, S) → (B, Q, E)."""
        queries = self.queries.expand(-1, len(memory), -1)
        if self.batch_first:
            queries = queries.transpose(0, 1)
        else:
            memory, positions = memory.transpose(0, 1), positions.transpose(0, 1)
        q = memory + positions
        memory = memory + self.encoder(q, q, memory, key_padding_mask=padding)[0]
        target = torch.zeros_like(queries)
        for layer in self.layers:
            target = layer(target, queries, memory, positions, padding)
        return target if self.batch_first else target.transpose(0, 1)


def results(model, memory, positions):
    out = model(memory, positions, PADDING)
    return [out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_object_queries_run_packed(batch_first, training):
    model = Detr(batch_first).double().train(training)
    inputs = torch.randn(2, 3, LENGTH, E, dtype=torch.float64)
    want = results(model, *inputs)
    with nta.patch(model, need_weights=False, on_fallback="raise") as handle:
        torch.testing.assert_close(results(model, *inputs), want)
        assert handle.calls == {None: 3}  # the encoder, and each attention to the memory
        poisoned = inputs.masked_fill(PADDING[None, :, :, None], torch.nan)
        assert model(*poisoned, PADDING).isfinite().all()  # padding is not computed
    torch.testing.assert_close(results(model, *inputs), want, rtol=0, atol=0)


def test_weights_are_none_by_default_only():
    model = nn.ModuleList([nn.MultiheadAttention(E, HEADS, batch_first=True)])
    x = torch.randn(3, LENGTH, E)
    want = model[0](x, x, x, key_padding_mask=PADDING)
    with nta.patch(model, need_weights=False) as handle:
        out, weights = model[0](x, x, x, key_padding_mask=PADDING)
        assert weights is None
        torch.testing.assert_close(out[~PADDING], want[0][~PADDING])
        assert model[0](x, x, x)[1] is None
        with pytest.warns(NotPackedWarning, match="need_weights is not False"):
            torch.testing.assert_close(model[0](x, x, x, PADDING, True), want, rtol=0, atol=0)
        assert handle.calls == {None: 1, "need_weights is not False": 1}
    assert model[0](x, x, x)[1] is not None


@pytest.mark.parametrize("on_fallback", ["warn", "raise"])
def test_fallback_for_weights_names_the_option(on_fallback):
    model = Detr()
    nta.patch(model, on_fallback=on_fallback)
    message = r"pass need_weights=False: in the call, or to nt_attention\.patch"
    expected = pytest.warns(NotPackedWarning, match=message)
    if on_fallback == "raise":
        expected = pytest.raises(NotPackedError, match=message)
    with expected:
        model(*torch.randn(2, 3, LENGTH, E), PADDING)


def test_need_weights_must_be_a_bool():
    with pytest.raises(ValueError, match="need_weights must be True or False, got None"):
        nta.patch(Detr(), need_weights=None)

"""`patch(cuda_graphs=True)` for the Transformer modules of PyTorch, and for `nn.MultiheadAttention`.

Without a GPU, graphs are fake; see `helpers/cuda_graphs.py`.
"""

import copy

import pytest
import torch
from cuda_graphs import DEVICE, GPU, assert_same, cuda_graphs  # noqa: F401
from token_tiled_cases import IGNORED_WARNINGS
from torch import nn

import nt_attention as nta
from nt_attention.patching.handle import NotPackedWarning

pytestmark = [*IGNORED_WARNINGS, pytest.mark.usefixtures("cuda_graphs")]

TOLERANCE = 2e-3 if GPU else 1e-5
BATCHES = ([5, 2, 9], [1], [3, 3, 3, 3, 2], [9, 0, 4], [5, 2, 9])


def encoder(**more):
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(DEVICE)


def padding_of(lengths):
    """(B, L), True at padding."""
    return (torch.arange(max(lengths) + 2) >= torch.tensor(lengths)[:, None]).to(DEVICE)


def rows_of(padding, width=32):
    return torch.randn(*padding.shape, width, device=DEVICE)


def pair(model):
    """The model with graphs, and a copy that packs without them."""
    other = copy.deepcopy(model)
    nta.patch(other)
    return model, nta.patch(model, cuda_graphs=True), other


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"norm_first": True, "activation": "gelu"}], ids=["default", "pre-norm"])
def test_encoder(causal, more):
    model, handle, other = pair(encoder(**more))
    for lengths in BATCHES:
        padding = padding_of(lengths)
        x, mask = rows_of(padding), None
        if causal:
            mask = nn.Transformer.generate_square_subsequent_mask(padding.shape[1], device=DEVICE) < 0
        options = {"mask": mask, "src_key_padding_mask": padding, "is_causal": causal}
        with torch.no_grad():
            assert_same(model(x, **options), other(x, **options), TOLERANCE)
    assert handle.graphs.calls == handle.calls == {None: len(BATCHES)}
    assert handle.graphs.captured < len(BATCHES)


def test_encoder_with_compiled_layers():
    torch._dynamo.reset()
    model, handle, other = pair(encoder())
    for layer in model.layers:
        layer.compile(backend="inductor" if GPU else "aot_eager", dynamic=True)
    with torch.no_grad():
        for lengths in (*BATCHES, [40, 2], [70, 60, 4], [100] * 5, [9] * 20, [200, 100, 7]):
            padding = padding_of(lengths)
            x = rows_of(padding)
            assert_same(model(x, src_key_padding_mask=padding), other(x, src_key_padding_mask=padding), TOLERANCE)
    assert handle.graphs.calls == {None: 10}
    torch._dynamo.reset()


def test_encoder_with_rows_first_and_nested():
    layer = nn.TransformerEncoderLayer(32, 2, 48)
    model, handle, other = pair(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(DEVICE))
    padding = padding_of([5, 2, 9])
    x = rows_of(padding).transpose(0, 1)
    nested = torch.nested.nested_tensor([torch.randn(n, 32) for n in (5, 2, 9)], layout=torch.jagged, device=DEVICE)
    with torch.no_grad():
        assert_same(model(x, src_key_padding_mask=padding), other(x, src_key_padding_mask=padding), TOLERANCE)
        got, want = model(nested), other(nested)
    assert_same(got.values(), want.values(), TOLERANCE)
    assert got.offsets() is nested.offsets()
    assert handle.graphs.calls == {None: 2}
    assert handle.graphs.captured == 1


def test_transformer():
    model = nn.Transformer(32, 2, 2, 2, 48, batch_first=True).eval().to(DEVICE)
    model, handle, other = pair(model)
    for lengths, targets in (([5, 2, 9], [3, 4, 1]), ([6, 1, 9], [2, 4, 4]), ([9, 3], [4, 2])):
        source, target = padding_of(lengths), padding_of(targets)
        src, tgt = rows_of(source), rows_of(target)
        options = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=DEVICE) < 0,
            "tgt_is_causal": True,
            "src_key_padding_mask": source,
            "tgt_key_padding_mask": target,
            "memory_key_padding_mask": source,
        }
        with torch.no_grad():
            assert_same(model(src, tgt, **options), other(src, tgt, **options), TOLERANCE)
    assert handle.graphs.calls == {None: 6}  # an encoder and a decoder each
    assert handle.calls == {None: 3}


def test_decoder_and_lone_decoder_layer():
    layer = nn.TransformerDecoderLayer(32, 2, 48, batch_first=True)
    for made in (nn.TransformerDecoder(layer, 2), layer):
        model, handle, other = pair(made.eval().to(DEVICE))
        source, target = padding_of([5, 2, 9]), padding_of([3, 4, 1])
        tgt, memory = rows_of(target), rows_of(source)
        options = {"tgt_key_padding_mask": target, "memory_key_padding_mask": source}
        with torch.no_grad():
            assert_same(model(tgt, memory, **options), other(tgt, memory, **options), TOLERANCE)
        assert handle.graphs.calls == {None: 1}


def test_reasons():
    model, handle, _ = pair(encoder())
    padding = padding_of([5, 2, 9])
    x = rows_of(padding)
    model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        model.train()(x, src_key_padding_mask=padding)
    reasons = " ".join(map(str, handle.graphs.calls))
    for text in ("gradients are enabled", "training mode"):
        assert text in reasons
    assert len(handle.graphs) == 0
    assert handle.graphs.calls.total() == 2  # the attention of a layer is no call of its own


def test_fallback_runs_without_a_graph():
    model, handle, other = pair(encoder())
    padding = padding_of([5, 2, 9])
    x, mask = rows_of(padding), torch.rand(11, 11, device=DEVICE) > 0.5
    mask.fill_diagonal_(False)
    with torch.no_grad(), pytest.warns(NotPackedWarning):
        got, want = (m(x, mask=mask, src_key_padding_mask=padding) for m in (model, other))
    assert_same(got, want, TOLERANCE)
    assert handle.graphs.calls == {}

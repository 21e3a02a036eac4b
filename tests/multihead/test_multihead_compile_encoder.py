"""torch.compile over PyTorch's encoders with VarlenMultiheadAttention, and over patched encoders."""

import random

import pytest
import torch
from multihead_compile import (
    EMBED,
    HEADS,
    LENGTHS,
    Batch,
    close,
    compiled,
    gradients,
    slow_backend,
)
from parameters import with_random_parameters
from sweeps import sweep_except
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import nt_attention as nta
from nt_attention import VarlenMultiheadAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def encoder_layer(norm_first=False, dropout=0.0, attention=VarlenMultiheadAttention.from_torch):
    layer = nn.TransformerEncoderLayer(
        EMBED, HEADS, 50, dropout=dropout, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layer.self_attn = attention(layer.self_attn)
    return with_random_parameters(layer)


@pytest.mark.parametrize(
    ("norm_first", "mode"), sweep_except([(True, "train"), (False, "no_grad"), (True, "inference")], (False, "no_grad"))
)
def test_compiled_encoder_layer_on_nested_tensors(norm_first, mode):
    """In eval without gradients, stock layers have a fused kernel, which does not support jagged NestedTensors."""
    layer, batch = encoder_layer(norm_first).train(mode == "train"), Batch(LENGTHS)

    def call(x, _):
        return layer(x, is_causal=norm_first)

    want = batch.results(call, "nested", layer.parameters(), mode)
    close(batch.results(compiled(call, "aot_eager_decomp_partition"), "nested", layer.parameters(), mode), want)


@pytest.mark.parametrize(("norm_first", "mode"), sweep_except([(False, "train"), (True, "no_grad")], (True, "no_grad")))
def test_compiled_patched_encoder_on_nested_tensors_is_one_graph(norm_first, mode):
    layer = encoder_layer(norm_first, attention=lambda stock: stock)
    model = nn.TransformerEncoder(layer, 1, nn.LayerNorm(EMBED).double(), enable_nested_tensor=False)
    with_random_parameters(model).train(mode == "train")
    counter = CompileCounterWithBackend("aot_eager")
    with nta.patch(model):
        graph = compiled(model, counter)
        for lengths in (LENGTHS, [7, 11]):
            batch = Batch(lengths)
            want, got = (
                batch.results(lambda x, _, f=f: f(x, is_causal=True), "nested", model.parameters(), mode)
                for f in (model, graph)
            )
            close(got, want)
    assert counter.frame_count <= 2


@pytest.mark.sweep
def test_compiled_patched_encoder_on_padded_batches_breaks_the_graph_at_the_mask_only():
    layer = encoder_layer(attention=lambda stock: stock)
    model = with_random_parameters(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    counter, r, graphs = CompileCounterWithBackend("aot_eager"), random.Random(0), []
    with nta.patch(model) as handle:
        graph = torch.compile(model, backend=counter)
        for _ in range(5):
            lengths = [r.randint(1, 13) for _ in range(r.randint(2, 6))]
            padding = torch.arange(max(lengths) + 1) >= torch.tensor(lengths)[:, None]
            x = torch.randn(*padding.shape, EMBED, dtype=torch.float64, requires_grad=True)
            outs = [function(x, src_key_padding_mask=padding) for function in (model, graph)]
            close(*([out, *gradients(out, [x, *model.parameters()])] for out in outs))
            graphs.append(counter.frame_count)
        assert handle.calls == {None: 10}
    assert graphs[-1] == graphs[2] <= 8, graphs  # before the mask and after it; for two sizes, and then for all


@pytest.mark.sweep
@slow_backend
def test_compiled_encoder_layer_trains_with_dropout():
    layer, count, length = encoder_layer(dropout=0.1), 400, 5
    batch = Batch([length] * count)
    batch.rows = batch.rows[:length].repeat(count, 1)

    def call(x, _):
        return layer(x, is_causal=True)

    out, *grads = batch.results(compiled(call, fullgraph=False), "nested", layer.parameters())
    assert all(x.isfinite().all() and x.any() for x in grads)
    one, other = (x.view(count, length, EMBED) for x in (out, batch.results(call, "nested")[0]))
    error = (one.var(0) / count + other.var(0) / count).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()

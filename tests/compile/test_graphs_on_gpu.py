"""Graphs on a GPU: offsets in reused buffers, syncs, and a captured CUDA graph of a model."""

import pytest
import tiny
import torch
from waiting import syncs

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

pytestmark = pytest.mark.gpu


def test_buffers_that_the_compiler_reuses_for_other_offsets():
    """Inductor writes the second offsets to the tensor object of the first ones, and does not change its version."""

    def attend_twice(x, lengths, ends):
        first = SequenceLayout.from_offsets(torch.cumsum(lengths, 0).int() * 1)
        x = varlen_attention(x, x, x, first).sin()
        second = SequenceLayout.from_offsets((ends * x.float().sum().sign().abs().int()).int() + 0)
        return varlen_attention(x, x, x, second)

    x = torch.randn(12, 2, 64, device="cuda")
    lengths, ends = (torch.tensor(y, device="cuda", dtype=torch.int32) for y in ([0, 5, 7], [0, 2, 12]))
    with torch.no_grad():
        got = torch.compile(attend_twice, fullgraph=True)(x, lengths, ends)
        torch.testing.assert_close(got, attend_twice(x, lengths, ends), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "registered"])
def test_compiled_model_syncs_once_in_a_forward(patched, mode):
    model = tiny.make("llama", "LlamaModel", "sdpa").to("cuda", torch.bfloat16)
    if patched:
        mask = torch.arange(40, device="cuda") < torch.tensor([7, 40, 13], device="cuda")[:, None]
        call = {"input_ids": torch.randint(5, tiny.VOCABULARY, mask.shape, device="cuda"), "attention_mask": mask}
        nta.patch(model, packing="always")
    else:
        model.set_attn_implementation(nta.hf.register())
        positions = torch.cat([torch.arange(n, device="cuda") for n in (7, 40, 13)])[None]
        ids = torch.randint(5, tiny.VOCABULARY, positions.shape, device="cuda")
        call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    with mode():
        compiled(**call)
        assert syncs(lambda: compiled(**{name: x.clone() if x is not False else x for name, x in call.items()})) <= 1


def test_captured_graph_of_a_packed_row():
    model = tiny.make("llama", "LlamaModel", nta.hf.register()).to("cuda", torch.bfloat16)
    positions = torch.cat([torch.arange(n, device="cuda") for n in (7, 40, 13)])[None]
    ids = torch.randint(5, tiny.VOCABULARY, positions.shape, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        with torch.cuda.stream(stream):
            model(input_ids=ids, position_ids=positions, use_cache=False)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = model(input_ids=ids, position_ids=positions, use_cache=False)[0]
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_an_encoder_layer_on_nested_tensors_is_one_graph():
    """On a GPU, this runs with versions of torch that no CPU runs. The offsets of what a norm gives have no source."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True, device="cuda")
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    x = nta.SequenceLayout.from_lengths([5, 17, 3], device="cuda").to_nested(torch.randn(25, 64, device="cuda"))
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x.requires_grad_())
    torch.testing.assert_close(got.values(), layer(x).values(), rtol=1e-3, atol=1e-3)

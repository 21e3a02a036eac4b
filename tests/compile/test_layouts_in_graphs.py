"""Layouts that are made inside of a graph or from fake tensors, and what their operators read.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

import pickle

import numpy as np
import pytest
import torch
from calls import OFFSETS, attend
from sweeps import covering, sweep_except
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts.sequence import new_forward_token


def test_graph_of_a_value_with_more_rows_than_the_key():
    torch._dynamo.reset()
    key, value = torch.randn(14, 3, 7), torch.randn(17, 3, 7)

    def run(key, value, offsets):
        return varlen_attention(key, key, value, SequenceLayout.from_offsets(offsets))

    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(key, value, OFFSETS), run(key, value, OFFSETS))
    with pytest.raises(ValueError, match="key and value must have the same tokens"):
        graph(torch.randn(16, 3, 7), value, OFFSETS)


def test_layout_made_in_a_graph_checks_rows_in_eager_calls():
    torch._dynamo.reset()
    layout = torch.compile(lambda x: SequenceLayout.from_offsets(x), backend="eager")(torch.tensor([0, 4, 9]))
    x = torch.randn(9, 3, 7)
    want = attend(x, torch.tensor([0, 4, 9]))
    torch.testing.assert_close(varlen_attention(x, x, x, layout, is_causal=True), want)
    with pytest.raises(ValueError, match="have 9 tokens"):
        varlen_attention(x[:5], x[:5], x[:5], layout)


@pytest.mark.parametrize("options", [{}, {"rotary": nta.Rotary(dims=4)}], ids=["plain", "rotary"])
def test_fake_tensors_have_the_shapes_of_real_ones(options):
    module = nta.VarlenMultiheadAttention(24, 3, **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, offsets = torch.randn(14, 24), torch.tensor([0, 5, 14])
        out, _ = module(x, x, x, layout=SequenceLayout.from_offsets(offsets))
    assert isinstance(out, FakeTensor)
    assert out.shape == (14, 24)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, layout: layout.pad(varlen_attention(x, x, x, layout)),
        lambda x, layout: layout.pad(x),
        lambda x, layout: layout.pack(torch.cat([x, x]).unflatten(0, (2, 14))),
        lambda x, layout: x * layout.position_ids[:, None, None],
        lambda x, layout: x * layout.lengths.sum(),
        lambda x, layout: varlen_attention(x, x, x, layout, backend="cpu"),
    ],
    ids=["attention and pad", "pad", "pack", "positions", "lengths", "attention"],
)
def test_graph_with_a_layout_whose_offsets_were_changed(use):
    """The layout has its own copy."""
    torch._dynamo.reset()
    offsets, x = torch.tensor([0, 7, 14]), torch.randn(14, 3, 7)
    layout = SequenceLayout.from_offsets(offsets)
    graph = torch.compile(use, fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(x, layout), use(x, layout))
    offsets.numpy()[1] = 4
    torch.testing.assert_close(graph(x, layout), use(x, SequenceLayout.from_lengths([7, 7])))
    new = SequenceLayout.from_offsets(offsets)
    torch.testing.assert_close(graph(x, new), use(x, new))


@covering({"compiler": ["eager", "aot_eager"], "name": ["offsets", "cu_seqlens"]})
def test_graph_that_writes_to_tensors_of_its_layout(name, compiler):
    torch._dynamo.reset()
    layout, x = SequenceLayout.from_lengths([7, 7]), torch.randn(14, 3, 7, requires_grad=True)

    def run(x, layout):
        offsets = getattr(layout, name)
        offsets.zero_()
        offsets[2:] = 14
        return varlen_attention(x, x, x, layout)

    want = varlen_attention(x, x, x, layout)
    got = torch.compile(run, fullgraph=True, backend=compiler)(x, layout)
    torch.testing.assert_close(got, want)
    layout.cu_seqlens.zero_()
    grads = (torch.autograd.grad(each.square().sum(), x)[0] for each in (got, want))
    torch.testing.assert_close(*grads)


def test_named_backend_of_a_graph_whose_offsets_were_changed_before_the_backward():
    torch._dynamo.reset()
    offsets, x = torch.tensor([0, 7, 14], dtype=torch.int32), torch.randn(14, 3, 7, requires_grad=True)
    run = lambda x, layout: varlen_attention(x, x, x, layout, backend="cpu")  # noqa: E731
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x, SequenceLayout.from_offsets(offsets))
    offsets.numpy()[1] = 4
    want = torch.autograd.grad(run(x, SequenceLayout.from_lengths([7, 7])).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)


def test_graph_that_outlives_the_offsets_of_its_layout():
    """They are read again from the copy that the graph keeps."""
    x = torch.randn(14, 3, 7)
    layout = SequenceLayout.from_offsets(torch.tensor([0, 7, 14]))
    want = varlen_attention(x, x, x, layout)

    class Program(torch.nn.Module):
        def forward(self, x):
            return varlen_attention(x, x, x, layout)

    graph = torch.export.export(Program(), (x,)).module()
    layout = None
    torch.testing.assert_close(graph(x), want)


def test_bound_of_a_layout_that_is_made_in_a_graph():
    """`pad` breaks the graph, and pads to the bound as in eager mode."""
    torch._dynamo.reset()
    x = torch.randn(14, 3, 7)

    def run(x, offsets, longest):
        return SequenceLayout.from_offsets(offsets, max_seqlen=longest).pad(x)

    graph = torch.compile(run, backend="eager")
    for longest in (10, 17):
        torch.testing.assert_close(graph(x, OFFSETS, longest), run(x, OFFSETS, longest))
    with pytest.raises(ValueError, match="max_seqlen=3 is below"):
        graph(x, OFFSETS, 3)


def without_vectors():
    """Inductor without vectorization, which compiles faster."""
    options = {"cpp.simdlen": 0, "cpp.vec_isa_ok": True}
    return torch._inductor.config.patch(options)


@pytest.mark.parametrize("mode", sweep_except([torch.no_grad, torch.inference_mode]))
def test_buffers_that_the_compiler_reuses_for_other_offsets(like_a_gpu, mode):
    """Inductor writes the second offsets to the tensor object of the first ones, and does not change its version."""

    def attend_twice(x, lengths, ends):
        first = SequenceLayout.from_offsets(torch.cumsum(lengths, 0).int() * 1)
        x = varlen_attention(x, x, x, first).sin()
        second = SequenceLayout.from_offsets((ends * x.sum().sign().abs().int()).int() + 0)
        return varlen_attention(x, x, x, second)

    inputs = torch.randn(12, 2, 8), torch.tensor([0, 5, 7]), torch.tensor([0, 2, 12], dtype=torch.int32)
    torch._dynamo.reset()
    with mode(), without_vectors():
        want = attend_twice(*inputs)
        torch.testing.assert_close(torch.compile(attend_twice, fullgraph=True)(*inputs), want)


def test_tensor_object_that_is_written_without_another_version(like_a_gpu):
    """As by the replay of a CUDA graph. Operators read offsets again that they have not made."""
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    operator = torch.ops.nt_attention.offsets.default
    for ends in ([5, 12], [2, 12], [0, 12]):
        offsets.data[1:] = torch.tensor(ends)
        assert SequenceLayout.in_operator(operator(offsets, None, 0)).lengths.tolist() == np.diff([0, *ends]).tolist()
    assert len(like_a_gpu) == 3
    first, second = (new_forward_token(torch.device("cpu")) for _ in range(2))
    for _ in range(3):
        operator(offsets, first, 0)
    assert len(like_a_gpu) == 4  # read once in a forward
    operator(offsets, second, 0)
    assert len(like_a_gpu) == 5


def test_offsets_that_were_read_outside_are_not_read_in_a_graph(like_a_gpu):
    torch._dynamo.reset()
    layout = SequenceLayout.from_offsets(OFFSETS.clone())
    x = torch.randn(14, 3, 7, requires_grad=True)

    def run(x, offsets):
        for _ in range(3):
            x = varlen_attention(x, x, x, SequenceLayout.from_offsets(offsets))
        return x

    like_a_gpu.clear()
    torch.compile(run, fullgraph=True, backend="aot_eager")(x, layout.offsets).sum().backward()
    assert not like_a_gpu


LAYOUTS = {
    "lengths": lambda: SequenceLayout.from_lengths([5, 2, 7]),
    "mask": lambda: SequenceLayout.from_attention_mask(torch.arange(7) < torch.tensor([[5], [2], [7]])),
    "int32": lambda: SequenceLayout.from_offsets(torch.tensor([0, 5, 7, 14], dtype=torch.int32)),
    "extended": lambda: SequenceLayout.from_lengths([4, 1, 6]).extended(1),
    "pickled": lambda: pickle.loads(pickle.dumps(SequenceLayout.from_lengths([5, 2, 7]))),
}


@pytest.mark.parametrize("name", sweep_except(LAYOUTS, "lengths", "extended"))
def test_layouts_that_are_freed_before_the_backward_are_not_read_again(like_a_gpu, name):
    make = LAYOUTS[name]

    def run(x, layout):
        for _ in range(3):
            x = varlen_attention(x, x, x, layout)
        return x.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(14, 3, 7, requires_grad=True)
        want = torch.autograd.grad(run(x, make()), x)
        loss = compiled(x, make())  # the layout exists in the forward only
        like_a_gpu.clear()
        torch.testing.assert_close(torch.autograd.grad(loss, x), want, rtol=1e-4, atol=1e-3)
        assert not like_a_gpu


def test_offsets_of_a_graph_are_read_in_the_forward_only(like_a_gpu):
    torch._dynamo.reset()
    x = torch.randn(14, 3, 7, requires_grad=True)

    def run(x, lengths):
        layout = SequenceLayout.from_offsets(lengths.cumsum(0))
        for _ in range(3):
            x = varlen_attention(x, x, x, layout)
        return x

    torch.compile(run, fullgraph=True, backend="aot_eager")(x, OFFSETS.diff(prepend=OFFSETS[:1])).sum().backward()
    assert len(like_a_gpu) == 1

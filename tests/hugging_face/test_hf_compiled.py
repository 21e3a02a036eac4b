"""Models under the registered name compile as one graph, and packed rows stay apart in it."""

import warnings

import pytest
import tiny
import torch
from sweeps import covering, sweep_except
from torch._dynamo.testing import CompileCounterWithBackend

import nt_attention as nta
from nt_attention.hf.route import masks, positions
from nt_attention.layouts import sequence

LENGTHS, LENGTH = [11, 4, 7], 11
MODELS = {"llama": "LlamaForCausalLM", "bert": "BertModel", "mistral": "MistralForCausalLM"}


@covering({"model_type": MODELS, "form": ["padded", "packed", "packed under a mask"]})
def test_compiled_model_is_one_graph_and_gives_what_eager_gives(model_type, form):
    torch._dynamo.reset()
    model = tiny.make(model_type, MODELS[model_type], nta.hf.register(), num_hidden_layers=1)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape)
    with torch.no_grad():
        alone = torch.cat([model(ids[b : b + 1, :n])[0][0] for b, n in enumerate(LENGTHS)])
        if form == "padded":
            call = {"input_ids": ids, "attention_mask": mask.long()}
        else:
            call = packed_row(LENGTHS)
            call["input_ids"] = ids[mask][None]
            if form == "packed under a mask":
                call["attention_mask"] = torch.ones_like(call["position_ids"])
        got = torch.compile(model, backend="eager", fullgraph=True)(**call)[0]
    torch.testing.assert_close(got[mask] if form == "padded" else got[0], alone, rtol=0, atol=5e-5)


def packed_row(lengths, *, with_offsets=False):
    """The inputs of sequences that are packed into one row."""
    total = sum(lengths)
    row = {"input_ids": torch.randint(5, tiny.VOCABULARY, (1, total)), "use_cache": False}
    row["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    if with_offsets:
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        row |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(lengths)}
        row["max_length_k"] = max(lengths)
    return row


class Recorder:
    """A compiler that keeps its graphs, forward and backward."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def backend(self):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self, bw_compiler=self)

    def shapes(self):
        """The shapes of all tensors in the graphs."""
        found = [node.meta.get("val") for graph in self.graphs for node in graph.graph.nodes]
        return [tuple(x.shape) for x in found if isinstance(x, torch.Tensor)]


ROWS = [[11, 4, 7], [3, 30], [1, 1, 1, 9], [40], [5, 0, 13, 2]]


@pytest.mark.parametrize(
    ("model_type", "with_offsets", "checkpointing", "autocast"),
    sweep_except(
        [
            *(("llama", False, False, False), ("llama", True, True, True), ("mistral", True, False, True)),
            *(("mistral", False, True, False), ("bert", True, True, False)),
        ],
        ("llama", False, False, False),
    ),
)
def test_training_of_packed_rows_is_one_graph_without_a_mask(model_type, with_offsets, checkpointing, autocast):
    """No tensor of a graph has T × T elements, and one graph serves all lengths."""
    torch._dynamo.reset()
    model = tiny.make(model_type, MODELS[model_type], nta.hf.register(), num_hidden_layers=1).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder.backend(), dynamic=True, fullgraph=True)
    parameters = [x for x in model.parameters() if x.requires_grad]

    def solve(function, row):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = function(**row)[0]
        loss = out.float().square().mean()
        return out, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    for lengths in ROWS:
        row = packed_row([n for n in lengths if n or with_offsets], with_offsets=with_offsets)
        (got, got_grads), (want, want_grads) = solve(compiled, row), solve(model, row)
        tolerance = 0.05 if autocast else 1e-4
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got_grads, want_grads, rtol=tolerance, atol=tolerance)
    assert len(recorder.graphs) <= 6  # forward and backward, of at most 3 graphs
    squares = [shape for shape in recorder.shapes() if len(shape) >= 2 and shape[-1] == shape[-2]]
    assert all(isinstance(shape[-1], int) for shape in squares), squares  # none has two sizes of T tokens


def test_positions_are_read_once_in_a_graph_for_all_layers(monkeypatch):
    torch._dynamo.reset()
    reads = []
    read = sequence.starts_of_positions

    def counting(position_ids):
        reads.append(position_ids)
        return read(position_ids)

    model = tiny.make("llama", "LlamaForCausalLM", nta.hf.register())
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    rows = [packed_row(lengths) for lengths in ([11, 4, 7], [3, 30])]
    monkeypatch.setattr(sequence, "starts_of_positions", counting)
    for row in rows:
        reads.clear()
        made = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in row.items()}
        got = compiled(**made)[0]
        assert len(reads) == 1
        torch.testing.assert_close(got, model(**made)[0], rtol=0, atol=5e-5)


def test_capture_of_a_cuda_graph_reads_no_positions(monkeypatch):
    """Positions that were read before are used. Others get a dense mask, with a warning."""
    model = tiny.make("llama", "LlamaForCausalLM", nta.hf.register())
    row, other = packed_row([11, 4, 7]), packed_row([11, 4, 7])
    with torch.no_grad():
        want, others = (model(**x)[0] for x in (row, other))
        other["position_ids"] = other["position_ids"].clone()
        for module in (positions, masks):
            monkeypatch.setattr(module, "is_captured", lambda tensor: True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(model(**row)[0], want)
        with pytest.warns(UserWarning, match="run the call once with the same position_ids before the capture"):
            torch.testing.assert_close(model(**other)[0], others, rtol=0, atol=5e-5)


def pair(model_type="llama", **more):
    """A model under transformers' sdpa, and the same under the registered name."""
    models = [tiny.make(model_type, MODELS[model_type], name, **more) for name in ("sdpa", nta.hf.register())]
    models[1].load_state_dict(models[0].state_dict())
    return models


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
TREE = torch.tensor([[0, 1, 1, 2, 2, 2]])


def tree_mask():
    """(2, 1, 6, 6) bool, in which each token sees itself and the tokens above it in a tree."""
    above, visible = [-1, 0, 0, 1, 2, 1], torch.zeros(6, 6, dtype=torch.bool)
    for i in range(6):
        j = i
        while j >= 0:
            visible[i, j], j = True, above[j]
    return visible.expand(2, 1, 6, 6).contiguous()


MASKED = {
    "padding between tokens": (HOLES, (HOLES.cumsum(-1) - 1).masked_fill(HOLES == 0, 1)),
    "mask of the caller": (tree_mask(), TREE.expand(2, -1).contiguous()),
    "the same position everywhere": (torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), torch.zeros(2, 6, dtype=torch.long)),
}


@covering({"case": MASKED, "backend": ["eager", "aot_eager"]})
def test_masks_that_are_given_with_positions(case, backend):
    torch._dynamo.reset()
    stock, model = pair(num_hidden_layers=1)
    mask, position_ids = MASKED[case]
    call = {
        "input_ids": torch.randint(5, tiny.VOCABULARY, (2, 6)),
        "attention_mask": mask,
        "position_ids": position_ids,
    }
    with torch.no_grad():
        want, got = stock(**call)[0], torch.compile(model, backend=backend)(**call)[0]
    is_token = mask.bool() if mask.dim() == 2 else torch.ones(2, 6, dtype=torch.bool)
    torch.testing.assert_close(got[is_token], want[is_token], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("mode", "like_a_gpu"),
    sweep_except([(torch.no_grad, False), (torch.inference_mode, True), (torch.enable_grad, True)]),
)
def test_two_packings_that_one_graph_computes(like_a_gpu, mode, monkeypatch):
    """Inductor reuses the buffer of the positions of the first call for those of the second."""
    torch._dynamo.reset()
    model = tiny.make("llama", "LlamaModel", nta.hf.register(), num_hidden_layers=1)

    def one(ids, begins):
        index = torch.arange(begins.shape[1])
        first = torch.where(begins[0].bool(), index, torch.zeros_like(index)).cummax(0).values
        return model(ids, position_ids=(index - first)[None], use_cache=False)[0]

    def two(ids, begins, others):
        return one(ids, begins), one(ids, others)

    def begins_of(lengths):
        return torch.zeros(1, 8, dtype=torch.long).index_fill(1, torch.tensor([0, *lengths[:-1]]).cumsum(0), 1)

    ids = torch.randint(5, tiny.VOCABULARY, (1, 8))
    plainest = {"cpp.simdlen": 0, "cpp.vec_isa_ok": True}
    with mode(), torch._inductor.config.patch(plainest):
        call = ids, begins_of([3, 5]), begins_of([1, 7])
        torch.testing.assert_close(torch.compile(two)(*call), two(*call), rtol=0, atol=5e-5)


def test_layers_that_run_alone_after_positions_were_changed():
    torch._dynamo.reset()
    model = tiny.make("llama", "LlamaModel", nta.hf.register())

    def run(ids, position_ids, first):
        x = model.embed_tokens(ids)
        rotation = model.rotary_emb(x, position_ids)
        for layer in model.layers[first:]:
            x = layer(x, attention_mask=None, position_ids=position_ids, position_embeddings=rotation)
        return x

    ids, position_ids = torch.randint(5, tiny.VOCABULARY, (1, 8)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    compiled = torch.compile(run, backend="eager")
    with torch.no_grad():
        compiled(ids, position_ids, 0)
        position_ids.copy_(torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]]))
        want = run(ids, position_ids.clone(), 1)
        torch.testing.assert_close(compiled(ids, position_ids, 1), want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("with_offsets", sweep_except([False, True], False))
def test_layers_that_are_compiled_one_by_one_share_a_graph(with_offsets):
    torch._dynamo.reset()
    model = tiny.make("llama", "LlamaModel", nta.hf.register(), num_hidden_layers=3)
    counter = CompileCounterWithBackend("eager")
    rows = [packed_row(lengths, with_offsets=with_offsets) for lengths in ROWS if 0 not in lengths]
    with torch.no_grad():
        want = [model(**row)[0] for row in rows]
        for layer in model.layers:
            layer.compile(backend=counter, dynamic=True)
        for row, theirs in zip(rows, want, strict=True):
            torch.testing.assert_close(model(**row)[0], theirs, rtol=0, atol=5e-5)
    assert counter.frame_count <= 2

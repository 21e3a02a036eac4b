"""Patched models under torch.compile: packing and padding are outside, everything between them is one graph."""

import random
import warnings
from types import FunctionType

import pytest
import tiny
import torch
import transformers
from sweeps import covering, sweep_except
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend

import nt_attention as nta
from nt_attention.compiler import is_exporting
from nt_attention.hf.pack.packed_forward import PackedCall
from nt_attention.hf.pack.routes import Packed, Unpatched
from nt_attention.layouts import cache
from nt_attention.patching.forwards import PatchedForward

# Other types run the code of one of these.
TYPES = (
    *("albert", "bert", "deepseek_v3", "esm", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "modernbert", "opt"),
    "roberta",
)
CLASSES = {model_type: tiny.classes(model_type)[-1] for model_type in TYPES} | {
    "bert": "BertForMaskedLM",
    "llama": "LlamaForCausalLM",
    "modernbert": "ModernBertForMaskedLM",
}
ONE_LAYER = (
    "albert",
    "bert",
    "esm",
    "gpt2",
    "llama",
    "mistral",
    "opt",
    "roberta",
)  # compiles faster; the others have kinds of layers
GRAPHS = {"esm": 4}  # it embeds its tokens outside of the graph
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):  # their code breaks graphs, also without a patch
    GRAPHS |= {"opt": 8, "gpt_oss": 32}
# Variants: the arguments of torch.compile, checkpointing, autocast, dropout, or the mode of the model.
VARIANTS = [
    *(("static first", "bert"), ("checkpointing", "bert"), ("checkpointing", "llama")),
    *(("autocast", "bert"), ("dropout", "modernbert"), ("evaluation", "modernbert")),
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BATCHES = [[7, 1, 13, 19], [3, 11, 2, 5], [5, 5, 17], [23, 2, 3, 8, 4]]


@pytest.fixture(autouse=True)
def _fresh_compiler(fresh_compiler):
    """For every test here."""


def batch_of(model, lengths):
    mask = torch.arange(max(lengths) + 2) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if type(model).__name__.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
        batch["labels"] = ids.masked_fill(~mask, -100)
    return batch


def solve(function, model, batch, *, autocast=False, before_backward=lambda: None):
    """The main output at real tokens, the loss and the gradients of the parameters."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = function(**batch)
    mask = batch["attention_mask"].bool()
    main = next(iter(x for name, x in out.items() if name != "loss"))
    parts = [main] if isinstance(main, torch.Tensor) else list(main)
    parts = [x[mask] if x.shape[:2] == mask.shape else x for x in parts]
    loss = out["loss"] if "loss" in out else sum(x.float().square().sum() for x in parts)
    if not loss.requires_grad:
        return parts, []
    before_backward()
    parameters = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [*parts, loss], list(grads)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize("model_type", sweep_except(list(CLASSES), "llama"))
def test_one_graph_gives_what_the_model_gives(model_type, monkeypatch):
    """Outputs, losses and gradients in training, for batches of other lengths; then what stays and what is read."""
    implementation = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"  # they have no sdpa
    more = {"num_hidden_layers": 1} if model_type in ONE_LAYER else {}
    model = tiny.make(model_type, CLASSES[model_type], implementation, **more).train()
    numbers, batches = random.Random(0), [batch_of(model, lengths) for lengths in BATCHES]
    batches += [batch_of(model, [numbers.randint(1, 40) for _ in range(numbers.randint(2, 6))])]
    want = [solve(model, model, batch) for batch in batches]
    read, reads = cache._read, []
    monkeypatch.setattr(cache, "_read", lambda offsets: reads.append(offsets) or read(offsets))
    counter = CompileCounterWithBackend("aot_eager")
    with nta.patch(model, on_fallback="raise") as handle:
        compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=model_type not in GRAPHS)
        for batch, theirs in zip(batches, want, strict=True):
            torch.testing.assert_close(solve(compiled, model, batch, before_backward=reads.clear), theirs, **CLOSE)
            assert not reads  # the layout no longer exists in the backward; on a GPU, each layer would wait for it
        assert handle.calls == {None: len(batches)}
        assert counter.frame_count <= GRAPHS.get(model_type, 3)
        before = len(cache._entries)
        with torch.no_grad():
            for batch in batches[:4]:
                compiled(**batch)
        assert len(cache._entries) - before < 3  # those of earlier batches were freed
        assert counter.frame_count <= 2 * GRAPHS.get(model_type, 3)  # and as many without gradients
    # All models share the code of the patch, and PyTorch limits the graphs of a function.
    parts = PatchedForward, PackedCall, Packed, Unpatched
    functions = [x for part in parts for x in vars(part).values() if isinstance(x, FunctionType)]
    assert Packed.run in functions
    assert not [x for x in functions if _debug_get_cache_entry_list(x.__code__)]


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
@pytest.mark.parametrize(("variant", "model_type"), sweep_except(VARIANTS))
def test_variants_in_one_graph(variant, model_type):
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "attention_dropout": 0.3}
    more = {} if model_type == "modernbert" else {"num_hidden_layers": 1}  # compiles faster
    model = tiny.make(model_type, CLASSES[model_type], "sdpa", **more, **(dropout if variant == "dropout" else {}))
    model.train(variant != "evaluation")
    if variant == "checkpointing":  # PyTorch raises an error if a tensor of a checkpoint is unpacked twice
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counter, numbers = CompileCounterWithBackend("aot_eager"), random.Random(0)
    with (
        nta.patch(model, on_fallback="raise") as handle,
        torch.set_grad_enabled(variant != "evaluation"),
    ):
        compiled = torch.compile(model, backend=counter, dynamic=None if variant == "static first" else True)
        for _ in range(5):
            batch = batch_of(model, [numbers.randint(1, 40) for _ in range(numbers.randint(2, 6))])
            got = solve(compiled, model, batch, autocast=variant == "autocast")
            if variant != "dropout":  # a graph draws other random numbers
                want = solve(model, model, batch, autocast=variant == "autocast")
                tolerance = 0.1 if variant == "autocast" else 2e-4
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert handle.calls == {None: 5 if variant == "dropout" else 10}
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "first", sweep_except([["return_dict"], ["return_dict", "labels"]], ["return_dict"]), ids=" ".join
)
@pytest.mark.parametrize("model_type", sweep_except(["bert", "llama"]))
def test_calls_with_other_arguments(model_type, first):
    """PyTorch does not notice items that other calls add to a dictionary from which a graph removes items."""
    model = tiny.make(model_type, CLASSES[model_type], "sdpa", num_hidden_layers=1).eval()
    batch = batch_of(model, BATCHES[0]) | {"return_dict": True}
    with nta.patch(model), torch.no_grad():
        compiled = torch.compile(model, backend="eager", dynamic=True)
        for names in (first, ["return_dict", "labels"], ["labels"], ["return_dict"]):
            given = {name: x for name, x in batch.items() if name in ("input_ids", "attention_mask", *names)}
            want, got = model(**given), compiled(**given)
            assert got.keys() == want.keys()
            torch.testing.assert_close(tuple(got.values()), tuple(want.values()), rtol=1e-4, atol=1e-4)


def test_parts_that_were_compiled_before_the_patch():
    model = tiny.make("bert", "BertForMaskedLM", "sdpa", num_hidden_layers=1)
    batch = batch_of(model, BATCHES[0])
    want = solve(model, model, batch)
    model.bert.encoder = torch.compile(model.bert.encoder, backend="eager")
    torch.testing.assert_close(solve(model, model, batch), want, **CLOSE)
    with nta.patch(model) as handle:
        for _ in range(2):
            torch.testing.assert_close(solve(model, model, batch), want, **CLOSE)
        assert handle.calls == {None: 2}


@pytest.mark.sweep
def test_a_base_model_that_was_replaced_by_its_compiled_form():
    model = tiny.make("bert", "BertForMaskedLM", "sdpa", num_hidden_layers=1).train()
    batch = batch_of(model, BATCHES[0])
    with nta.patch(model) as handle:
        want = solve(model, model, batch)
        model.bert = torch.compile(model.bert, backend="eager")
        torch.testing.assert_close(solve(model, model, batch), want, rtol=1e-4, atol=1e-5)
        assert handle.calls == {None: 2}


@covering(
    {
        "recorder": ["torch.export", "torch.jit.trace"],
        "name": ["BertModel", "BertForSequenceClassification"],
    }
)
def test_recorded_models_are_those_without_the_patch(name, recorder):
    model = tiny.make("bert", name, "sdpa", num_hidden_layers=1)
    batch = batch_of(model, BATCHES[0])
    want = model(**batch)[-1]
    with nta.patch(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if recorder == "torch.jit.trace":
            recorded = torch.jit.trace(model, example_kwarg_inputs=batch, strict=False, check_trace=False)
        else:
            recorded = torch.export.export(model, (), batch, strict="strict" in recorder).module()
    assert not handle.calls
    torch.testing.assert_close(list(recorded(**batch).values())[-1], want)


def test_a_compiled_function_is_not_exported():
    """With `torch.compiler.is_exporting` itself, torch 2.11 would take the call for an export."""
    compiled = torch.compile(lambda x: x + is_exporting(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == 0


class Embedded(nn.Module):
    """A model that is not patched itself, but has a patched encoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(32))

    def forward(self, input_ids, attention_mask):
        return {"out": self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)}


@pytest.mark.parametrize("train", sweep_except([True, False]))
def test_transformer_encoder_in_a_model(train, monkeypatch):
    read, reads = cache._read, []
    monkeypatch.setattr(cache, "_read", lambda offsets: reads.append(offsets) or read(offsets))
    model = Embedded().train(train)
    batches = [batch_of(model, lengths) for lengths in BATCHES]
    want = [solve(model, model, batch) for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    with nta.patch(model, on_fallback="raise") as handle:
        compiled = torch.compile(model, backend=counter, dynamic=True)
        for batch, theirs in zip(batches, want, strict=True):
            got = solve(compiled, model, batch, before_backward=reads.clear)
            torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-5)
            assert not reads
        assert handle.calls == {None: len(BATCHES)}
    assert counter.frame_count <= 4  # two for the embedding, which runs before the packing


@pytest.mark.sweep
def test_inductor():
    model = tiny.make("bert", "BertForMaskedLM", "sdpa", num_hidden_layers=1).train()
    batches = [batch_of(model, lengths) for lengths in BATCHES]
    want = [solve(model, model, batch) for batch in batches]
    plainest = {"cpp.simdlen": 0, "cpp.vec_isa_ok": True}  # compiles faster
    with nta.patch(model, on_fallback="raise"), torch._inductor.config.patch(plainest):
        compiled = torch.compile(model, dynamic=True)
        for batch, theirs in zip(batches, want, strict=True):
            torch.testing.assert_close(solve(compiled, model, batch), theirs, rtol=1e-3, atol=1e-4)

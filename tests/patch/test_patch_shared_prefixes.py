"""`patch(shared_prefixes=True)`: outputs, losses and gradients are those of packing without sharing."""

import copy
import gc

import peft
import pytest
import tiny
import torch
from cuda_graphs import DEVICE, cuda_graphs  # noqa: F401
from sweeps import covering, sweep_except
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import nt_attention as nta
from nt_attention.hf.pack.rules import NO_MASK
from nt_attention.layouts.tree import TreeLayout

TYPES = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "phi3")
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # as in other tests of models: some compute norms and rotations in float32


def make(model_type="llama", name="LlamaForCausalLM", **more):
    implementation = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"
    if model_type == "llama":  # the others have kinds of layers
        more = {"num_hidden_layers": 1, **more}
    return tiny.make(model_type, name, implementation, **more).train()


def batch_of(groups=((40, (5, 9, 0, 3)), (33, (7, 1))), alone=20, *, left=False, labels=True):
    """Groups of rows with a prompt of some tokens and answers, then a row of its own; padded."""
    rows = []
    for prompt, answers in groups:
        first = torch.randint(4, tiny.VOCABULARY, (prompt,))
        rows += [torch.cat([first, torch.randint(4, tiny.VOCABULARY, (n,))]) for n in answers]
    rows += [torch.randint(4, tiny.VOCABULARY, (alone,))] if alone else []
    length = max(map(len, rows)) + 2
    ids, mask = torch.full((2, len(rows), length), tiny.PAD)
    mask = torch.zeros_like(mask)
    for at, row in enumerate(rows):
        where = slice(length - len(row), length) if left else slice(0, len(row))
        ids[at, where], mask[at, where] = row, 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if left:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch | ({"labels": ids.masked_fill(mask == 0, -100)} if labels else {})


def solve(model, batch):
    model.zero_grad()
    out = model(**batch)
    loss = out["loss"] if "loss" in out else sum(x.float().square().mean() for x in out.values() if torch.is_tensor(x))
    loss.backward()
    hidden = out.get("hidden_states") or ()
    grads = [x.grad for x in model.parameters() if x.requires_grad]
    return [x for x in out.values() if torch.is_tensor(x)] + list(hidden), grads


def check(model, *batches, counts=None, **options):
    """Compare with the same patch without sharing. Returns the handle."""
    other = copy.deepcopy(model)
    nta.patch(other)
    handle = nta.patch(model, shared_prefixes=True, on_fallback="silent", **options)
    for batch in batches:
        torch.testing.assert_close(solve(model, batch), solve(other, batch), **CLOSE)
    assert handle.prefixes.calls == (counts or {None: len(batches)})
    assert handle.calls.keys() <= {None, NO_MASK}
    return handle


@pytest.mark.parametrize("model_type", sweep_except(TYPES, "gemma2", "gpt2", "deepseek_v3"))
def test_decoders(model_type):
    name = {"gpt2": "GPT2LMHeadModel"}.get(model_type, f"{tiny.CONFIGS[model_type][0]}ForCausalLM")
    handle = check(make(model_type, name), batch_of() | {"output_hidden_states": True})
    assert (handle.prefixes.tokens, handle.prefixes.computed) == (271, 271 - 3 * 40 - 33)
    assert "118 of 271 tokens were computed" in str(handle)


def test_left_padding_and_logits_to_keep():
    """As in TRL: prompts are padded on the left, answers on the right, and logits of the last positions are wanted."""
    batch = batch_of(labels=False)
    padding = {"input_ids": tiny.PAD, "attention_mask": 0}
    shifted = {name: nn.functional.pad(x, (3, 0), value=padding[name]) for name, x in batch.items()}
    check(make(), shifted | {"logits_to_keep": 12}, batch_of(left=True))


def test_rows_without_padding():
    """Also without a mask, as evaluation harnesses call models."""
    batch = batch_of(((40, (6, 6, 6)),), alone=46, labels=False)
    ids = batch["input_ids"][:, :46]
    check(make(), {"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def test_heads_with_labels():
    batch, count = batch_of(labels=False), 7
    of_tokens = torch.randint(3, batch["input_ids"].shape).masked_fill(batch["attention_mask"] == 0, -100)
    labels = {
        "LlamaForSequenceClassification": {"labels": torch.arange(count) % 3},
        "LlamaForTokenClassification": {"labels": of_tokens},
        "LlamaForQuestionAnswering": {"start_positions": torch.full((count,), 2), "end_positions": torch.arange(9, 16)},
    }
    for name, values in labels.items():
        check(make("llama", name), batch | values)


def test_heads_without_labels_and_base_models():
    check(make("llama", "LlamaForSequenceClassification"), batch_of(labels=False))
    check(make("llama", "LlamaModel"), batch_of(labels=False))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    check(model, batch_of())


@pytest.mark.usefixtures("cuda_graphs")
@pytest.mark.usefixtures("uncompared")  # whose first call would run without a graph
def test_cuda_graphs_share_nothing():
    """Calls without gradients run as graphs, which do not know what rows share; calls with gradients share."""
    model, batch = make().eval().to(DEVICE), {name: x.to(DEVICE) for name, x in batch_of().items()}
    other = copy.deepcopy(model)
    nta.patch(other, packing="always")
    handle = nta.patch(model, packing="always", shared_prefixes=True, cuda_graphs=True)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch)["loss"], other(**batch)["loss"], **CLOSE)
    assert handle.graphs.calls[None] == 2
    reason = "the lengths are not known on the host, as in CUDA graphs, or the batch is divided over a mesh"
    assert list(handle.prefixes.calls) == [reason]
    torch.testing.assert_close(solve(model, batch), solve(other, batch), **CLOSE)
    assert handle.prefixes.calls[None] == 1


def test_batches_that_share_nothing():
    model = make()
    check(
        model,
        batch_of(((20, (3, 4)),)),
        {"inputs_embeds": torch.randn(2, 50, 48), "attention_mask": torch.ones(2, 50).tril(30).long()},
        counts={"its rows share too little": 1, "it has inputs_embeds": 1},
    )


def test_rows_without_padding_that_share_nothing():
    """They run unpatched, as without sharing, and as rows that are too short to share."""
    model = make()
    handle = nta.patch(model, shared_prefixes=True, on_fallback="raise")
    for length in (40, 20):
        model(input_ids=torch.randint(4, tiny.VOCABULARY, (3, length)))
    model(input_ids=torch.full((3, 31), 5))
    model(inputs_embeds=torch.randn(2, 40, 48))
    reasons = {"its rows share too little": 3, "it has no input_ids, or positions with axes": 1}
    assert handle.prefixes.calls == reasons
    assert handle.calls == {NO_MASK: 4}


def test_dropout_is_not_shared():
    model = make(attention_dropout=0.1)
    handle = nta.patch(model, shared_prefixes=True)
    model(**batch_of())
    model.eval()
    model(**batch_of())
    reason = "it has dropout, which would be the same in all rows that share a prefix"
    assert handle.prefixes.calls == {reason: 1, None: 1}


def test_dropout_of_a_part_in_training():
    model = make(attention_dropout=0.1, num_hidden_layers=2)
    handle = nta.patch(model, shared_prefixes=True)
    model.eval()
    model.model.layers[0].train()
    model(**batch_of())
    assert list(handle.prefixes.calls) == ["it has dropout, which would be the same in all rows that share a prefix"]


def _in_a_fork(x):
    """As trackers of tensor parallelism draw: the state of the generator is reset."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.empty_like(x).normal_()


DRAWS = {
    "default": torch.rand_like,
    "dropout": lambda x: nn.functional.dropout(torch.ones_like(x)),
    "fork": _in_a_fork,
    "fork, one number first": lambda x: torch.rand(1) + _in_a_fork(x),
    "generator": lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", sweep_except(DRAWS, "dropout", "fork, one number first", "generator"))
def test_random_numbers_are_not_shared(name):
    """Noise of a hook, of a router, or of an activation. Then the call is as without sharing, and no more are tried."""
    model, batch, draw = make(), batch_of(), DRAWS[name]
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + draw(out) if module.training else out)
    other = copy.deepcopy(model)
    nta.patch(other)
    handle = nta.patch(model, shared_prefixes=True)
    for _ in range(2):
        outs = []
        for each in (model, other):
            torch.manual_seed(0)
            outs.append(each(**batch)["logits"])
        torch.testing.assert_close(*outs)
    reason = "it draws random numbers, which would be the same in all rows that share a prefix"
    assert handle.prefixes.calls == {reason: 2}


@covering({"shares, total": [(True, 118), (False, 271)], "place": ["layers.0", "layers.1", "layers.1.mlp", "norm"]})
def test_values_of_each_row_fall_back(place, shares, total):
    """A hook adds (B, 1, E). The call runs padded, with and without sharing."""
    model, batch = make(num_hidden_layers=2), batch_of(labels=shares) | {"output_hidden_states": True}
    rows, other = torch.randn(len(batch["input_ids"]), 1, 48), copy.deepcopy(model)
    handle = nta.patch(model, shared_prefixes=shares, on_fallback="silent")
    for each in (model, other):
        each.model.get_submodule(place).register_forward_hook(lambda module, args, out: out + rows)
    torch.testing.assert_close(solve(model, batch), solve(other, batch))
    (reason,) = handle.calls.keys() - {None}
    assert f"has 7 rows of {total} tokens, but the batch was packed as one row of {total}: a hook or a" in reason


@pytest.mark.parametrize("keep", sweep_except(["attribute", "list", "sum", "nested"], "attribute", "nested"))
def test_losses_that_modules_keep_are_not_shared(keep):
    """As the z-loss of a router, which the training loop adds to the loss."""
    model, batch = make(), batch_of()

    def keep_loss(module, args, out):
        loss = out.square().mean()
        if keep == "attribute":
            module.loss = loss
        elif keep == "sum":  # over calls
            module.loss = getattr(module, "loss", 0) + loss
        else:
            module.losses["z"].append(loss if keep == "list" else (loss,))

    for layer in model.model.layers:
        layer.mlp.losses = {"z": []}
        layer.mlp.register_forward_hook(keep_loss)
    other = copy.deepcopy(model)
    nta.patch(other)
    handle = nta.patch(model, shared_prefixes=True)
    kept = []
    for each in (model, other):
        for _ in range(2):
            each(**batch)
        kept.append([layer.mlp.losses["z"] or layer.mlp.loss for layer in each.model.layers])
    torch.testing.assert_close(*kept)
    reason = "its modules keep values of tokens, such as a loss, which would count tokens that rows share once"
    assert handle.prefixes.calls == {reason: 2}


def test_gradients_scaled_by_frequency_are_not_shared():
    model = make()
    model.model.embed_tokens.scale_grad_by_freq = True
    with pytest.raises(ValueError, match="its embedding divides gradients by the number of tokens"):
        nta.patch(model, shared_prefixes=True)


def test_no_tensor_stays_after_a_call():
    model = make().eval()
    handle = nta.patch(model, shared_prefixes=True)
    batch = batch_of() | {"output_hidden_states": True}
    model(**batch)
    gc.collect()
    gc.disable()
    try:
        before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        model(**batch)
        left = [x.shape for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before]
    finally:
        gc.enable()
    assert (left, handle.prefixes.calls) == ([], {None: 2})


def test_in_function_transforms_nothing_is_shared():
    model, batch = make().eval(), batch_of()
    handle = nta.patch(model, shared_prefixes=True)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, kwargs=batch)["loss"]

    grads = torch.func.grad(loss)(parameters)
    assert handle.prefixes.calls == {"a function transform runs it": 1}
    loss(parameters).backward()
    torch.testing.assert_close(grads, {name: x.grad for name, x in parameters.items()}, **CLOSE)


def test_number_of_items_in_the_batch():
    """Trainer passes it as a tensor."""
    model = make()
    handle = nta.patch(model, shared_prefixes=True)
    model(**batch_of(), num_items_in_batch=torch.tensor(200))
    assert handle.prefixes.calls == {None: 1}


@pytest.mark.parametrize("what", sweep_except(["model", "layer"], "layer"))
def test_compiled_models_share_nothing(what):
    model, batch = make(), batch_of()
    want = solve(copy.deepcopy(model), batch)[0][:1]
    handle = nta.patch(model, shared_prefixes=True)
    if what == "layer":
        model.model.layers[0].compile(backend="eager", dynamic=True)
    function = torch.compile(model, backend="eager", dynamic=True) if what == "model" else model
    torch.testing.assert_close([function(**batch)["loss"]], want, **CLOSE)
    assert handle.prefixes.calls == {"it or its layers are compiled": 1}


@pytest.mark.parametrize("adapter", [peft.LoraConfig, peft.LoHaConfig, peft.LoKrConfig])
def test_adapters_without_dropout_share(adapter):
    """LoHa and LoKr draw a number to decide whether an adapter runs, also if its rate of dropout is 0."""
    config = adapter(target_modules=["q_proj", "v_proj"])
    config.init_lora_weights = config.init_weights = False
    model = peft.get_peft_model(make(), config).train()
    check(model, batch_of(), batch_of())


def test_a_mesh_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="leave out mesh"):
            nta.patch(make(), shared_prefixes=True, mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()


def test_padding_free_is_needed():
    with pytest.raises(ValueError, match="padding_free=False"):
        nta.patch(make(), shared_prefixes=True, padding_free=False)


def test_other_positions_are_not_shared():
    """Equal tokens at other positions are other tokens."""
    model, batch = make(), batch_of(((40, (5, 9)),), alone=0)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]) + torch.tensor([[0], [3]])
    check(model, batch, counts={"its rows share too little": 1})


def test_attention_that_is_not_causal_any_more():
    model = make()
    handle = nta.patch(model, shared_prefixes=True)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    ids = torch.cat([torch.arange(1, 41), torch.tensor([7])]).expand(2, -1).contiguous()
    ids[1, -1] = 8
    model(input_ids=ids)
    assert handle.prefixes.calls["its attention is not causal any more"] == 1


def test_sharing_is_tried_on_the_model(monkeypatch):
    monkeypatch.setattr(TreeLayout, "levels", lambda self: [])
    with pytest.raises(ValueError, match="differs if shared prefixes are computed once"):
        nta.patch(make(), shared_prefixes=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make("bert", "BertModel"), "not causal"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1), "no Hugging Face"),
    ],
)
def test_models_that_cannot_share(model, message):
    with pytest.raises(ValueError, match=message):
        nta.patch(model(), shared_prefixes=True)

"""Patched Hugging Face models with tensor parallelism, on two processes: results and gradients of one process."""

import copy
import tempfile

import pytest
import tiny
import torch
import transformers
from processes import run_in_processes
from ranks import whole
from sweeps import covering, sweep_except
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_tensor_parallelism
from transformers.distributed.tensor_parallel import ColwiseParallel as OfTransformers

import nt_attention as nta
from nt_attention.graphs.module_state import ModuleState
from nt_attention.patching.handle import NotPackedError, NotPackedWarning

NAMES_LAYERS = hasattr(transformers.PreTrainedModel, "_expand_parallel_plan")  # not before transformers 5.21
LENGTHS, LENGTH = [13, 1, 7, 19], 19
TEXT = {**tiny.TEXT, "num_attention_heads": 4, "hidden_size": 20, "intermediate_size": 26, "vocab_size": 98}
SIZES = {**TEXT, "num_key_value_heads": 2, "head_dim": 6}
# GPT-OSS has no plan for attention. This is that of other models with sinks.
OF_SINKS = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn": "local_params",
}
# Name → the class, what its config has beside SIZES, and the plan.
MODELS = {
    "llama": ("LlamaForCausalLM", {}, "auto"),
    "qwen2": ("Qwen2ForCausalLM", {}, "auto"),
    "qwen3": ("Qwen3ForCausalLM", {}, "auto"),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}, "auto"),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        OF_SINKS,
    ),
}


def make(name):
    kind, own, _ = MODELS[name]
    torch.manual_seed(2)
    model = getattr(transformers, kind)(transformers.CONFIG_MAPPING[name](**SIZES, **own)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def make_batch():
    torch.manual_seed(3)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(4, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    return {"input_ids": ids, "attention_mask": mask.long()}


def results(model, batch=None):
    """Logits at tokens, the model's own loss, and gradients. The model's loss is in float32, so another one is used."""
    batch = batch or make_batch()
    is_token = batch["attention_mask"].bool()
    logits = model(**batch).logits[is_token]
    logits.square().mean().backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()  # not after the next forward, which leaves parameters of FSDP2 gathered
    labels = batch["input_ids"].masked_fill(~is_token, -100)
    with torch.no_grad():
        loss = model(**batch, labels=labels).loss
    return logits.detach(), loss, gradients


def check_same(found, want):
    torch.testing.assert_close(found[0], want[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1], want[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2], want[2], rtol=0, atol=1e-9)


def check_plan(name, fsdp, folder, saved):
    kind = getattr(transformers, MODELS[name][0])
    one = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    config = DistributedConfig(tp_size=2, fsdp_size=fsdp, tp_plan=MODELS[name][2])
    model = kind.from_pretrained(
        folder, dtype=torch.float64, distributed_config=config, experts_implementation="eager"
    ).eval()
    weights = [parameter for parameter in model.model.layers[0].self_attn.parameters() if parameter.dim() == 2]
    assert all(isinstance(weight, DTensor) for weight in weights)
    want = results(one)
    handle = nta.patch(model)
    check_same(results(model), want)
    assert handle.calls == {None: 2}
    holds = {reason for is_so, reason in ModuleState(model).reasons(differentiates=False) if is_so}
    assert holds & {"its parameters are DTensors", "a module has forward hooks"}  # no CUDA graphs
    ids = make_batch()["input_ids"][-1:]
    model.save_pretrained(saved)
    tokens = [each.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=tiny.PAD) for each in (model, one)]
    assert torch.equal(*tokens)
    handle.remove()
    check_same(results(model), want)
    return dict(kind.from_pretrained(saved, dtype=torch.float64).state_dict())


PLANS = [*((name, 1) for name in MODELS), ("llama", 2)]


@pytest.mark.parametrize(("name", "fsdp"), sweep_except(PLANS, ("llama", 1), ("gpt_oss", 1)))
def test_plan_of_transformers(name, fsdp):
    if name == "gpt_oss" and "local_params" not in ALL_PARALLEL_STYLES:
        pytest.skip("this version of transformers can't divide sinks")
    if fsdp > 1 and not NAMES_LAYERS:
        pytest.skip("this version of transformers can't load a model with FSDP2 and tensor parallelism")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        model = make(name)
        model.save_pretrained(folder)
        weights = run_in_processes(2 * fsdp, check_plan, name, fsdp, folder, saved)[0]
    for key, x in model.state_dict().items():
        assert (weights[key] == x.numpy()).all()


def divide(model, style):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if style == "transformers":
        plans = [model._expand_parallel_plan(model.tp_plan)] if NAMES_LAYERS else []
        apply_tensor_parallelism(model, mesh, *plans)
        return
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    columns += ("query", "key", "value", "intermediate.dense")
    rows = ("o_proj", "down_proj", "output.dense")
    names = [name for name, _ in model.named_modules()]
    plan = {name: ColwiseParallel() for name in names if name.endswith(columns)}
    parallelize_module(model, mesh, plan | {name: RowwiseParallel() for name in names if name.endswith(rows)})


def check_order(style, is_first):
    model = make("llama")
    want = results(copy.deepcopy(model))
    if is_first:
        divide(model, style)
    handle = nta.patch(model, on_fallback="raise")
    if not is_first:
        divide(model, style)
    for _ in range(2):
        check_same(results(model), want)
        assert handle.calls == {None: 2}
        handle.remove()
        check_same(results(model), want)
        handle = nta.patch(model, on_fallback="raise")


@covering({"style": ["transformers", "torch"], "is_first": [True, False]})
def test_order(style, is_first):
    run_in_processes(2, check_order, style, is_first)


def divide_tokens(model, mesh):
    """Sequence parallelism: each rank has half of the tokens between the layers."""
    tokens, replicated = Shard(1), Replicate()
    of_attention = {"input_kwarg_layouts": {"hidden_states": tokens}}
    of_attention["desired_input_kwarg_layouts"] = {"hidden_states": replicated}
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=replicated, output_layouts=tokens),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(**of_attention),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(replicated,)),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=replicated),
    }
    parallelize_module(model, mesh, plan)


def check_tokens_divided():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = make("llama")
    unpadded = {"input_ids": make_batch()["input_ids"][:, :18], "attention_mask": torch.ones(4, 18, dtype=torch.int64)}
    unpadded["position_ids"] = torch.arange(18).expand(4, -1)
    want = results(copy.deepcopy(model), unpadded)
    handle = nta.patch(model)
    model(**make_batch())
    assert handle.calls == {None: 1}
    divide_tokens(model, mesh)
    with pytest.warns(NotPackedWarning, match="its parallel styles divide the tokens of a row over ranks"):
        check_same(results(model, unpadded), want)
    assert handle.calls[None] == 1
    handle.remove()
    nta.patch(model, on_fallback="raise")
    with pytest.raises(NotPackedError, match="divide the tokens"):
        model(**make_batch())
    for is_of_torch in (True, False):
        model = make("llama")
        if is_of_torch:
            parallelize_module(model, mesh, {"model.norm": SequenceParallel()})
        else:
            divide(model, "transformers")
            OfTransformers(output_layouts=Shard(1)).install_forward(model.model.layers[1].mlp.up_proj, mesh)
        nta.patch(model, on_fallback="raise")
        with pytest.raises(NotPackedError, match="divide the tokens"):
            model(**make_batch())


def test_sequence_parallelism_runs_padded():
    run_in_processes(2, check_tokens_divided)


class OwnStyle(OfTransformers):
    pass


def check_distributed_logits():
    """As for a loss that is computed on parts of the vocabulary."""
    model, batch = make("llama"), make_batch()
    is_token = batch["attention_mask"].bool()
    labels = batch["input_ids"].masked_fill(~is_token, -100)
    whole = copy.deepcopy(model)
    one, norm = whole(**batch, labels=labels), whole.model.norm.weight
    divide(model, "torch")
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"lm_head": head})
    handle = nta.patch(model)
    with loss_parallel():
        out = model.train()(**batch, labels=labels)
        weight, want = model.model.norm.weight, torch.autograd.grad(one.logits[is_token].sum(), norm)
    torch.testing.assert_close(out.loss.full_tensor(), one.loss, rtol=0, atol=1e-5)
    for logits in (out.logits, model.eval()(**batch).logits):
        assert isinstance(logits, DTensor)
        torch.testing.assert_close(logits.full_tensor()[is_token], one.logits[is_token], rtol=0, atol=1e-9)
        got = torch.autograd.grad((logits.full_tensor() * is_token[..., None]).sum(), weight)
        torch.testing.assert_close(got, want)
    assert handle.calls == {None: 2}


def test_distributed_logits():
    run_in_processes(2, check_distributed_logits)


def check_errors():
    mesh, batch = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), make_batch()
    model = make("llama")
    own = OwnStyle()
    own.shard_param(model.lm_head, "weight", mesh)
    own.install_forward(model.lm_head, mesh)
    is_token = batch["attention_mask"].bool()
    want = model(**batch).logits[is_token]
    with nta.patch(model, on_fallback="raise"):  # a style of the user is checked, and known to be right
        torch.testing.assert_close(model(**batch).logits[is_token], want)
    model = make("llama")
    columns = {f"model.layers.{i}.self_attn.q_proj": ColwiseParallel() for i in range(2)}
    rows = {f"model.layers.{i}.self_attn.o_proj": RowwiseParallel() for i in range(2)}
    nta.patch(model)
    parallelize_module(model, mesh, columns | rows)  # both ranks have all key heads
    with pytest.raises(ValueError, match="has 2 query heads for each key head, but its call has 2 query"):
        model(**batch)
    bloom = transformers.BloomConfig(n_layer=1, n_head=4, hidden_size=20, vocab_size=tiny.VOCABULARY)
    mpt = transformers.MptConfig(n_layers=1, n_heads=4, d_model=20, vocab_size=tiny.VOCABULARY)
    models = transformers.BloomForCausalLM(bloom), transformers.MptForCausalLM(mpt)
    plan = {"*.query_key_value": ColwiseParallel(), "*.dense": RowwiseParallel()}
    for model in models:
        nta.patch(model, check="never")  # which would find it, and run the call padded
    parallelize_module(models[0].transformer.h[0], mesh, plan)
    for model in models:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                module.n_heads = module.num_heads = 2
        with pytest.raises(ValueError, match="Attention has 2 of 4 heads, so the ALiBi slopes"):
            model(**batch)


def test_errors():
    run_in_processes(2, check_errors)

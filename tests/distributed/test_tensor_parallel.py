"""`HeadParallel` against the module in one process: results, gradients, steps, checkpoints, FSDP and errors."""

import copy
import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_in_processes
from ranks import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize, prune

import nt_attention as nta
from nt_attention.distributed import HeadParallel

E, H = 24, 8
LENGTHS = [5, 1, 0, 7]
EPS = 1e-3  # of optimizers. The gradient of the key bias is 0 but for rounding, and a small eps would amplify it
close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)

OPTIONS = {
    "fused": {},
    "separate": {"kdim": 10, "vdim": 14},
    "no_bias": {"bias": False},
    "grouped": {"num_kv_heads": 4},
    "grouped_separate": {"num_kv_heads": 4, "kdim": 10, "vdim": 14, "head_dim": 5},
    "sinks": {"sinks": True, "num_kv_heads": 4},
    "alibi": {"alibi": True, "window_size": (3, 2)},
    "rotary": {"rotary": nta.Rotary(), "head_dim": 4, "qk_norm": "rms", "num_kv_heads": 4},
    "layer_norm": {"qk_norm": "layer", "bias": False},
    "window": {"window_size": (2, 0), "num_kv_heads": 4},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "uneven": {"head_dim": 3, "num_kv_heads": 2},
    "added_keys": {"add_bias_kv": True, "add_zero_attn": True, "num_kv_heads": 4},
}


@functools.cache
def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]


@functools.cache
def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make(**options):
    torch.manual_seed(1)
    attention = nta.VarlenMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def divide(attention, mesh=None, **options):
    return parallelize_module(copy.deepcopy(attention), mesh or mesh_of_all(), HeadParallel(**options))


def packed(width=E, seed=0):
    torch.manual_seed(seed)
    return torch.randn(sum(LENGTHS), width, dtype=torch.float64)


def inputs_of(attention, *, is_cross=False):
    q = packed().requires_grad_()
    if attention.kdim == attention.vdim == E and not is_cross:
        return q, q, q
    return q, packed(attention.kdim, 1).requires_grad_(), packed(attention.vdim, 2).requires_grad_()


def stock_gradients(module):
    """The gradients with the names of the state_dict."""
    gradients = {name: whole(p.grad) for name, p in module.named_parameters()}
    for fused in ("in_proj_weight", "in_proj_bias"):
        names = [fused.replace("in_", f"{x}_") for x in "qkv"]
        is_fused = fused == "in_proj_bias" or module.kdim == module.vdim == module.embed_dim
        if names[0] in gradients and is_fused:
            gradients[fused] = torch.cat([gradients.pop(name) for name in names])
    return gradients


def check_same(attention, parallel, inputs, call):
    """Compare outputs and all gradients of `call(module, *inputs)`."""
    results = []
    for module in (attention, parallel):
        module.zero_grad()
        for x in inputs:
            x.grad = None
        outputs = [x for x in call(module, *inputs) if x is not None]
        loss = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outputs)
        loss.backward()
        different = {id(x): x.grad.clone() for x in inputs}
        results.append((outputs, list(different.values()), stock_gradients(module)))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])
    assert results[1][2].keys() == results[0][2].keys()
    for name, gradient in results[0][2].items():
        close(results[1][2][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def as_packed(module, q, k, v, **options):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    return module(q, k, v, layout=layout, **options)


def as_nested(module, q, k, v, **options):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    different = {id(x): layout.to_nested(x) for x in (q, k, v)}
    out, weights = module(*(different[id(x)] for x in (q, k, v)), **options)
    return out.values(), weights


def as_list(module, q, k, v, **options):
    different = {id(x): list(x.split(LENGTHS)) for x in (q, k, v)}
    out, weights = module(*(different[id(x)] for x in (q, k, v)), **options)
    return torch.cat(out), weights


def as_padded(module, q, k, v, **options):
    layout = nta.SequenceLayout.from_lengths(LENGTHS)
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS).unsqueeze(1)
    different = {id(x): layout.pad(x) for x in (q, k, v)}
    tensors = [different[id(x)] for x in (q, k, v)]
    options = {"need_weights": False, **options}
    out, weights = module(*tensors, key_padding_mask=padding, **options)
    return out, weights


def check_options(name):
    attention = make(**OPTIONS[name])
    parallel = divide(attention)
    for p in parallel.parameters():  # memory is divided
        parts = dist.get_world_size() if p.placements != (Replicate(),) else 1
        assert p.to_local().untyped_storage().nbytes() == p.numel() * p.element_size() // parts
    inputs = inputs_of(attention)
    check_same(attention, parallel, inputs, functools.partial(as_packed, is_causal=True))
    for form in (as_nested, as_list, as_padded):
        check_same(attention, parallel, inputs, form)
    check_same(attention, parallel, inputs_of(attention, is_cross=True), as_nested)
    for average in (True, False):
        call = functools.partial(as_padded, need_weights=True, average_attn_weights=average)
        check_same(attention, parallel, inputs, call)
    optimizers = [torch.optim.AdamW(x.parameters(), 0.1, eps=EPS) for x in (attention, parallel)]
    for optimizer in optimizers:
        optimizer.step()
    for name, p in attention.state_dict().items():
        close(parallel.state_dict()[name].full_tensor(), p)


@pytest.mark.parametrize("name", OPTIONS)
def test_results_gradients_and_a_step(name):
    run_in_processes(2, check_options, name)


@pytest.mark.parametrize("name", ["grouped_separate", "alibi", "rotary", "added_keys"])
def test_on_four_ranks(name):
    run_in_processes(4, check_options, name)


def check_masks():
    attention = make(num_kv_heads=4)
    parallel, inputs = divide(attention), inputs_of(attention)
    longest, batch = max(LENGTHS), len(LENGTHS)
    torch.manual_seed(3)
    bias = torch.randn(batch * H, longest, longest, dtype=torch.float64)
    for form in (as_packed, as_nested, as_padded):
        for mask in (bias, bias > 1, bias[0], bias[0] > 1):
            check_same(attention, parallel, inputs, functools.partial(form, attn_mask=mask))
    masks = [torch.randn(H, n, n, dtype=torch.float64) for n in LENGTHS]
    check_same(attention, parallel, inputs, functools.partial(as_list, attn_mask=masks))
    for learned in (bias.clone().requires_grad_(), bias[0].clone().requires_grad_()):

        def call(module, q, k, v, mask):
            return as_nested(module, q, k, v, attn_mask=mask)

        check_same(attention, parallel, (*inputs, learned), call)

    def mask_mod(b, h, i, j):
        return (i + j + h) % 3 > 0

    def score_mod(score, b, h, i, j):
        return score * (h + 1) + b - j

    mods = {"mask_mod": mask_mod, "score_mod": score_mod, "backend": "reference"}
    attention.backend = parallel.backend = mods.pop("backend")
    check_same(attention, parallel, inputs, functools.partial(as_packed, **mods))
    check_same(attention, parallel, inputs, functools.partial(as_packed, need_weights=True, **mods))
    for wrong in (bias[: batch * H // 2], bias[:3]):
        with pytest.raises(ValueError, match="attn_mask must have 32 rows"):
            as_packed(parallel, *inputs, attn_mask=wrong)
    with pytest.raises(ValueError, match=r"attn_mask must have 8 rows"):
        as_list(parallel, *inputs, attn_mask=[x[:4] for x in masks])
    factor = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="this rank's heads"):
        as_packed(parallel, *inputs, score_mod=lambda score, b, h, i, j: score * factor)


def test_masks_with_heads():
    run_in_processes(2, check_masks)


def check_layouts():
    attention, mesh = make(sinks=True, qk_norm="rms"), mesh_of_all()
    inputs = inputs_of(attention)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def with_dtensor(placement, module, x, *_):
        if module is not attention:
            x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [placement])
        return as_packed(module, x, x, x)

    for placement in (Replicate(), Shard(0), Shard(1)):
        x = packed().requires_grad_()
        check_same(attention, divide(attention), (x,), functools.partial(with_dtensor, placement))

    def gathered(dim, form, module, *tensors):
        out, weights = form(module, *tensors)
        if module is not attention:
            assert isinstance(out, DTensor)
            assert out.placements == (Shard(dim % out.dim()),)
            assert out.to_local().shape == out.full_tensor().chunk(ranks, dim)[rank].shape
            out = out.full_tensor()
        return out, weights

    for dim in (0, 1, -1):  # 13 rows of packed tensors, which are not divided evenly
        parallel = divide(attention, output_layout=Shard(dim), use_local_output=False)
        for form in (as_packed, as_padded):
            check_same(attention, parallel, inputs, functools.partial(gathered, dim, form))
    local, _ = as_packed(divide(attention, output_layout=Shard(0)), *inputs)
    close(local, as_packed(attention, *inputs)[0].chunk(ranks)[rank])
    out, _ = as_packed(divide(attention, use_local_output=False), *inputs)
    assert isinstance(out, DTensor)
    assert out.placements == (Replicate(),)
    close(out.to_local(), as_packed(attention, *inputs)[0])
    with pytest.raises(ValueError, match="NestedTensors and lists can't be divided"):
        as_nested(parallel, *inputs)
    with pytest.raises(ValueError, match="the output has 2 dimensions"):
        as_packed(divide(attention, output_layout=Shard(2)), *inputs)


def test_layouts_of_inputs_and_outputs():
    run_in_processes(2, check_layouts)


def check_other_mesh():
    x = DTensor.from_local(packed(), mesh_2d(), [Replicate(), Replicate()])
    with pytest.raises(ValueError, match="a DTensor input is on"):
        as_packed(divide(make(), mesh_2d()["tp"]), x, x, x)


def test_an_input_on_another_mesh():
    run_in_processes(4, check_other_mesh)


def check_state_dict(options):
    attention = make(**options)
    parallel, expected = divide(attention), attention.state_dict()
    state = parallel.state_dict()
    assert list(state) == list(expected)
    assert list(get_model_state_dict(nn.ModuleDict({"attn": parallel}))) == [f"attn.{name}" for name in expected]
    for name, x in expected.items():
        assert state[name].shape == x.shape
        assert torch.equal(state[name].full_tensor(), x)
        local = state[name].to_local()
        if name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "sinks"):
            assert local.untyped_storage().nbytes() == x.numel() * x.element_size() // dist.get_world_size()
    other = {name: torch.randn_like(x) for name, x in expected.items()}
    for given in (other, {name: distribute_tensor(x, mesh_of_all(), [Shard(0)]) for name, x in other.items()}):
        model = nn.Sequential(divide(make(**options)))
        model.load_state_dict({f"0.{name}": x for name, x in given.items()})
        for name, x in model[0].state_dict().items():
            close(x.full_tensor(), whole(given[name]), rtol=0, atol=0)
    model = nn.Sequential(divide(make(**options)))
    model.load_state_dict({f"0.{name}": x for name, x in other.items()}, assign=True)
    assert model[0].q_proj_weight.placements == (Shard(0),)
    assert torch.equal(model[0].state_dict()["out_proj.weight"].full_tensor(), other["out_proj.weight"])
    model = nn.Sequential(divide(make(**options)))
    set_model_state_dict(
        model, {f"0.{name}": x for name, x in other.items()}, options=StateDictOptions(full_state_dict=True)
    )
    for name, x in model[0].state_dict().items():
        assert torch.equal(x.full_tensor(), other[name])
    stock = make(**options)  # the other way
    stock.load_state_dict({name: x.full_tensor() for name, x in model[0].state_dict().items()})


@pytest.mark.parametrize("world", [2, 4])
def test_state_dict(world):
    run_in_processes(
        world, check_state_dict, {"num_kv_heads": 4, "sinks": True, "qk_norm": "layer", "add_bias_kv": True}
    )
    run_in_processes(world, check_state_dict, OPTIONS["separate"])


def check_errors_of_state_dict():
    parallel, stock = divide(make()), make().state_dict()
    wrong = {**stock, "in_proj_weight": torch.zeros(3, E)}
    with pytest.raises(RuntimeError, match="size mismatch for in_proj_weight") as error:
        parallel.load_state_dict(wrong)
    assert "Missing" not in str(error.value)
    del stock["in_proj_bias"]
    keys = parallel.load_state_dict({**stock, "more": torch.zeros(1)}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["in_proj_bias"], ["more"])
    with pytest.raises(RuntimeError, match=r'Missing key.*"in_proj_bias"'):
        parallel.load_state_dict(stock)


def test_errors_of_state_dict():
    run_in_processes(2, check_errors_of_state_dict)


def one_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=EPS)
    as_packed(model["attn"], *inputs_of(model["attn"]))[0].square().sum().backward()
    optimizer.step()
    return optimizer


CHECKPOINT = {"num_kv_heads": 4, "sinks": True, "qk_norm": "rms"}


def save(folder):
    model = nn.ModuleDict({"attn": divide(make(**CHECKPOINT))})
    optimizer = one_step(model)
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


def load(folder, names):
    """Load into a divided module of this number of ranks, with the state of the optimizer, and compare a step."""
    model = nn.ModuleDict({"attn": divide(make(**CHECKPOINT))})
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=EPS)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    before = {name: x.full_tensor().clone() for name, x in model.state_dict().items()}
    as_packed(model["attn"], *inputs_of(model["attn"]))[0].sum().backward()
    optimizer.step()
    return before, {name: x.full_tensor() for name, x in model.state_dict().items()}


def test_checkpoint_for_other_numbers_of_ranks():
    with tempfile.TemporaryDirectory() as folder:
        saved = run_in_processes(2, save, folder)[0]
        stock = nn.ModuleDict({"attn": make(**CHECKPOINT)})
        state = {"model": {name: torch.zeros_like(x) for name, x in stock.state_dict().items()}}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        stock.load_state_dict(state["model"])
        assert saved.keys() == stock.state_dict().keys()
        for name, x in stock.state_dict().items():
            close(x, torch.as_tensor(saved[name]), rtol=0, atol=0)
        loaded = {world: run_in_processes(world, load, folder, list(saved)) for world in (1, 2, 4)}
    for name, x in saved.items():
        for results in loaded.values():
            for before, after in results:
                assert (before[name] == x).all()
                close(torch.as_tensor(after[name]), torch.as_tensor(loaded[2][0][1][name]))


def load_stock(folder):
    model = nn.ModuleDict({"attn": divide(make(**CHECKPOINT))})
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


def test_checkpoint_of_one_process():
    stock = nn.ModuleDict({"attn": make(**CHECKPOINT)})
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(stock.state_dict(), checkpoint_id=folder, no_dist=True)
        for loaded in run_in_processes(2, load_stock, folder):
            for name, x in stock.state_dict().items():
                assert (loaded[name] == x.numpy()).all()


class Model(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, q, k, v):
        return as_nested(self.attn, q, k, v)


def check_fsdp(options):
    mesh, stock = mesh_2d(), Model(make(**options))
    model = fully_shard(Model(divide(stock.attn, mesh["tp"])), mesh=mesh["dp"])
    for name, x in model.state_dict().items():
        assert torch.equal(x.full_tensor(), stock.state_dict()[name])
    inputs = [x.detach() for x in inputs_of(stock.attn)]
    with pytest.raises(RuntimeError, match="call the module that fully_shard"):
        as_packed(model.attn, *inputs)
    optimizers = [torch.optim.AdamW(x.parameters(), 0.1, eps=EPS) for x in (stock, model)]
    for _ in range(2):
        # Replica r gets its own inputs, and FSDP takes the mean of the gradients.
        for r in (0, 1):
            different = {id(x): x * (r + 1) for x in inputs}
            tensors = [different[id(x)] for x in inputs]
            (stock(*tensors)[0].square().sum() / 2).backward()
            if r == mesh["dp"].get_local_rank():
                model(*tensors)[0].square().sum().backward()
        norms = [nn.utils.clip_grad_norm_(x.parameters(), 1.0) for x in (stock, model)]
        close(norms[1].full_tensor(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = stock.state_dict()
    for name, x in model.state_dict().items():
        close(x.full_tensor(), expected[name])
    other = {name: torch.randn_like(x) for name, x in expected.items()}
    model.load_state_dict(other)
    for name, x in model.state_dict().items():
        assert torch.equal(x.full_tensor(), other[name])
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        dcp.save(get_model_state_dict(model), checkpoint_id=folders[0])
        model.load_state_dict({name: torch.zeros_like(x) for name, x in other.items()})
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folders[0])
        set_model_state_dict(model, state)
        dist.barrier()
    for name, x in model.state_dict().items():
        assert torch.equal(x.full_tensor(), other[name])


@pytest.mark.parametrize("name", ["grouped_separate", "sinks", "rotary", "added_keys", "uneven"])
def test_fully_shard_over_two_dimensions(name):
    run_in_processes(4, check_fsdp, OPTIONS[name])


def check_dropout():
    attention = nta.VarlenMultiheadAttention(E, H, dropout=0.5, batch_first=True)
    parallel = divide(attention)
    x = torch.randn(2, 6, E)
    torch.manual_seed(5)
    out, weights = parallel(x, x, x, average_attn_weights=False)
    after = torch.rand(3)
    dropped = weights == 0
    assert not torch.equal(dropped[:, : H // 2], dropped[:, H // 2 :])  # the heads of two ranks
    torch.manual_seed(5)
    assert torch.equal(parallel(x, x, x)[0], out)
    close(parallel.eval()(x, x, x)[0], attention.eval()(x, x, x)[0], atol=1e-6)
    return out, after


def test_dropout():
    (out, after), (other, other_after) = run_in_processes(2, check_dropout)
    assert (out == other).all()
    assert (after == other_after).all()  # random numbers outside of attention stay equal


def check_layer():
    """In an nn.TransformerEncoder, under autocast and without gradients, and frozen parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    layer.self_attn = nta.VarlenMultiheadAttention(E, H, batch_first=True)
    layer.self_attn.out_proj.bias.requires_grad_(False)
    stock = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = copy.deepcopy(stock)
    parallelize_module(model, mesh_of_all(), {"layers.*.self_attn": HeadParallel()})
    assert not model.layers[1].self_attn.out_proj.bias.requires_grad
    x, padding = torch.randn(2, 6, E), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    for training in (True, False):
        with torch.set_grad_enabled(training):
            outputs = [m.train(training)(x, src_key_padding_mask=padding) for m in (stock, model)]
        close(outputs[1][~padding], outputs[0][~padding], atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        attention = model.layers[0].self_attn
        assert attention(x, x, x, need_weights=False)[0].dtype == torch.bfloat16
    clone = copy.deepcopy(attention)
    clone.load_state_dict(attention.state_dict())
    close(clone(x, x, x)[0], attention(x, x, x)[0])
    state = stock.layers[0].self_attn.state_dict()
    attention._reset_parameters()
    bound = (6 / (3 * E + E)) ** 0.5  # as for the fused parameter
    largest = attention.q_proj_weight.full_tensor().abs().max()
    assert 0.8 * bound < largest <= bound
    assert state["in_proj_weight"].abs().max() <= bound


def test_in_a_transformer_encoder():
    run_in_processes(2, check_layer)


def check_compiled():
    attention = make(**OPTIONS["rotary"], alibi=True)
    parallel = divide(attention)
    compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True)

    def call(module, q, k, v):
        return as_nested(module if module is attention else compiled, q, k, v)

    check_same(attention, parallel, inputs_of(attention), call)


def test_in_a_graph():
    run_in_processes(2, check_compiled)


def check_meta():
    """Parameters of a module on the meta device get memory on their rank only."""
    with torch.device("meta"):
        attention = make(num_kv_heads=4)
    parallel = divide(attention).to_empty(device="cpu")
    expected = make(num_kv_heads=4)
    parallel.load_state_dict(expected.state_dict())
    check_same(expected, parallel, inputs_of(expected), as_packed)
    assigned = divide(attention)
    assert assigned.state_dict()["in_proj_weight"].is_meta
    assigned.load_state_dict(expected.state_dict(), assign=True)
    check_same(expected, assigned, inputs_of(expected), as_packed)


def test_meta_device():
    run_in_processes(2, check_meta)


def check_changes_in_place():
    attention, parallel = make(qk_norm="rms"), None
    parallel = divide(attention)
    layout = nta.SequenceLayout.from_lengths([3, 5])
    x = packed()[: layout.total]

    def step():
        torch.optim.SGD(parallel.parameters(), 0.1).step()

    changes = {
        "weight": lambda: parallel.q_proj_weight.mul_(2),
        "output": lambda: parallel.out_proj.weight.mul_(2),
        "norm": lambda: parallel.q_norm.weight.mul_(2),
        "step": step,
        "state": lambda: parallel.load_state_dict(parallel.state_dict()),
    }
    for name, change in changes.items():
        for parameter in parallel.parameters():
            parameter.grad = torch.ones_like(parameter)
        out = parallel(x, x, x, layout=layout)[0]
        with torch.no_grad():
            change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        assert name
    given = distribute_tensor(x, parallel._mesh, (Replicate(),)).requires_grad_()
    out = parallel(given, given, given, layout=layout)[0]
    out += 1  # a result may be changed
    out.sum().backward(retain_graph=True)
    with torch.no_grad():
        given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_changes_in_place_before_the_backward():
    run_in_processes(2, check_changes_in_place)


def check_mods():
    parallel = divide(make())
    layout = nta.SequenceLayout.from_lengths([3, 5])
    x, bias = packed()[: layout.total], torch.randn(8, dtype=torch.float64)

    def score_mod(score, b, h, i, j):
        return score + bias[h]

    class Unhashable:
        __hash__ = None

        def __call__(self, score, b, h, i, j):
            return score + h

    parallel(x, x, x, layout=layout, score_mod=score_mod)
    parallel(x, x, x, layout=layout, score_mod=Unhashable())
    bias.requires_grad_()
    with pytest.raises(ValueError, match="uses a tensor that needs a gradient"):
        parallel(x, x, x, layout=layout, score_mod=score_mod)


def test_mods_are_checked_in_each_call():
    run_in_processes(2, check_mods)


def check_errors():
    def refused(module, match, error=ValueError, mesh=None):
        with pytest.raises(error, match=match):
            parallelize_module(module, mesh or mesh_of_all(), HeadParallel())

    refused(nta.VarlenMultiheadAttention(15, 3), "num_heads is 3, which 2 ranks")
    refused(nta.VarlenMultiheadAttention(E, H, num_kv_heads=1), "num_kv_heads is 1, which 2 ranks")
    refused(nta.VarlenMultiheadAttention(E, H, cuda_graphs=True), "pass cuda_graphs=False")
    refused(nn.MultiheadAttention(E, H), "VarlenMultiheadAttention.from_torch", TypeError)
    refused(nn.Linear(2, 2), "got Linear", TypeError)
    refused(divide(make()), "apply HeadParallel once")
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    refused(make(), 'such as mesh."tp".', mesh=two)
    refused(fully_shard(make(), mesh=mesh_of_all()), "apply it before fully_shard", TypeError)
    pruned = make()
    prune.l1_unstructured(pruned, "in_proj_weight", 0.5)
    refused(pruned, "prune.remove")
    adapted = make()
    adapted.out_proj = nn.Sequential(adapted.out_proj)
    with pytest.raises(ValueError, match="out_proj is a Sequential"):
        HeadParallel()._apply(adapted, mesh_of_all())
    changed = make()
    parametrize.register_parametrization(changed, "in_proj_weight", nn.Identity())
    refused(changed, "parametrizations", TypeError)
    with pytest.raises(TypeError, match="output_layout must be"):
        HeadParallel(output_layout=0)
    with pytest.raises(ValueError, match="load this module's state_dict"):
        divide(make()).to_torch()
    parallel = divide(make())
    parallel.graphs = nta.VarlenMultiheadAttention(E, H, cuda_graphs=True).graphs  # as `patch` does
    with torch.no_grad():
        as_packed(parallel.eval(), *inputs_of(parallel))
    assert "its heads are divided over ranks" in str(parallel.graphs.calls)


def test_errors():
    run_in_processes(2, check_errors)

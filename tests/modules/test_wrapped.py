"""VarlenMultiheadAttention in other hands, untouched: data-parallel, sharded, functional, parametrized, saved and loaded.

Dimensions: T rows, E embed dim, H heads.
"""

import copy
import io
import socket

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

import nt_attention as nta
from nt_attention import SequenceLayout, VarlenMultiheadAttention
from nt_attention.modules.rotary import Rotary

EMBED, HEADS, LENGTHS = 24, 4, [5, 1, 7, 0, 3]
OPTIONS = {
    "plain": {},
    "added": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "positions": {"rotary": Rotary(dims=4), "alibi": True, "window_size": (3, 2), "qk_norm": "rms"},
    "sinks": {"sinks": True, "num_kv_heads": 2},
}
every_option = pytest.mark.parametrize("name", OPTIONS)
slow_under_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def scrambled(module):
    """With parameters that are nowhere constant: fresh biases and sinks are 0 and would hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def make(name="plain", **more):
    return scrambled(VarlenMultiheadAttention(EMBED, HEADS, dtype=torch.float64, **OPTIONS[name], **more))


def rows_of(lengths=LENGTHS):
    return torch.randn(sum(lengths), EMBED, dtype=torch.float64)


def attend(module, rows, form="packed", lengths=LENGTHS):
    """Causal self-attention (T, E) to (T, E), by way of either form."""
    layout = SequenceLayout.from_lengths(lengths)
    if form == "packed":
        return module(rows, rows, rows, is_causal=True, layout=layout)[0]
    x = layout.to_nested(rows)
    return module(x, x, x, is_causal=True)[0].values()


def weighted(out):
    """A number to differentiate, in which every element counts for something else."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- two processes, which train on batches of their own


class Tower(nn.Module):
    """Residual attention over a ragged batch, then a head."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.attentions = nn.ModuleList(map(make, OPTIONS))
        self.norms = nn.ModuleList(nn.LayerNorm(EMBED, dtype=torch.float64) for _ in OPTIONS)
        self.head = nn.Linear(EMBED, 3, dtype=torch.float64)
        self.checkpointed = checkpointed

    def forward(self, x, place=None):
        layout = SequenceLayout.from_offsets(place) if isinstance(place, torch.Tensor) else place
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            if self.checkpointed:
                x = x + checkpoint(self.block, attention, norm(x), layout, use_reentrant=False)
            else:
                x = x + self.block(attention, norm(x), layout)
        return self.head(x.values() if x.is_nested else x)

    @staticmethod
    def block(attention, x, layout):
        return attention(x, x, x, is_causal=True, layout=layout)[0]


STEPS = 2
BATCHES = [[[5, 1, 7], [2, 0, 11, 3]], [[4], [6, 2, 9]]]  # the lengths of every rank in every step
WAYS = [
    *(("ddp", "layout", "eager"), ("ddp", "nested", "eager"), ("ddp", "layout", "checkpointed")),
    *(("ddp", "nested", "compiled"), ("ddp", "offsets", "compiled")),
    *(("fsdp", "layout", "eager"), ("fsdp", "nested", "eager"), ("fsdp", "offsets", "compiled")),
    ("fsdp", "layout", "checkpointed"),
]


def batch_of(step, rank, form):
    lengths = BATCHES[step][rank]
    rows = torch.randn(sum(lengths), EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    layout = SequenceLayout.from_lengths(lengths)
    return {"layout": (rows, layout), "offsets": (rows, layout.offsets), "nested": (layout.to_nested(rows),)}[form]


def loss_of(model, step, rank, form="layout"):
    return model(*batch_of(step, rank, form)).square().mean()


def worker(rank, port, folder):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    state, whole = torch.load(f"{folder}/state.pt"), StateDictOptions(full_state_dict=True)
    found = {}
    for way in WAYS:
        wrapper, form, run = way
        torch._dynamo.reset()
        inner = Tower(checkpointed=run == "checkpointed")
        if wrapper == "ddp":
            inner.load_state_dict(state)
            model = DistributedDataParallel(inner)
        else:
            for attention in inner.attentions:
                fully_shard(attention)
            model = fully_shard(inner)
            set_model_state_dict(model, state, options=whole)
        if run == "compiled":
            model = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        losses, grads = [], []
        for step in range(STEPS):
            loss = loss_of(model, step, rank, form)
            loss.backward()
            dist.all_reduce(mean := loss.detach() / 2)
            losses.append(mean)
            grads.append([p.grad.full_tensor() if wrapper == "fsdp" else p.grad.clone() for p in inner.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        found[way] = losses, grads, get_model_state_dict(inner, options=whole)
    dist.barrier()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(7)
    model = Tower()
    torch.save(model.state_dict(), folder / "state.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, folder), nprocs=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, grads = [], []
    for step in range(STEPS):
        loss = (loss_of(model, step, 0) + loss_of(model, step, 1)) / 2
        loss.backward()
        losses.append(loss.detach())
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return torch.load(folder / "found.pt"), (losses, grads, model.state_dict())


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_two_processes_train_as_one_does(way, of_two_processes):
    """Step by step, from weights that came whole and go whole; each process sees other lengths."""
    found, (losses, grads, state) = of_two_processes
    got_losses, got_grads, got_state = found[way]
    close(got_losses, losses)
    close(got_grads, grads)
    assert list(got_state) == list(state)
    close(dict(got_state), dict(state))


# --- gradients, by torch's own book


@pytest.mark.parametrize("form", ["packed", "nested"])
@every_option
def test_gradcheck_of_rows_and_parameters(name, form):
    module, rows = make(name), rows_of().requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)

    def call(rows, *parameters):
        with _reparametrize_module(module, dict(zip(names, parameters, strict=True))):
            return attend(module, rows, form)

    assert torch.autograd.gradcheck(call, (rows, *parameters), fast_mode=True)


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_the_reference_can_be_differentiated_twice():
    module, rows = make("sinks", backend="reference"), rows_of([3, 1, 4]).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: attend(module, x, lengths=[3, 1, 4]), (rows,), fast_mode=True)
    with pytest.raises(RuntimeError, match="differentiated once: pass backend='reference'"):
        torch.autograd.gradgradcheck(lambda x: attend(make("sinks"), x, lengths=[3, 1, 4]), (rows,), fast_mode=True)


# --- functional


def ensemble(name, count=3):
    """Modules, their parameters one on the other, and what calls one of them with some."""
    modules = [make(name) for _ in range(count)]
    stacked, _ = stack_module_state(modules)
    layout = SequenceLayout.from_lengths(LENGTHS)

    def call(parameters, rows):
        return functional_call(modules[0], parameters, (rows, rows, rows), {"layout": layout, "is_causal": True})[0]

    return modules, stacked, call


@every_option
def test_functional_call_takes_other_parameters(name):
    modules, _, call = ensemble(name)
    rows = rows_of()
    for module in modules:
        parameters = dict(module.named_parameters())
        close(call(parameters, rows), attend(module, rows))
        got = grad(lambda parameters, rows: weighted(call(parameters, rows)))(parameters, rows)
        want = torch.autograd.grad(weighted(attend(module, rows)), list(parameters.values()))
        close(list(got.values()), list(want))


@slow_under_vmap
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
@every_option
def test_an_ensemble_runs_under_vmap(name, mode):
    modules, stacked, call = ensemble(name)
    rows = rows_of()
    with mode():
        got = vmap(call, (0, None))(stacked, rows)
        want = torch.stack([attend(module, rows) for module in modules])
    close(got, want)


@slow_under_vmap
@every_option
def test_the_gradients_of_an_ensemble(name):
    """Of the mapped call, and mapped over: both are what every module finds by itself."""
    modules, stacked, call = ensemble(name)
    rows = rows_of()
    want = [torch.autograd.grad(weighted(attend(module, rows)), list(module.parameters())) for module in modules]
    want = dict(zip(stacked, map(torch.stack, zip(*want, strict=True)), strict=True))
    leaves = {key: x.detach().requires_grad_() for key, x in stacked.items()}
    sum(map(weighted, vmap(call, (0, None))(leaves, rows))).backward()
    close({key: x.grad for key, x in leaves.items()}, want)
    each = vmap(grad(lambda parameters, rows: weighted(call(parameters, rows))), (0, None))
    close(each(stacked, rows), want)


@slow_under_vmap
def test_a_jacobian_by_reverse_mode():
    module, rows = make("sinks"), rows_of([2, 1])
    got = jacrev(lambda x: attend(module, x, lengths=[2, 1]))(rows)
    want = torch.autograd.functional.jacobian(lambda x: attend(module, x, lengths=[2, 1]), rows)
    close(got, want)


# --- parametrized weights


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


PARAMETRIZED = {
    "own": lambda module: parametrize.register_parametrization(module, "in_proj_weight", Doubled()),
    "weight norm": lambda module: parametrizations.weight_norm(module, "in_proj_weight"),
    "spectral norm": lambda module: parametrizations.spectral_norm(module, "in_proj_weight").eval(),
}


@pytest.mark.parametrize("form", ["packed", "nested"])
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_a_parametrized_weight_is_the_one_that_is_used(kind, form):
    module, rows = make(), rows_of()
    PARAMETRIZED[kind](module)
    plain = make()
    plain.load_state_dict(
        {key: getattr(module, key) if "." not in key else x for key, x in plain.state_dict().items()}
        | {key: x for key, x in module.state_dict().items() if key in plain.state_dict()}
    )
    got, want = attend(module, rows, form), attend(plain, rows, form)
    close(got, want)
    weighted(got).backward()
    weighted(want).backward()
    original = next(iter(module.parametrizations["in_proj_weight"].parameters()))
    assert original.grad.any()
    if kind == "own":
        close(original.grad, 2 * plain.in_proj_weight.grad)
    close(module.out_proj.weight.grad, plain.out_proj.weight.grad)


def test_a_parametrized_weight_compiles_and_comes_off():
    module, rows = make(), rows_of()
    PARAMETRIZED["own"](module)
    layout = SequenceLayout.from_lengths(LENGTHS)
    torch._dynamo.reset()
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    want = attend(module, rows)
    close(graph(rows, rows, rows, is_causal=True, layout=layout)[0], want)
    before = list(make().state_dict())
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert sorted(module.state_dict()) == sorted(before)
    close(attend(module, rows), want)
    close(attend(VarlenMultiheadAttention.from_torch(module.to_torch()), rows), want)


# --- saved and loaded


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "bias": False}, {"kdim": 5, "vdim": 9}], ids=str)
def test_weights_travel_between_stock_and_ours(options, assign):
    stock = scrambled(nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options))
    ours = make(**options)
    ours.load_state_dict(saved_and_loaded(stock.state_dict()), assign=assign)
    back = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
    back.load_state_dict(saved_and_loaded(ours.state_dict()), assign=assign)
    assert list(back.state_dict()) == list(stock.state_dict())
    close(dict(back.state_dict()), dict(stock.state_dict()))
    query, key, value = (torch.randn(5, width, dtype=torch.float64) for width in (EMBED, stock.kdim, stock.vdim))
    close(ours(query, key, value), stock(query, key, value))


@every_option
def test_weights_travel_through_a_compiled_module_and_a_copy(name):
    module, other, rows = make(name), make(name), rows_of()
    want = attend(module, rows)
    state = saved_and_loaded(torch.compile(module, backend="eager").state_dict())
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "_orig_mod.")
    other.load_state_dict(state)
    close(attend(other, rows), want)
    close(attend(copy.deepcopy(module), rows), want)
    with torch.device("meta"):
        empty = make(name)
    empty.load_state_dict(state, assign=True)
    close(attend(empty, rows), want)


def test_an_optimizer_resumes_where_it_was():
    """Trained in one go, and trained, saved, loaded and trained: the same weights."""
    batches = [rows_of() for _ in range(4)]

    def train(module, optimizer, batches):
        for rows in batches:
            weighted(attend(module, rows)).backward()
            optimizer.step()
            optimizer.zero_grad()

    module = make("added")
    resumed = copy.deepcopy(module)
    train(module, torch.optim.AdamW(module.parameters(), 1e-2), batches)
    optimizer = torch.optim.AdamW(resumed.parameters(), 1e-2)
    train(resumed, optimizer, batches[:2])
    states = saved_and_loaded((resumed.state_dict(), optimizer.state_dict()))
    fresh = make("added")
    optimizer = torch.optim.AdamW(fresh.parameters(), 1e-2)
    for part, state in zip((fresh, optimizer), states, strict=True):
        part.load_state_dict(state)
    train(fresh, optimizer, batches[2:])
    close(dict(fresh.state_dict()), dict(module.state_dict()))


def test_a_patched_model_saves_what_a_stock_one_loads():
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, hidden = torch.randn(2, 5, EMBED, dtype=torch.float64), torch.tensor([[False] * 5, [False] * 2 + [True] * 3])
    with nta.patch(model):
        scrambled(model)
        want = model(x, src_key_padding_mask=hidden)
        state = saved_and_loaded(model.state_dict())
    stock = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    stock.load_state_dict(state)
    close(stock(x, src_key_padding_mask=hidden)[~hidden], want[~hidden])

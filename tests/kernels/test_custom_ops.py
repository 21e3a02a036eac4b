"""Backends as registered operators: what compilers, dispatch modes, transforms and checkpoints make of them."""

import itertools
from functools import partial

import pytest
import torch
from oracle import Problem, assert_same, problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from nt_attention import SequenceLayout, use_backend, varlen_attention
from nt_attention.kernels import autograd, custom_ops
from nt_attention.kernels.backend import HeadDims
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS, ENVIRONMENT_VARIABLE, SlowBackendWarning

NAMES = pytest.mark.parametrize("backend", ["cpu", "auto"])
LENGTHS, KEY_LENGTHS = [5, 0, 1, 17, 3], [2, 3, 0, 19, 7]
NAMED = {
    "self": {"lengths": LENGTHS},
    "cross": {"lengths": LENGTHS, "key_lengths": KEY_LENGTHS, "past": (3, 2)},
}


def case_of(lengths, geometry, extra, /, **more) -> Problem:
    return problem("self", geometry, extra, **NAMED[lengths], **more)


def call(case: Problem, backend: str):
    layout = SequenceLayout.from_lengths(case.lengths)
    key_layout = None if case.key_lengths is None else SequenceLayout.from_lengths(case.key_lengths)
    return partial(
        varlen_attention, layout=layout, key_layout=key_layout, return_lse=True, backend=backend, **case.options
    )


def operator(name, direction):
    return getattr(torch.ops.nt_attention, f"{name}_{direction}").default


@pytest.fixture
def fake(registered_variant):
    """Puts a variant of the CPU backend on the list, as "fake" or by another name, and returns which of its two ran."""

    def make(listed="fake", **changes):
        ran = []

        def forward(*args):
            ran.append("forward")
            return cpu.forward(*args)

        def backward(*args):
            ran.append("backward")
            return cpu.backward(*args)

        registered_variant(cpu.BACKEND, listed, forward=forward, backward=backward, **changes)
        return ran

    return make


# --- what operators say of themselves


def operands(
    name="cpu", lengths="cross", *, lower_right=True, causal=True, past=(0, 0), heads_first=False, alibi=False
):
    """An operator's arguments by position: float32, grouped heads, odd head dims."""

    def random(rows, heads, width):
        return torch.randn(heads, rows, width).transpose(0, 1) if heads_first else torch.randn(rows, heads, width)

    key_lengths = KEY_LENGTHS if lengths == "cross" else LENGTHS
    offsets, key_offsets = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (LENGTHS, key_lengths)
    )
    if lengths == "self":
        key_offsets = offsets
    rows, keys = sum(LENGTHS) + past[0], sum(key_lengths) + past[1]
    tensors = (random(rows, 6, 11), random(keys, 3, 11), random(keys, 3, 7))
    slopes = torch.rand(len(LENGTHS), 6) if alibi else None
    alignment = "lower_right" if lower_right else "upper_left"
    options = (0.3, causal, alignment, (-1, -1), 0.0, 0.0, False, False, True)
    return (*tensors, offsets, key_offsets, slopes, *options, *(["auto"] if name == "auto" else []))


def check(name, *arguments, grad_lse=False, **which):
    forward, backward = operator(name, "forward"), operator(name, "backward")
    torch.library.opcheck(forward, arguments, **which)
    results = forward(*arguments)
    towards_lse = torch.randn_like(results[1]) if grad_lse else None
    torch.library.opcheck(backward, given_back(torch.randn_like(results[0]), towards_lse, results, arguments), **which)


def given_back(grad, grad_lse, results, arguments):
    """The backward's arguments: ``auto``'s is told the choice in the place of what was asked for."""
    chosen = results[3:]
    return (grad, grad_lse, *results[:3], *(arguments[:-1] if chosen else arguments), *chosen)


@NAMES
@pytest.mark.parametrize("grad_lse", [False, True], ids=["out", "out-and-lse"])
@pytest.mark.parametrize("lengths", ["self", "cross"])
def test_operators_are_what_they_say(backend, lengths, grad_lse):
    check(backend, *operands(backend, lengths, alibi=grad_lse), grad_lse=grad_lse)


VARIANTS = {
    "plain": {},
    "padded": {"head_dims": HeadDims(multiple=8, equal=True)},
    "lower-right-alone": {"lower_right_only": True},
    "no-blind-rows": {"takes_fully_masked_rows": False, "features": cpu.BACKEND.features - {"window"}},
}


@pytest.mark.parametrize("past", [(0, 0), (3, 2)], ids=["whole", "rows-past-the-end"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens-first", "heads-first"])
@pytest.mark.parametrize("lower_right", [False, True], ids=["upper_left", "lower_right"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_is_added_to_a_kernel(fake, variant, lower_right, heads_first, past):
    """Gradients lie in memory as inputs do, which compilers count on, also where rows were moved in between."""
    fake(**VARIANTS[variant])
    name = BACKENDS["fake"].name
    arguments = operands(name, lower_right=lower_right, heads_first=heads_first, past=past)
    check(name, *arguments, grad_lse=True, test_utils="test_faketensor")


def as_meta(tensors):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in tensors]


def described(tensors):
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


@NAMES
@pytest.mark.parametrize("past", [(0, 0), (3, 2)], ids=["whole", "rows-past-the-end"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_without_data_shapes_and_strides_are_the_same(backend, dtype, past):
    arguments = operands(backend, past=past)
    arguments = (*(x.to(dtype) for x in arguments[:3]), *arguments[3:])
    forward, backward = operator(backend, "forward"), operator(backend, "backward")
    real = forward(*arguments)
    assert real[1].dtype == torch.promote_types(dtype, torch.float32)
    gradients = backward(*given_back(real[0], real[1], real, arguments))
    assert described(forward(*as_meta(arguments))) == described(real)
    assert described(backward(*as_meta(given_back(real[0], real[1], real, arguments)))) == described(gradients)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        imagined = forward(*given)
        assert described(imagined) == described(real)
        imagined_gradients = backward(*given_back(imagined[0], imagined[1], imagined, given))
        assert described(imagined_gradients) == described(gradients)


def test_a_call_may_be_imagined():
    case = case_of("self", "causal", "wide-values-gqa", dtype=torch.float32)
    function = call(case, "cpu")
    real = case.solve(lambda **kwargs: function(**{name: kwargs[name] for name in case.inputs}))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = {name: mode.from_tensor(x).requires_grad_() for name, x in case.inputs.items()}
        out, lse = function(**leaves)
        grads = torch.autograd.grad(out.sum() + lse.sum(), tuple(leaves.values()))
    assert described((out, lse, *grads)) == described(real.values())


# --- graphs

COMPILED = {
    "plain": ("causal", "plain"),
    "sinks": ("causal", "sinks"),
    "all": ("full", "all"),
    "upper_left": ("both-sides-upper_left", "gqa"),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def compiled(case, backend, **options):
    """The call as one graph, which takes and gives what the call itself does."""
    function = call(case, backend)
    graph = torch.compile(lambda inputs: function(**inputs), backend="aot_eager", **{"fullgraph": True, **options})
    return lambda **kwargs: graph({name: kwargs[name] for name in case.inputs})


@pytest.mark.parametrize(
    ("lengths", "which", "backend"),
    [
        *(("self", "plain", "cpu"), ("cross", "all", "cpu"), ("cross", "upper_left", "cpu")),
        *(("self", "sinks", "auto"), ("self", "all", "auto"), ("cross", "plain", "auto"), ("cross", "sinks", "auto")),
    ],
)
def test_one_graph_forward_and_backward(lengths, which, backend):
    case = case_of(lengths, *COMPILED[which])
    function = compiled(case, backend)
    want = case.truth()
    assert_same(case.solve(function), want, 1e-9)
    torch._dynamo.config.error_on_recompile = True
    try:
        assert_same(case.solve(function), want, 1e-9)
    finally:
        torch._dynamo.config.error_on_recompile = False


@NAMES
def test_a_graph_gives_the_call_s_bits(backend):
    case = case_of("cross", "causal", "wide-values-gqa", dtype=torch.float32)
    one, two = case.solve(compiled(case, backend)), case.solve(lambda **inputs: call(case, backend)(**only(inputs)))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def only(inputs):
    """Without the options, which are given already."""
    return {name: inputs[name] for name in ("query", "key", "value")}


@NAMES
def test_a_graph_without_gradients(backend):
    case = case_of("cross", "causal", "plain")
    function = compiled(case, backend)
    with torch.no_grad():
        out, lse = function(**case.inputs)
    want = case.truth()
    assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-9)
    assert not out.requires_grad


class TestWhoRunsAGraph:
    """``"auto"`` is chosen when a graph runs, by what holds then."""

    @pytest.fixture
    def case(self):
        return case_of("cross", "causal", "gqa", dtype=torch.float32)

    def test_the_backend_that_is_named(self, fake, case):
        ran, others = fake(), fake("cpu")
        case.solve(compiled(case, "fake"))
        assert (ran, others) == (["forward", "backward"], [])

    @pytest.mark.parametrize("made", ["inside", "outside"])
    def test_use_backend(self, fake, case, made):
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto")
        if made == "outside":
            case.solve(function)
            assert (ran, others) == ([], ["forward", "backward"])
            others.clear()
        with use_backend("fake"):
            assert_same(case.solve(function), case.truth(), 1e-4)
        assert (ran, others) == (["forward", "backward"], [])

    def test_the_environment_variable(self, fake, case, monkeypatch):
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto")
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fake")
        assert_same(case.solve(function), case.truth(), 1e-4)
        assert (ran, others) == (["forward", "backward"], [])

    @pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
    def test_backward_runs_where_forward_ran(self, fake, case, graph):
        """The state of random numbers is a backend's own, and backward is often called after the block."""
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto") if graph else lambda **inputs: call(case, "auto")(**only(inputs))
        leaves = {name: x.requires_grad_() for name, x in case.inputs.items()}
        with use_backend("fake"):
            out, _ = function(**leaves)
        out.sum().backward()
        assert (ran, others) == (["forward", "backward"], [])

    def test_a_named_backend_that_cannot(self, fake, case):
        fake()
        case.options["softcap"] = 3.0
        with pytest.raises(ValueError, match="softcap is not supported: leave softcap at 0"):
            compiled(case, "fake", fullgraph=False)(**case.inputs)

    def test_one_that_turns_out_unable_says_so_when_the_graph_runs(self, fake, case):
        fake(features=cpu.BACKEND.features - {"cross", "no keys"})
        function = compiled(case, "auto")
        function(**case.inputs)
        with use_backend("fake"), pytest.raises(ValueError, match="must have as many keys as queries"):
            function(**case.inputs)


class TestWhatNoOperatorTakes:
    def test_breaks_the_graph_and_runs_on_the_reference(self):
        case = problem("self", "full", "plain", lengths=[3], options={"softcap": 2.0})
        with pytest.warns(SlowBackendWarning, match="softcap is not supported"):
            out, lse = compiled(case, "auto", fullgraph=False)(**case.inputs)
        want = case.truth()
        assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-9)

    def test_is_told_where_the_graph_is_made_already(self):
        arguments = list(operands("auto"))
        arguments[:3] = [x.double() for x in arguments[:3]]
        arguments[custom_ops.argument_index("softcap")] = 2.0
        with pytest.raises(ValueError, match=r"(?s)'reference' is not a custom operator.* softcap is not supported"):
            operator("auto", "forward")(*arguments)

    def test_an_unknown_name_is_told_the_known_ones(self):
        with pytest.raises(ValueError, match=r"no backend 'nobody'.*'cpu', 'reference'"):
            operator("auto", "forward")(*operands("auto")[:-1], "nobody")


# --- who looks at operators, and who does not


class Looking(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "nt_attention":
            self.seen.append(function)
        return function(*args, **(kwargs or {}))


@NAMES
@pytest.mark.parametrize("extra", ["wide-values-gqa", "all"])
def test_a_dispatch_mode_sees_operators_that_give_the_same_bits(backend, extra):
    case = case_of("cross", "causal", extra, dtype=torch.float32)
    function = call(case, backend)
    alone = case.solve(lambda **inputs: function(**{name: inputs[name] for name in case.inputs}))
    with Looking() as mode:
        watched = case.solve(lambda **inputs: function(**{name: inputs[name] for name in case.inputs}))
    assert mode.seen == [operator("cpu", "forward"), operator("cpu", "backward")]
    for name in alone:
        assert torch.equal(alone[name], watched[name]), name
        assert alone[name].stride() == watched[name].stride(), name


def test_a_mode_may_look_at_the_backward_alone():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    out, lse = call(case, "cpu")(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, case.grads, retain_graph=True)
    with Looking() as mode:
        again = torch.autograd.grad((out, lse), leaves, case.grads)
    assert mode.seen == [operator("cpu", "backward")]
    assert all(map(torch.equal, grads, again))


def test_where_nobody_looks_no_operator_is_called(monkeypatch):
    def refused(*_):
        raise AssertionError("called as an operator")

    monkeypatch.setattr(autograd.Kernel, "_operator", refused)
    case = case_of("cross", "causal", "gqa")
    function = call(case, "cpu")
    assert_same(case.solve(lambda **inputs: function(**only(inputs))), case.truth(), 1e-9)
    function(*map(torch.nn.Parameter, case.inputs.values()))[0].sum().backward()
    with pytest.raises(AssertionError, match="called as an operator"), Looking():
        function(**case.inputs)


class Wrapped(torch.Tensor):
    """A subclass that notes what it is handed to."""

    @staticmethod
    def __new__(cls, inner, seen):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)

    def __init__(self, inner, seen):
        self.inner, self.seen = inner, seen

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, cls):
                x.seen.append(function)
        args = [x.inner if isinstance(x, cls) else x for x in args]
        return function(*args, **(kwargs or {}))


def test_a_tensor_subclass_sees_the_operator():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    want = call(case, "cpu")(**case.inputs)
    seen = []
    got = call(case, "cpu")(**{name: Wrapped(x, seen) for name, x in case.inputs.items()})
    assert seen.count(operator("cpu", "forward")) == 3  # once for each that it was handed
    assert all(map(torch.equal, got, want))


@NAMES
@pytest.mark.parametrize("extra", ["gqa", "all"])
def test_functional_gradients_are_autograd_s(backend, extra):
    case = case_of("cross", "causal", extra)
    function = call(case, backend)

    def loss(inputs):
        out, lse = function(**inputs)
        return (out * case.grads[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grads[1]).sum()

    got = torch.func.grad(loss)(case.inputs)
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    grads = torch.autograd.grad(loss(leaves), tuple(leaves.values()))
    for name, want in zip(leaves, grads, strict=True):
        assert torch.equal(got[name], want), name


@NAMES
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_autocast_decides_the_precision(backend, graph):
    case = case_of("cross", "causal", "wide-values-gqa", dtype=torch.float32)
    function = compiled(case, backend) if graph else call(case, backend)
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = function(**leaves)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad(out.float().square().sum(), tuple(leaves.values()))
    rounded = {name: x.bfloat16().requires_grad_() for name, x in case.inputs.items()}
    want, want_lse = call(case, backend)(**rounded)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    wanted = torch.autograd.grad(want.float().square().sum(), tuple(rounded.values()))
    for got, right in zip(grads, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, right.float())


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("keep", "forwards"), [(False, 2), (True, 1)], ids=["recomputed", "saved"])
def test_a_checkpoint_may_save_what_the_operator_gave(monkeypatch, keep, forwards, graph):
    calls = {"forward": 0, "backward": 0}

    def counting(name, kernel):
        def run(*args, **kwargs):
            calls[name] += 1
            return kernel(*args, **kwargs)

        return run

    monkeypatch.setattr(cpu, "_run", counting("forward", cpu._run))
    monkeypatch.setattr(cpu, "_run_backward", counting("backward", cpu._run_backward))
    case = problem("self", "causal", "gqa", lengths=[13], dtype=torch.float32)  # one tile, and so one call
    function = call(case, "cpu")

    def policy(context, called, *args, **kwargs):
        save = called is operator("auto" if graph else "cpu", "forward")
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(query, key, value):
        out, lse = function(query.sin(), key, value)
        return (out.square().sum() + lse.sum()).cos()

    def grads(run):
        leaves = [x.clone().requires_grad_() for x in case.inputs.values()]
        return torch.autograd.grad(run(*leaves), leaves)

    want = grads(loss)
    calls.update(forward=0, backward=0)
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if keep else {}
    run = partial(checkpoint, loss, use_reentrant=False, **contexts)
    if graph:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = grads(run)
    if not graph or keep:  # a graph without a policy may keep what it likes
        assert calls == {"forward": forwards, "backward": 1}
    assert all(map(torch.equal, got, want))


@NAMES
def test_flops_are_counted(backend):
    case = case_of("cross", "full", "wide-values-gqa", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    products = 2 * case.heads * sum(a * b for a, b in zip(LENGTHS, KEY_LENGTHS, strict=True))
    with FlopCounterMode(display=False) as counter:
        out, _ = call(case, backend)(*leaves)
    assert counter.get_total_flops() == products * (case.head_dim + case.value_dim)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == products * (3 * case.head_dim + 2 * case.value_dim)
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.nt_attention.cpu_backward}


@NAMES
def test_functional_gradients_in_a_graph(backend):
    layout = SequenceLayout.from_lengths([5, 7])
    tensors = torch.randn(3, 12, 3, 11).unbind()

    def loss(q, k, v):
        return varlen_attention(q, k, v, layout, is_causal=True, backend=backend).square().sum()

    grad = torch.func.grad(loss, (0, 1, 2))
    for one, two in zip(
        torch.compile(grad, fullgraph=True, backend="aot_eager")(*tensors), grad(*tensors), strict=True
    ):
        assert one.any()
        torch.testing.assert_close(one, two)


@NAMES
def test_one_tensor_may_be_query_key_and_value_of_a_graph(backend):
    layout = SequenceLayout.from_lengths([5, 7])
    x = torch.randn(12, 3, 11, requires_grad=True)

    def attend(x):
        return varlen_attention(x, x, x, layout, backend=backend)

    (want,) = torch.autograd.grad(attend(x).square().sum(), x)
    (got,) = torch.autograd.grad(torch.compile(attend, fullgraph=True, backend="aot_eager")(x).square().sum(), x)
    torch.testing.assert_close(got, want)


# --- arguments that do not fit


WRONG = {
    "heads that do not divide": ({0: torch.randn(26, 5, 11)}, "query heads must be a multiple of key heads"),
    "a head dim": ({1: torch.randn(31, 3, 12)}, "query and key must have the same head dim"),
    "heads of the values": ({2: torch.randn(31, 2, 7)}, "key and value must have the same number of heads"),
    "too few values": ({2: torch.randn(30, 3, 7)}, "value has shape"),
    "dimensions": ({0: torch.randn(26, 66)}, "must be \\(tokens, heads, head dim\\)"),
    "a dtype": ({1: torch.randn(31, 3, 11).double()}, "must share a dtype"),
    "slopes": ({5: torch.rand(4)}, "alibi_slopes must be a tensor"),
    "sequences": ({4: torch.tensor([0, 31], dtype=torch.int32)}, "cu_seqlens are of 5 sequences"),
}


@NAMES
@pytest.mark.parametrize("wrong", WRONG)
def test_an_operator_refuses_what_its_kernel_can_not_read(backend, wrong):
    changes, message = WRONG[wrong]
    arguments = list(operands(backend))
    for index, x in changes.items():
        arguments[index] = x
    with pytest.raises(ValueError, match=message):
        operator(backend, "forward")(*arguments)


@NAMES
@pytest.mark.parametrize("which", range(4), ids=["grad", "grad_lse", "out", "lse"])
def test_a_backward_operator_refuses_other_shapes(backend, which):
    arguments = operands(backend)
    results = operator(backend, "forward")(*arguments)
    given = list(given_back(torch.randn_like(results[0]), torch.randn_like(results[1]), results, arguments))
    given[which] = given[which][:-1]
    with pytest.raises(ValueError, match=f"{('grad', 'grad_lse', 'out', 'lse')[which]} must be"):
        operator(backend, "backward")(*given)


OPTIONS = {"softcap": 2.0, "dropout_p": 0.25, "window_size": (3, 3), "deterministic": True}


@pytest.mark.parametrize("backend", [*(name for name, x in BACKENDS.items() if x.backward is not None), "auto"])
@pytest.mark.parametrize("option", [*OPTIONS, "softcap and dropout_p"])
def test_a_fake_has_a_random_state_under_dropout_alone(backend, option):
    arguments = list(operands(backend))
    for name in option.split(" and "):
        arguments[custom_ops.argument_index(name)] = OPTIONS[name]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        state = operator(backend, "forward")(*fakes)[2]
    assert state.shape == (2 if "dropout_p" in option else 0,)

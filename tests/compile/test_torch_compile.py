"""`varlen_attention` in graphs of torch.compile, and the backend that runs in them."""

from functools import partial

import pytest
import torch
from operators import BACKENDS, FORWARD, call, case_of, only, operands
from oracle import assert_same, problem
from sweeps import covering, sweep_except
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nt_attention import SequenceLayout, use_backend, varlen_attention
from nt_attention.kernels.backends import cpu, reference
from nt_attention.kernels.select import ENVIRONMENT_VARIABLE

COMPILED = {
    "plain": ("causal", "plain"),
    "sinks": ("causal", "sinks"),
    "all": ("full", "all"),
    "upper_left": ("both-sides-upper_left", "gqa"),
}


def compiled(case, backend, **options):
    """The call as one graph, with the same arguments and results."""
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
def test_one_graph_without_recompiling(lengths, which, backend):
    case = case_of(lengths, *COMPILED[which])
    function = compiled(case, backend)
    want = case.truth()
    assert_same(case.solve(function), want, 1e-9)
    torch._dynamo.config.error_on_recompile = True
    try:
        assert_same(case.solve(function), want, 1e-9)
    finally:
        torch._dynamo.config.error_on_recompile = False


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_graph_gives_the_same_bits_as_eager(backend):
    case = case_of("cross", "causal", "wide-values-gqa", dtype=torch.float32)
    one, two = case.solve(compiled(case, backend)), case.solve(lambda **inputs: call(case, backend)(**only(inputs)))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("backend", sweep_except(BACKENDS, "auto"))
def test_graph_without_gradients(backend):
    case = case_of("cross", "causal", "plain")
    function = compiled(case, backend)
    with torch.no_grad():
        out, lse = function(**case.inputs)
    want = case.truth()
    assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-9)
    assert not out.requires_grad


class TestBackendOfAGraph:
    """`"auto"` selects the backend when the graph runs."""

    @pytest.fixture
    def case(self):
        return case_of("cross", "causal", "gqa", dtype=torch.float32)

    def test_named_backend_runs_in_a_graph(self, fake, case):
        ran, others = fake(), fake("cpu")
        case.solve(compiled(case, "fake"))
        assert (ran, others) == (["forward", "backward"], [])

    @pytest.mark.parametrize("made", ["inside", "outside"])
    def test_use_backend_around_a_graph(self, fake, case, made):
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto")
        if made == "outside":
            case.solve(function)
            assert (ran, others) == ([], ["forward", "backward"])
            others.clear()
        with use_backend("fake"):
            assert_same(case.solve(function), case.truth(), 1e-4)
        assert (ran, others) == (["forward", "backward"], [])

    def test_environment_variable_around_a_graph(self, fake, case, monkeypatch):
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto")
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fake")
        assert_same(case.solve(function), case.truth(), 1e-4)
        assert (ran, others) == (["forward", "backward"], [])

    @pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
    def test_backward_runs_on_the_backend_of_the_forward(self, fake, case, graph):
        """The state of random numbers belongs to one backend, and backward is often called after the `with` block."""
        ran, others = fake(), fake("cpu")
        function = compiled(case, "auto") if graph else lambda **inputs: call(case, "auto")(**only(inputs))
        leaves = {name: x.requires_grad_() for name, x in case.inputs.items()}
        with use_backend("fake"):
            out, _ = function(**leaves)
        out.sum().backward()
        assert (ran, others) == (["forward", "backward"], [])

    def test_named_backend_that_cannot_run_in_a_graph(self, fake, case):
        fake()
        case.options["batch_invariant"] = True
        with pytest.raises(ValueError, match="leave batch_invariant at False"):
            compiled(case, "fake", fullgraph=False)(**case.inputs)

    def test_backend_that_cannot_run_raises_when_the_graph_runs(self, fake, case):
        fake(features=cpu.BACKEND.features - {"cross", "no keys"})
        function = compiled(case, "auto")
        function(**case.inputs)
        with use_backend("fake"), pytest.raises(ValueError, match="must have as many keys as queries"):
            function(**case.inputs)


class TestNoOperatorSupportsTheCall:
    @pytest.mark.parametrize("name", ["cpu", pytest.param("reference", marks=pytest.mark.sweep)])
    def test_graph_break(self, name, backends_that_ran):
        case = problem("self", "full", "plain", lengths=[3], options={"mask_mod": lambda b, h, q, k: q >= k})
        with use_backend("auto" if name == "cpu" else name):
            out, lse = compiled(case, "auto", fullgraph=False)(**case.inputs)
        assert backends_that_ran == [name]
        want = case.truth()
        assert_same({"out": out, "lse": lse}, {name: want[name] for name in ("out", "lse")}, 1e-9)

    def test_auto_operator_raises_if_the_backend_of_the_block_is_no_operator(self, registered_variant):
        registered_variant(reference.BACKEND, "fake", backward=None)
        with use_backend("fake"), pytest.raises(ValueError, match="'fake' is not a custom operator"):
            FORWARD(*operands("auto"))

    def test_unknown_backend_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"no backend 'unknown'.*'cpu', 'reference'"):
            FORWARD(*operands("auto")[:-1], "unknown")


DROPOUT = {"softcap": {"softcap": 2.0}, "dropout": {"dropout_p": 0.3}}


@covering({"option": DROPOUT, "backend": BACKENDS})
def test_random_numbers_in_one_graph_are_those_of_eager_calls(option, backend):
    """With dropout, the backward drops the same weights as the forward."""
    case = problem("self", "causal", "gqa", lengths=[5, 0, 7], options=DROPOUT[option])
    function = compiled(case, backend)

    def solve(function):
        torch.manual_seed(3)
        return case.solve(function)

    got = solve(function)
    eager = call(case, backend)
    assert_same(got, solve(lambda **inputs: eager(**only(inputs))), 1e-9)


@pytest.mark.parametrize("backend", sweep_except(BACKENDS, "auto"))
def test_torch_func_grad_in_a_graph(backend):
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


@pytest.mark.parametrize("backend", sweep_except(BACKENDS, "auto"))
def test_same_tensor_as_query_key_and_value_of_a_graph(backend):
    layout = SequenceLayout.from_lengths([5, 7])
    x = torch.randn(12, 3, 11, requires_grad=True)

    def attend(x):
        return varlen_attention(x, x, x, layout, backend=backend)

    (want,) = torch.autograd.grad(attend(x).square().sum(), x)
    (got,) = torch.autograd.grad(torch.compile(attend, fullgraph=True, backend="aot_eager")(x).square().sum(), x)
    torch.testing.assert_close(got, want)


@covering({"graph": [False, True, True], "backend": BACKENDS})
def test_autocast_decides_the_dtype(backend, graph):
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


@covering({"graph": [False, True], "keep, forwards": [(False, 2), (True, 1)]})
def test_selective_checkpoint_saves_the_operator_s_output(monkeypatch, keep, forwards, graph):
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
        save = called is FORWARD
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
    if not graph or keep:  # the compiler decides what a graph without a policy saves
        assert calls == {"forward": forwards, "backward": 1}
    assert all(map(torch.equal, got, want))

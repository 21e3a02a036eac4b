"""Sequences that share prefixes on a GPU: every backend in both ways, against each sequence alone in float64."""

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels import tree as ways
from nt_attention.kernels.select import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning"),
]

NAMES = [name for name in BACKENDS if name not in ("cpu", "reference", "split_kv")]
TREES = {
    "groups": ([300, 40, 1, 0, 77, 130, 5, 90], [-1, 0, 0, 0, 0, -1, 5, 5]),
    "deep": ([64, 33, 20, 7, 129, 16, 2, 250], [-1, 0, 1, 2, 1, 0, 5, -1]),
    "nothing shared": ([40, 129, 3], [-1, -1, -1]),
}
OPTIONS = {
    "causal": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "window": {"window_size": (50, 0)},
    "alibi": {"alibi_slopes": True},
    "deterministic": {"deterministic": True},
}


def draw(rows, heads, dim, dtype):
    return torch.randn(rows, heads, dim, device="cuda", dtype=dtype, requires_grad=True)


SHAPES = [(4, 2, 64), (6, 6, 128), (8, 1, 32), (8, 1, 128)]  # heads, key heads, head dim
CASES = [("causal", shape) for shape in SHAPES] + [(option, SHAPES[0]) for option in OPTIONS if option != "causal"]


@pytest.mark.parametrize(("option", "shape"), CASES, ids=str)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("way", [ways.JOINED, ways.COPIED, ways.MASKED])
@pytest.mark.parametrize("backend", NAMES)
def test_each_way(backend, way, tree, option, shape, monkeypatch):
    heads, groups, dim = shape
    tree = nta.TreeLayout(*TREES[tree], device="cuda")
    if BACKENDS[backend].missing() is not None:
        pytest.skip("not installed")
    dtype = torch.bfloat16
    options = dict(OPTIONS[option])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, heads, device="cuda")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 0.5, heads, device="cuda")
    inputs = [draw(tree.total + 3, h, dim, dtype) for h in (heads, groups, groups)]
    without_sinks = {name: x for name, x in options.items() if name != "sinks"}
    explanation = nta.explain(*inputs, tree, is_causal=True, backend=backend, **options)
    if explanation.chosen is None:
        pytest.skip(str(explanation.reasons[backend]))
    spec = nta.functional.plan(*inputs, tree, is_causal=True, backend=backend, **without_sinks).call.spec
    if way not in ways.expected_us(BACKENDS[backend], spec, tree):
        pytest.skip("can't run in this way")
    monkeypatch.setattr(ways, "way_of", lambda *_: way)
    out, lse = nta.varlen_attention(*inputs, tree, is_causal=True, backend=backend, return_lse=True, **options)
    assert not out[tree.total :].any()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    repeated = [tree.expand(x) for x in exact]
    want = nta.varlen_attention(
        *repeated, tree.sequences, is_causal=True, backend="reference", return_lse=True, **options
    )
    weights = torch.randn_like(want[0]), torch.randn_like(want[1])
    got = tree.expand(out), tree.expand(lse)
    use_lse = backend != "flex"
    grads = torch.autograd.grad(
        [got[0], *got[1:][:use_lse]], inputs, [weights[0].to(dtype), *[weights[1].float()][:use_lse]]
    )
    exact_grads = torch.autograd.grad([want[0], *want[1:][:use_lse]], exact, list(weights)[: 1 + use_lse])
    for name, x, y in zip(["out", "lse", "dq", "dk", "dv"], [*got, *grads], [*want, *exact_grads], strict=True):
        error = float((x.double() - y).norm() / y.norm())
        assert error < 0.02, (name, error)

"""The cases of `tools/verify_backends.py`, and the faults that they find."""

import dataclasses
import itertools

import pytest
import torch
import verify_backends
from verified_cases import FEW, FEW_KEYS, case, few_runs  # noqa: F401
from verify_backends import Finding, cases_of, run_case

from nt_attention.kernels import support
from nt_attention.kernels.backends import cpu, reference
from nt_attention.kernels.select import BACKENDS

pytestmark = pytest.mark.usefixtures("few_runs")

CPU = torch.device("cpu")


@pytest.fixture
def fake(registered_variant):
    """Adds a faulty backend: ``out`` and ``grads`` change the results of its kernel."""

    def make(out=None, grads=None, **changes):
        def forward(query, key, value, problem):
            given, *more = cpu.forward(query, key, value, problem)
            return given if out is None else out(given, query, problem), *more

        def backward(*args):
            given = cpu.backward(*args)
            return given if grads is None else tuple(grads(*given))

        registered_variant(cpu.BACKEND, "fake", **{"forward": forward, "backward": backward} | changes)

    return make


class TestCPUBackend:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dims", [(16, 16), (8, 24)], ids=str)
    def test_check_of_the_cpu_backend(self, dtype, dims):
        found = run_case(case(backend="cpu", dtype=dtype, head_dim=dims[0], value_dim=dims[1]), CPU)
        assert found.result == "both", found.details
        assert found.details.endswith(" of PyTorch's own error")
        assert 0 < float(found.details.split()[0]) <= 2

    @pytest.mark.parametrize("feature", sorted(cpu.BACKEND.features - support.BY_HEAD_DIMS))
    def test_check_of_every_feature_of_the_cpu_backend(self, feature):
        (first, *_) = (c for c in cases_of(cpu.BACKEND) if c.which == feature and c.dtype == torch.float32)
        keys = None if first.workload.key_lengths is None else FEW_KEYS
        workload = dataclasses.replace(first.workload, lengths=FEW, key_lengths=keys)
        found = run_case(dataclasses.replace(first, workload=workload), CPU)
        assert found.result == ("forward" if feature == "paged" else "both"), found.details
        assert found.case.which == feature


def scaled(which, factor):
    """The gradients, one of them multiplied by a factor."""
    return lambda *grads: (g * factor if i == which else g for i, g in enumerate(grads))


def with_nan(x):
    """The tensor with NaN as the last number of the last sequence."""
    x = x.clone()
    x[sum(FEW) - 1, -1, -1] = torch.nan
    return x


def times(factor):
    """The output, and ``scaled`` above."""
    return lambda out, query, call: out * factor


def last_row(out, query, call):
    out[call.layout.total - 1] = 0
    return out


def for_groups_only(dq, dk, dv):
    return dq, dk if dk.shape[1] == dq.shape[1] else dk * 0.5, dv


OFF_BY_INF = "gradients off by inf of PyTorch's own error"
# The fault, whether out or gradients have it, of which case, and what is found.
FAULTS = {
    "none": ({}, {}, "both", ""),
    **{
        f"{name} times {factor}": ({"grads": scaled(i, factor)}, {}, "forward", "gradients off by ")
        for i, name in enumerate(("dq", "dk", "dv"))
        for factor in (1.01, 0.0, -1.0, torch.nan)
    },
    **{
        f"one NaN in {name}": (
            {"grads": lambda *grads, i=i: (with_nan(g) if i == at else g for at, g in enumerate(grads))},
            *({}, "forward", OFF_BY_INF),
        )
        for i, name in enumerate(("dq", "dk", "dv"))
    },
    "out": ({"out": times(1.05)}, {}, "no", "output off by "),
    "out in bfloat16": ({"out": times(1.05)}, {"dtype": torch.bfloat16}, "no", "output off by "),
    "the last row": ({"out": last_row}, {}, "no", "output off by "),
    "one NaN": ({"out": lambda out, *_: with_nan(out)}, {}, "no", "output off by inf of PyTorch's own error"),
    "grouped heads, without them": ({"grads": for_groups_only}, {}, "both", ""),
    "grouped heads": ({"grads": for_groups_only}, {"which": "grouped heads", "kv_heads": 2}, "forward", "gradients"),
    "rows past the end are read": ({"out": lambda out, query, _: out + 0 * query[-1, 0, 0]}, {}, "no", ""),
    **{
        f"gradient {i} of a relative bias": (
            {"grads": lambda *given, i=i: [g * 1.1 if at == 3 + i else g for at, g in enumerate(given)]},
            {"which": "relative bias", "options": verify_backends.FIELDS["relative bias"]["options"]},
            *("forward", "gradients off by "),
        )
        for i in range(3)
    },
}


@pytest.mark.parametrize(("fault", "fields", "result", "details"), FAULTS.values(), ids=FAULTS)
def test_faults(fake, fault, fields, result, details):
    fake(**fault)
    found = run_case(case(**fields), CPU)
    assert found.result == result
    assert found.details.startswith(details)


class TestOtherFaults:
    @pytest.mark.parametrize("value", [1.0, torch.nan])
    def test_rows_past_the_end_are_written(self, fake, value):
        """On a backend whose rows past the end are not cleared afterwards."""

        def forward(query, key, value_, problem):
            out, lse = reference.forward(query, key, value_, problem)
            past = torch.arange(len(out)) >= problem.layout.total
            return out.masked_fill(past[:, None, None], value), lse

        fake(forward=forward, backward=None, traits={"differentiable"})
        assert run_case(case(), CPU) == Finding(case(), "no", "rows past the last offset are not 0")

    def test_not_deterministic(self, fake):
        times = itertools.count()
        fake(grads=lambda dq, dk, dv: (dq, dk * (1 + 2**-22 * (next(times) % 2)), dv))
        found = run_case(case("deterministic", options={"deterministic": True}), CPU)
        assert (found.result, found.details) == ("forward", "the same call gave other bits")
        assert run_case(case(), CPU).result == "both"  # where it is not requested

    def test_not_batch_invariant(self, fake):
        changes = {"features": cpu.BACKEND.features | {"batch_invariant"}}
        fake(out=lambda out, query, problem: out * (1 + 2**-22 * (problem.layout.batch_size > 1)), **changes)
        found = run_case(case("batch_invariant", options={"batch_invariant": True}), CPU)
        assert (found.result, found.details) == ("forward", "a sequence alone gave other bits than in the batch")


DROPPED = {"options": {"dropout_p": 0.2}, "head_dim": 8, "value_dim": 8, "lengths": (1, 129, 0, 17, 300)}


class TestDropout:
    """``fake`` does not drop weights as it declares."""

    def test_check_of_dropout(self):
        for backend in ("reference", "cpu"):
            assert run_case(case("dropout", backend, **DROPPED), CPU).result == "both"

    def test_dropout_is_ignored(self, fake):
        def forward(query, key, value, problem):
            spec = dataclasses.replace(problem.spec, dropout_p=0.0)
            return *reference.forward(query, key, value, problem._replace(spec=spec)), torch.zeros(2).long()

        fake(forward=forward, backward=None, traits={"differentiable"})
        found = run_case(case("dropout", **DROPPED), CPU)
        assert (found.result, found.details) == ("no", "nothing was dropped")


class TestCases:
    @pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
    def test_cases_of_each_backend(self, name):
        backend = BACKENDS[name]
        found = list(cases_of(backend))
        assert {c.backend for c in found} == {backend.name}
        assert {c.dtype for c in found} == set(backend.dtypes) - {torch.float64}
        for dtype in {c.dtype for c in found}:
            rows = {
                kind: [c for c in found if (c.dtype, c.kind) == (dtype, kind)] for kind in ("head dims", "features")
            }
            assert sorted(c.which for c in rows["features"]) == sorted([*(backend.features - support.BY_HEAD_DIMS)] * 2)
            assert len({c.which for c in rows["head dims"]}) == len(rows["head dims"])
        for c in found:
            head_dim, value_dim = c.workload.head_dim, c.workload.value_dim
            assert max(head_dim, value_dim) <= backend.head_dims.most
            if c.kind == "head dims":
                assert c.which == (str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}")
                assert head_dim % backend.head_dims.multiple == value_dim % backend.head_dims.multiple == 0
                assert head_dim == value_dim or not backend.head_dims.equal

"""The cases of `tools/verify_backends.py`, and the faults that they find."""

import dataclasses
import itertools

import pytest
import torch
import verify_backends
from verified_cases import FEW, FEW_KEYS, case, few_runs  # noqa: F401
from verify_backends import Finding, cases_of, run_case

from nt_attention.kernels import support
from nt_attention.kernels.backend import HeadDims
from nt_attention.kernels.backends import cpu, flash_attn_4, reference
from nt_attention.kernels.call import FEATURES, AttentionSpec
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

    def test_check_of_a_feature_that_is_not_supported(self):
        found = run_case(case("batch_invariant", "cpu", options={"batch_invariant": True}), CPU)
        assert found.result == "no"
        assert found.details == "backend='cpu': it cannot run this call."


def scaled(which, factor):
    """The gradients, one of them multiplied by a factor."""
    return lambda *grads: (g * factor if i == which else g for i, g in enumerate(grads))


def with_nan(x):
    """The tensor with NaN as the last number of the last sequence."""
    x = x.clone()
    x[sum(FEW) - 1, -1, -1] = torch.nan
    return x


class TestFaultyBackend:
    def test_no_fault(self, fake):
        fake()
        assert run_case(case(), CPU).result == "both"

    @pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
    @pytest.mark.parametrize("factor", [1.01, 0.0, -1.0, torch.nan])
    def test_wrong_gradient(self, fake, which, factor):
        fake(grads=scaled(which, factor))
        found = run_case(case(), CPU)
        assert found.result == "forward"
        assert found.details.startswith("gradients off by ")

    @pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
    def test_nan_in_the_last_number_of_a_gradient(self, fake, which):
        fake(grads=lambda *grads: (with_nan(g) if i == which else g for i, g in enumerate(grads)))
        assert run_case(case(), CPU) == Finding(case(), "forward", "gradients off by inf of PyTorch's own error")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_wrong_output(self, fake, dtype):
        fake(out=lambda out, query, problem: out * 1.05)
        found = run_case(case(dtype=dtype), CPU)
        assert found.result == "no"
        assert found.details.startswith("output off by ")

    def test_wrong_row_of_the_output(self, fake):
        def one_row(out, query, problem):
            out[problem.layout.total - 1] = 0
            return out

        fake(out=one_row)
        assert run_case(case(), CPU).result == "no"

    def test_nan_in_one_number_of_the_output(self, fake):
        fake(out=lambda out, query, problem: with_nan(out))
        assert run_case(case(), CPU) == Finding(case(), "no", "output off by inf of PyTorch's own error")

    def test_gradient_wrong_for_grouped_heads_only(self, fake):
        fake(grads=lambda dq, dk, dv: (dq, dk if dk.shape[1] == dq.shape[1] else dk * 0.5, dv))
        assert run_case(case(), CPU).result == "both"
        assert run_case(case("grouped heads", kv_heads=2), CPU).result == "forward"

    @pytest.mark.parametrize("value", [1.0, torch.nan])
    def test_rows_past_the_end_are_written(self, fake, value):
        """On a backend whose rows past the end are not cleared afterwards."""

        def forward(query, key, value_, problem):
            out, lse = reference.forward(query, key, value_, problem)
            past = torch.arange(len(out)) >= problem.layout.total
            return out.masked_fill(past[:, None, None], value), lse

        fake(forward=forward, backward=None, differentiable=True)
        assert run_case(case(), CPU) == Finding(case(), "no", "rows past the last offset are not 0")

    def test_rows_past_the_end_are_read(self, fake):
        fake(out=lambda out, query, problem: out + 0 * query[-1, 0, 0])
        assert run_case(case(), CPU).result == "no"

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

    @pytest.mark.parametrize("feature", ["softcap", "alibi", "relative bias", "score_mod", "mask_mod"])
    def test_ignored_option(self, fake, feature):
        def forward(query, key, value, call):
            spec = dataclasses.replace(call.spec, **ignored)
            call = call._replace(spec=spec, alibi_slopes=None, relative=None)
            return reference.forward(query, key, value, call)

        ignored = {"softcap": 0.0, "score_mod": None, "mask_mod": None, "alibi": False, "relative": ()}
        options = verify_backends.FIELDS[feature]["options"]
        assert run_case(case(feature, "reference", options=options), CPU).result == "both"
        fake(forward=forward, backward=None, differentiable=True, features=frozenset(FEATURES))
        found = run_case(case(feature, options=options), CPU)
        assert found.result == "no"
        assert found.details.startswith("output off by ")

    @pytest.mark.parametrize("wrong", range(3))
    def test_wrong_gradient_of_a_relative_bias(self, fake, wrong):
        def grads(*given):
            return [grad * 1.1 if at == 3 + wrong else grad for at, grad in enumerate(given)]

        fake(grads=grads)
        found = run_case(case("relative bias", options=verify_backends.FIELDS["relative bias"]["options"]), CPU)
        assert found.result == "forward"
        assert found.details.startswith("gradients off by ")

    @pytest.mark.parametrize(
        ("error", "details"),
        [
            (RuntimeError("no kernel image\nis available"), "no kernel image"),
            (ValueError("x" * 1000), "x" * 120),
            (NotImplementedError("not for 80"), "not for 80"),
            (AssertionError(), "AssertionError"),
            (
                TypeError("varlen_fwd(): incompatible function arguments"),
                "varlen_fwd(): incompatible function arguments",
            ),
        ],
        ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
    )
    @pytest.mark.parametrize("when", ["forward", "backward"])
    def test_raised_error(self, fake, error, details, when):
        def failing(*_):
            raise error

        fake(**{"out" if when == "forward" else "grads": failing})
        found = run_case(case(), CPU)
        assert (found.result, found.details) == ("no" if when == "forward" else "forward", details)


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

        fake(forward=forward, backward=None, differentiable=True)
        found = run_case(case("dropout", **DROPPED), CPU)
        assert (found.result, found.details) == ("no", "nothing was dropped")

    @pytest.mark.parametrize(
        ("factor", "result"), [((1.1, 1.0), "no"), ((1.0, 1.1), "forward")], ids=["not-rescaled", "wrong-gradient"]
    )
    def test_dropout_is_wrong(self, fake, factor, result):
        def forward(query, key, value, problem):
            forth, back = factor
            value = value * back - (value * (back - 1)).detach()  # its gradient is off, and it is not
            out, *rest = reference.forward(query, key, value, problem)
            return out * forth, *rest

        fake(forward=forward, backward=None, differentiable=True)
        assert run_case(case("dropout", **DROPPED), CPU).result == result

    def test_backward_drops_other_weights(self, fake):
        def backward(saved, query, key, value, problem):
            return reference.backward(saved._replace(rng_state=saved.rng_state + 1), query, key, value, problem)

        features = cpu.BACKEND.features | {"dropout"}
        fake(forward=reference.forward, backward=backward, features=features, rng_on_host=True)
        assert run_case(case("dropout", **DROPPED), CPU).result == "forward"


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

    @pytest.mark.parametrize("feature", FEATURES)
    def test_cases_of_a_feature_need_it(self, feature):
        """`AttentionSpec.features` has the same names, so that support is read from the row where it was written."""
        backend = dataclasses.replace(cpu.BACKEND, features=frozenset(FEATURES))
        for c in (c for c in cases_of(backend) if c.which == feature):
            workload = c.workload
            options = dict(workload.options)
            alibi, relative = options.pop("alibi_slopes", None), options.pop("relative", None)
            spec = AttentionSpec(
                *(CPU, c.dtype, workload.heads, workload.kv_heads, workload.head_dim, workload.value_dim),
                **{"scale": 0.3, "alibi": alibi is not None, "needs_grad": True} | options,
                relative=() if relative is None else ("bias",),
                equal_lengths=workload.key_lengths is None,
                keyless=not min(workload.key_lengths or workload.lengths),
                bounded=c.which == "bounds",  # their inputs get other layouts, see `CHANGES`
                paged=c.which == "paged",
            )
            assert feature in spec.features

    def test_cases_of_head_dims_that_are_not_declared(self):
        """Head dims that the backend does not declare are verified too."""
        verified = {c.which for c in cases_of(flash_attn_4.BACKEND) if c.kind == "head dims"}
        assert {"16", "80", "64/128", "192/128"} <= verified

    def test_no_cases_for_the_reference(self):
        assert not list(cases_of(reference.BACKEND))

    @pytest.mark.parametrize(("dims", "listed"), [((16, 24), "16/24"), ((64, 64), "64")])
    def test_head_dim_is_verified_without_padding(self, dims, listed, fake):
        """It is not padded to a head dim that is known to be right."""
        head_dims = []

        def forward(query, key, value, problem):
            head_dims.append((query.shape[2], value.shape[2]))
            raise RuntimeError("seen")

        fake(forward=forward, head_dims=HeadDims(only=((64, 64), (128, 128))))
        found = run_case(case(listed, head_dim=dims[0], value_dim=dims[1]), CPU)
        assert (found.result, found.details) == ("no", "seen")
        assert head_dims == [dims]

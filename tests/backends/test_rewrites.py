"""Rewrites of calls that a kernel does not support, compared with the float64 oracle.

The kernels here are variants of the CPU backend. They assert that they get supported calls only.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch
from oracle import Problem, assert_same, problem

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.kernels.backend import COMMON
from nt_attention.kernels.backends import cpu

LENGTHS = {
    # more queries than keys, fewer, as many, one of either, none of either
    "cross": {"lengths": [5, 0, 1, 31, 17, 13, 3, 0], "key_lengths": [11, 3, 0, 17, 29, 13, 1, 0]},
    "self-apart": {"lengths": [5, 0, 1, 31, 13], "key_lengths": [5, 0, 1, 31, 13]},
    "more-queries": {"lengths": [7, 19, 3], "key_lengths": [5, 11, 2]},
    "more-keys": {"lengths": [5, 11, 2], "key_lengths": [7, 19, 3]},
    "some-keyless": {"lengths": [0, 7, 5, 3], "key_lengths": [2, 0, 11, 0]},
}

EXTRAS = ["plain", "gqa", "narrow-values", "alibi", "alibi-each-gqa", "relative", "relative-alibi-gqa", "all"]


def call(case: Problem):
    layout, key_layout = map(SequenceLayout.from_lengths, (case.lengths, case.key_lengths))
    return partial(varlen_attention, layout=layout, key_layout=key_layout, return_lse=True, backend="fake")


def assert_lower_right(problem):
    spec = problem.spec
    assert (
        problem.layout.same_lengths(problem.key_layout) or spec.window.is_open or spec.causal_alignment == "lower_right"
    )


def assert_no_fully_masked_rows(problem):
    spec = problem.spec
    queries, keys = problem.layout.host_offsets.diff(), problem.key_layout.host_offsets.diff()
    assert not (queries[keys == 0] > 0).any()
    assert spec.window in ((math.inf, math.inf), (math.inf, 0))
    if spec.is_causal and spec.lower_right:
        assert (queries <= keys).all()


@pytest.fixture
def fake(registered_variant):
    """Registers a variant of the CPU backend. Returns the calls that its kernel got, in order."""

    def make(*checks, **changes):
        kernel_calls = []

        def record(problem, *tensors):
            kernel_calls.append(problem)
            for check in checks:
                check(problem)
            layout, key_layout, slopes = problem[:3]
            assert slopes is None or slopes.dim() == 1 or len(slopes) == layout.batch_size == key_layout.batch_size
            for x, at in zip(tensors, (layout, key_layout, key_layout), strict=True):
                assert len(x) >= at.total
                assert len(x) == at.total or "reads_past_end" not in changes.get("traits", ())

        def forward(query, key, value, problem):
            record(problem, query, key, value)
            return cpu.forward(query, key, value, problem)

        def backward(known, query, key, value, problem):
            record(problem, query, key, value)
            assert len(known.grad) == len(known.out) == len(known.lse) == len(query)
            return cpu.backward(known, query, key, value, problem)

        registered_variant(cpu.BACKEND, "fake", forward=forward, backward=backward, **changes)
        return kernel_calls

    return make


@pytest.fixture
def lower_right(fake):
    return fake(assert_lower_right, traits={"lower_right_only"})


@pytest.fixture
def no_masked_rows(fake):
    return fake(
        assert_no_fully_masked_rows, traits={"no_fully_masked_rows"}, features=cpu.BACKEND.features - {"window"}
    )


@pytest.fixture
def both(fake):
    """Lower right only, and no fully masked rows."""
    return fake(
        assert_lower_right,
        assert_no_fully_masked_rows,
        traits={"lower_right_only", "no_fully_masked_rows"},
        features=COMMON,
    )


UPPER_LEFT = {
    "causal": {"is_causal": True},
    "causal-window": {"is_causal": True, "window_size": (5, 9)},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "both-sides": {"window_size": (7, 3)},
    "own-position-only": {"window_size": (0, 0)},
    "full": {},
}


class TestLowerRightOnly:
    @pytest.mark.parametrize("extra", EXTRAS)
    @pytest.mark.parametrize("geometry", UPPER_LEFT)
    def test_upper_left_rewritten_as_lower_right(self, lower_right, geometry, extra):
        options = {**UPPER_LEFT[geometry], "causal_alignment": "upper_left"}
        case = problem("cross", "full", extra, **LENGTHS["cross"], options=options)
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        rewritten = geometry != "full"  # full attention has no diagonal to align
        assert [p.spec.causal_alignment for p in lower_right] == ["lower_right" if rewritten else "upper_left"] * 2

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("geometry", ["causal", "both-sides", "right"])
    def test_rewrite_for_any_lengths(self, lower_right, geometry, lengths):
        options = {**UPPER_LEFT[geometry], "causal_alignment": "upper_left"}
        case = problem("cross", "full", "alibi-each-gqa", **LENGTHS[lengths], options=options)
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        assert len(lower_right) == 2

    @pytest.mark.parametrize("geometry", ["causal", "both-sides"])
    def test_lower_right_is_not_rewritten(self, lower_right, geometry):
        case = problem("cross", "full", "gqa", **LENGTHS["cross"], options=UPPER_LEFT[geometry])
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        assert [p.layout.host_offsets.diff().tolist() for p in lower_right] == [LENGTHS["cross"]["lengths"]] * 2

    def test_equal_lengths_are_not_rewritten(self, lower_right):
        options = {"is_causal": True, "causal_alignment": "upper_left"}
        case = problem("self", "full", "gqa", **LENGTHS["self-apart"], options=options)
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        assert [p.layout.host_offsets.diff().tolist() for p in lower_right] == [LENGTHS["self-apart"]["lengths"]] * 2

    @pytest.mark.usefixtures("uninitialized_is_nan")
    @pytest.mark.parametrize("past", [(3, 0), (0, 2), (3, 2)], ids=str)
    @pytest.mark.parametrize("geometry", ["causal", "left"])
    def test_rows_past_the_end_are_never_read(self, lower_right, geometry, past):
        garbage_is_never_read({**UPPER_LEFT[geometry], "causal_alignment": "upper_left"}, past)
        assert len(lower_right) == 2

    def test_rewritten_layouts_are_cached(self, lower_right):
        case = problem("cross", "causal-upper_left", "gqa", **LENGTHS["cross"])
        function = call(case)
        case.solve(function)
        case.solve(function)
        assert (
            len({id(p.layout.offsets) for p in lower_right})
            == len({id(p.key_layout.offsets) for p in lower_right})
            == 1
        )


WITHOUT_WINDOWS = {
    "full": {},
    "full-upper_left": {"causal_alignment": "upper_left"},  # the alignment matters for ALiBi only
    "causal": {"is_causal": True},
    "causal-upper_left": {"is_causal": True, "causal_alignment": "upper_left"},
}


class TestNoFullyMaskedRows:
    @pytest.mark.parametrize("extra", EXTRAS)
    @pytest.mark.parametrize("geometry", WITHOUT_WINDOWS)
    def test_fully_masked_rows_are_removed(self, no_masked_rows, geometry, extra):
        case = problem("cross", "full", extra, **LENGTHS["cross"], options=WITHOUT_WINDOWS[geometry])
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        assert len(no_masked_rows) == 2

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("geometry", WITHOUT_WINDOWS)
    def test_rewrite_for_any_lengths(self, no_masked_rows, geometry, lengths):
        case = problem("cross", "full", "alibi-each-gqa", **LENGTHS[lengths], options=WITHOUT_WINDOWS[geometry])
        assert_same(case.solve(call(case)), case.truth(), 1e-9)
        assert len(no_masked_rows) == 2

    def test_only_fully_masked_rows_are_removed(self, no_masked_rows):
        case = problem("cross", "causal", "plain", lengths=[5, 0, 7, 3, 2], key_lengths=[3, 2, 7, 11, 0])
        case.solve(call(case))
        assert [p.layout.host_offsets.diff().tolist() for p in no_masked_rows] == [[3, 0, 7, 3, 0]] * 2
        assert [p.key_layout.host_offsets.diff().tolist() for p in no_masked_rows] == [[3, 2, 7, 11, 0]] * 2

    @pytest.mark.usefixtures("uninitialized_is_nan")
    @pytest.mark.parametrize("past", [(3, 0), (0, 2), (3, 2)], ids=str)
    @pytest.mark.parametrize("geometry", ["full", "causal"])
    def test_rows_past_the_end_are_never_read(self, no_masked_rows, geometry, past):
        garbage_is_never_read(WITHOUT_WINDOWS[geometry], past)
        assert len(no_masked_rows) == 2

    @pytest.mark.parametrize("key_lengths", [[0, 0, 0], [0, 3, 0]], ids=str)
    @pytest.mark.parametrize("geometry", WITHOUT_WINDOWS)
    def test_all_rows_fully_masked(self, no_masked_rows, geometry, key_lengths):
        """Keys of sequences without queries do not count."""
        case = Problem([5, 0, 7], key_lengths, 6, 3, past=(3, 2), options=WITHOUT_WINDOWS[geometry])
        want = case.truth()
        assert (want["lse"] == -torch.inf).all()
        assert_same(case.solve(call(case)), want, 0)
        assert not no_masked_rows  # no kernel is launched

    def test_nan_gradient_of_lse_in_removed_rows_is_ignored(self, no_masked_rows):
        case = problem("cross", "causal", "gqa", **LENGTHS["cross"])
        want = case.truth()
        fully_masked = want["lse"] == -torch.inf
        assert fully_masked.any()
        case.grads = (case.grads[0], case.grads[1].masked_fill(fully_masked, torch.nan))
        assert_same(case.solve(call(case)), want, 1e-9)

    def test_layout_without_fully_masked_rows_is_cached(self, no_masked_rows):
        case = problem("cross", "causal", "gqa", **LENGTHS["cross"])
        function = call(case)
        case.solve(function)
        case.solve(function)
        assert len(no_masked_rows) == 4
        assert len({id(p.layout.offsets) for p in no_masked_rows}) == 1


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("geometry", ["full", "causal"])
def test_both_rewrites_together(both, geometry, lengths):
    """Full attention is the same with both alignments. Lower right causal attention has fully masked rows."""
    alignment = "upper_left" if geometry == "full" else "lower_right"
    options = {**WITHOUT_WINDOWS[geometry], "causal_alignment": alignment}
    case = problem("cross", "full", "gqa", **LENGTHS[lengths], options=options)
    assert_same(case.solve(call(case)), case.truth(), 1e-9)
    assert len(both) == 2


def garbage_is_never_read(options, past):
    case = problem("cross", "full", "all", **LENGTHS["cross"], past=past, options=options)
    clean = case.truth()
    for name, rows in (("query", past[0]), ("key", past[1]), ("value", past[1])):
        case.inputs[name][len(case.inputs[name]) - rows :] = torch.nan
    for grad in case.grads:
        grad[len(grad) - past[0] :] = torch.nan
    got, want = case.solve(call(case)), clean
    # the oracle's gradient of sinks includes the rows past the end
    got.pop("d sinks"), want.pop("d sinks")
    assert_same(got, want, 1e-9)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("past", [(3, 0), (0, 2), (3, 2), (0, 0)], ids=str)
@pytest.mark.parametrize("trait", ["reads_past_end", "lower_right_only", "no_fully_masked_rows"])
def test_kernel_gets_no_rows_past_the_end(fake, trait, past):
    features = cpu.BACKEND.features - ({"window"} if trait == "no_fully_masked_rows" else set())
    kernel_calls = fake(traits={"reads_past_end", trait}, features=features)
    garbage_is_never_read({"is_causal": True, "causal_alignment": "upper_left"}, past)
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_rewrite_for_a_kernel_that_supports_the_call(is_causal, fake):
    kernel_calls = fake()
    case = problem("cross", "full", "plain", **LENGTHS["cross"], options={"is_causal": is_causal})
    case.solve(call(case))
    assert [p.layout.host_offsets.diff().tolist() for p in kernel_calls] == [LENGTHS["cross"]["lengths"]] * 2


def test_a_backend_with_windows_must_support_fully_masked_rows():
    with pytest.raises(ValueError, match="'no_fully_masked_rows' is not supported together with 'window'"):
        dataclasses.replace(cpu.BACKEND, traits={"no_fully_masked_rows"}, features=COMMON | {"window"})

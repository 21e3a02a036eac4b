"""Random calls on the CPU, compared with the oracle."""

from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Problem, assert_same

from nt_attention import SequenceLayout, varlen_attention

lengths = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 31, 64, 65, 127, 129, 150]))

window_side = st.one_of(st.just(-1), st.integers(0, 12), st.sampled_from([64, 127, 128, 140]))


@st.composite
def problems(draw, lengths=lengths):
    pairs = draw(st.lists(st.tuples(lengths, lengths), max_size=5))
    same = draw(st.booleans())
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    alignment = st.sampled_from(["lower_right", "upper_left"])
    return Problem(
        lengths=[q for q, _ in pairs],
        key_lengths=None if same else [k for _, k in pairs],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        past=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        sinks=draw(st.booleans()),
        alibi=draw(st.sampled_from(["", "H", "BH"])) if pairs else "",
        options={
            "is_causal": draw(st.booleans()),
            "causal_alignment": draw(alignment),
            "window_size": (draw(window_side), draw(window_side)),
            "scale": draw(st.sampled_from([None, 0.3])),
        },
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_random_calls_agree_with_the_oracle(case):
    layout = SequenceLayout.from_lengths(case.lengths)
    key_layout = None if case.key_lengths is None else SequenceLayout.from_lengths(case.key_lengths)
    function = partial(varlen_attention, layout=layout, key_layout=key_layout, return_lse=True, backend="cpu")
    assert_same(case.solve(function), case.truth(), 1e-9)

"""The expected time of a call, and the order in which "auto" tries backends. No GPU is needed."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels import cost_model, measurements, select
from nt_attention.kernels.backends import reference
from nt_attention.kernels.call import AttentionSpec, Call
from nt_attention.kernels.cost_model import CallSize, expected_us
from nt_attention.kernels.measurements import Table
from nt_attention.kernels.select import BACKENDS, choose, explain_spec, fastest_first

SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, 5, 5, 64, 64, 0.125)

SIZE = CallSize(7, 1009.0, 100_003)

# µs for a call, ns for a head's sequence, token and 1000 pairs
TABLE = {
    ("16-bit", "forward", "full"): {
        64: {
            "token_tiled": (11.0, 2.0, 3.0, 13.0),
            "torch_flash": (5.0, 17.0, 3.0, 7.0),
            "flash_attn_4": (31.0, 0, 0, 1),
        },
        128: {"token_tiled": (23.0, 2.0, 3.0, 13.0), "torch_flash": (19.0, 0.0, 0.0, 0.0)},
    },
    ("16-bit", "both", "full"): {64: {"token_tiled": (1.0, 0, 0, 0), "torch_flash": (2.0, 0, 0, 0)}},
    ("16-bit", "forward", "causal"): {64: {"token_tiled": (13.0, 0, 0, 0), "torch_flash": (17.0, 0, 0, 0)}},
    ("float32", "forward", "full"): {64: {"torch_efficient": (3.0, 0, 0, 0), "token_tiled": (7.0, 0, 0, 0)}},
}

FILES = [
    file for file in (Path(measurements.__file__).parent / "measured").iterdir() if not file.name.startswith("trees_")
]

KINDS = (
    "full",
    "causal",
    "nonlinear",
    "sinks",
    "few queries",
    "more keys",
    *(f"{n}window{b}" for n in ("", "narrow ") for b in ("", " behind")),
)


@pytest.fixture
def of_tables(monkeypatch):
    """Sets what was measured on every GPU: tables, of which the first that has a kind of call wins."""

    def set_tables(*costs):
        tables = tuple(Table(read(table), f"table {i}") for i, table in enumerate(costs))
        monkeypatch.setattr(measurements, "tables", lambda device: tables)
        cost_model._find.cache_clear()

    yield set_tables
    cost_model._find.cache_clear()


def read(table):
    """Rows of four or five numbers get zeros. A head dim is that of values too."""
    return {
        key: {
            dim if isinstance(dim, tuple) else (dim, dim): {name: (*row, 0.0, 0.0)[:6] for name, row in rows.items()}
            for dim, rows in by_dim.items()
        }
        for key, by_dim in table.items()
    }


@pytest.fixture
def measured(of_tables, monkeypatch):
    of_tables(TABLE)
    monkeypatch.setattr(cost_model, "LEAST_US", {"forward": 0.0, "both": 0.0})


def test_expected_times_below_the_accuracy_of_the_fits_are_equal(of_tables):
    """The order of the table decides."""
    of_tables({("16-bit", "forward", "full"): {64: {"token_tiled": (9.0, 0, 0, 1), "torch_flash": (5.0, 0, 0, 0)}}})
    assert expected_us(SPEC, CallSize(1, 1.0, 1)) == {"token_tiled": 10.0, "torch_flash": 10.0}
    assert select.fastest_first(SPEC, CallSize(1, 1.0, 1))[0] == "token_tiled"
    assert expected_us(SPEC, CallSize(1, 1.0, 10**6))["token_tiled"] > 10


def call(**changes):
    return dataclasses.replace(SPEC, **changes)


@pytest.mark.usefixtures("measured")
class TestExpectedTime:
    def test_expected_time_of_sequences_tokens_and_visible_pairs(self):
        got = expected_us(SPEC, SIZE)
        want = {
            "token_tiled": 11 + 5e-3 * (2 * 7 + 3 * 1009 + 13 * 100.003),
            "torch_flash": 5 + 5e-3 * (17 * 7 + 3 * 1009 + 7 * 100.003),
            "flash_attn_4": 31 + 5e-3 * 100.003,
        }
        assert got == pytest.approx(want, rel=1e-12)

    @pytest.mark.parametrize(
        ("dims", "measured_at"),
        [
            *(((64, 64), 64), ((7, 3), 64), ((65, 65), 128), ((64, 65), 128), ((72, 3), 128), ((128, 128), 128)),
            *(((129, 129), 128), ((256, 17), 128)),  # the largest, if there is none above
        ],
        ids=str,
    )
    def test_expected_time_of_the_next_larger_head_dim(self, dims, measured_at):
        got = expected_us(call(head_dim=dims[0], value_dim=dims[1]), CallSize(0, 0, 0))
        assert got["token_tiled"] == {64: 11, 128: 23}[measured_at]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_expected_time_with_gradients(self, dtype):
        got = expected_us(call(needs_grad=True, dtype=dtype), SIZE)
        assert got == {"token_tiled": 1, "torch_flash": 2}

    def test_expected_time_without_measurements(self, of_tables):
        assert expected_us(call(dtype=torch.float32, needs_grad=True), SIZE) == {}
        of_tables({})
        assert expected_us(SPEC, SIZE) == {}

    def test_expected_time_of_the_query_that_sees_the_most_keys(self, of_tables):
        of_tables({("16-bit", "forward", "full"): {64: {"torch_flash": (1.0, 0.0, 0.0, 0.0, 5.0)}}})
        of_heads = [expected_us(call(num_heads=heads), CallSize(7, 1009.0, 100_003, 300.0, 300.0)) for heads in (5, 10)]
        assert of_heads == [{"torch_flash": pytest.approx(1 + 5e-3 * 300)}] * 2  # heads run side by side

    def test_tokens_of_few_queries_are_counted_for_each_key_head(self, of_tables):
        of_tables({("16-bit", "forward", "few queries"): {64: {"split_kv": (1.0, 2.0, 3.0, 5.0, 0.0)}}})
        got = expected_us(call(num_heads=8, num_kv_heads=2, equal_lengths=False), CallSize(7, 1009.0, 100_003, 1, 900))
        assert got == {"split_kv": pytest.approx(1 + 2e-3 * 3 * 1009 + 8e-3 * (2 * 7 + 5 * 100.003))}
        assert expected_us(call(num_heads=8, num_kv_heads=2, needs_grad=True), CallSize(7, 1009.0, 100_003, 1)) == {}

    def test_tokens_of_calls_with_more_keys_are_counted_for_each_key_head(self, of_tables):
        of_tables({("16-bit", "both", "more keys"): {64: {"torch_flash": (1.0, 2.0, 3.0, 5.0, 0.0)}}})
        spec = call(num_heads=8, num_kv_heads=2, equal_lengths=False, needs_grad=True)
        got = expected_us(spec, CallSize(7, 20_003, 900_001, 96, 900))
        assert got == {"torch_flash": pytest.approx(1 + 2e-3 * 3 * 20_003 + 8e-3 * (2 * 7 + 5 * 900.001))}

    def test_sequences_of_key_heads(self, of_tables):
        of_tables({("16-bit", "forward", "full"): {64: {"torch_flash": (1.0, 0.0, 0.0, 0.0, 0.0, 7.0)}}})
        of_heads = [expected_us(call(num_heads=8, num_kv_heads=n), CallSize(11, 1009.0, 100_003)) for n in (2, 8)]
        assert of_heads == [{"torch_flash": pytest.approx(1 + 1e-3 * 7 * 11 * n)} for n in (2, 8)]

    @pytest.mark.parametrize(
        ("spec", "kinds"),
        [
            ({}, ["full", "causal"]),
            ({"is_causal": True}, ["causal"]),
            ({"window_size": (64, 64)}, ["narrow window", "window", "causal"]),
            ({"window_size": (256, 256)}, ["window", "causal"]),
            ({"window_size": (7, -1)}, ["window", "causal"]),
            ({"window_size": (127, 0)}, ["narrow window behind", "window behind", "causal"]),
            ({"window_size": (127, 5), "is_causal": True}, ["narrow window behind", "window behind", "causal"]),
            ({"window_size": (4095, 0)}, ["window behind", "causal"]),
            ({"softcap": 50.0}, ["nonlinear", "full", "causal"]),
            ({"sinks": True, "is_causal": True}, ["causal"]),  # they only matter with gradients
            ({"softcap": 50.0, "window_size": (4095, 0)}, ["nonlinear", "window behind", "causal"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        ("most_queries", "first"), [(300, []), (96, ["more keys"]), (97, []), (1, ["few queries"])], ids=str
    )
    def test_kinds_that_are_not_measured_use_the_next_one(self, of_tables, spec, kinds, most_queries, first):
        spec, size = call(equal_lengths=False, **spec), CallSize(7, 1009.0, 100_003, most_queries)
        kinds = first + kinds
        assert cost_model.kind_of(spec, size) == kinds[0]
        table = {}
        for kind in reversed(kinds):
            number = 1000.0 + len(table)
            table["16-bit", "forward", kind] = {64: {"torch_flash": (number, 0.0, 0.0, 0.0)}}
            of_tables(table)
            assert expected_us(spec, size) == {"torch_flash": number}, kind

    def test_pairs_of_head_dims(self, of_tables):
        dims = (64, (192, 128), 192, 256)
        rows = {dim: {"torch_flash": (1000.0 + i, 0.0, 0.0, 0.0)} for i, dim in enumerate(dims)}
        of_tables({("16-bit", "forward", "full"): rows})
        for asked, i in (
            ((192, 128), 1),
            ((65, 64), 1),
            ((64, 65), 1),
            ((128, 192), 2),
            ((192, 129), 2),
            ((576, 512), 3),
        ):
            spec = call(head_dim=asked[0], value_dim=asked[1])
            assert expected_us(spec, SIZE) == {"torch_flash": 1000 + i}, asked

    def test_kinds_with_sinks(self, of_tables):
        """Kernels that don't take the gradient of lse have a further column in the backward."""
        size, both = CallSize(7, 1009.0, 100_003, 300), {"needs_grad": True, "sinks": True}
        assert cost_model.kind_of(call(is_causal=True, **both), size) == "sinks"
        assert cost_model.kind_of(call(**both), size) == "sinks"
        assert cost_model.kind_of(call(softcap=3.0, **both), size) == "nonlinear"
        assert cost_model.kind_of(call(window_size=(127, 0), **both), size) == "narrow window behind"
        rows = {
            kind: {64: {"torch_flash": (us, 0.0, 0.0, 0.0)}} for kind, us in (("sinks", 1000.0), ("causal", 2000.0))
        }
        of_tables({("16-bit", "both", kind): row for kind, row in rows.items()})
        assert expected_us(call(is_causal=True, **both), size) == {"torch_flash": 1000.0}
        assert expected_us(call(is_causal=True, needs_grad=True), size) == {"torch_flash": 2000.0}
        of_tables({("16-bit", "both", "causal"): rows["causal"]})
        assert expected_us(call(is_causal=True, **both), size) == {"torch_flash": 2000.0}

    def test_kind_that_was_measured_at_smaller_head_dims_only(self, of_tables):
        row = {"torch_flash": (1000.0, 0.0, 0.0, 0.0)}
        of_tables(
            {
                ("16-bit", "forward", "window behind"): {64: row},
                ("16-bit", "forward", "causal"): {256: {"torch_flash": (2000.0, 0.0, 0.0, 0.0)}},
            }
        )
        for head_dim, us in ((64, 1000), (65, 2000), (256, 2000), (257, 1000)):
            spec = call(head_dim=head_dim, value_dim=head_dim, window_size=(999, 0))
            assert expected_us(spec, SIZE) == {"torch_flash": us}, head_dim

    def test_numbers_of_the_user_come_first_for_each_head_dim(self, of_tables):
        key = ("16-bit", "forward", "full")

        def rows(us):
            return {"torch_flash": (us, 0.0, 0.0, 0.0)}

        of_tables({key: {64: rows(1000.0)}}, {key: {64: rows(2000.0), 96: rows(3000.0), 128: rows(4000.0)}})
        for head_dim, us, about in ((32, 1000, "table 0"), (80, 3000, "table 1"), (128, 4000, "table 1")):
            spec = call(head_dim=head_dim, value_dim=head_dim)
            assert expected_us(spec, SIZE) == {"torch_flash": us}
            assert cost_model.costs_of(spec, SIZE).about == about


@pytest.mark.usefixtures("measured")
class TestOrder:
    @pytest.mark.parametrize(
        ("changes", "size", "order"),
        [
            ({}, CallSize(0, 0, 0), ("torch_flash", "token_tiled", "flash_attn_4")),
            ({}, CallSize(997, 1009, 0), ("flash_attn_4", "token_tiled", "torch_flash")),  # many short sequences
            ({}, CallSize(1, 1009, 1_000_003), ("flash_attn_4", "torch_flash", "token_tiled")),  # a long one
            ({"head_dim": 65}, CallSize(0, 0, 0), ("torch_flash", "token_tiled")),
            ({"needs_grad": True}, SIZE, ("token_tiled", "torch_flash")),
            ({"is_causal": True}, SIZE, ("token_tiled", "torch_flash")),
            ({"dtype": torch.float32}, SIZE, ("torch_efficient", "token_tiled")),
            ({"dtype": torch.float32, "needs_grad": True}, SIZE, ()),
        ],
    )
    def test_order_is_expected_time_then_the_list_then_the_reference(self, changes, size, order):
        others = [name for name in BACKENDS if name not in (*order, "cpu", "reference")]
        assert fastest_first(call(**changes), size) == (*order, *others, "reference")

    def test_expected_time_decides_which_backend_runs(self, not_verified):
        assert choose(SPEC, CallSize(0, 0, 0)).name == "torch_flash"
        assert choose(SPEC, CallSize(1, 1009, 1_000_003)).name == "flash_attn_4"
        # a kernel without what is asked for is passed over
        assert choose(call(softcap=3.0), CallSize(0, 0, 0)).name == "token_tiled"
        assert choose(call(needs_grad=True), SIZE, "torch_flash").name == "torch_flash"

    def test_measured_backends_come_before_others(self, not_verified):
        """`flash_attn_2` can run every call of `torch_flash`, and was not measured."""
        assert choose(call(alibi=True, is_causal=True), SIZE).name == "token_tiled"
        assert choose(call(score_mod=lambda s, *_: s), SIZE).name == "flex"
        assert choose(call(dtype=torch.float64), SIZE).name == "reference"

    def test_explain_shows_the_expected_times_of_backends_that_can_run(self, not_verified):
        explanation = explain_spec(call(softcap=3.0), CallSize(0, 0, 0))
        assert explanation.chosen == "token_tiled"
        assert explanation.expected_us == {"token_tiled": 11, "flash_attn_4": 31}
        lines = {line.split()[0]: line for line in str(explanation).splitlines()[1:]}
        assert lines["token_tiled"].endswith("; expected time 11 µs")
        assert lines["flash_attn_4"].endswith("; expected time 31 µs")
        assert not any("expected" in lines[name] for name in ("torch_flash", "flash_attn_2", "reference"))
        assert explanation.times == "table 0"
        assert str(explanation).splitlines()[-1] == "  expected times: table 0"

    def test_backend_of_a_file_that_is_not_there_is_left_out(self, of_tables, not_verified):
        of_tables({("16-bit", "forward", "full"): {64: {"gone": (1.0,) * 5, "torch_flash": (2.0,) * 5}}})
        assert fastest_first(SPEC, SIZE)[0] == "torch_flash"
        assert set(explain_spec(SPEC, SIZE).expected_us) == {"torch_flash"}


class TestOnACPU:
    @pytest.fixture(autouse=True)
    def _nothing_is_read(self, monkeypatch):
        def refused(device):
            raise AssertionError("read what was measured on a GPU")

        monkeypatch.setattr(measurements, "tables", refused)
        cost_model._find.cache_clear()

    def test_order_on_a_cpu_is_fixed(self):
        assert fastest_first(call(device=torch.device("cpu"), dtype=torch.float32), SIZE) == ("cpu", "reference")


class TestMeasurements:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_measurements_are_valid(self, file):
        """A file may have no numbers while a measurement is running."""
        content = json.loads(file.read_text())
        assert file.stem == measurements.slug(content["gpu"])
        assert measurements.Card(**content["card"]).speeds > (0, 0, 0)
        assert content["costs"].keys() <= {"16-bit", "float32"}
        for (dtype, direction, kind), by_head_dim in measurements.read_costs(content["costs"]).items():
            assert direction in ("forward", "both")
            assert kind in KINDS
            assert by_head_dim, (dtype, direction, kind)
            for dims, rows in by_head_dim.items():
                at = (dtype, direction, kind, dims)
                assert 0 < min(dims) <= max(dims) <= 576, at
                assert rows.keys() <= set(BACKENDS) - {"cpu", "reference"}, at
                for name, row in rows.items():
                    assert len(row) == 6, (*at, name)
                    assert all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in row), (*at, name)
                    assert any(row), (*at, name)
                    measured = torch.float32 if dtype == "float32" else torch.bfloat16
                    assert measured in BACKENDS[name].dtypes, (*at, name)
                    assert max(dims) <= BACKENDS[name].head_dims.most, (*at, name)


def test_split_kv_is_the_first_for_few_queries(measured, monkeypatch):
    few, more = CallSize(3, 500.0, 1000, 4), CallSize(3, 500.0, 1000, 5)
    four_heads = {"num_heads": 8, "num_kv_heads": 2, "equal_lengths": False}
    assert select.fastest_first(call(**four_heads), few)[0] == "split_kv"
    assert select.fastest_first(call(**four_heads), more)[0] != "split_kv"
    assert select.fastest_first(call(needs_grad=True, **four_heads), few)[0] != "split_kv"
    for size in (few, more):
        order = select.fastest_first(call(**four_heads), size)
        assert sorted(order) == sorted({*order})
    one = CallSize(3, 500.0, 1000, 1)  # decoding in multi-head latent attention
    latent = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "equal_lengths": False}
    assert select.fastest_first(call(**latent), one)[0] == "split_kv"
    assert select.fastest_first(call(), few)[0] != "split_kv"  # short sequences that see their own tokens only
    monkeypatch.setattr(select, "_can_run", lambda *_: True)
    fast = dataclasses.replace(reference.BACKEND, name="mine", expected_us=lambda spec, size: 0.1)
    with nta.register_backend(fast):
        assert select.fastest_first(call(**four_heads), few)[:2] == ("mine", "split_kv")


def test_times_of_few_queries_decide_if_they_were_measured(of_tables):
    rows = {"split_kv": (2000.0, 0, 0, 0), "flash_attn_4": (1000.0, 0, 0, 0), "token_tiled": (3000.0, 0, 0, 0)}
    of_tables({("16-bit", "forward", "few queries"): {64: rows}, ("16-bit", "forward", "full"): {64: rows}})
    few = CallSize(3, 500.0, 1000, 1)
    spec = call(equal_lengths=False)
    assert fastest_first(spec, few)[:3] == ("flash_attn_4", "split_kv", "token_tiled")
    assert fastest_first(dataclasses.replace(spec, paged=True), few)[0] == "split_kv"  # others copy the keys
    del rows["split_kv"]
    of_tables({("16-bit", "forward", "few queries"): {64: rows}})
    assert fastest_first(spec, few)[:2] == ("split_kv", "flash_attn_4")


@pytest.mark.parametrize(
    ("sequences", "queries", "keys", "is_first"),
    [(1, 64, 65536, True), (1, 128, 65536, True), (1, 512, 65536, False), (1, 64, 512, False), (32, 64, 4096, False)],
)
def test_split_kv_is_the_first_if_few_tiles_see_many_keys(measured, sequences, queries, keys, is_first):
    pairs = sequences * (queries * keys - queries * (queries - 1) // 2)  # lower right causal
    size = CallSize(sequences, sequences * (queries + keys) / 2, pairs, queries)
    spec = call(num_heads=32, num_kv_heads=8)
    assert (select.fastest_first(spec, size)[0] == "split_kv") == is_first
    unknown = CallSize(sequences, 1000.0, pairs)  # the default of most_queries
    assert select.fastest_first(spec, unknown)[0] != "split_kv"


def test_slow_backend_warning_gives_the_reasons_of_the_fastest_backend(not_verified, measured):
    """The first in the order of expected time, not the first of the list."""
    spec = call(dtype=torch.float64)
    assert select.fastest_first(spec, CallSize(0, 0, 0))[0] == "torch_flash"
    problem = Call(*(nta.SequenceLayout.from_lengths([17]),) * 2, None, spec)
    with pytest.warns(
        select.SlowBackendWarning, match="torch_flash .* dtype must be float16 or bfloat16, got torch.float64"
    ):
        select.warn_if_slow(problem, "auto")

"""``python -m nt_attention bench``, from its arguments to the tables."""

import functools
import re
from importlib.metadata import version

import pytest
import torch
from torch.nn import functional as F

from nt_attention.__main__ import main
from nt_attention.cli import bench, timing
from nt_attention.cli.implementations import NESTED, PADDED, CaseInputs, NotSupportedError, implementations
from nt_attention.cli.workloads import DISTRIBUTIONS, WORKLOADS, Workload, draw_lengths

CPU = torch.device("cpu")
GIVEN = ["bench", "--device", "cpu", "--lengths", "5,0,11,17", "--heads", "4", "--head-dim", "16", "--backends", "auto"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(timing, "wall_ms", functools.partial(timing.wall_ms, seconds=0.0))


@pytest.fixture
def run(capsys):
    """Runs the command and returns the exit status, what was printed, and the rows and notes by implementation."""

    def run(*arguments):
        status = main([*GIVEN, *arguments])
        out = capsys.readouterr().out
        rows, notes = {}, {}
        for line in out.splitlines():
            if line.startswith("| ") and not line.startswith("| implementation"):
                name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
                rows[name] = cells
            if line.startswith("- "):
                name, _, note = line.removeprefix("- ").partition(": ")
                notes.setdefault(name, []).append(note)
        return status, out, rows, notes

    return run


class TestBenchLengths:
    def test_lengths_given_one_by_one(self):
        assert draw_lengths("5,0,900,17", tokens=3) == (5, 0, 900, 17)

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_lengths_drawn_from_a_distribution(self, distribution):
        drawn = draw_lengths(f"{distribution}:17", 1700)
        assert sum(drawn) == 1700
        assert max(drawn) <= 17
        assert drawn == draw_lengths(f"{distribution}:17", 1700)
        assert (drawn == draw_lengths(f"{distribution}:17", 1700, seed=1)) is (distribution == "equal")

    def test_equal_lengths_are_as_many_as_fit(self):
        assert draw_lengths("equal:4", 10) == (4, 4)

    @pytest.mark.parametrize("text", ["", "5,", "5,-1", "5,x", "normal:9", "equal:0", "uniform:"])
    def test_invalid_lengths(self, text):
        with pytest.raises(ValueError, match="5,0,900,17"):
            draw_lengths(text)

    def test_named_workloads_have_as_many_tokens_as_declared(self):
        assert {sum(WORKLOADS[name].lengths) for name in "ABCDEFG"} == {32768}
        assert WORKLOADS["A"].lengths[:5] == (715, 87, 166, 428, 123)  # saved results depend on them


def test_bench_prints_a_markdown_table(run):
    status, out, rows, notes = run()
    assert status == 0
    assert notes == {}
    assert out.startswith("`python -m nt_attention bench --device cpu --lengths 5,0,11,17")
    assert f"torch {version('torch')}" in out
    assert "given: 4 sequences, 5,0,11,17, 4 × 16" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {7}
    assert list(rows) == ["auto (cpu)", PADDED, NESTED]  # with the backend that auto selected
    for name, (forward, ratio, both, both_ratio, error) in rows.items():
        assert float(forward) > 0
        assert float(both) > 0
        assert float(error) < 1e-5
        if name == "auto (cpu)":
            assert ratio == both_ratio == "1.00"


def test_bench_runs_all_available_backends_by_default(monkeypatch):
    missing = {"token_tiled": "needs Triton.", "torch_flash": None, "cpu": None, "reference": None}
    monkeypatch.setattr(bench, "available_backends", lambda: missing)
    assert bench.available(CPU) == ["cpu"]
    assert bench.available(torch.device("cuda")) == ["torch_flash"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-heads", "2", "--options", "is_causal=True"],
        ["--options", "window_size=3,2"],
        ["--options", "window_size=5,-1", "is_causal=True", "--dtype", "bfloat16"],
        ["--options", "window_size=-1,0"],  # causal by another name
        ["--lengths", "equal:1", "--tokens", "13"],  # the gradients of q and k are 0
        ["--options", "deterministic=True"],
        ["--backends", "cpu", "reference"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_bench_results_are_right(arguments, run):
    status, _, rows, notes = run(*arguments)
    assert status == 0
    for name, (forward, *_, error) in rows.items():
        if forward == "–":
            assert name == NESTED
            assert " has no " in notes[name][0]
        else:
            assert float(error) < (2e-2 if "bfloat16" in arguments else 1e-5)


@pytest.mark.parametrize("factor", [1.1, 1 + 5e-4, float("nan")], ids=["tenth", "as-tf32", "nan"])
def test_bench_marks_a_wrong_result(factor, run, monkeypatch):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **options: right(*x, **options) * factor)
    status, _, rows, notes = run()
    assert status == 1
    assert [name for name, cells in rows.items() if cells[-1].endswith(" ✗")] == [PADDED, NESTED]
    assert notes == {name: ["wrong: out", "wrong: out, dq, dk, dv"] for name in (PADDED, NESTED)}


def test_bench_reports_a_failure(run, monkeypatch):
    def failing(query, *_, **options):
        raise RuntimeError("no kernel | here\nand more") if query.is_nested else torch.OutOfMemoryError("too much")

    monkeypatch.setattr(F, "scaled_dot_product_attention", failing)
    status, _, rows, notes = run()
    assert status == 1
    assert notes == {NESTED: ["failed: no kernel | here"], PADDED: ["out of memory"]}
    assert rows[NESTED] == ["–", "", "–", "", "✗"]
    assert rows[PADDED] == ["–", "", "–", "", ""]
    assert float(rows["auto (cpu)"][4]) < 1e-5


def test_bench_shows_why_a_call_is_not_supported(run):
    options = ["--options", "softcap=20", "is_causal=True"]
    status, _, rows, notes = run("--backends", "cpu", "reference", "torch_flash", *options)
    assert status == 0  # no result is wrong
    assert notes[PADDED] == ["SDPA has no softcap."]
    assert "torch_flash" in notes
    assert float(rows["reference"][4]) < 1e-5


def test_bench_auto_without_a_backend_shows_every_reason(run):
    *_, notes = run("--options", "batch_invariant=True")
    assert "cpu: batch invariance is not supported" in notes["auto"][0]
    assert "reference: batch invariance is not supported" in notes["auto"][0]


def test_bench_forward_only(run):
    status, _, rows, _ = run("--forward-only")
    assert status == 0
    assert {len(cells) for cells in rows.values()} == {3}


def test_bench_draws_the_times(run, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "wall_ms", lambda call: 12.5)
    status, *_ = run("--options", "softcap=5", "--plot", str(tmp_path / "times.svg"))
    assert status == 0
    text = (tmp_path / "times.svg").read_text("utf-8")
    assert {"auto", "12.5"} <= set(re.findall("<!-- (.*?) -->", text))
    assert PADDED not in text  # it has no softcap


def test_bench_table_on_a_gpu_has_device_time_and_host_time(monkeypatch, capsys):
    """No GPU is needed: the times are made up."""
    measured = [bench.Measurement(ms=2.0, host_us=31.4), bench.Measurement(ms=50.0, host_us=80.0)]
    table = bench.table({"auto": measured, PADDED: [bench.Measurement(ms=3.0), bench.Measurement()]}, is_cuda=True)
    assert [column.header for column in table.columns][:4] == [
        "implementation", "forward, ms", "host, µs", "× auto",
    ]  # fmt: skip
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0][:7] == ("auto", "2.000", "31", "1.00", "50.0", "80", "1.00")
    assert rows[1][:7] == (PADDED, "3.000", "", "1.50", "–", "", "")


def inputs_of(*lengths, heads=1):
    return CaseInputs.random(Workload("ragged", "", lengths, heads, heads, 8), CPU, torch.float32)


def test_bench_does_not_measure_too_much_padding():
    found = implementations(["cpu"])
    with pytest.raises(NotSupportedError, match="400000 padded tokens for 4099 real ones"):
        found[PADDED](inputs_of(4000, *[1] * 99, heads=8), True)


def test_bench_sample_is_the_first_sequences_and_the_longest_that_fits():
    assert bench.sample_of(inputs_of(3, 5, 1500, 700, 2500, 30000)) == [0, 1, 2, 4]  # 30000² scores do not fit
    assert bench.sample_of(inputs_of(30000)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "Z"], "invalid choice: 'Z'"),
        (["--lengths", "5,9", "--workloads", "A"], "pass one of them"),
        (["--lengths", "five"], "such as 5,0,900,17"),
        (["--lengths", "0,0"], "has no tokens"),
        (["--lengths", "5,9", "--tokens", "99"], "--lengths lognormal:2048"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads must divide the 4 heads of small, got 3"),
        (["--heads", "0"], "must be an integer ≥ 1, got '0'"),
        (["--options", "window_size=128"], "window_size must be (left, right)"),
        (["--options", "softcap=-1"], "softcap must be 0 (off) or a positive number"),
        (["--options", "softcap"], "softcap must be 0 (off) or a positive number"),
        (["--options", "is_causal=yes"], "is_causal must be True or False"),
        (["--options", "dropout_p=0.5"], "--options must be of is_causal"),
        (["--backends", "fastest"], "invalid choice: 'fastest'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--plot", "times.txt"], "--plot: must be a .png, .svg or .pdf, got 'times.txt'"),
    ],
)
def test_invalid_bench_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_on_a_gpu(run, capsys):
    assert main(["bench", "--lengths", "5,300,11,17", "--kv-heads", "4", "--options", "is_causal=True"]) == 0
    out = capsys.readouterr().out
    assert f"| {NESTED}" in out
    assert "host, µs" in out


@pytest.mark.gpu
def test_device_time_does_not_count_the_host():
    import time

    x = torch.ones(2**20, device="cuda")

    def slow_host():
        time.sleep(2e-3)
        x.add_(1)

    assert timing.device_ms(slow_host) < 0.5
    assert timing.host_us(slow_host) > 1900
    assert timing.wall_ms(slow_host, seconds=0.1) > 1.9

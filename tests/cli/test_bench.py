"""``python -m nt_attention bench``, from its arguments to the tables."""

import functools
from importlib.metadata import version

import pytest
import torch
from torch.nn import functional as F

from nt_attention.__main__ import main
from nt_attention.cli import timing
from nt_attention.cli.calls import (
    CAUSAL,
    DISTRIBUTIONS,
    CaseInputs,
    NotSupportedError,
    Workload,
    attention,
    draw_lengths,
    padded,
)

CPU, PADDED = torch.device("cpu"), "padded SDPA"
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
            if line.startswith("| ") and not line.startswith(("| implementation", "| ---")):
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

    def test_draws_stay_the_same(self):
        assert draw_lengths("lognormal:2048")[:5] == (715, 87, 166, 428, 123)  # saved results depend on them
        assert sum(draw_lengths("lognormal:2048")) == 32768


def test_bench_prints_a_markdown_table(run):
    status, out, rows, notes = run()
    assert status == 0
    assert notes == {}
    assert out.startswith("`python -m nt_attention bench --device cpu --lengths 5,0,11,17")
    assert f"torch {version('torch')}" in out
    assert "given: 4 sequences, 5,0,11,17, 4 × 16" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {6}
    assert list(rows) == ["auto (cpu)", PADDED]  # with the backend that auto selected
    for name, (forward, ratio, both, both_ratio) in rows.items():
        assert float(forward) > 0
        assert float(both) > 0
        if name == "auto (cpu)":
            assert ratio == both_ratio == "1.00"


def test_bench_runs_all_available_backends_by_default(capsys):
    main(["bench", "--device", "cpu", "--lengths", "5,3", "--forward-only"])
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert (rows[2], rows[-1]) == ("auto", "padded")
    assert "cpu" in rows
    assert "reference" not in rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, CAUSAL, {"window_size": (3, 2)}, {"window_size": (-1, 0)}, CAUSAL | {"window_size": (5, -1)}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(5, 0, 11, 17), (4, 4)], ids=str)
def test_padded_sdpa_computes_the_same(lengths, options, dtype):
    inputs = CaseInputs.random(Workload("", "", lengths, 4, 2, 16, options), CPU, dtype)
    exact = attention("reference", inputs.in_dtype(torch.float64)).results(True)
    for name, x in padded(inputs).results(True).items():
        assert (x.double() - exact[name]).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * exact[name].norm()


@pytest.mark.parametrize(
    "arguments", [["--kv-heads", "2", "--options", "is_causal=True"], ["--backends", "cpu", "reference"]]
)
def test_bench_options(arguments, run):
    status, out, _, notes = run(*arguments)
    assert (status, notes) == (0, {})
    assert "–" not in out


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (RuntimeError("no kernel | here\nand more"), "failed: no kernel | here"),
        (torch.OutOfMemoryError("too much"), "out of memory"),
    ],
)
def test_bench_reports_a_failure(run, monkeypatch, error, note):
    def failing(query, *_, **options):
        raise error

    monkeypatch.setattr(F, "scaled_dot_product_attention", failing)
    status, _, rows, notes = run()
    assert status == (1 if note.startswith("failed") else 0)
    assert notes == {PADDED: [note]}
    assert rows[PADDED] == ["–", "", "–", ""]
    assert float(rows["auto (cpu)"][0]) > 0


def test_bench_shows_why_a_call_is_not_supported(run):
    options = ["--options", "softcap=20", "is_causal=True"]
    status, _, rows, notes = run("--backends", "cpu", "reference", "torch_flash", *options)
    assert status == 0  # no result is wrong
    assert notes[PADDED] == ["SDPA has no softcap."]
    assert "torch_flash" in notes
    assert float(rows["reference"][0]) > 0


def test_bench_auto_without_a_backend_shows_every_reason(run):
    *_, notes = run("--options", "batch_invariant=True")
    assert "cpu: batch invariance is not supported" in notes["auto"][0]
    assert "reference: batch invariance is not supported" in notes["auto"][0]


def test_bench_forward_only(run):
    status, _, rows, _ = run("--forward-only")
    assert status == 0
    assert {len(cells) for cells in rows.values()} == {2}


def inputs_of(*lengths, heads=1):
    return CaseInputs.random(Workload("ragged", "", lengths, heads, heads, 8), CPU, torch.float32)


def test_bench_does_not_measure_too_much_padding():
    with pytest.raises(NotSupportedError, match="400000 padded tokens for 4099 real ones"):
        padded(inputs_of(4000, *[1] * 99, heads=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "five"], "such as 5,0,900,17"),
        (["--lengths", "0,0"], "has no tokens"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads must divide the 4 heads, got 3"),
        (["--heads", "0"], "must be an integer ≥ 1, got '0'"),
        (["--options", "window_size=128"], "window_size must be (left, right)"),
        (["--options", "softcap=-1"], "softcap must be 0 (off) or a positive number"),
        (["--options", "softcap"], "softcap must be 0 (off) or a positive number"),
        (["--options", "is_causal=yes"], "is_causal must be True or False"),
        (["--options", "dropout_p=0.5"], "--options must be of is_causal"),
        (["--backends", "fastest"], "invalid choice: 'fastest'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_invalid_bench_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_on_a_gpu(capsys):
    assert main(["bench", "--lengths", "5,300,11,17", "--kv-heads", "4", "--options", "is_causal=True"]) == 0
    assert f"| {PADDED}" in capsys.readouterr().out


@pytest.mark.gpu
def test_device_time_does_not_count_the_host():
    import time

    x = torch.ones(2**20, device="cuda")

    def slow_host():
        time.sleep(2e-3)
        x.add_(1)

    assert timing.device_ms(slow_host) < 0.5
    assert timing.wall_ms(slow_host, seconds=0.1) > 1.9

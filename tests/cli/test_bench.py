"""The command line, from its arguments to the table, the numbers and the plot."""

import argparse
import functools
import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from nt_attention.__main__ import main
from nt_attention.cli import plot, timing
from nt_attention.cli.accuracy import expected_results
from nt_attention.cli.implementations import NESTED, PADDED, UNMASKED, all_implementations
from nt_attention.cli.inputs import WorkloadTensors
from nt_attention.cli.lengths import KINDS, Lengths, parse_lengths
from nt_attention.cli.workloads import ALL, Workload

GIVEN = ["bench", "--device", "cpu", "--lengths", "5,0,11,17", "--heads", "4", "--head-dim", "16", "--backends", "auto"]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    monkeypatch.setattr(timing, "cpu_ms", functools.partial(timing.cpu_ms, seconds=0.0))


def saved(folder, *arguments):
    """The exit status and each implementation's numbers of the one batch."""
    status = main([*GIVEN, *arguments, "--save", str(folder)])
    (workload,) = json.loads((folder / "table.json").read_text())["batches"]
    return status, workload["rivals"]


def test_lengths_are_given_one_by_one():
    assert parse_lengths("5,0,900,17").up_to(3) == (5, 0, 900, 17)
    with pytest.raises(ValueError, match="4 lengths for 3 sequences"):
        parse_lengths("5,0,900,17").of(3)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_drawn(kind):
    lengths = parse_lengths(f"{kind}:17")
    assert lengths == Lengths(kind=kind, number=17)
    drawn = lengths.up_to(1700)
    assert sum(drawn) == 1700
    assert max(drawn) <= 17
    assert lengths.up_to(1700) == drawn  # the same each time
    assert len(lengths.of(13)) == 13


@pytest.mark.parametrize("text", ["", "5,", "5,-1", "5,x", "normal:9", "equal:0", "uniform:"])
def test_other_lengths_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="5,0,900,17"):
        parse_lengths(text)


def test_a_described_batch_runs_from_end_to_end(tmp_path, capsys):
    folder = tmp_path / "results"
    status, numbers = saved(folder, "--picture", str(tmp_path / "bars.png"))
    table, waiting = capsys.readouterr()
    assert status == 0
    assert (folder / "table.md").read_text() == table
    command, _, machine, *_ = table.splitlines()
    assert command.startswith("`python -m nt_attention bench --device cpu --lengths 5,0,11,17")
    assert f"torch {torch.__version__.partition('+')[0]}" in machine
    header, rule, row = (line for line in table.splitlines() if line.startswith("|"))
    assert header.count("|") == rule.count("|") == row.count("|") == 6
    assert header == f"| batch | auto | {PADDED} | {UNMASKED} | {NESTED} |"
    assert "given: 4 sequences, 5 + 0 + 11 + 17, 4 × 16" in row
    assert "(1.00)" in row
    assert row.split("|")[2].endswith(" cpu ")  # what auto selected
    assert numbers["auto"]["chosen"] == ["cpu", "cpu"]
    for name, result in numbers.items():
        assert result["forward_ms"] > 0
        assert result["both_ms"] > 0
        assert result["reason"] is None
        if name != UNMASKED:  # there padding takes part
            assert result["agrees"] is True
            assert result["max_error"] < 1e-5
            assert set(result["errors"]["both"]) == {"out", "dq", "dk", "dv"}
    assert numbers[UNMASKED]["agrees"] is None
    assert f"batch 1 of 1, given: {NESTED}" in waiting
    assert (folder / "picture.svg").read_text().lstrip().startswith("<?xml")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--key-lengths", "7,3,0,23", "--kv-heads", "2", "--value-dim", "8"],
        ["--key-lengths", "uniform:19", "--causal", "--kv-heads", "2"],
        ["--key-lengths", "7,3,0,23", "--window", "3,2"],
        ["--window=5,-1", "--causal", "--dtype", "bfloat16"],
        ["--lengths", "equal:1", "--tokens", "13"],  # gradients of q and k are 0
    ],
    ids=["cross", "cross-causal", "cross-window", "window", "one-key"],
)
def test_all_agree(arguments, tmp_path):
    status, numbers = saved(tmp_path, *arguments)
    assert status == 0
    assert numbers["auto"]["agrees"] is True
    assert numbers[PADDED]["agrees"] is True
    assert numbers[NESTED]["agrees"] is True or "no" in numbers[NESTED]["reason"]


@pytest.mark.parametrize("factor", [1.1, 1 + 5e-4, float("nan")], ids=["tenth", "as-tf32", "nan"])
def test_a_wrong_result_is_caught(factor, tmp_path, monkeypatch, capsys):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **how: right(*x, **how) * factor)
    status, numbers = saved(tmp_path)
    assert status == 1
    assert [name for name, result in numbers.items() if result["agrees"] is False] == [PADDED, NESTED]
    table = capsys.readouterr().out
    assert "✗ |" in table
    assert f"✗ given, {PADDED} with its backward: dk is off by" in table


def test_a_failure_is_reported(tmp_path, monkeypatch, capsys):
    def failing(query, *_, **how):
        raise RuntimeError("no kernel | here\nand more") if query.is_nested else torch.OutOfMemoryError("too much")

    monkeypatch.setattr(F, "scaled_dot_product_attention", failing)
    status, numbers = saved(tmp_path)
    assert status == 1
    assert numbers[NESTED]["failed"]
    assert numbers[NESTED]["reason"] == "no kernel | here"
    assert not numbers[PADDED]["failed"]
    assert numbers["auto"]["agrees"] is True
    assert "| out of memory | out of memory | failed: no kernel \\| here |" in capsys.readouterr().out


def test_a_refusal_gives_its_reason_once(capsys):
    status = main([*GIVEN, "cpu", "reference", "torch_flash", "--softcap", "20", "--causal"])
    table = capsys.readouterr().out
    assert status == 0  # none of it is wrong
    assert f"- {PADDED} (given): has no softcap." in table
    assert table.count("has no softcap.") == 3
    assert table.count("- torch_flash (given): ") == 1
    assert "| – | – | – |" in table


def test_no_gradients_if_forwards_are_enough(tmp_path):
    status, numbers = saved(tmp_path, "--forward-only")
    assert status == 0
    assert numbers["auto"]["both_ms"] is None
    assert set(numbers["auto"]["errors"]) == {"forward"}


def test_without_patience_a_call_is_timed_once(capsys):
    assert main([*GIVEN, "--patience", "0"]) == 0
    assert "† (1.00)" in capsys.readouterr().out


def test_what_is_too_large_is_left_out():
    tensors = WorkloadTensors(Workload("long", "", (4000, *[1] * 99), 8, 8, 8), torch.device("cpu"), torch.float32)
    reasons = {
        implementation.name: implementation.reasons(tensors, True)
        for implementation in all_implementations(["reference", "cpu"])
    }
    assert "400000 padded tokens" in reasons[PADDED][0]
    assert "scores" in reasons["reference"][0]
    assert not reasons["cpu"]


def test_the_sample_is_the_first_few_and_the_longest():
    workload = Workload("ragged", "", (3, 5, 1500, 700, 2500, 30000), 1, 1, 8)
    tensors = WorkloadTensors(workload, torch.device("cpu"), torch.float32)
    sample = expected_results(tensors, backward=False)
    assert sample is not None
    assert sample.rows["out"].tolist() == [*range(1508), *range(2208, 4708)]  # 30000² scores would not fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "Z"], "no batch 'Z': pass all, or some of 'A'"),
        (["--lengths", "5,9", "--batches", "A"], "pass one of both"),
        (["--lengths", "five"], "such as 5,0,900,17"),
        (["--lengths", "5,9", "--tokens", "99"], "--lengths lognormal:2048"),
        (["--lengths", "5,9", "--key-lengths", "5,9,3"], "3 lengths for 2 sequences"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads 3 does not divide the 4 heads"),
        (["--window", "128"], "two whole numbers such as 128,128"),
        (["--backends", "fastest"], "no backend 'fastest': pass auto"),
        (["--device", "tpu"], "cpu, cuda or cuda:N"),
        (["--picture", "bars.gif"], ".svg, .png, .pdf"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["bench", *arguments])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([*GIVEN, "--picture", str(tmp_path / "bars.svg")])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_workloads_have_the_tokens_that_they_declare():
    assert {sum(workload.lengths) for name, workload in ALL.items() if len(name) == 1} == {32768}


def test_without_a_command_the_environment(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nt_attention ")
    assert "\nbackends:\n" in out


def test_the_environment_imports_no_benchmark():
    script = (
        "import sys, nt_attention.__main__ as m; m.main([]); "
        "print([n for n in sys.modules if n.startswith('nt_attention.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['nt_attention.cli.environment']"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    arguments = ["bench", "--lengths", "5,300,11,17", "--kv-heads", "4", "--causal", "--save", str(tmp_path)]
    assert main(arguments) == 0
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["batches"][0]["rivals"][NESTED]["agrees"] is True
    assert numbers["host_us"]["auto"] > 0
    assert "Host time for a call" in capsys.readouterr().out

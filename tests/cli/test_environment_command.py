"""``python -m nt_attention`` without a command, its devices, and packages that are not installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import nt_attention as nta
from nt_attention.__main__ import main, run
from nt_attention.cli import environment, timing
from nt_attention.kernels.select import BACKENDS, ENVIRONMENT_VARIABLE


def test_prints_the_versions_and_every_backend(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nt_attention ")
    assert f"torch {torch.__version__}" in out.splitlines()[0]
    _, backends = out.split("\nbackends:\n")
    assert [line.split()[0] for line in backends.splitlines()] == list(BACKENDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    assert re.fullmatch(f"nt_attention {nta.__version__}, {re.escape(versions)}.*\n", capsys.readouterr().out)


@pytest.mark.parametrize("page", ["am_i_packed.md", "reference/command_line.md"])
def test_pages_show_every_backend(page):
    """The pages are run, but an ellipsis in their outputs would hide a backend."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    lists = re.findall(r"(?m)^backends:\n((?:  .*\n)+)|^backend='auto':.*\n((?:  .*\n)+)", text)
    assert lists
    for each in lists:
        assert [line.split()[0] for line in "".join(each).splitlines()] == list(BACKENDS)


def test_prints_the_environment_variable(monkeypatch, capsys):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    assert main([]) == 0
    assert f"{ENVIRONMENT_VARIABLE} is 'fastest', which is not a backend" in capsys.readouterr().out


@pytest.mark.sweep
def test_imports_no_other_command_and_no_optional_package():
    script = (
        "import sys, nt_attention.__main__ as m; m.main(['--version']); m.main([]); "
        "print([n for n in sys.modules if n.startswith('nt_attention.cli.') or n == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['nt_attention.cli.environment']"


@pytest.mark.parametrize("arguments", [[], ["bench", "--device", "cpu", "--lengths", "5,3", "--backends", "cpu"]])
def test_stdout_in_ascii(arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "wall_ms", lambda call: 1.0)
    monkeypatch.setattr(sys, "argv", ["nt_attention", *arguments])
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run() == 0
    text = (tmp_path / "out").read_text("ascii")
    assert "? auto" in text if arguments else text.startswith("nt_attention ")


def test_a_closed_pipe_ends_it_quietly(monkeypatch, capfd):
    """As in `python -m nt_attention | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["nt_attention"])
    with open(writer, "w", buffering=1) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run() == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("gpus", "devices"), [(0, ["cpu"]), (2, ["cuda", "cuda:0", "cuda:1", "cpu"])], ids=["no-gpu", "two-gpus"]
)
def test_devices(gpus, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert environment.devices() == devices

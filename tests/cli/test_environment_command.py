"""``python -m nt_attention`` without a command, its devices, and packages that are not installed."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from nt_attention.__main__ import main
from nt_attention.cli import environment
from nt_attention.kernels.select import BACKENDS, ENVIRONMENT_VARIABLE


def test_prints_the_versions_and_every_backend(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nt_attention ")
    assert f"torch {torch.__version__}" in out.splitlines()[0]
    _, backends = out.split("\nbackends:\n")
    assert [line.split()[0] for line in backends.splitlines()] == list(BACKENDS)


def test_prints_the_environment_variable(monkeypatch, capsys):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    assert main([]) == 0
    assert f"{ENVIRONMENT_VARIABLE} is 'fastest', which is not a backend" in capsys.readouterr().out


def test_imports_no_other_command_and_no_optional_package():
    script = (
        "import sys, nt_attention.__main__ as m; m.main([]); "
        "print([n for n in sys.modules if n.startswith('nt_attention.cli.') or n in ('rich', 'matplotlib')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['nt_attention.cli.environment']"


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_command_without_rich_names_the_extra(command, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit:
        main([command])
    assert exit.value.code == 2
    assert f"{command} needs rich: pip install 'nt-attention[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "devices"), [(0, ["cpu"]), (2, ["cuda", "cuda:0", "cuda:1", "cpu"])], ids=["no-gpu", "two-gpus"]
)
def test_devices(gpus, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert environment.devices() == devices

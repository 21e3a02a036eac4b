"""``python -m nt_attention check``: what it prints of right and of faulty backends."""

import pytest
import torch

from nt_attention.__main__ import main
from nt_attention.kernels.backends import cpu

WHICH = ["16", "window", "deterministic", "batch_invariant"]


def check(capsys, *arguments):
    status = main(["check", "--device", "cpu", "--which", *WHICH, *arguments])
    return status, capsys.readouterr().out.splitlines()[1:]


def test_right_backend(capsys):
    status, lines = check(capsys, "--backends", "cpu")
    assert status == 0
    assert [line.split()[:3] for line in lines] == [
        ["cpu", dtype, "right:"] for dtype in ("float64", "float32", "float16", "bfloat16")
    ]
    assert all(line.endswith("right: 16, window, deterministic") for line in lines)


def scaled(which, factor):
    return lambda *inputs: tuple(x * factor if i == which else x for i, x in enumerate(cpu.backward(*inputs)))


def raises(*_):
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"forward": lambda *inputs: (cpu.forward(*inputs)[0] * 1.1, *cpu.forward(*inputs)[1:])}, "out off by 1.0e-01"),
        ({"backward": scaled(0, 1.1)}, "dq off by "),
        ({"backward": scaled(1, torch.nan)}, "dk off by nan"),
        ({"backward": scaled(2, -1)}, "dv off by "),
        ({"forward": raises}, "RuntimeError: no kernel image"),
    ],
)
def test_wrong_results(fields, wrong, capsys, registered_variant):
    registered_variant(cpu.BACKEND, "fake", **fields)
    status, lines = check(capsys, "--backends", "fake", "--which", "64")
    assert status == 1
    assert len(lines) == 4
    assert all(f"not right: 64 ({wrong}" in line for line in lines)


def test_other_bits(capsys, registered_variant):
    registered_variant(
        cpu.BACKEND, "fake", backward=lambda *i: [x * (1 + 1e-6 * torch.rand(())) for x in cpu.backward(*i)]
    )
    _, lines = check(capsys, "--backends", "fake", "--which", "deterministic")
    assert lines[0].endswith("not right: deterministic (AssertionError: the same call gave other bits)")


@pytest.mark.parametrize(
    ("arguments", "details"),
    [
        (["--backends", "fastest"], "invalid choice: 'fastest'"),
        (["--backends", "torch_flash"], "torch_flash is not available: "),
    ],
)
def test_invalid_arguments(arguments, details, capsys):
    with pytest.raises(SystemExit, match="2"):
        check(capsys, *arguments)
    assert details in capsys.readouterr().err


def test_it_says_if_nothing_was_compared(capsys):
    status, lines = check(capsys, "--backends", "cpu", "--which", "batch_invariant")
    assert status == 1
    assert lines[-1].startswith("nothing was compared")

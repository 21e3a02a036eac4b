"""The token-tiled kernels compile for GPUs of several kinds, within the shared memory of each. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sweep_except

SCRIPT = Path(__file__).with_name("compile_token_tiled.py")

CONSUMER_SHARED_MEMORY = 99 * 1024  # bytes a program may have on the smallest GPUs of capability 8.0 and more


def run_script(capability, kernels):
    """The words of each line that the script prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, capability, *kernels.split()], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", sweep_except(["80", "90"]))
def test_kernels_without_switches_compile(capability):
    lines = run_script(capability, "others")
    assert len(lines) == 14
    assert all(int(stores) > 0 for _, stores, _ in lines)


@pytest.mark.parametrize("kernels", sweep_except(["forward key", "query fused"], "forward key"))
@pytest.mark.parametrize("capability", sweep_except(["80", "90"], "90"))
def test_kernels_compile_to_matrix_instructions_and_wide_loads(capability, kernels):
    lines = run_script(capability, kernels)
    assert [line[0] for line in lines] == [name for name in kernels.split() for _ in range(5)]
    for kernel, switches, matrix, _, wide, _, shared, _ in lines:
        assert int(matrix) > 0, (kernel, switches)
        assert int(wide) > 0, (kernel, switches)
        assert int(shared) <= CONSUMER_SHARED_MEMORY, (kernel, switches)


# (compute capability, KiB of shared memory that a program may have, head dim / bytes of an element)
KINDS = [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)]
TILES = [(*kind, which) for kind in KINDS for which in ("128", "256", "384", "512", "576", "64/4", "128/4", "256/4")]


@pytest.mark.parametrize(("capability", "kib", "which"), sweep_except(TILES, (86, 99, "512")))
def test_tiles_fit_in_shared_memory(capability, kib, which):
    lines = run_script(str(capability), f"{kib} {which}")
    assert len(lines) >= 6
    for line in lines:
        assert int(line[-1]) <= 1024 * kib, line

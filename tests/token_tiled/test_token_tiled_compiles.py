"""The token-tiled kernels compile for GPUs of capability 8.0 and 9.0. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

from sweeps import sweep_product

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


@sweep_product("capability", ["80", "90"])
def test_kernels_without_switches_compile(capability):
    lines = run_script(capability, "others")
    assert len(lines) == 14
    assert all(int(stores) > 0 for _, stores, _ in lines)


@sweep_product("capability, kernels", ["80", "90"], ["forward key", "query fused"])
def test_kernels_compile_to_matrix_instructions_and_wide_loads(capability, kernels):
    lines = run_script(capability, kernels)
    assert [line[0] for line in lines] == [name for name in kernels.split() for _ in range(5)]
    for kernel, switches, matrix, _, wide, _, shared, _ in lines:
        assert int(matrix) > 0, (kernel, switches)
        assert int(wide) > 0, (kernel, switches)
        assert int(shared) <= CONSUMER_SHARED_MEMORY, (kernel, switches)

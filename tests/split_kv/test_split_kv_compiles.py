"""The split_kv kernels compile for GPUs of six kinds, within the shared memory of each. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sweep_except

SCRIPT = Path(__file__).with_name("compile_split_kv.py")
# compute capability → KiB of shared memory that a program may have
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize("capability", sweep_except(SHARED_MEMORY, 86))
def test_kernels_compile_within_the_shared_memory(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    which = ["all"] if capability in (89, 90) else []
    command = [sys.executable, SCRIPT, str(capability), str(SHARED_MEMORY[capability]), *which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == (39 if which else 15)
    for name, *numbers, shared in lines:
        assert int(shared) <= 1024 * SHARED_MEMORY[capability], (name, numbers)
        if name == "attention":
            assert int(numbers[-1]) >= 8, numbers  # keys and values are read 16 bytes at a time

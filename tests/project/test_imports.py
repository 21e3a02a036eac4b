"""What `import nt_attention` imports, and how long it takes, in a new interpreter."""

import json
import statistics
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys, time
import torch

def cost():
    # in a fork, so that each try imports everything anew; CPU time, so that a busy machine does not count
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        before = time.process_time()
        import nt_attention
        os.write(writer, str(time.process_time() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return float(os.read(reader, 100))

seconds = [cost() for _ in range(3)]
import einops
before = set(sys.modules)
import nt_attention
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "all": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_pulls_in_only_torch_and_einops(imported):
    packages = {name.partition(".")[0] for name in imported["new"]} - set(sys.stdlib_module_names)
    assert packages <= {"nt_attention", "torch", "einops"}


@pytest.mark.parametrize("name", ["torch._dynamo", "torch._inductor", "triton"])
def test_pulls_in_no_compiler(imported, name):
    assert not [new for new in imported["new"] if new == name or new.startswith(name + ".")]


@pytest.mark.parametrize("name", ["transformers", "flash_attn"])
def test_an_optional_package_stays_out(imported, name):
    assert name not in imported["new"]


def test_says_nothing():
    script = "import nt_attention"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_costs_less_than_half_a_second(imported):
    assert statistics.median(imported["seconds"]) < 0.5

"""What `import nt_attention` imports in a new interpreter, besides torch and einops."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch, einops
before = set(sys.modules)
import nt_attention
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_imports_only_torch_and_einops(imported):
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert packages <= {"nt_attention", "torch", "einops"}


@pytest.mark.parametrize("name", ["torch._dynamo", "torch._inductor", "triton"])
def test_import_imports_no_compiler(imported, name):
    assert not [new for new in imported if new == name or new.startswith(name + ".")]


@pytest.mark.parametrize("name", ["transformers", "flash_attn"])
def test_import_imports_no_optional_package(imported, name):
    assert name not in imported


FIRST_NESTED_TENSOR = """
import torch, nt_attention as nta
x = torch.nested.nested_tensor([torch.ones(3, 2, 4), torch.ones(5, 2, 4)], layout=torch.jagged)
out = nta.varlen_attention(x, x, x)
nta.SequenceLayout.from_lengths([2, 1]).to_nested(torch.ones(3, 4))
"""


@pytest.mark.parametrize(
    ("flags", "script"),
    [(["-W", "error"], "import nt_attention"), (["-W", "ignore:The PyTorch API of nested"], FIRST_NESTED_TENSOR)],
    ids=["import", "first NestedTensor"],
)
def test_prints_nothing(flags, script):
    done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_import_time_is_that_of_torch(imported):
    """The time is not measured. Of other packages' modules, which take the time, hardly any is new."""
    assert len([name for name in imported if not name.startswith("nt_attention")]) <= 20

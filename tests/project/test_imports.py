"""What `import nt_attention` imports in a new interpreter, and what it needs of transformers."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from nt_attention import torch_registry
from nt_attention.hf.installed import OLDEST, check_version

SCRIPT = """
import json, sys
import torch, einops
before = set(sys.modules)
import nt_attention
found = {"modules": sorted(set(sys.modules) - before)}
attention = torch.nn.attention
if hasattr(attention, "current_flash_attention_impl"):
    assert attention.current_flash_attention_impl() is None
    found["flash"] = list(attention.list_flash_attention_impls())
    found["replaced"] = [x for x in torch.library._impls if x.startswith("aten/_flash") and x.endswith("/CUDA")]
x = torch.nested.nested_tensor([torch.ones(3, 2, 4), torch.ones(5, 2, 4)], layout=torch.jagged)
out = nt_attention.varlen_attention(x, x, x)
nt_attention.SequenceLayout.from_lengths([2, 1]).to_nested(torch.ones(3, 4))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """The import, and the first NestedTensor, print and warn of nothing."""
    flags = ["-W", "error", "-W", "ignore:The PyTorch API of nested"]
    done = subprocess.run([sys.executable, *flags, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported(found):
    return found["modules"]


def test_import_offers_our_kernels_to_the_registry_of_torch_and_changes_nothing(found):
    if not torch_registry.is_supported():
        pytest.skip("this version of torch takes no flash attention implementations")
    assert "nt_attention" in found["flash"]
    assert found["replaced"] == []


def test_import_imports_only_torch_and_einops(imported):
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert packages <= {"nt_attention", "torch", "einops"}


@pytest.mark.parametrize("name", ["torch._dynamo", "torch._inductor", "triton"])
def test_import_imports_no_compiler(imported, name):
    assert not [new for new in imported if new == name or new.startswith(name + ".")]


@pytest.mark.parametrize("name", ["transformers", "flash_attn"])
def test_import_imports_no_optional_package(imported, name):
    assert name not in imported


def test_import_time_is_that_of_torch(imported):
    """The time is not measured. Of other packages' modules, which take the time, hardly any is new."""
    assert len([name for name in imported if not name.startswith("nt_attention")]) <= 20


WITH_TRANSFORMERS = """
import importlib, json, sys
from torch import nn
{start}
import nt_attention as nta

def error_of(function, *args):
    try:
        function(*args)
    except ImportError as error:
        return str(error)

modules = ("nt_attention.hf", "nt_attention.hf.trainer", "nt_attention.integrations.trainer")
found = [error_of(importlib.import_module, module) for module in modules]
with nta.patch(nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))) as handle:
    assert handle.layers
{end}
print(json.dumps(found))
"""
OLD = """
from transformers import BertConfig, BertModel
sys.modules["transformers"].__version__ = "5.16.2"
config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
"""
WITH_OLD = """
found += [error_of(nta.patch, nn.Sequential(nn.Linear(2, 2), BertModel(config)))]
with nta.patch_all() as handle:
    BertModel(config)
found += handle.left.values()
"""
TOO_OLD = "nt_attention needs transformers 5.17 or later, and 5.16.2 is installed: pip install -U 'transformers>=5.17'"
NOT_INSTALLED = "nt_attention.hf needs transformers, which is not installed: pip install 'nt-attention[hf]'"


@pytest.mark.parametrize(
    ("start", "end", "errors"),
    [
        pytest.param(OLD, WITH_OLD, [TOO_OLD] * 5, marks=pytest.mark.sweep),
        ("sys.modules['transformers'] = None", "", [NOT_INSTALLED] * 3),
    ],
    ids=["too old", "not installed"],
)
def test_transformers_too_old_or_not_installed(start, end, errors):
    """Models of torch.nn are patched all the same."""
    script = WITH_TRANSFORMERS.format(start=start, end=end)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == errors


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [("4.57.1", False), ("5.9.0", False), ("5.16.2", False), ("5.17.0.dev0", True), ("5.17.0", True), ("10.0", True)],
)
def test_versions_of_transformers(version, is_enough):
    with nullcontext() if is_enough else pytest.raises(ImportError, match=f"and {version} is installed"):
        check_version(version)


def test_oldest_version_is_that_of_the_requirements():
    assert f'hf = ["transformers>={OLDEST}"]' in (Path(__file__).parents[2] / "pyproject.toml").read_text()

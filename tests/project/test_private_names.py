"""Private names of torch and transformers: one file for each library has them, and the package imports without them."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nt_attention"
FILES = PACKAGE / "torch_private.py", PACKAGE / "hf" / "transformers_private.py"
# Methods of classes of the two libraries that subclasses override.
OVERRIDDEN = {"_load_from_state_dict", "_save_to_state_dict", "_reset_parameters", "_prepare_context_parallel_inputs"}
OF_OTHERS = {"_replace", "_asdict", "_fields", "_getframe"}  # of the standard library


def trees(files):
    return {path: ast.parse(path.read_text()) for path in files}


def private_strings(tree):
    """The strings that are a path with a private part, such as "torch._C._is_cached_tensor"."""
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {x for x in found if re.fullmatch(r"(\w+\.)*\w+", x) and re.search(r"(^|\.)_[A-Za-z]|fx\.experimental", x)}


def attributes(tree):
    """The private attributes that are read or set, by line, but not those of `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[A-Za-z]", node.attr):
            owner = ast.unparse(node.value)
            yield node.attr, node.lineno, owner in ("self", "cls", "super()")


def imports(tree):
    """The modules and names that are imported from torch and transformers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def defined(tree):
    """The private names that a file defines: functions, classes, variables, and attributes of `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


OTHERS = trees(sorted(set(PACKAGE.rglob("*.py")) - set(FILES)))
STRINGS = {string for tree in trees(FILES).values() for string in private_strings(tree)}
OF_ACCELERATE = {"_prepare_cp", "_prepare_device_mesh"}
PATTERNS = {"_attn", "_global_", "_hooks"}  # parts of names
READ = {name for tree in trees(FILES).values() for name, _, is_own in attributes(tree) if not is_own} - {"_C"}
PRIVATE = {string.rpartition(".")[2] for string in STRINGS} | READ | OVERRIDDEN


def test_they_are_few():
    counted = PRIVATE - OF_ACCELERATE - PATTERNS
    assert len(counted) <= 79, sorted(counted)


def test_no_other_file_has_one():
    ours = {name for tree in OTHERS.values() for name in defined(tree)} - PRIVATE
    found = []
    for path, tree in OTHERS.items():
        in_file = set(defined(tree))
        for name, line, is_own in attributes(tree):
            if name not in ours | OF_OTHERS and not (is_own and name in in_file):
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
        for name, line in imports(tree):
            if re.match(r"(torch|transformers)\.(.*\.)?(_[a-z]|fx\.experimental)", name):
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
        found += [f"{path.relative_to(PACKAGE)}: {name}" for name in private_strings(tree) & PRIVATE]
    assert not found


# Deletes names of torch. Those of classes in C++, without which there is no torch, can't be deleted.
DELETE = """
import importlib, json, pkgutil, sys
import torch, torch.fx.experimental.proxy_tensor

def delete(path):
    owner, name = pkgutil.resolve_name(path.rpartition(".")[0]), path.rpartition(".")[2]
    value = getattr(owner, name)
    try:
        delattr(owner, name)
    except (AttributeError, TypeError):
        return None
    return owner, name, value

paths = json.loads(sys.stdin.read())
"""
EACH = """
import nt_attention.torch_private as file
deleted_names = []
for path in paths:
    if (deleted := delete(path)) is not None:
        importlib.reload(file)
        setattr(*deleted)
        deleted_names.append(path)
print(json.dumps(deleted_names))
"""
ALL = """
for path in paths:
    delete(path)
import nt_attention
from nt_attention.torch_private import FakeTensor, is_transformed
assert not isinstance(torch.ones(2), FakeTensor)
try:
    is_transformed()
except RuntimeError as error:
    print(error)
"""


def run(script):
    paths = sorted(x for x in STRINGS if x.startswith("torch.") and not x.startswith("torch._dynamo."))
    done = subprocess.run(
        [sys.executable, "-c", DELETE + script], input=json.dumps(paths), capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_import_without_each():
    assert len(json.loads(run(EACH))) > 25


def test_import_without_all():
    assert "has no torch._C._are_functorch_transforms_active, which nt_attention needs" in run(ALL)

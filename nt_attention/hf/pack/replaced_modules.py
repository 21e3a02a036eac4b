"""Notices modules that were put into a model after the patch, in place of modules that the patch has changed."""

from __future__ import annotations

import weakref
from collections.abc import Set as AbstractSet

from torch import nn

from ...patching.forwards import is_patched
from ...torch_private import children_of


def classes_to_watch(root: nn.Module, candidates: AbstractSet[str]) -> frozenset[str]:
    """Those of these class names that only modules have which the patch has changed."""
    unchanged = {type(module).__name__ for module in root.modules() if not is_patched(module)}
    return frozenset(candidates) - unchanged


def why_replaced(root: nn.Module, classes: AbstractSet[str]) -> str | None:
    """Why a model can't be packed: a module of these classes is not patched. None if all are.

    All modules are looked at only if one on the way to a module of these classes has changed.
    """
    if not classes:
        return None
    ways = _ways.get(root)
    if ways is not None and all(_leads(*way) for way in ways):
        return None
    paths = {path: module for path, module in root.named_modules() if type(module).__name__ in classes}
    new = next((path for path, module in paths.items() if not is_patched(module)), None)
    if new is not None:
        return f"{new} was replaced, or its forward, after the patch: patch the model again, after remove()"
    _ways[root] = [
        (weakref.ref(root.get_submodule(parent)), name, weakref.ref(root.get_submodule(f"{parent}.{name}".strip("."))))
        for parent, name in {_split(path, at) for path in paths for at in range(1, path.count(".") + 2)}
    ]
    return None


_Way = tuple["weakref.ref[nn.Module]", str, "weakref.ref[nn.Module]"]
# Models → each module on the way to one that is watched: its parent, its name there, and itself.
_ways: weakref.WeakKeyDictionary[nn.Module, list[_Way]] = weakref.WeakKeyDictionary()


def _leads(parent: weakref.ref[nn.Module], name: str, part: weakref.ref[nn.Module]) -> bool:
    module = parent()
    return module is not None and children_of(module).get(name) is part() is not None


def _split(path: str, at: int) -> tuple[str, str]:
    """The first `at` names of a path, as the path of the parent and the last name."""
    *parents, name = path.split(".")[:at]
    return ".".join(parents), name

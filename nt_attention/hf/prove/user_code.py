"""What the code of classes that are not from torch or transformers reads: names and numbers.

A proof tries the numbers, such as ids of tokens and lengths.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MappingProxyType, ModuleType, NoneType, SimpleNamespace
from typing import Any

from torch import nn

from ...patching import building
from ..families import class_of
from .parts import OF_LAYERS, is_of_layers

_SCALARS = (bool, int, float, complex, str, bytes, NoneType)
_TABLES = (dict, OrderedDict, defaultdict, Counter, MappingProxyType)
_LISTS = (list, tuple, set, frozenset)
_MOST_ITEMS = 20_000  # of one value
_MOST_FUNCTIONS = 2_000
# The versions of Python, torch and transformers stand for the code of these packages.
_PACKAGES = {"huggingface_hub", "torch", "transformers", *sys.stdlib_module_names} - {"__main__"}
_KNOWN = {*_PACKAGES, "builtins", "numpy"}


def is_known(module: str) -> bool:
    """Whether a module is of Python, torch or transformers."""
    return module.partition(".")[0] in _KNOWN


def classes_of(model: nn.Module) -> set[type]:
    """The classes of a model's modules and of its config, but for layers that compute each token alone."""
    classes = {class_of(module) for module in model.modules()} | {type(getattr(model, "config", None))}
    return {each for each in classes if not is_of_layers(each)}


def has_other_code(model: nn.Module) -> bool:
    """Whether code runs in a model that is not from known packages, or that was set on classes of transformers."""
    classes = classes_of(model)
    return any(not is_known(base.__module__) for each in classes for base in each.__mro__) or any(
        True for _ in replaced_functions(classes)
    )


def user_code_of(model: nn.Module) -> UserCode:
    """The code of a model and its config that is not from known packages, and functions replaced in transformers."""
    classes = classes_of(model)
    functions = [x for name, x in replaced_functions(classes) if is_known(name) and not _is_of_packages(x)]
    return UserCode.of({base for each in classes for base in each.__mro__ if not is_known(base.__module__)}, functions)


def replaced_functions(classes: set[type]) -> Iterator[tuple[str, Any]]:
    """Functions of these classes, and of the files that define them, that come from a package that is not theirs.

    Yields:
        The module and the function; also all partial functions.
    """
    for name in {each.__module__ for each in classes} & sys.modules.keys():
        owners = [vars(sys.modules[name]), *(vars(each) for each in classes if each.__module__ == name)]
        for value in [value for owner in owners for value in owner.values()]:
            if isinstance(value, functools.partial | functools.partialmethod):
                yield name, value
            if not inspect.isfunction(value):
                continue
            if not inspect.isfunction(inspect.unwrap(value)):
                continue  # what torch.compile has compiled, which it puts into the namespace of the file
            imported = _imported_by(name) if is_known(name) else frozenset()  # by transformers itself
            known = _PACKAGES | imported | {name.partition(".")[0], "nt_attention"}
            for function in _with_wrapped(value):
                if str(function.__globals__.get("__name__")).partition(".")[0] not in known:
                    yield name, function


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function, and those inside of its decorators."""
    while inspect.isfunction(function):
        yield function
        function = vars(function).get("__wrapped__")


def _is_of_packages(function: Any) -> bool:
    """Whether a function is of a package that replaces layers, such as liger_kernel."""
    return str(getattr(function, "__module__", "")).partition(".")[0] in OF_LAYERS


@functools.lru_cache(256)
def _imported_by(module: str) -> frozenset[str]:
    """The packages that the source of a module imports, also in functions."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # it has no source file
        return frozenset()
    return frozenset(re.findall(r"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE))


@dataclass
class UserCode:
    """What the code of some classes reads.

    Attributes:
        names: of variables, attributes and keys, and all other strings in the code.
        numbers: integers in the code, and in the values that it reads.
    """

    names: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _waiting: list[FunctionType] = field(default_factory=list)

    @property
    def exists(self) -> bool:
        """Whether there is any code."""
        return bool(self._done)

    @classmethod
    def of(cls, classes: set[type], functions: Iterable[FunctionType] = ()) -> UserCode:
        """Read the code of classes and functions, and of what it calls outside of known packages."""
        code = cls()
        for kind in classes:
            code._add_class(kind)
        for function in functions:
            code._add_function(function)
        while code._waiting and len(code._done) < _MOST_FUNCTIONS:
            code._read_function(code._waiting.pop())
        return code

    def _add_class(self, kind: type) -> None:
        if id(kind) in self._done:
            return
        self._done.add(id(kind))
        for name, value in list(vars(kind).items()):
            is_special = name.startswith("__") and name.endswith("__")
            for function in _functions_in(value):
                self._add_function(function)
            if not is_special and type(value) in (*_SCALARS, *_TABLES, *_LISTS):
                self._add_value(value)

    def _add_function(self, function: FunctionType) -> None:
        is_ours = function.__globals__.get("__name__") == building.__name__  # around a constructor of the user
        if id(function) not in self._done and not is_known(str(function.__module__)) and not is_ours:
            self._done.add(id(function))
            self._waiting.append(function)

    def _read_function(self, function: FunctionType) -> None:
        names = self._read_code(function.__code__)
        for value in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            self._add(value, names)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not set yet
                self._add(cell.cell_contents, names)
        for name in names & function.__globals__.keys():
            self._add(function.__globals__[name], names)

    def _read_code(self, code: CodeType) -> set[str]:
        """Add the names and constants of a function, and return the names."""
        names = set(code.co_names)
        waiting = list(code.co_consts)
        while waiting:
            constant = waiting.pop()
            if isinstance(constant, CodeType):
                names |= self._read_code(constant)
            elif isinstance(constant, tuple | frozenset):
                waiting += constant
            elif isinstance(constant, str):
                self.names.add(constant)
            elif type(constant) in (int, float) and constant == constant // 1:
                self.numbers.add(int(constant))
        self.names |= names
        return names

    def _add(self, value: Any, names: set[str], depth: int = 0) -> None:
        """Add the value of a variable. Of modules and objects, the attributes that the code names."""
        kind = type(value)
        if kind in (*_SCALARS, *_TABLES, *_LISTS):
            self._add_value(value)
        elif isinstance(value, type):
            if not is_known(value.__module__):
                self._add_class(value)
        elif depth > 2 or (isinstance(value, ModuleType) and is_known(value.__name__)):
            return
        elif isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] != "nt_attention":
                for name in names & vars(value).keys():
                    self._add(vars(value)[name], names, depth + 1)
        elif functions := list(_functions_in(value)):
            for function in functions:
                self._add_function(function)
        elif not is_known(kind.__module__) or kind is SimpleNamespace:
            self._add_class(kind)
            for part in list(getattr(value, "__dict__", {}).values()):
                self._add(part, names, depth + 1)

    def _add_value(self, value: Any) -> None:
        for leaf in leaves_of(value):
            if isinstance(leaf, int | float) and leaf == leaf // 1:
                self.numbers.add(int(leaf))
            elif isinstance(leaf, type) and not is_known(leaf.__module__):
                self._add_class(leaf)
            elif inspect.isfunction(leaf):
                self._add_function(leaf)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions of a method, a property, a partial, or a wrapper."""
    if isinstance(value, functools.partial | functools.partialmethod):
        yield from _functions_in(value.func)
        return
    accessors = [getattr(value, name, None) for name in ("fget", "fset")] if isinstance(value, property) else []
    for function in [value, getattr(value, "__func__", None), getattr(value, "func", None), *accessors]:
        if not inspect.isfunction(function):
            continue
        yield function
        inner = inspect.unwrap(function)
        if inner is not function and inspect.isfunction(inner):
            yield inner


def leaves_of(value: Any, most: int = _MOST_ITEMS) -> Iterator[Any]:
    """The values in a plain value, also those in its dicts and lists."""
    waiting, done = [value], set()
    while waiting and (most := most - 1) >= 0:
        item = waiting.pop()
        kind = type(item)
        if kind not in (*_TABLES, *_LISTS):
            yield item
        elif id(item) not in done:
            done.add(id(item))
            parts = [*item.keys(), *item.values()] if kind in _TABLES else item
            waiting += itertools.islice(parts, most)

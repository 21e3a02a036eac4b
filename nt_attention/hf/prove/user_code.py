"""What the code of classes that are not from torch or transformers reads: names, numbers, and plain values.

A proof tries the numbers, such as ids of tokens and lengths. Its key has the values, because they may change.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MappingProxyType, ModuleType, NoneType, SimpleNamespace
from typing import Any

from torch import nn

from ..families import class_of
from .parts import OF_LAYERS, is_of_layers

_SCALARS = (bool, int, float, complex, str, bytes, NoneType)
_TABLES = (dict, OrderedDict, defaultdict, Counter, MappingProxyType)
_LISTS = (list, tuple, set, frozenset)
_MOST_ITEMS = 20_000  # of one value, for a key
_LONGEST = 200_000  # characters of one string
_MOST_FUNCTIONS = 2_000
# The versions of Python, torch and transformers stand for the code of these packages.
_PACKAGES = {"huggingface_hub", "torch", "transformers", *sys.stdlib_module_names} - {"__main__"}
_KNOWN = {*_PACKAGES, "builtins", "numpy"}


def is_known(module: str) -> bool:
    """Whether a module is of Python, torch or transformers."""
    return module.partition(".")[0] in _KNOWN


def user_code_of(model: nn.Module) -> UserCode:
    """The code of a model and its config that is not from known packages, and functions replaced in transformers."""
    classes = {class_of(module) for module in model.modules()} | {type(getattr(model, "config", None))}
    classes = {each for each in classes if not is_of_layers(each)}
    functions = [x for name, _, x in replaced_functions(classes) if is_known(name) and _is_replacement(x, name)]
    return UserCode.of({base for each in classes for base in each.__mro__ if not is_known(base.__module__)}, functions)


def replaced_functions(classes: set[type]) -> Iterator[tuple[str, str, Any]]:
    """Functions of these classes, and of the files that define them, that come from a package that is not theirs.

    Yields:
        The module, the name of the function there, and the function; also all partial functions.
    """
    for name in {each.__module__ for each in classes} & sys.modules.keys():
        owners = [vars(sys.modules[name]), *(vars(each) for each in classes if each.__module__ == name)]
        for attribute, value in [item for owner in owners for item in owner.items()]:
            if isinstance(value, functools.partial | functools.partialmethod):
                yield name, attribute, value
            if not inspect.isfunction(value):
                continue
            function = inspect.unwrap(value)
            if not inspect.isfunction(function):
                continue  # what torch.compile has compiled, which it puts into the namespace of the file
            module = str(function.__globals__.get("__name__"))
            imported = _imported_by(name) if is_known(name) else frozenset()  # by transformers itself
            if module.partition(".")[0] not in _PACKAGES | imported | {name.partition(".")[0]}:
                yield name, attribute, function


def _is_replacement(function: Any, module: str) -> bool:
    """Whether a function in a module of transformers is not one that this module imports by itself."""
    package = str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0]
    return inspect.isfunction(function) and package not in {*OF_LAYERS, *_imported_by(module)}


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
        classes: those whose code was read.
        names: of variables, attributes and keys, and all other strings in the code.
        numbers: integers in the code, and in the values that it reads.
        values: a line for each value that it reads.
        is_complete: False if a value is too large for a line of its own: of it, only the size is in `values`.
    """

    classes: set[type] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    is_complete: bool = True
    _done: set[int] = field(default_factory=set)
    _waiting: list[FunctionType] = field(default_factory=list)

    @property
    def exists(self) -> bool:
        """Whether there is any code."""
        return bool(self._done)

    @classmethod
    def of(cls, classes: set[type], functions: Iterable[FunctionType] = ()) -> UserCode:
        """Read the code of classes and functions, and of what it calls outside of known packages."""
        code = cls(set(classes))
        for kind in classes:
            code._add_class(kind)
        for function in functions:
            code._add_function(function)
        while code._waiting and len(code._done) < _MOST_FUNCTIONS:
            code._read_function(code._waiting.pop())
        code.is_complete = code.is_complete and not code._waiting
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
                self._add_value(f"{kind.__qualname__}.{name}", value)

    def _add_function(self, function: FunctionType) -> None:
        if id(function) not in self._done and not is_known(str(function.__module__)):
            self._done.add(id(function))
            self._waiting.append(function)

    def _read_function(self, function: FunctionType) -> None:
        names = self._read_code(function.__code__)
        where = f"{function.__module__}.{function.__qualname__}"
        self.values.add(f"{where} is {digest_of(function.__code__)}")
        for number, value in enumerate(function.__defaults__ or ()):
            self._add(f"{where} {number}", value, names)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._add(f"{where} {name}", value, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._add(f"{where} {name}", cell.cell_contents, names)
            except ValueError:  # not set yet
                continue
        for name in names & function.__globals__.keys():
            self._add(f"{function.__module__}.{name}", function.__globals__[name], names)

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

    def _add(self, where: str, value: Any, names: set[str], depth: int = 0) -> None:
        """Add the value of a variable. Of modules and objects, the attributes that the code names."""
        kind = type(value)
        if kind in (*_SCALARS, *_TABLES, *_LISTS):
            self._add_value(where, value)
        elif isinstance(value, type):
            if not is_known(value.__module__):
                self._add_class(value)
        elif depth > 2 or (isinstance(value, ModuleType) and is_known(value.__name__)):
            return
        elif isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] != "nt_attention":
                for name in names & vars(value).keys():
                    self._add(f"{value.__name__}.{name}", vars(value)[name], names, depth + 1)
        elif functions := list(_functions_in(value)):
            for function in functions:
                self._add_function(function)
        elif not is_known(kind.__module__) or kind is SimpleNamespace:
            self._add_class(kind)
            for name, part in list(getattr(value, "__dict__", {}).items()):
                self._add(f"{where}.{name}", part, names, depth + 1)

    def _add_value(self, where: str, value: Any) -> None:
        budget = [_MOST_ITEMS]
        text = text_of(value, budget)
        if budget[0] < 0:
            self.is_complete = False
            text = f"{type(value).__name__} of {len(value)} items"
        for leaf in leaves_of(value):
            if isinstance(leaf, int | float) and leaf == leaf // 1:
                self.numbers.add(int(leaf))
            elif isinstance(leaf, type) and not is_known(leaf.__module__):
                self._add_class(leaf)
            elif inspect.isfunction(leaf):
                self._add_function(leaf)
        self.values.add(f"{where} = {text}")


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


def digest_of(code: CodeType) -> str:
    """A hash of what a function does, but for the values of its variables."""
    constants = [digest_of(x) if isinstance(x, CodeType) else _constant(x) for x in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def text_of(value: Any, budget: list[int]) -> str:
    """A text that is the same for equal plain values. Other objects are named by their class.

    Takes one from `budget[0]` for each item, and stops when it is below 0.
    """
    return _text(value, budget, ())


def _text(value: Any, budget: list[int], inside: tuple[int, ...]) -> str:
    budget[0] -= 1
    kind = type(value)
    if budget[0] < 0 or id(value) in inside:
        return "..."
    if isinstance(value, str | bytes) and len(value) > _LONGEST:
        budget[0] = -1
        return "..."
    if kind in _SCALARS:
        return repr(value)
    inside = (*inside, id(value))
    if kind in _TABLES:
        parts = []
        for key, item in list(value.items())[: budget[0] + 1]:
            parts.append(f"{_text(key, budget, inside)}: {_text(item, budget, inside)}")
        return f"{kind.__name__} {{{', '.join(sorted(parts))}}}"
    if kind in _LISTS:
        parts = [_text(item, budget, inside) for item in list(value)[: budget[0] + 1]]
        return f"{kind.__name__} [{', '.join(parts if kind in (list, tuple) else sorted(parts))}]"
    return f"{kind.__module__}.{kind.__qualname__} {getattr(value, '__qualname__', '')}"


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

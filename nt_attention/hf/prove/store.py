"""Keeps proofs: those shipped with nt_attention, those in the user's cache, and those made in this process.

The key of a proof has all of a model that can change it: the class and its source, the config but for its sizes, the
classes of its modules, and the version of transformers. A test makes the shipped proofs again, and the cache has a
directory for each state of the code that packs and proves.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from .. import families
from ..families import class_of
from ..proof import Proof
from ..transformers_private import attention_of
from .parts import is_of_layers, marks_of, name_of, parts_of
from .prover import prove
from .twin import changed_numbers, flags_of, new_model, twin_config
from .user_code import own_code_of, replaced_functions
from .whole_twin import whole_fields

SHIPPED = Path(__file__).parent / "proofs"

_logger = logging.getLogger(__name__)
_made: dict[str, Proof] = {}
# Classes that are defined in functions → key → proof. Such a key is of this process, and of no other class.
_made_for: weakref.WeakKeyDictionary[type, dict[str, Proof]] = weakref.WeakKeyDictionary()


_ADDRESS = " at 0x"


def proof_of(model: PreTrainedModel) -> tuple[Proof, str]:
    """The proof for a model, and where it is from. Makes the proof if there is none.

    A proof is looked up in the data shipped with nt_attention, then in the user's cache (`cache_directory`). A new one
    is kept in the cache if the source of all classes of the model is known.
    """
    key, can_be_kept = key_of(model)
    if can_be_kept and key in shipped():
        return shipped()[key], f"shipped with nt_attention for transformers {transformers.__version__}"
    made = _made if can_be_kept else _made_for.setdefault(class_of(model), {})
    if key in made:
        return made[key], "made before in this process"
    file = cache_directory() / f"{key}.json"
    if can_be_kept and (read := _read(file)) is not None:
        return read, f"kept in {file.parent}"
    name = class_of(model).__name__
    _logger.warning("nt_attention: no proof says yet if %s with this config can be packed; trying a small model.", name)
    begin = time.perf_counter()
    proof = make(model)
    where = f"made in {time.perf_counter() - begin:.1f} s"
    if not proof.tried:
        return proof, f"{where}, not kept"
    if _ADDRESS not in key:
        made[key] = proof
    if not can_be_kept:
        why = "a class is defined in a function or has no source file, or reads what can't be compared"
        return proof, f"{where}, not kept, because {why}"
    return proof, f"{where}, kept in {file.parent}" if _write(file, proof) else f"{where}, not kept"


def make(model: PreTrainedModel) -> Proof:
    """Make a new proof. Takes up to some seconds."""
    if (changed := _changed_after_construction(model)) is not None:
        return Proof(changed)
    return prove(model, families.family_of(model))


def _changed_after_construction(model: PreTrainedModel) -> str | None:
    """Which module or flag is not what the class makes from the config of the model, or None."""
    new = new_model(model)
    if new is None:  # then no small model can be built either
        return None
    missing, fresh = parts_of(model) - parts_of(new), marks_of(new)
    for path, module in model.named_modules():
        if (kind_name := name_of(class_of(module))) in missing:
            return f"{path} is a {kind_name}, which a new model with the same config does not have"
    for (class_name, name, value), path in marks_of(model).items():
        if (class_name, name, value) not in fresh and any(mark[:2] == (class_name, name) for mark in fresh):
            usual = next(mark[2] for mark in fresh if mark[:2] == (class_name, name))
            where = f"{path} ({class_name})" if path else class_name
            return f"{name} of {where} is {value}, but {usual} in a new model with the same config"
    return None


def key_of(model: PreTrainedModel) -> tuple[str, bool]:
    """The key of a model's proof, and whether the proof can be kept for other processes.

    It can't be kept if a class has no source file, or is defined in a function, whose variables may differ, or if its
    code reads a large table, or an object without a value of its own. Of the last, it is not even kept in this process.
    """
    kind, family = class_of(model), families.family_of(model)
    classes = {class_of(module) for module in model.modules()} | {type(model.config)}
    classes = {each for each in classes if not is_of_layers(each)}
    code = own_code_of(model)
    quirks = [function for function in (family.pool, family.embed) if function is not None]
    fields = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "config": twin_config(kind, families.config_of(model)),
        "attention": attention_of(model.config) if code.classes else None,
        "parts": sorted(parts_of(model)),
        "marks": sorted(marks_of(model)),
        "family": [family.positions, *map(_code_of, quirks)],
        "replaced": sorted({_replacement(*each) for each in replaced_functions(classes)}),
        "own code": [
            *sorted([kind.__qualname__, *sorted(_codes_of(kind))] for kind in code.classes),
            *_own_files(code.classes),
        ],
        "sources": sorted({_digest(file) for each in classes if (file := _file_of(each))}),
        "versions": [transformers.__version__, _kernels()],
    }
    if code.exists:
        fields |= {"whole config": whole_fields(families.config_of(model), code), "values": sorted(code.values)}
        fields["changed"] = [changed_numbers(model), {name: x.tolist() for name, x in flags_of(model).items()}]
    text = _canonical(fields)
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    functions = [getattr(quirk, "__qualname__", "<locals>") for quirk in quirks]
    if _ADDRESS in text:  # of an object that may be freed
        return f"{key}{_ADDRESS}", False
    if (
        not code.is_complete
        or not all(map(_file_of, classes))
        or any("<locals>" in name for name in functions + [c.__qualname__ for c in classes])
    ):
        return f"{key} {sorted(id(each) for each in [*classes, *quirks])}", False
    return key, True


@functools.cache
def _kernels() -> list[bool]:
    """Whether packages are there that let some models of transformers keep packed sequences apart."""
    return [importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d", "mamba_ssm")]


def _canonical(value: Any) -> str:
    """A text that is the same for equal values."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_canonical(k)}: {_canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    return repr(value)


def _codes_of(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            yield f"{name} {_code_of(inspect.unwrap(function))}"


def _own_files(own: set[type]) -> list[str]:
    """Digests of all loaded files in the packages of the user's classes, and of all that are not installed packages."""
    if not own:
        return []
    packages = {kind.__module__.partition(".")[0] for kind in own}
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    digests = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or name.partition(".")[0] == "nt_attention":
            continue
        if name.partition(".")[0] in packages or not file.startswith(installed):
            digests.append(_digest(file))
    return sorted(digests)


@functools.cache
def shipped() -> dict[str, Proof]:
    """The proofs that nt_attention ships for this version of transformers, by key."""
    file = SHIPPED / f"{transformers.__version__}.json"
    return {entry["key"]: Proof(**entry["proof"]) for entry in read_entries(file)}


def read_entries(file: Path) -> list[dict[str, Any]]:
    """The entries of a file of proofs: class, model type, key and proof. Empty if there is no file."""
    return json.loads(file.read_text()) if file.exists() else []


def cache_directory() -> Path:
    """The directory of the user's proofs, in `$NT_ATTENTION_CACHE`, by default `~/.cache/nt_attention`."""
    given = os.environ.get("NT_ATTENTION_CACHE")
    if not given:
        given = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nt_attention")
    return Path(given) / "proofs" / _own_digest()


def _read(file: Path) -> Proof | None:
    try:
        fields = json.loads(file.read_text())
        proof = Proof(**fields)
    except (OSError, ValueError, TypeError, RecursionError):  # there is none, or it can't be read
        return None
    return proof if fields == dataclasses.asdict(proof) and proof.is_valid else None


def _write(file: Path, proof: Proof) -> bool:
    temporary = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dataclasses.asdict(proof)))
        os.replace(temporary, file)
    except OSError:  # for example, a file system that is read-only
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def as_fields(proof: Proof) -> dict[str, Any]:
    """The fields of a proof that differ from their defaults."""
    return {name: x for name, x in dataclasses.asdict(proof).items() if x != getattr(Proof(), name)}


def _code_of(function: Any) -> list[Any]:
    """What a function does: its code, its defaults, and the variables around it."""
    if str(getattr(function, "__module__", "")).partition(".")[0] == "nt_attention":
        return [function.__module__, function.__qualname__]  # _own_digest stands for its code
    code = getattr(function, "__code__", None)
    if code is None:
        return [str(function)]
    source: Any = _digest(code.co_filename)
    if not source:  # as in a notebook
        constants = [x.co_code.hex() if inspect.iscode(x) else repr(x) for x in code.co_consts]
        source = [code.co_code.hex(), code.co_names, constants]
    given = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    defaults = [[name, _variable(value)] for name, value in given]
    around = [_variable(cell.cell_contents) for cell in function.__closure__ or ()]
    return [code.co_qualname, code.co_firstlineno, source, defaults, around]


def _name_of_function(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def _variable(value: Any) -> Any:
    """A variable that a function uses from the function around it, such as the class that `super()` uses."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if inspect.isfunction(value):
        return _code_of(value)
    if type(value).__module__ in sys.stdlib_module_names and " at 0x" in repr(value):
        return _variable(type(value))  # such as dataclasses.MISSING
    return repr(value)


def _file_of(kind: type) -> str | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file if file and os.path.isfile(file) else None


def _digest(file: str) -> str:
    """A hash of a file as it is now, or "" if there is none."""
    try:
        found = os.stat(file)
        return _digest_of(file, found.st_mtime_ns, found.st_size)
    except OSError:
        return ""


@functools.cache
def _digest_of(file: str, changed_at: int, size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


@functools.cache
def _own_digest() -> str:
    """A hash of the code that packs and proves."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _replacement(module: str, attribute: str, value: Any) -> str:
    """A text for a function that is not of the package of the file in which it is."""
    if isinstance(value, functools.partial | functools.partialmethod):
        options = _canonical([value.args, value.keywords])
        return f"{module} {attribute} = partial({_name_of_function(value.func)}, {options})"
    return f"{module} {attribute} = {value.__globals__.get('__name__')} {_code_of(value)}"

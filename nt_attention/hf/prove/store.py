"""Keeps proofs: those shipped with nt_attention, those in the user's cache, and those made in this process.

The key of a proof has all of a model that can change it: the class and its source, the config but for its sizes, the
classes of its modules, and the version of transformers. A test makes the shipped proofs again, and the cache has a
directory for each state of the code that packs and proves. Proofs of models with other code are not kept: it may depend
on anything.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from ...kernels import measurements
from .. import families
from ..families import class_of
from ..proof import Proof
from .parts import marks_of, name_of, parts_of
from .prover import prove
from .twin import has_packages, may_need_gpu, new_model
from .twin_config import twin_config
from .user_code import classes_of, has_other_code, replaced_functions

SHIPPED = Path(__file__).parent / "proofs"
PACKAGE = Path(__file__).parents[2]
# The files of nt_attention on which a proof depends: those that prove, and those that run in a packed call of a twin.
DEPENDS_ON = (
    "hf/prove/*.py", "hf/prove/*.json", "hf/pack/*.py", "hf/route/*.py", "hf/families.py", "hf/proof.py",
    "hf/transformers_private.py", "functional.py", "compiler.py", "torch_private.py", "layouts/*.py", "kernels/*.py",
    "kernels/backends/*.py", "patching/*.py",
)  # fmt: skip

_logger = logging.getLogger(__name__)
_made: dict[str, Proof] = {}
# Class with other code → what else is compared of a model → its proof, in `keeping_all_proofs`.
_made_of_class: weakref.WeakKeyDictionary[type, dict[str, tuple[Proof, str]]] = weakref.WeakKeyDictionary()
_keeps_all: ContextVar[bool] = ContextVar("keeps_all", default=False)


@contextmanager
def keeping_all_proofs() -> Iterator[None]:
    """A context in which a class with code that is not from transformers is tried once for each config.

    Elsewhere it is tried for each model, because its code may also read what no config says.
    """
    token = _keeps_all.set(True)
    try:
        yield
    finally:
        _keeps_all.reset(token)


def proof_of(model: PreTrainedModel) -> tuple[Proof, str]:
    """The proof for a model, and where it is from. Makes the proof if there is none.

    A proof is looked up in the data shipped with nt_attention, then in the user's cache (`cache_directory`). A new one
    is kept in the cache if all code of the model is from transformers.
    """
    if (key := key_of(model)) is None:
        if not _keeps_all.get():
            proof, where = _made_now(model)
            return proof, f"{where}, not kept, because code that is not from transformers may change"
        kept, of_model = _made_of_class.setdefault(class_of(model), {}), _canonical(_compared(model))
        if of_model not in kept:
            kept[of_model] = _made_now(model)
        return kept[of_model]
    if key in shipped():
        return shipped()[key], f"shipped with nt_attention for transformers {transformers.__version__}"
    if key in _made:
        return _made[key], "made before in this process"
    file = cache_directory() / f"{key}.json"
    if (read := _read(file)) is not None:
        return read, f"kept in {file.parent}"
    proof, where = _made_now(model)
    if not proof.tried:
        return proof, f"{where}, not kept"
    _made[key] = proof
    return proof, f"{where}, kept in {file.parent}" if _write(file, proof) else f"{where}, not kept"


def _made_now(model: PreTrainedModel) -> tuple[Proof, str]:
    name = class_of(model).__name__
    _logger.warning("nt_attention: %s with this config was not checked yet; trying a small model of its class.", name)
    begin = time.perf_counter()
    proof = make(model)
    gc.collect()  # exceptions of the trial refer to their frames, and those to the model
    return proof, f"made in {time.perf_counter() - begin:.1f} s"


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


def key_of(model: PreTrainedModel) -> str | None:
    """The key of a model's proof, or None if code runs in it that is not from transformers or nt_attention."""
    kind, family = class_of(model), families.family_of(model)
    quirks = [function for function in (family.pool, family.embed) if function is not None]
    if has_other_code(model) or any(not str(getattr(x, "__module__", "")).startswith("nt_attention.") for x in quirks):
        return None
    of_others = [each for each in classes_of(model) if not each.__module__.startswith("torch.")]  # as in other versions
    fields = {
        "class": name_of(kind),
        "config": twin_config(kind, families.config_of(model)),
        "parts": sorted(parts_of(model)),
        "marks": sorted(marks_of(model)),
        "family": [family.positions, *([x.__module__, x.__qualname__] for x in quirks)],
        "sources": sorted({_digest(file) for each in of_others if (file := _file_of(each))}),
        "versions": [transformers.__version__, has_packages(), *(["cuda"] if may_need_gpu() else [])],
        **{"attention": None, "replaced": [], "own code": []},  # they were other values in models with other code
    }
    return hashlib.sha256(_canonical(fields).encode()).hexdigest()[:24]


def _compared(model: PreTrainedModel) -> list[Any]:
    """What is compared of a model with other code: its config, its modules and flags, and replaced functions."""
    functions = [id(function) for _, function in replaced_functions(classes_of(model))]
    return [families.config_of(model).to_dict(), parts_of(model), marks_of(model), functions]


def _canonical(value: Any) -> str:
    """A text that is the same for equal values."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_canonical(k)}: {_canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    return repr(value)


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
    return measurements.cache_directory() / "proofs" / digest_of_code()


def _read(file: Path) -> Proof | None:
    try:
        fields = json.loads(file.read_text())
        proof = Proof(**fields)
    except (OSError, ValueError, TypeError, RecursionError):  # there is none, or it can't be read
        return None
    return proof if fields == dataclasses.asdict(proof) else None


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
    fields = {name: x for name, x in dataclasses.asdict(proof).items() if x != getattr(Proof(), name)}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}  # as JSON has them


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
def digest_of_code(package: Path = PACKAGE) -> str:
    """A hash of the files in a directory of nt_attention on which a proof depends."""
    files = sorted(file for pattern in DEPENDS_ON for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]

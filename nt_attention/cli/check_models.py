"""Prove which text models of the installed transformers can be packed."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..hf import families
from ..hf.proof import Proof
from ..hf.prove import store, text_models
from .environment import output_file, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "model types, such as bert; or names on the Hub or folders with a config.json; by default all types"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=about)
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the checks to a JSON file")
    parser.add_argument("--jobs", type=positive, default=1, help="number of processes (default: 1)")


def main(options: argparse.Namespace) -> int:
    """Prove, print a line for each class, and return 1 if a proof differs from the shipped one."""
    sources = [name for name in options.models if "/" in name or os.path.isdir(name)]
    types, rows = set(options.models) - set(sources), text_models.text_classes()
    if unknown := types - {model_type for model_type, _, _ in rows}:
        names = ", ".join(sorted(unknown))
        options.error(f"no text models of type {names}: pass values of config.model_type, Hub names or folders")
    try:
        of_configs = [row for source in sources for row in text_models.classes_of(source)]
    except (OSError, ValueError) as error:
        options.error(str(error))
    wanted = [row for row in rows if not options.models or row[0] in types] + of_configs
    console, entries = Console(highlight=False, soft_wrap=True), []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for entry in pool.map(_prove, wanted):
            entries.append(entry)
            console.print(escape(_line(entry)))
    console.print(", ".join(f"{number} {what}" for what, number in Counter(map(_state, entries)).items()))
    if options.write:
        options.write.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
        return 0
    shipped = store.shipped()
    differ = [e for e in entries if e["key"] and e["key"] in shipped and shipped[e["key"]] != Proof(**e["proof"])]
    for entry in differ:
        console.print(f"{entry['class']}: differs from the shipped check")
    return 1 if differ else 0


def _prove(row: tuple[str, str, str]) -> dict[str, Any]:
    """The entry of a class: its key is empty if the class can't be built from its default config."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    source, class_name, head = row
    entry: dict[str, Any] = {"type": source, "class": class_name, "head": head, "key": "", "proof": {}}
    try:
        model = text_models.on_meta_device(source, class_name)
    except Exception as error:  # whatever a class raises
        reason = f"no default config: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        return {**entry, "proof": {"reason": reason}}
    entry["key"] = store.key_of(model) or ""
    not_packed = families.why_not_packed(model)
    return {**entry, "proof": {"reason": not_packed} if not_packed else store.as_fields(store.make(model))}


def _state(entry: dict[str, Any]) -> str:
    return "not built" if not entry["key"] else "refused" if "reason" in entry["proof"] else "packed"


def _line(entry: dict[str, Any]) -> str:
    proof = Proof(**entry["proof"])
    how = proof.reason or ", ".join(f"{name} {x}" for name, x in store.as_fields(proof).items() if name != "pool")
    return f"{entry['type']:28}{entry['class']:44}{_state(entry)}: {how or 'as usual'}"

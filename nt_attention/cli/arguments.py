"""The workloads that a command line asks for, by name or by lengths, and its options for heads and masks."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from .lengths import KINDS, TOKENS, parse_lengths
from .workloads import ALL, MORE, SMALL, WORKLOADS, Workload

CPU_TOKENS = 4096


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("batches")
    which.add_argument(
        "--batches", nargs="+", metavar="NAME",
        help=f"of {', '.join(map(repr, ALL))}, or all; without it A to E on a GPU, two small ones on a CPU",
    )  # fmt: skip
    kinds = ", ".join(f"{kind}:N" for kind in KINDS)
    which.add_argument(
        "--lengths",
        type=parse_lengths,
        help=f"a batch of your own: 5,0,900,17, or one of {kinds} with a cap or length N",
    )
    which.add_argument("--tokens", type=count, help=f"that drawn lengths add up to: {TOKENS}, on a CPU {CPU_TOKENS}")
    which.add_argument("--key-lengths", type=parse_lengths, help="for cross attention: as --lengths, one a sequence")
    what = parser.add_argument_group("attention", "for every batch; where left out, as the batch has it")
    what.add_argument("--heads", type=count, help="12 for --lengths")
    what.add_argument("--kv-heads", type=count, help="as --heads, if that is given")
    what.add_argument("--head-dim", type=count, help="64 for --lengths")
    what.add_argument("--value-dim", type=count, help="as --head-dim")
    what.add_argument("--causal", action="store_true")
    what.add_argument(
        "--window", type=parse_window, metavar="L,R", help="keys before and after; --window=-1,0 leaves a side open"
    )
    what.add_argument("--softcap", type=float)


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1.")
    return int(text)


def parse_window(text: str) -> tuple[int, int]:
    sides = text.split(",")
    if len(sides) != 2 or not all(side.removeprefix("-").isdecimal() and int(side) >= -1 for side in sides):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two whole numbers such as 128,128, each -1 for an open side."
        )
    return int(sides[0]), int(sides[1])


def requested_workloads(options: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The workloads that the options describe.

    Raises:
        ValueError: options that do not fit each other.
    """
    if options.lengths is not None and options.batches is not None:
        raise ValueError("--lengths describes a batch and --batches names some: pass one of both.")
    if options.tokens is not None and (options.lengths is None or options.lengths.given is not None):
        raise ValueError("--tokens goes with lengths that are drawn: pass --lengths lognormal:2048 or the like.")
    if options.softcap is not None and not 0 <= options.softcap < float("inf"):
        raise ValueError(f"--softcap must be 0 (off) or a positive number, got {options.softcap}.")
    if options.lengths is not None:
        tokens = options.tokens or (TOKENS if device.type == "cuda" else CPU_TOKENS)
        lengths = options.lengths.up_to(tokens)
        if not sum(lengths):
            raise ValueError(
                f"--lengths {options.lengths.about} leaves no token: pass a length above 0, or more --tokens."
            )
        workloads = [Workload("given", options.lengths.about, lengths, 12, 12, 64)]
    else:
        workloads = named_workloads(options.batches, device)
    return [_changed(workload, options) for workload in workloads]


def named_workloads(names: list[str] | None, device: torch.device) -> list[Workload]:
    if names is None:
        return list(SMALL) if device.type == "cpu" else [WORKLOADS[name] for name in "ABCDE"]
    unknown = [name for name in names if name not in ALL and name != "all"]
    if unknown:
        raise ValueError(f"there is no batch {unknown[0]!r}: pass all, or some of {', '.join(map(repr, ALL))}.")
    found = [[*WORKLOADS.values(), *MORE] if name == "all" else [ALL[name]] for name in names]
    return list({workload.name: workload for some in found for workload in some}.values())


def _changed(workload: Workload, options: argparse.Namespace) -> Workload:
    """A workload with the options applied."""
    changes: dict[str, Any] = {}
    changed: list[str] = []
    if options.heads is not None:
        changes["heads"] = changes["kv_heads"] = options.heads
    if options.kv_heads is not None:
        changes["kv_heads"] = options.kv_heads
    heads, kv_heads = (changes.get(name, getattr(workload, name)) for name in ("heads", "kv_heads"))
    if heads % kv_heads:
        raise ValueError(
            f"--kv-heads {kv_heads} does not divide the {heads} heads of batch {workload.name}: pass one that does, "
            "and --heads with it."
        )
    if options.head_dim is not None:
        changes["head_dim"] = options.head_dim
    if options.value_dim is not None:
        changes["value_dim"] = options.value_dim
    if options.causal and not workload.is_causal:
        changes["is_causal"] = True
        changed.append("causal")
    if options.window is not None:
        changes["window_size"] = options.window
        changed.append("window {},{}".format(*options.window))
    if options.softcap is not None:
        changes["softcap"] = options.softcap
        changed.append(f"softcap {options.softcap:g}")
    if options.key_lengths is not None:
        try:
            changes["key_lengths"] = options.key_lengths.of(len(workload.lengths), seed=1)
        except ValueError as error:
            raise ValueError(f"--key-lengths for workload {workload.name}: {error}") from None
        if not sum(changes["key_lengths"]):
            raise ValueError("--key-lengths leaves no key: pass a length above 0.")
        changed.append(f"keys {options.key_lengths.about}")
    return dataclasses.replace(workload, **changes, about=", ".join([workload.about, *changed]))

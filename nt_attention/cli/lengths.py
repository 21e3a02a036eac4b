"""Lengths of sequences: drawn with a fixed seed by a kind and a number, or given one by one.

The kinds follow real workloads: lognormal lengths with a cap (most are short, a few reach it), uniform ones from 1 to a
cap, and equal ones.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

TOKENS = 32768


@dataclass(frozen=True)
class Lengths:
    """Lengths as they were asked for.

    Attributes:
        given: one for each sequence, or None where they are drawn.
        kind, number: a name of ``KINDS``, and its cap or length.
    """

    given: tuple[int, ...] | None = None
    kind: str = ""
    number: int = 0

    @property
    def about(self) -> str:
        if self.given is None:
            return f"all {self.number}" if self.kind == "equal" else f"{self.kind} ≤ {self.number}"
        return (
            " + ".join(map(str, self.given)) if len(self.given) <= 6 else f"from {min(self.given)} to {max(self.given)}"
        )

    def up_to(self, tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Lengths that add up to ``tokens``; equal ones to as many as fit."""
        if self.given is not None:
            return self.given
        if self.kind == "equal":
            return (self.number,) * (tokens // self.number)
        draw, lengths, left = KINDS[self.kind](self.number, random.Random(seed)), [], tokens
        while left:
            lengths.append(min(draw(), left))
            left -= lengths[-1]
        return tuple(lengths)

    def of(self, sequences: int, seed: int = 0) -> tuple[int, ...]:
        """A length for each of so many sequences.

        Raises:
            ValueError: another number of lengths was given.
        """
        if self.given is not None:
            if len(self.given) != sequences:
                raise ValueError(f"got {len(self.given)} lengths for {sequences} sequences: pass one for each.")
            return self.given
        draw = KINDS[self.kind](self.number, random.Random(seed))
        return tuple(draw() for _ in range(sequences))


def _lognormal(cap: int, source: random.Random) -> Callable[[], int]:
    return lambda: min(cap, max(1, round(math.exp(source.gauss(math.log(cap) - 1.9, 0.9)))))


def _uniform(cap: int, source: random.Random) -> Callable[[], int]:
    return lambda: source.randint(1, cap)


def _equal(length: int, _: random.Random) -> Callable[[], int]:
    return lambda: length


KINDS: dict[str, Callable[[int, random.Random], Callable[[], int]]] = {
    "lognormal": _lognormal,
    "uniform": _uniform,
    "equal": _equal,
}


def parse_lengths(text: str) -> Lengths:
    """``5,0,900,17`` or ``KIND:NUMBER``, as argparse wants a type to be.

    Raises:
        argparse.ArgumentTypeError: neither of these.
    """
    kind, colon, number = text.partition(":")
    if colon:
        if kind in KINDS and number.isdecimal() and int(number):
            return Lengths(kind=kind, number=int(number))
    elif all(part.strip().isdecimal() for part in text.split(",")):
        return Lengths(given=tuple(map(int, text.split(","))))
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a list of lengths such as 5,0,900,17 nor one of "
        f"{', '.join(f'{kind}:N' for kind in KINDS)} with N from 1."
    )

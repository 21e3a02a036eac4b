"""Random calls of the backends, compared with float64.

    python tests/helpers/soak.py [--minutes M] [--draws N] [--seed N] [--device D] [--backends NAME …]

A draw is a program of about ten lines, which runs as it is printed if it fails. So a printed program repeats its
failure. What no kernel may read is NaN: memory around the tensors, rows past the last sequence, and unused pages.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from soak_tools import FORMS, OF_KEYS, OF_QUERIES, TOLERANCES

from nt_attention.cli.environment import backends_of, device_name, devices, positive
from nt_attention.kernels import registry
from nt_attention.kernels.backend import Backend
from nt_attention.kernels.relative import TERMS
from nt_attention.torch_private import FakeTensor

EDGES = (0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)  # lengths
DIMS = (1, 5, 8, 16, 24, 32, 64, 72, 96, 128, 192, 256, 320, 576)
DRAWS_OF_A_KERNEL = 100  # on a GPU, where kernels are compiled for seconds
WARM_UP = 50  # rounds before memory is measured
LEFT_OVER = 50, 2**26  # tensors, and bytes on a GPU, that caches may add after that

NOT_SUPPORTED = "backend={!r}: it cannot run this call."

LAYOUTS = ("lengths", "offsets", "mask", "bounds", "nested", "tree", "paged", "dropout")  # the last has lengths too
HEADER = """import torch
import nt_attention as nta
from nt_attention.cli.check import every_third, tilt
from soak_tools import *"""


@dataclass
class Draw:
    """The random choices of a program."""

    backend: Backend
    device: torch.device
    of_kernel: random.Random  # decides what a kernel is compiled for
    random: random.Random  # decides lengths, strides and numbers

    def chance(self, p: float, feature: str = "") -> bool:
        return self.of_kernel.random() < p and (not feature or feature in self.backend.features)

    def lengths(self, count: int, most: int) -> list[int]:
        kind, pick = self.random.choice(("edges", "equal", "short", "one long")), self.random.choice
        lengths = [pick(EDGES) if kind == "edges" else self.random.randint(0, 9) for _ in range(count)]
        if kind == "equal":
            lengths = [pick(EDGES)] * count
        elif kind == "one long":
            lengths[0] = self.random.randint(200, 500 if self.device.type == "cpu" else 4000)
            self.random.shuffle(lengths)
        return [min(length, most) for length in lengths]

    def parents(self, segments: int) -> list[int]:
        """Those of a `TreeLayout`."""
        path: list[int] = []
        parents = []
        for segment in range(segments):
            del path[self.random.randint(0, len(path)) :]
            parents.append(path[-1] if path else -1)
            path.append(segment)
        return parents

    def shapes(self, total: int, key_total: int, past: int, form: str) -> tuple[dict[str, Any], list[str]]:
        """The arguments of `draw` for each tensor, and the names of those that need gradients."""
        drops, pick = form == "dropout", self.of_kernel.choice
        dims = [dim for dim in DIMS if dim <= self.backend.head_dims.most]
        head_dim = 64 if drops else pick(dims)
        value_dim = head_dim if drops or self.chance(0.7) else pick(dims)
        groups = self.of_kernel.randint(1, 3)
        heads, terms = groups * pick((1, 1, 2, 3)), [name for name in TERMS if self.chance(0.5)]
        sizes: dict[str, tuple[int, ...]] = {"query": (total, heads, head_dim), "key": (key_total, groups, head_dim)}
        sizes["value"] = (key_total, groups, value_dim)
        sizes |= {"sinks": (heads,)} if self.chance(0.2) else {}
        if form != "paged" and self.chance(0.3, "relative bias"):
            of_terms = {"bias": (), "query_bias": (total,), "key_bias": (key_total,)}
            sizes |= {name: (*of_terms[name], heads, buckets) for buckets in [pick((2, 5, 40))] for name in terms}
        needs = [] if form == "paged" or self.backend.inference_only or self.chance(0.1) else list(sizes)
        if needs:
            needs = self.of_kernel.sample(needs, pick(range(1, len(needs) + 1))) if self.chance(0.3) else needs
            sizes |= {"grad": (total, heads, value_dim)} | ({"grad_lse": (total, heads)} if self.chance(0.5) else {})
        arguments = {}
        for name, size in sizes.items():
            forms = list(FORMS) if len(size) > 1 else ["contiguous", "inside", "every other"]
            rows = past if name in (*OF_QUERIES, *OF_KEYS) else 0
            arguments[name] = (pick(forms) if self.chance(0.5) else "contiguous", rows, *size)
        return arguments, needs

    def options(self, form: str, heads: int, sequences: int, is_cross: bool) -> dict[str, str]:
        chance, pick = self.chance, self.of_kernel.choice
        options = {"is_causal": "True"} if form == "tree" or chance(0.5) else {}
        if chance(0.3, "window"):
            options["window_size"] = str((pick((-1, 0, 3, 17, 64, 128)), pick((-1, 0, 3, 17, 64, 128))))
        if is_cross and chance(0.5):
            options["causal_alignment"] = "'upper_left'"
        if chance(0.3):
            options["scale"] = pick(("0.3", "0.05", *(("-0.2", "0.0") if "scale ≤ 0" in self.backend.features else ())))
        if chance(0.2, "softcap"):
            options["softcap"] = "5.0"
        if chance(0.2, "alibi"):
            shape = f"{sequences}, {heads}" if form != "tree" and chance(0.5) else str(heads)
            options["alibi_slopes"] = f"torch.rand({shape}, device=device) / 32"
        for name, mod in (("score_mod", "tilt"), ("mask_mod", "every_third")):
            if form != "tree" and chance(0.15, name):
                options[name] = mod
        return options

    def program(self) -> str:
        """One call with a layout of some form, and the same call in float64."""
        chance, pick = self.chance, self.of_kernel.choice
        with_feature = {"paged", "dropout"} | ({"bounds"} if self.device.type == "cuda" else set())
        form = pick([name for name in LAYOUTS if name not in with_feature - self.backend.features])
        most, count = 64 if form == "dropout" else 10**6, self.random.randint(1, 8)
        lengths = self.lengths(count, most)
        is_cross = form == "paged" or (form not in ("mask", "bounds", "tree") and chance(0.4))
        key_lengths = self.lengths(count, most) if is_cross else lengths
        past = 0 if form in ("nested", "dropout") else max(0, self.random.randint(-4, 4))
        arguments, needs = self.shapes(sum(lengths), sum(key_lengths), past, form)
        options = self.options(form, arguments["query"][3], count, is_cross)
        known = [dtype for dtype in TOLERANCES if self.backend.dtypes is None or dtype in self.backend.dtypes]
        dtype = pick(known[1:] if self.backend.is_reference else known)  # not float64 with itself
        plain = "nta.SequenceLayout.from_lengths({}, device=device)"
        lines = [f"torch.manual_seed({self.random.randrange(10**6)})", f"device, dtype = '{self.device}', {dtype}"]
        lines += [f"plain = {plain.format(lengths)}"]
        if form == "tree":
            lines = [*lines[:2], f"plain = nta.TreeLayout({lengths}, {self.parents(count)}, device=device)"]
        lines += [f"keys = {plain.format(key_lengths) if is_cross else 'plain'}"]
        lines += [f"x = draw({arguments}, dtype, device)"]
        lines += [f"needs, options = {needs}, dict({', '.join(f'{name}={x}' for name, x in options.items())})"]
        return "\n".join([HEADER, *lines, *self.calls(form, past, max(lengths), needs, options)])

    def calls(self, form: str, past: int, longest: int, needs: list[str], options: dict[str, str]) -> list[str]:
        """The lines that run the calls and compare them."""
        call = "lambda q, k, v, **more: nta.varlen_attention({}, return_lse=True, backend='{}', **more, **options{})"
        repeats = bool(needs) and form != "dropout" and self.chance(0.3, "deterministic")
        is_alone = form == "lengths" and not {"mask_mod", "alibi_slopes"} & options.keys()
        is_alone = is_alone and self.chance(0.3, "batch_invariant")
        promises = ", deterministic=True" * repeats + ", batch_invariant=True" * is_alone
        promises += ", dropout_p=0.3" * (form == "dropout")
        first, heads_first = self.random.choice((0, 3)), self.chance(0.5)
        tensors = {
            "nested": ", ".join(f"nest({x}, {first}, {heads_first})" for x in ("q, plain", "k, keys", "v, keys")),
            "paged": "q, *pools, plain, paged",
            "tree": "q, k, v, plain",
            **dict.fromkeys(("offsets", "mask", "bounds"), "q, k, v, layout, None if keys is plain else keys"),
        }
        mask = f"torch.arange({longest + 2}, device=device) < plain.lengths[:, None]"
        bounds = f"max_seqlen={longest + 2}, max_tokens=plain.total + {past}"
        made = {
            "offsets": "layout = nta.SequenceLayout.from_offsets(plain.cu_seqlens.clone())",
            "bounds": f"layout = nta.SequenceLayout.from_offsets(plain.cu_seqlens.clone(), {bounds})",
            "mask": f"layout = nta.SequenceLayout.from_attention_mask({mask})",
            "paged": f"paged, *pools = to_pages(keys, {self.of_kernel.choice((0, 1, 4, 16))}, x['key'], x['value'])",
        }
        name = self.backend.name
        lines = [made[form]] if form in made else []
        attend = call.format(tensors.get(form, "q, k, v, plain, keys"), name, promises)
        lines += [f"attend = {attend.replace('v,', 'v, plain=plain, keys=keys,', 1) if is_alone else attend}"]
        if form == "dropout":  # each call drops the same weights
            lines[-1] = lines[-1].replace("nta.", "torch.manual_seed(5) and nta.")
        if form == "nested":
            lines += [f"attend = unnest(attend, plain, {first}, {heads_first})"]
        sequences = "q, k, v, plain.sequences" if form == "tree" else "q, k, v, plain, keys"
        lines += [f"exact = {call.format(sequences, 'reference', '')}"]
        if form == "tree":
            lines += ["exact = on_tree(exact, plain)"]
        if form == "dropout":
            lines += ["exact = with_dropout(attend, exact, x, 0.3, plain, keys)"]
        lines += ["got = results(attend, x, needs)"]
        lines += ["error = compare(got, results(exact, exactly(x, plain, keys), needs), dtype)"]
        if repeats:
            lines += ["compare_bits(got, results(attend, x, needs))"]
        if is_alone:
            lines += ["compare_alone(attend, got, x, plain, keys)"]
        return lines


@dataclass
class Row:
    """The row of a backend in the summary."""

    draws: int = 0
    skipped: int = 0
    largest: float = 0.0
    failed: str = ""

    def run(self, name: str, program: str) -> None:
        self.draws += 1
        names: dict[str, Any] = {}
        try:
            exec(compile(program, "<draw>", "exec"), names)
            self.largest = max(self.largest, names["error"])
        except Exception as error:  # kernels of other libraries raise errors of any type: each is a result
            if isinstance(error, ValueError) and NOT_SUPPORTED.format(name) in str(error):
                self.skipped += 1
                return
            self.failed = f"{type(error).__name__}: {error}"
            print(f"\n{name}, draw {self.draws}: {self.failed}", flush=True)
            print(f"This program repeats it, in tests/helpers:\n\n{program}\n", flush=True)
        finally:
            names.clear()  # the functions in it refer to it, so its tensors would stay until the next collection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run draws of all backends by turns. A backend that fails gets no further draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="run random calls for this time; default: 1")
    parser.add_argument("--draws", type=positive, help="of each backend; fewer if the time ends before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=devices(), default=devices()[0])
    parser.add_argument("--backends", nargs="+", choices=list(registry.backends()), help="default: all but reference")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = options.backends or [name for name in backends_of(device) if name != "reference"]
    rows = {name: Row() for name in names}
    end = time.monotonic() + 60 * options.minutes
    before, grown = None, ""
    same = DRAWS_OF_A_KERNEL if device.type == "cuda" else 1
    for number in itertools.count():
        left = [name for name in names if not rows[name].failed]
        if not left or number == options.draws or time.monotonic() >= end:
            break
        for name in left:
            seeds = f"kernel {options.seed} {name} {number // same}", f"{options.seed} {name} {number}"
            rows[name].run(name, Draw(registry.backends()[name], device, *map(random.Random, seeds)).program())
        if number == WARM_UP:
            before = held(device)
    after = held(device)
    print(f"{device_name(device)}, seed {options.seed}")
    print(f"{'backend':<16} {'draws':>7} {'skipped':>8} {'largest error / tolerance':>26}")
    for name, row in rows.items():
        print(f"{name:<16} {row.draws:>7} {row.skipped:>8} {row.largest:>26.2f}{'  failed' if row.failed else ''}")
    if before is not None and any(x - y > most for x, y, most in zip(after, before, LEFT_OVER, strict=True)):
        grown = f"memory grew: tensors and bytes on the GPU were {before} after {WARM_UP} draws, and are {after} now."
        print(grown)
    return int(bool(grown) or any(row.failed for row in rows.values()))


def held(device: torch.device) -> tuple[int, int]:
    """The number of tensors that exist, and the bytes that are allocated on a GPU."""
    gc.collect()
    tensors = sum(issubclass(kind := type(x), torch.Tensor) and kind is not FakeTensor for x in gc.get_objects())
    return tensors, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())

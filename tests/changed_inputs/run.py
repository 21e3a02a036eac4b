"""Run one combination, and compare with the oracle or with the errors of stock PyTorch.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nt_attention.layouts.bounded import LengthsUnknownError

from .changes import HIDDEN, NO_VALUES, OPERATIONS, ORIGINS, WAYS, Change
from .entries import ENTRIES, Entry, Subject, stock_module
from .forms import Form, Lengths, Listed
from .modes import BEFORE, MODES, Mode

Both = tuple[Lengths, Lengths]
Results = dict[str, Tensor]

BATCHES: dict[str, Both] = {
    "first": ((2, 5, 4), (3, 1, 3)),
    "same total": ((3, 1, 7), (1, 4, 2)),
    "other": ((2, 6, 1, 4), (1, 5, 2, 3)),
    "other, three": ((2, 6, 5), (1, 5, 4)),
}
# Both must raise before the end of the forward pass, or both after it.
AFTER = ("change", "backward")


@dataclass(frozen=True)
class Combination:
    entry: str
    origin: str
    change: Change
    mode: str
    backend: str

    @property
    def label(self) -> str:
        return " | ".join((self.entry, self.origin, self.change.label, self.mode, self.backend))

    @property
    def of(self) -> Entry:
        return ENTRIES[self.entry]

    @property
    def how(self) -> Mode:
        return MODES[self.mode]

    @property
    def residual(self) -> bool:
        """Whether the function adds its first input to its first output: a trace that drops one gradient is seen."""
        return self.how.traced and not self.of.meaning.startswith("rows")

    @property
    def batch(self) -> Both:
        """The lengths of the inputs."""
        if self.change.moment == "between two readings":
            return _changed(BATCHES["first"], self.change.side)
        which = self.how.lengths
        return BATCHES["other, three" if which == "other" and self.of.form is Listed else which]

    @property
    def right_lengths(self) -> list[Both]:
        """By which lengths the result may be computed: one answer, two where torch can't tell of a change."""
        if self.change.moment != "before forward" or self.change.target != "lengths":
            return [self.batch]
        new = _changed(self.batch, self.change.side)
        entry = self.of
        if entry.outside and entry.carrier is not None and entry.carrier.copies:
            return [self.batch]
        return [new, self.batch] if entry.outside and self.change.how in HIDDEN else [new]


def _changed(batch: Both, side: int) -> Both:
    new = BATCHES["same total"]
    return (batch[0], new[1]) if side else (new[0], batch[1])


@dataclass
class Outcome:
    results: Results | None
    stage: str = ""
    error: BaseException | None = None


def draw(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _total(lengths: Lengths) -> int:
    return sum(lengths)


# ---- leaves and rows, the same for the oracle and the tested programs


def leaf_shapes(combination: Combination) -> dict[str, tuple[int, ...]]:
    entry, origin = combination.of, ORIGINS[combination.origin]
    shapes = {name: (_total(combination.batch[side]), *token) for name, (side, token) in entry.inputs.items()}
    if origin.shared:
        return {"all": origin.leaf(next(iter(shapes.values())))}
    return {name: origin.leaf(shape) for name, shape in shapes.items()}


def rows_of(combination: Combination, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    entry, origin = combination.of, ORIGINS[combination.origin]
    if origin.shared:
        whole = origin.rows(leaves["all"], ())
        return {name: whole if origin.shared == "same" else whole[:, at] for at, name in enumerate(entry.inputs)}
    return {
        name: origin.rows(leaves[name], (_total(combination.batch[side]), *token))
        for name, (side, token) in entry.inputs.items()
    }


def _weighted(named: dict[str, Tensor]) -> Tensor:
    """A loss in which every number has a weight of its own; an object that has two names counts once."""
    seen: dict[int, Tensor] = {}
    for name, x in named.items():
        if id(x) not in seen:
            seen[id(x)] = (x * draw(f"weight of {name}", x.shape)).sum()
    return sum(seen.values(), torch.zeros((), dtype=torch.float64))


def _second(grads: dict[str, Tensor]) -> Tensor:
    return _weighted({f"gradient of {name}": x for name, x in grads.items()})


# ---- what the oracle gives


_known: dict[Any, Results] = {}


def truth(combination: Combination, lengths: Both, variant: int = 0) -> Results:
    """Equal programs share it: those of one meaning, whatever the entry, the mode and the backend."""
    change = combination.change if combination.change.target not in NO_VALUES else Change()
    of_program = combination.of.meaning, combination.origin, change, combination.batch, combination.residual
    key = *of_program, combination.how.through == "double", lengths, variant
    if key not in _known:
        _known[key] = _compute_truth(combination, change, lengths, variant)
    return _known[key]


def _compute_truth(combination: Combination, change: Change, lengths: Both, variant: int) -> Results:
    double = combination.how.through == "double"
    entry = combination.of
    leaves = {
        name: draw(f"{name}{variant}", shape).requires_grad_() for name, shape in leaf_shapes(combination).items()
    }
    parameters = {}
    if not entry.meaning.startswith(("rows", "varlen")):
        module = stock_module(entry.meaning)
        parameters = {name: x.detach().clone().requires_grad_() for name, x in module.named_parameters()}
    rows = rows_of(combination, leaves)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which can be differentiated twice
        outs = entry.truth(rows, lengths, parameters)
    first = next(iter(rows))
    if combination.residual:
        outs["out"] = outs["out"] + rows[first]
    named = {**rows, **outs}
    if change.target:
        operand = named[change.other] if change.other else draw("operand", named[change.target].shape)
        changed = OPERATIONS[change.how].result(named[change.target], operand)
        old = named[change.target]
        named = {name: changed if x is old else x for name, x in named.items()}
    loss = _weighted({name: named[name] for name in rows}) + _weighted({name: named[name] for name in outs})
    targets = {**leaves, **parameters}
    grads = torch.autograd.grad(loss, list(targets.values()), create_graph=double, allow_unused=True)
    found = {f"d {name}": _filled(g, x) for (name, x), g in zip(targets.items(), grads, strict=True)}
    if double:
        second = torch.autograd.grad(_second(found), list(targets.values()), allow_unused=True)
        found |= {f"d2 {name}": _filled(g, x) for (name, x), g in zip(targets.items(), second, strict=True)}
    return {name: x.detach() for name, x in {**{name: named[name] for name in outs}, **found}.items()}


def _filled(grad: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if grad is None else grad


# ---- the tested programs


@functools.cache
def subject(entry: str, world: str, backend: str) -> Subject:
    made = ENTRIES[entry]
    return made.ours(backend) if world == "ours" else made.stock(world)


_prepared: dict[Any, Any] = {}
_count = itertools.count()


class ProgramRun:
    """One program in one world; ``stage`` tells how far it got."""

    def __init__(self, combination: Combination, world: str, lengths: Both) -> None:
        self.combination, self.world, self.lengths = combination, world, lengths
        self.entry, self.mode, self.change = combination.of, combination.how, combination.change
        self.stage = "make"
        self.tensors: list[Tensor] = []  # the carriers'
        self.layouts: list[Any] = []

    def run(self) -> Results:
        self.subject = subject(self.entry.name, self.world, self.combination.backend)
        batch = BATCHES["first"] if self.change.moment == "between two readings" else self.combination.batch
        self.make_lengths(batch)
        if self.mode.before in BEFORE or self.change.moment == "between two readings":
            self.stage = "before"
            with BEFORE.get(self.mode.before, torch.no_grad)():
                self.once(batch)
        if self.change.moment == "between two readings":
            self.change_lengths()
            self.make_layouts()
        return getattr(self, f"through_{self.mode.through.replace(' ', '_').replace('.', '_')}")()

    # lengths

    def make_lengths(self, batch: Both) -> None:
        if self.entry.carrier is None:
            return
        made = self.mode.before == "made in inference_mode"
        with torch.inference_mode() if made else contextlib.nullcontext():
            self.tensors = [self.entry.carrier.tensor(batch[side]) for side in range(self.entry.sides)]
        self.make_layouts()

    def make_layouts(self) -> None:
        made = self.mode.before == "layout in inference_mode"
        entry = self.entry
        self.layouts = [None] * entry.sides
        if self.world == "ours" and entry.outside and entry.carrier is not None:
            with torch.inference_mode() if made else contextlib.nullcontext():
                self.layouts = [entry.carrier.layout(x) for x in self.tensors]

    def change_lengths(self) -> None:
        assert self.entry.carrier is not None
        tensor = self.tensors[self.change.side]
        if self.change.target == "layout":
            layout = self.layouts[self.change.side]
            with contextlib.suppress(LengthsUnknownError):
                result = None if layout is None else getattr(layout, self.change.other)
                if result is not None:
                    WAYS[self.change.how](result, torch.ones_like(result))
            return
        if self.change.target == "table":
            row = tensor._base[1]
            WAYS[self.change.how](row, torch.zeros_like(row))
            return
        new = self.entry.carrier.tensor(BATCHES["same total"][self.change.side])
        WAYS[self.change.how](tensor, new)

    # calls

    def wrap(self, rows: dict[str, Tensor], batch: Both) -> dict[str, list[Tensor]]:
        parts: dict[int, list[Tensor]] = {}
        wrapped = {}
        for name, (side, _) in self.entry.inputs.items():
            x = rows[name]
            if id(x) not in parts:
                parts[id(x)] = self.entry.form.wrap(x, batch[side], self.tensors[side] if self.tensors else None)
            wrapped[name] = parts[id(x)]
        return wrapped

    def carried(self) -> list[Tensor]:
        return self.tensors if self.entry.carries and self.entry.carrier is not None else []

    def flat(self, parts: dict[str, list[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        counts = {name: len(x) for name, x in parts.items()}
        entry, function, residual = self.entry, self.subject.function, self.combination.residual

        def run(*xs: Tensor, layouts: list[Any]) -> tuple[Tensor, ...]:
            batch, at = {}, 0
            for name, count in counts.items():
                batch[name], at = list(xs[at : at + count]), at + count
            if all(len(x) == 1 and x[0] is xs[0] for x in batch.values()):  # query, key and value stay the same object
                first = batch[next(iter(batch))]
                batch = dict.fromkeys(batch, first)
            found = function(batch, list(xs[at:]), layouts)
            if residual:
                found["out"] = [a + b for a, b in zip(found["out"], batch[next(iter(batch))], strict=True)]
            return tuple(x for name in entry.outputs for x in found[name])

        run.__code__ = run.__code__.replace(co_name=f"run_{next(_count)}")  # the compiler caches by code object
        return run

    def prepared(self, parts: dict[str, list[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        function = self.flat(parts)
        if self.mode.prepare is None:
            return functools.partial(function, layouts=self.layouts)
        if not self.mode.traced:
            return self.mode.prepare(functools.partial(function, layouts=self.layouts))
        compiled = self.combination.mode.startswith("compile")
        key = (
            self.entry.name, self.world, self.combination.backend, self.combination.mode.split(",")[0],
            self.combination.origin, self.change.moment and self.layouts and not compiled and self,
        )  # fmt: skip
        if key not in _prepared:
            self.stage = "trace"
            _prepared[key] = self.prepare(function, compiled)
        ready = _prepared[key]
        if isinstance(ready, BaseException):
            self.stage = "trace"
            raise ready
        return functools.partial(ready, layouts=self.layouts) if compiled else ready

    def prepare(self, function: Callable[..., Any], compiled: bool) -> Any:
        """Trace on the first batch, on tensors that nothing else holds."""
        example = self
        if self.combination.batch != BATCHES["first"]:
            example = ProgramRun(self.combination, self.world, BATCHES["first"])
            example.subject = self.subject
            example.make_lengths(BATCHES["first"])
        shapes = leaf_shapes(
            Combination(self.entry.name, self.combination.origin, Change(), "eager", self.combination.backend)
        )
        leaves = {name: draw(f"example {name}", shape).requires_grad_() for name, shape in shapes.items()}
        first = Combination(self.entry.name, self.combination.origin, Change(), "eager", self.combination.backend)
        tensors = [x.clone() for x in example.tensors]
        example_tensors, example.tensors = example.tensors, tensors
        parts = example.wrap(rows_of(first, leaves), BATCHES["first"])
        flat = [x for own in parts.values() for x in own] + (tensors if self.carried() else [])
        example.tensors = example_tensors
        try:
            if compiled:
                return self.mode.prepare(function, flat, example.layouts)  # type: ignore[misc, call-arg]
            given = functools.partial(function, layouts=example.layouts)
            return self.mode.prepare(given, flat, self.subject.module)  # type: ignore[misc, call-arg]
        except Exception as error:  # judged with the others
            return error

    def once(self, batch: Both) -> None:
        shapes = {name: (_total(batch[side]), *token) for name, (side, token) in self.entry.inputs.items()}
        rows = {name: draw(name, shape) for name, shape in shapes.items()}
        parts = self.wrap(rows, batch)
        flat = [x for own in parts.values() for x in own] + self.carried()
        self.flat(parts)(*flat, layouts=self.layouts)

    def leaves(self, variant: int = 0) -> dict[str, Tensor]:
        """The leaves; where the form itself is to be one, its parts."""
        shapes = leaf_shapes(self.combination)
        return {name: draw(f"{name}{variant}", shape) for name, shape in shapes.items()}

    def body(self, leaves: dict[str, Tensor], *, own_leaves: bool = False) -> tuple[Tensor, Results, Any]:
        """The loss, the outputs' rows, and the parts that are leaves themselves."""
        entry, change, batch = self.entry, self.change, self.combination.batch
        self.stage = "make"
        parts = self.wrap(rows_of(self.combination, leaves), batch)
        if own_leaves:
            parts = {name: [x.detach().requires_grad_() for x in own] for name, own in parts.items()}
        function = self.prepared(parts)
        if change.moment == "before forward":
            self.stage = "change"
            self.change_lengths()
        self.stage = "call"
        with self.mode.forward():
            flat = function(*[x for own in parts.values() for x in own], *self.carried())
        outs, at = {}, 0
        for name, form in entry.outputs.items():
            count = len(self.lengths[0]) if form is Listed else 1
            outs[name], at = list(flat[at : at + count]), at + count
        named = {**parts, **outs}
        if change.target == "weight":
            self.stage = "change"
            with torch.no_grad():
                self.weight().mul_(2.0)
        elif change.moment == "before backward":
            self.stage = "change"
            self.change_lengths()
        elif change.target and change.target not in NO_VALUES:
            self.stage = "change"
            self.change_values(named)
        self.stage = "backward"
        rows: dict[str, Tensor] = {}
        taken: dict[int, Tensor] = {}
        for name, own in named.items():
            form: type[Form] = entry.form if name in parts else entry.outputs[name]
            side = entry.inputs[name][0] if name in parts else 0
            lengths = batch if name in parts or form is Listed else self.lengths
            if id(own) not in taken:
                taken[id(own)] = form.rows(own, lengths[side])
            rows[name] = taken[id(own)]
        with self.mode.backward():
            loss = _weighted({name: rows[name] for name in parts}) + _weighted({name: rows[name] for name in outs})
        return loss, {name: rows[name] for name in outs}, parts

    def weight(self) -> Tensor:
        wanted = ("in_proj_weight", "query.weight", "q_proj.weight")
        return next(x for name, x in self.subject.parameters.items() if name.endswith(wanted))

    def change_values(self, named: dict[str, list[Tensor]]) -> None:
        entry, change = self.entry, self.change
        target = named[change.target]
        form = entry.outputs.get(change.target, entry.form)
        if change.other:
            operand = named[change.other]
        else:
            side, token = entry.inputs.get(change.target, (0, ()))
            if change.target in entry.outputs:
                first = next(iter(entry.inputs.values()))[1]
                token = first[:1] if change.target == "lse" else first
            rows = draw("operand", (_total(self.combination.batch[side]), *token))
            lengths = self.combination.batch[side]
            operand = form.wrap(rows, lengths, self.tensors[side] if self.tensors else None)
        for part, other in zip(target, operand, strict=True):
            OPERATIONS[change.how].in_place(part, other, form)

    # gradients

    def through_backward(self) -> Results:
        return self.gradients()

    def through_twice(self) -> Results:
        return self.gradients(twice=True)

    def through_double(self) -> Results:
        return self.gradients(double=True)

    def gradients(self, twice: bool = False, double: bool = False) -> Results:
        own_leaves = ORIGINS[self.combination.origin].is_leaf
        leaves = self.leaves()
        if not own_leaves:
            leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        loss, outs, parts = self.body(leaves, own_leaves=own_leaves)
        parameters = self.subject.parameters
        targets: list[Tensor] = [x for own in parts.values() for x in own] if own_leaves else list(leaves.values())
        targets = targets + list(parameters.values())
        with self.mode.backward():
            if self.combination.mode == "checkpoint, reentrant":  # reentrant checkpoints support .backward() only
                for x in targets:
                    x.grad = None
                loss.backward()
                grads: Sequence[Tensor | None] = [x.grad for x in targets]
            else:
                if twice:
                    torch.autograd.grad(loss, targets, retain_graph=True, allow_unused=True)
                grads = torch.autograd.grad(loss, targets, create_graph=double, allow_unused=True)
        grads = [_filled(g, x) for g, x in zip(grads, targets, strict=True)]
        found: Results = dict(outs)
        values = grads[: len(grads) - len(parameters)]
        named = self.by_leaf(values, leaves, parts, own_leaves)
        named |= {f"d {name}": g for name, g in zip(parameters, grads[len(values) :], strict=True)}
        if double:
            second = torch.autograd.grad(_second(named), targets, allow_unused=True)
            second = [_filled(g, x) for g, x in zip(second, targets, strict=True)]
            twos = self.by_leaf(second[: len(values)], leaves, parts, own_leaves)
            twos |= {f"d {name}": g for name, g in zip(parameters, second[len(values) :], strict=True)}
            named |= {f"d2 {name[2:]}": g for name, g in twos.items()}
        return {name: x.detach() for name, x in {**found, **named}.items()}

    def by_leaf(
        self, grads: Sequence[Tensor], leaves: dict[str, Tensor], parts: dict[str, list[Tensor]], own_leaves: bool
    ) -> Results:
        if not own_leaves:
            return {f"d {name}": g for name, g in zip(leaves, grads, strict=True)}
        found, at = {}, 0
        for name, own in parts.items():
            side = self.entry.inputs[name][0]
            found[f"d {name}"] = self.entry.form.rows(grads[at : at + len(own)], self.combination.batch[side])
            at += len(own)
        return found

    def through_threads(self) -> Results:
        """Four at once on the same layouts and module; the worst counts."""
        found: list[Results | BaseException] = []
        together = threading.Barrier(4)

        def work() -> None:
            try:
                program = ProgramRun(self.combination, self.world, self.lengths)
                program.subject, program.tensors, program.layouts = self.subject, self.tensors, self.layouts
                together.wait()
                found.append(program.gradients())
            except Exception as error:  # raised below
                self.stage = program.stage
                found.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        want = truth(self.combination, self.lengths)
        return next((one for one in found if _difference(one, want, self.entry.tolerance)), found[0])  # type: ignore

    def as_function(self, *leaves: Tensor) -> tuple[Tensor, Results]:
        loss, outs, _ = self.body(dict(zip(leaf_shapes(self.combination), leaves, strict=True)))
        return loss, outs

    def through_func_grad(self) -> Results:
        leaves = self.leaves()
        which = tuple(range(len(leaves)))
        grads, outs = torch.func.grad(self.as_function, argnums=which, has_aux=True)(*leaves.values())
        return {**outs, **{f"d {name}": g for name, g in zip(leaves, grads, strict=True)}}


def wanted(combination: Combination, lengths: Both) -> Results:
    return truth(combination, lengths)


def attempt(combination: Combination, world: str, lengths: Both) -> Outcome:
    program = ProgramRun(combination, world, lengths)
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        warnings.simplefilter("ignore")
        try:
            return Outcome(program.run(), "backward")
        except Exception as error:  # judged below
            # In torch 2.11, the hooks of a checkpoint stay active until its generator, a local variable, is freed.
            traceback.clear_frames(error.__traceback__)
            return Outcome(None, program.stage, error)
        finally:
            if combination.change.target == "weight" and hasattr(program, "subject"):
                kind = combination.of.meaning
                with torch.no_grad():
                    for name, x in program.subject.parameters.items():
                        x.copy_(dict(stock_module(kind).named_parameters())[name])


def _difference(got: Results, want: Results, tolerance: float) -> str:
    if got.keys() != want.keys():
        return f"it gives {sorted(got)} where {sorted(want)} is wanted"
    for name, x in want.items():
        if got[name].shape != x.shape:
            return f"{name} has shape {tuple(got[name].shape)}, not {tuple(x.shape)}"
        error = (got[name].double() - x).abs().max().item() if x.numel() else 0.0
        if not error <= tolerance * max(1.0, x.abs().max().item() if x.numel() else 0.0):
            return f"{name} is off by {error:.2g}"
    return ""


ALLOWED = (RuntimeError, ValueError, TypeError)


@dataclass
class Verdict:
    """``kind``: "right", "as stock" (refused where stock raises), "documented" (refused by the table), or "wrong"."""

    kind: str
    what: str = ""


def judge(combination: Combination, documented: Callable[[Combination, str, str], bool]) -> Verdict:
    differences = []
    for lengths in combination.right_lengths:
        ours = attempt(combination, "ours", lengths)
        if ours.error is not None:
            break
        assert ours.results is not None
        off = _difference(ours.results, wanted(combination, lengths), combination.of.tolerance)
        if not off:
            return Verdict("right")
        differences.append(off)
    else:
        return Verdict("wrong", "; or ".join(differences))
    error = ours.error
    message = (
        f"{type(error).__name__} at {ours.stage}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
    )
    stocks = []
    for way in combination.of.ways:
        stock = _stock(combination, way)
        stocks.append(stock)
        same = type(stock.error) is type(error) and str(stock.error) == str(error)  # the same error of torch
        is_clear = isinstance(error, ALLOWED) and bool(str(error))
        in_place = stock.error is not None and (stock.stage not in AFTER or ours.stage in AFTER)
        if in_place and (same or is_clear):
            return Verdict("as stock", message)
    if not isinstance(error, ALLOWED) or not str(error):
        return Verdict("wrong", f"bare {message}")
    if documented(combination, ours.stage, f"{type(error).__name__}: {error}"):
        return Verdict("documented", message)
    places = sorted({x.stage for x in stocks if x.error is not None})
    return Verdict("wrong", f"{message} ({f'stock raises later, at {places}' if places else 'stock does not raise'})")


_stocks: dict[Any, Outcome] = {}


def _stock(combination: Combination, way: str) -> Outcome:
    """What the stock program does, whatever our backend."""
    if combination.entry.startswith("varlen_attention/transposed") and combination.mode.startswith(KILLED_BY):
        return Outcome(None, "trace", RuntimeError("torch ends the process"))
    key = (combination.entry, combination.origin, combination.change, combination.mode, way)
    if key not in _stocks:
        found = attempt(combination, way, combination.right_lengths[0])
        _stocks[key] = Outcome(None, found.stage, found.error)
    return _stocks[key]


# NestedTensors ragged in dimension 2 under make_fx: "terminate called … operator aten::sym_size does not exist".
KILLED_BY = ("export",)

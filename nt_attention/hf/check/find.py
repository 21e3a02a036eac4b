"""Finds how a model is packed, by running the model itself on short rows, in its dtype and on its device.

"Packed equals each sequence alone" is two statements:

- A sequence does not depend on its neighbors. The same row runs again with other tokens in the neighbors: what the
  sequence gives has equal bits, because shapes, kernels and random numbers are the same. So dropout may be on.
- It has the right positions, windows and scales. The packed row is compared with each sequence alone, in the tolerance
  of the dtype; and module by module, when neighbors get other lengths, the same input must give the same output.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss

from ...patching.handle import PatchHandle
from .. import families
from ..pack.attention_code import has_adapter
from ..pack.change_model import make_padding_free, set_attention
from ..pack.convolutions import classes_with_convolutions
from ..pack.deferred_scores import CannotDeferError
from ..pack.padded_modules import one_group
from ..pack.side_effects import RandomNumbers
from ..pack.tensor_parallel import DIVIDES_TOKENS, divides_tokens
from ..plan import Form, Head, Plan, Positions
from ..route.dropout import without_attention_dropout
from ..route.packed_mask import CannotMaskError, MixesSequencesError
from ..route.rope import scales_by_length
from .errors import TOLERANCE, UNITS, is_near_loss, relative_error, units_apart, worst
from .rows import (
    OTHER_LENGTHS,
    Rows,
    Seen,
    device_of,
    embeddings_of,
    gathered,
    hooked,
    options_of,
    plain_mode,
    run,
    run_and_watch,
    seed_all,
    tensors_in,
    unchanged,
)

MOST_PADDED_CLASSES = 4
_PAST_ALL = 2**31  # the number of a call after those of all modules
_MIXES = "mixes the sequences of a packed row"
_BY_LENGTH = "depends on the lengths of other sequences in the row"


class NotPackableError(Exception):
    """A model can't be packed. The message says why.

    Attributes:
        module_class: the class of the module that mixes tokens, if it is known.
        number: the number of its call in the forward. The plan that fails in the last one is the best of those tried.
    """

    def __init__(self, reason: str, module_class: str | None = None, number: int = -1) -> None:
        super().__init__(reason)
        self.module_class, self.number = module_class, number

    @classmethod
    def by(cls, cause: Seen | None, reason: str) -> NotPackableError:
        """An error whose cause is a call of a module; None if it is none of them."""
        return cls(reason, None, _PAST_ALL) if cause is None else cls(reason, type(cause.module).__name__, cause.number)


class _CannotRunError(NotPackableError):
    """A usual call of the model runs padded, whatever the plan is."""


class _StrictHandle(PatchHandle):
    """The handle of a model during the check: a call that does not run packed is an error."""

    def fall_back(self, reason: str, what: str = "this call", advice: str = "") -> None:
        raise _CannotRunError(f"a call with input_ids and attention_mask can't run packed: {reason}")

    def differ(self, difference: str) -> None:
        """Differences are told in calls of users."""


@contextmanager
def packed(model: Any, plan: Plan, shared_prefixes: bool = False) -> Iterator[PatchHandle]:
    """A context in which a model runs packed by a plan."""
    with _StrictHandle(type(model).__name__, shared_prefixes=shared_prefixes) as handle:
        if families.has_named_attention(model):
            set_attention(model, handle)
        make_padding_free(model, plan, families.family_of(model), handle, "always", shared_prefixes, one_group)
        yield handle


def find_plan(model: PreTrainedModel, inside: bool = False) -> Plan:
    """How a model is packed. It stays as it is.

    Args:
        model: the model.
        inside: whether this is called in a call of the model. Its hooks then do not run again.

    Raises:
        NotPackableError: it can't be packed.
    """
    if divides_tokens(model):
        raise NotPackableError(DIVIDES_TOKENS)
    with plain_mode(device_of(model)), unchanged(model):
        return _Check(model, inside).find()


def why_prefixes_differ(model: PreTrainedModel, plan: Plan) -> str | None:
    """Why computing shared prefixes once would change what a model gives, or None."""
    base: Any = families.base_model(model)
    rows = Rows.draw(model, (47, 41, 52, 23))
    first = rows.sequences[0][:40]
    rows = replace(
        rows, sequences=(*(torch.cat([first, x[len(first) :]]) for x in rows.sequences[:3]), rows.sequences[3])
    )
    plan = replace(plan, head=None)
    with plain_mode(device_of(model)), unchanged(model):
        base.eval()
        try:
            with packed(base, plan):
                want = run(base, rows)
            with packed(base, plan, shared_prefixes=True) as handle:
                got = run(base, rows)
        except NotPackableError as error:
            return str(error)
    assert handle.prefixes is not None
    ratio, name = worst(got, want)
    reasons = [reason for reason in handle.prefixes.calls if reason is not None]
    return f"its {name} differs if shared prefixes are computed once" if ratio > 1 else next(iter(reasons), None)


class _Check:
    """The check of one model."""

    def __init__(self, model: PreTrainedModel, inside: bool) -> None:
        self.inside = inside
        self.model: Any = model
        self.base: Any = families.base_model(model)
        self.rows, self.other = Rows.draw(model), Rows.draw(model, seed=1)
        longer = Rows.draw(model, OTHER_LENGTHS, seed=2)
        targets = longer.targets and (longer.targets[0][:3], self.rows.targets[1], longer.targets[2])  # type: ignore[index]
        sequences = longer.sequences[0], self.rows.sequences[1], longer.sequences[2]
        self.longer = replace(longer, sequences=sequences, targets=targets)

    def find(self) -> Plan:
        """The plan of the model.

        Raises:
            NotPackableError: it can't be packed.
        """
        self.base.eval()
        self.scales = any(map(scales_by_length, self.base.modules()))
        try:
            first, *others = self.rows.each()[1:]
            values, seen = run_and_watch(self.base, first, 0, self.inside)
            alone = [values, *(run(self.base, each, self.inside) for each in others)]
            left = run(self.base, replace(self.rows, is_left=True), self.inside)
        except Exception as error:  # the code of any model
            raise NotPackableError(f"it does not run on rows of token ids: {first_line(error)}") from error
        self.alone = {name: torch.cat([x[name] for x in alone]) for name in alone[0]}  # of all but the first
        self.left = left if _are_finite(left) else None  # BLOOM in float64 gives NaN
        # Under autocast, outputs may have another dtype than those of modules.
        dtypes = {x.dtype for each in seen for x in each.outputs} | {x.dtype for x in values.values()}
        self.dtype = max(dtypes, key=lambda dtype: TOLERANCE.get(dtype, 0.0))
        self.tolerance = TOLERANCE.get(self.dtype, 0.0)
        if not self.alone or not _are_finite(self.alone):
            raise NotPackableError("its outputs are not finite, or have no values for tokens")
        plan = self._find_modules()
        return self._find_head(plan)

    def _find_modules(self) -> Plan:
        """The plan of the base model. A module that mixes tokens is tried on padded rows."""
        plans, first = list(self._plans()), None
        while True:
            failures = []
            for plan in plans:
                try:
                    return self._try(plan)
                except NotPackableError as error:
                    failures.append(error)
                finally:
                    self.base.eval()
            if isinstance(failures[0], _CannotRunError):
                raise failures[0]
            first = first or next((x for x in failures if x.module_class), failures[0])
            furthest = max(failures, key=lambda x: x.number)
            found = furthest.module_class
            alike = [x.number == furthest.number or (found and x.module_class == found) for x in failures]
            plans = list(itertools.compress(plans, alike))
            padded = plans[0].padded
            if found is not None and found not in padded and len(padded) < MOST_PADDED_CLASSES:
                plans = [_with_padded(plan, found) for plan in plans]
            elif padded and not plans[0].equal_lengths:  # a module may read the padding of its rows
                plans = [replace(plan, equal_lengths=True) for plan in plans]
            else:
                raise first

    def _plans(self) -> Iterator[Plan]:
        """The plans that are tried, the usual ones first."""
        family = families.family_of(self.model)
        positions = [family.positions] if family.positions else get_args(Positions)
        plan = Plan(convolutions=tuple(classes_with_convolutions(self.base)))
        if getattr(self.base, "pooler", None) is not None and "pooler_output" in self.alone and family.pool is None:
            plan = replace(plan, pool=True)
        if families.is_encoder_decoder(self.model):
            yield from (replace(plan, positions=each, mask="pairs") for each in positions)
            return
        forms: tuple[Form, ...] = get_args(Form)
        if families.routes_attention(self.model) and not has_adapter(self.base):
            yield from (replace(plan, positions=each) for each in positions)
            forms = ("pairs",)
        for form, is_causal, each in itertools.product(forms, (False, True), positions):
            yield replace(plan, positions=each, mask=form, is_causal=is_causal)

    def _try(self, plan: Plan) -> Plan:
        """The plan, with what is found out about it.

        Raises:
            NotPackableError: the base model gives something else packed.
        """
        with packed(self.base, plan):
            values, seen = self._watch(self.rows)
            self._compare_bits(values, "", seen)
            reads_padding = self._compare_alone(plan, values)
            _, of_longer = self._watch(self.longer)
            self._compare_lengths(seen, of_longer)
            self.base.train()
            with without_attention_dropout(), RandomNumbers(device_of(self.base)) as random:
                self._compare_bits(self._run_with_gradients(), "in training, ")
        if random.made:
            self._check_random()
        return replace(plan, reads_padding=reads_padding)

    def _run(self, rows: Rows) -> dict[str, Tensor]:
        with _explained(self.base):
            return run(self.base, rows, self.inside)

    def _watch(self, rows: Rows) -> tuple[dict[str, Tensor], list[Seen]]:
        with _explained(self.base):
            return run_and_watch(self.base, rows, min(1, len(rows.sequences) - 1), self.inside)

    def _compare_bits(self, values: dict[str, Tensor], when: str, seen: list[Seen] | None = None) -> None:
        """Compare what the second sequence gives if its neighbors have other tokens.

        With `seen`, also what each module gives: its effect on the result may be 0 now, as that of a new adapter.
        """
        again, values = self.rows.with_neighbors(self.other), self.rows.part(values, 1)
        if seen is None:
            if not _differs(self.rows.part(self._run(again), 1), values):
                return
            _, seen = self._watch(self.rows)
            got, changed = self._watch(again)
        else:
            got, changed = self._watch(again)
            if not _differs(self.rows.part(got, 1), values) and first_cause(seen, changed) is None:
                return
        repeated, once_more = self._watch(self.rows)
        if _differs(self.rows.part(repeated, 1), values, many=2**14):
            cause = first_cause(seen, once_more)
            raise NotPackableError.by(cause, f"{when}{of_cause(cause)} gives other values when the same row runs again")
        cause = first_cause(seen, changed)
        if cause is None and not _differs(self.rows.part(got, 1), values, many=2**10):
            return  # an order of additions that is not fixed
        raise NotPackableError.by(cause, f"{when}{of_cause(cause)} {_MIXES}")

    def _compare_alone(self, plan: Plan, got: dict[str, Tensor]) -> bool:
        """Compare with each sequence alone, with padding on the right and on the left.

        Returns:
            Whether the unpatched model reads padding.
        """
        ratio, name = worst(self._without_first(got), self.alone, self.tolerance)
        if ratio > 1:
            reason = f"its {name} differs between a packed row and each sequence alone"
            raise NotPackableError.by(self._apart(), reason)
        got = self._run(replace(self.rows, is_left=True))
        if self.left is not None and self._is_near(got, self.left):
            return False
        # Unpatched, states read padding, and some rotary embeddings are scaled by the longest row of a batch.
        may_differ = self.left is None or self.scales or (plan.mixing and plan.positions != "ids")
        of_tokens = self._of_tokens(self.alone, len(self.rows.sequences) - 1)
        if may_differ and worst(self._without_first(got), of_tokens, self.tolerance)[0] <= 1:
            return self.left is not None and bool(plan.mixing)
        raise NotPackableError.by(None, "with padding on the left, its values are not those of the padded run")

    def _without_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """What all sequences but the first give."""
        found = {}
        for name, x in values.items():
            parts = [self.rows.part({name: x}, n) for n in range(1, len(self.rows.sequences))]
            found[name] = torch.cat([part[name] for part in parts]) if parts[0] else x[1:]
        return found

    def _of_tokens(self, values: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Without the values for each row, such as a pooled output, which models read from padding on the left."""
        return {name: x for name, x in values.items() if len(x) > rows}

    def _is_near(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
        return worst(got, self._of_tokens(want, len(self.rows.sequences)), self.tolerance)[0] <= 1

    def _apart(self) -> Seen | None:
        """The first module that gives other values in the packed row than for the sequence alone."""
        _, seen = self._watch(self.rows)
        _, alone = self._watch(self.rows.each()[1])
        return first_cause(seen, alone, self.tolerance)

    def _compare_lengths(self, seen: list[Seen], of_longer: list[Seen]) -> None:
        """Compare the calls of modules, if the neighbors of the second sequence have other lengths."""
        units = max((torch.finfo(x.dtype).eps for each in seen for x in each.outputs), default=0.0)
        cause = first_cause(seen, of_longer, max(0.1 * self.tolerance, 4 * units))  # the length may choose the kernel
        if cause is not None:
            raise NotPackableError.by(cause, f"{of_cause(cause)} {_BY_LENGTH}")

    def _run_with_gradients(self) -> dict[str, Tensor]:
        """Run the rows, and check that no gradient flows from the second sequence to its neighbors."""
        embeddings, kept = embeddings_of(self.base), list[Tensor]()
        if embeddings is None or self.rows.targets or not _has_plain_parameters(self.base):
            return self._run(self.rows)

        def keep(module: nn.Module, args: Any, out: Any) -> Any:
            kept.append(out.detach().requires_grad_())
            return kept[-1].clone()  # the model may change it in place

        trained = [x for x in self.base.parameters() if x.requires_grad]
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            with torch.enable_grad(), hooked([embeddings], keep):
                values = self._run(self.rows)
                own = next((x for x in self.rows.part(values, 1).values() if x.requires_grad), None)
                if own is not None and kept:
                    own.float().square().sum().backward()  # reentrant checkpoints support no `autograd.grad`
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        gradient = kept[-1].grad if kept else None
        before, length, _ = self.rows.lengths
        if gradient is not None and gradient.shape[:2] == (1, sum(self.rows.lengths)):
            gradient[0, before : before + length] = 0
            if bool(gradient.any()):
                raise NotPackableError("in training, a gradient flows from one sequence of a packed row to another")
        return values

    def _check_random(self) -> None:
        """Check that the model makes no random numbers for each row: a packed batch has one row."""
        self.base.train()
        seed_all(0)
        with RandomNumbers(device_of(self.base)) as random:
            self.base(**self.rows.inputs)
        name = random.by_row(*self.rows.inputs["attention_mask"].shape)
        if name is not None:
            raise NotPackableError(
                f"in training it makes random numbers with {name} for each row, as stochastic depth does, and a packed "
                "batch has one row"
            )

    def _find_head(self, plan: Plan) -> Plan:
        """The plan with how the head runs."""
        self.model.eval()
        labels, has_base = self._labels(), self.base is not self.model
        out = self._call_padded(labels) or self._call_padded({})
        if out is None:  # it takes other arguments than its base model
            return replace(plan, head="sequence" if has_base else None)
        labels = labels if out.get("loss") is not None else {}
        heads = self._heads(out, labels)
        if not heads and not has_base:
            return plan
        for head in heads:
            if self._runs_packed(replace(plan, head=head), labels, out):
                return replace(plan, head=head)
        if not has_base:
            raise NotPackableError("its head or its loss gives something else in a packed row")
        plan = replace(plan, head="sequence", head_mixes=bool(heads))
        with _explained(self.model), packed(self.model, plan):
            self._call_model(labels)
        return plan

    def _heads(self, out: Any, labels: dict[str, Tensor]) -> list[Head]:
        """How the head may run packed."""
        shape, takes_labels = self._mask.shape, bool(self._labels())
        if "start_logits" in out:
            return ["span"] if self.rows.targets is None else []
        if not any(x.shape[:2] == shape for name, x in tensors_in(out) if "logits" in name):
            return []
        if self.rows.targets is not None or not labels:
            return [] if takes_labels and not labels else ["token"]
        # If the next token is predicted, nothing predicts the first tokens of rows: labels for them alone are as none.
        # A change of some labels of many would not do, because the mean over all of them hides it in 16 bits.
        none = labels["labels"].new_full(shape, -100)
        alone = none.clone()
        alone[:, 0] = labels["labels"][:, 0]
        first, nothing = ((self._call_padded({"labels": x}) or {}).get("loss") for x in (alone, none))
        if first is None or nothing is None:
            return ["token"]
        return ["next token" if torch.allclose(first, nothing, rtol=0, atol=0, equal_nan=True) else "token"]

    def _runs_packed(self, plan: Plan, labels: dict[str, Tensor], out: Any) -> bool:
        """Whether the head gives the same packed as `out`, the padded outputs."""
        if plan.head == "span":
            last = torch.tensor(self.rows.lengths, device=self._mask.device) - 1
            spans = {"start_positions": last // 2, "end_positions": last}
            out = self._call_padded(spans) or out
            if (loss := out.get("loss")) is not None:
                known = ForQuestionAnsweringLoss(out["start_logits"], out["end_logits"], **spans)
                if not is_near_loss(known, loss, self.dtype, error=0.0):  # a loss of its own
                    return False
        try:
            if plan.reads_padding or self.scales:  # the padded run gives something else
                with packed(self.model, replace(plan, head="sequence")):
                    out = self._call_model(labels)
            with packed(self.model, plan):
                got = self._call_model(labels)
        except Exception:  # the head can't run packed
            return False
        values, padded = self.rows.values(got), self.rows.values(out)
        if not self._is_near(values, padded):
            return False
        if plan.head != "span" and not self._has_same_numbers(got, out):
            return False
        loss, want = got.get("loss"), out.get("loss")
        if plan.head == "span" or want is None:
            return True
        error = max((relative_error(values[name], x) for name, x in padded.items() if name in values), default=0.0)
        return loss is not None and is_near_loss(loss, want, self.dtype, error)

    def _has_same_numbers(self, got: Any, out: Any) -> bool:
        """Whether outputs that are one number, or one for each row, are those of the padded outputs."""
        numbers = {name: x for name, x in tensors_in(out) if x.dim() < 2}
        return worst(dict(tensors_in(got)), numbers, self.tolerance)[0] <= 1

    def _call_padded(self, labels: dict[str, Tensor]) -> Any:
        """The padded outputs, or None if the model takes other arguments, or returns no outputs by name."""
        try:
            out = self._call_model(labels)
        except Exception:  # the code of any model
            return None
        return out if isinstance(out, Mapping) else None

    @property
    def _mask(self) -> Tensor:
        """(B, L) bool, the tokens that have labels."""
        return self.rows.inputs["decoder_attention_mask" if self.rows.targets else "attention_mask"].bool()

    def _labels(self) -> dict[str, Tensor]:
        """Labels of two kinds for all tokens, if the model takes labels."""
        parameters = inspect.signature(self.model.forward).parameters
        if "labels" not in parameters and not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            return {}
        drawn = torch.randint(2, self._mask.shape, generator=torch.Generator().manual_seed(3))
        return {"labels": drawn.to(self._mask.device).masked_fill(~self._mask, -100)}

    def _call_model(self, labels: dict[str, Tensor]) -> Any:
        seed_all(0)
        inputs = self.rows.inputs
        if labels and self.rows.targets is not None:
            inputs = {name: x for name, x in inputs.items() if not name.startswith("decoder_")}
        run = self.model.forward if self.inside else self.model
        out = run(**inputs, **{name: x.clone() for name, x in labels.items()}, **options_of(self.model))
        return gathered(out) if isinstance(out, Mapping) else out


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """A context in which an error of the code of a packed model says why it can't be packed."""
    try:
        yield
    except NotPackableError:
        raise
    except Exception as error:  # the code of any model
        raise why_raised(model, error) from error


def _are_finite(values: dict[str, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in values.values())


def _with_padded(plan: Plan, name: str) -> Plan:
    """The plan, with a class of modules that runs on padded rows."""
    convolutions = tuple(x for x in plan.convolutions if x != name)
    return replace(plan, padded=(*plan.padded, name), convolutions=convolutions)


def _has_plain_parameters(model: nn.Module) -> bool:
    """Whether a part of the model can have a backward that has no effect on its parameters.

    With FSDP it has one, and a model made in inference mode can have none.
    """
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_inference() for x in model.parameters())


def _differs(got: dict[str, Tensor], want: dict[str, Tensor], many: float = 0) -> bool:
    """Whether what a sequence gives has changed, by more units in the last place than `many`, or than its dtype's."""
    return any(n not in got or units_apart(got[n], x) > max(many, UNITS.get(x.dtype, 0)) for n, x in want.items())


def first_cause(one: list[Seen], two: list[Seen], tolerance: float = 0.0) -> Seen | None:
    """The first module that gives other outputs though its inputs are the same, or nearly so."""
    for a, b in zip(one, two, strict=False):
        if a.path != b.path:
            return None
        if not a.outputs or not all(_same(x, y, 0.01 * tolerance) for x, y in zip(a.inputs, b.inputs, strict=False)):
            continue
        if any(not _same(x, y, tolerance) for x, y in zip(a.outputs, b.outputs, strict=False)):
            return a
    return None


def _same(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if tolerance == 0.0:
        return units_apart(x, y) <= UNITS.get(x.dtype, 0)
    return relative_error(x, y) <= tolerance


def of_cause(cause: Seen | None) -> str:
    return "the model" if cause is None else f"{cause.path} ({type(cause.module).__name__})"


def why_raised(model: nn.Module, error: Exception) -> NotPackableError:
    """Why a packed model that raises an error can't be packed."""
    paths = {id(module): (path, type(module).__name__) for path, module in model.named_modules() if path}
    where, kind, traceback = f"the forward of {type(model).__name__}", None, error.__traceback__
    while traceback is not None:  # the innermost module that raised it
        module = traceback.tb_frame.f_locals.get("self", traceback.tb_frame.f_locals.get("module"))
        if id(module) in paths:
            path, kind = paths[id(module)]
            where = f"{path} ({kind})"
        traceback = traceback.tb_next
    if isinstance(error, CannotDeferError | CannotMaskError):
        return NotPackableError(f"{where} {error}", kind)
    if isinstance(error, MixesSequencesError):
        return NotPackableError(f"{where} computes attention over the whole row", kind)
    if "packed sequences apart without" in str(error):  # from transformers' functions that use such packages
        return NotPackableError(f"in {where}, {str(error).splitlines()[0]}", kind)
    reads_mask = "(0)" in str(error)  # the mask of a packed row has no elements
    why = "uses the attention mask, which a packed row does not have, or does not pass on its cu_seq_lens"
    return NotPackableError(f"{where} {why if reads_mask else f'raises {first_line(error)}'}", kind)


def first_line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"

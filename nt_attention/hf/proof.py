"""Proves on a twin of a Hugging Face model that it can be packed, and finds out how.

The twin (`twin.py`) runs a batch with padding packed, and each sequence alone without a patch. Both must give the same
outputs and gradients, in evaluation and in training. For the losses, for padding on the left, for padding between
tokens and for `inputs_embeds`, the packed run is compared with the unpatched padded run.

Dimensions: B rows of a padded batch, L positions in a row.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import diagnosis, families
from .change_model import make_padding_free, set_attention
from .families import Family, Head, Positions
from .rope import scales_by_length
from .twin import CannotBuild, build_twin, isolated, padding_of, vocabulary_of

LENGTHS = (7, 1, 23, 12)
LONG = (3, 120, 70, 1)  # for what happens at a distance, such as a window that the config does not name
POSITIONS: tuple[Positions, ...] = ("padded", "tokens", "ids")
# The largest error, relative to the largest value. Many models compute norms in float32 even if they are in float64.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}


@dataclass(frozen=True)
class Proof:
    """What was proven about a class and a config.

    Attributes:
        reason: why the model can't be packed, or None if it can.
        positions, pool: as in `Family`; `pool` is whether the base model's `pooler` gets the first token of each row.
        head: how the head runs, or None for a base model.
        holes: whether rows with padding between tokens can be packed.
        embeds: whether `inputs_embeds` can be packed.
        token_types: whether `token_type_ids` can be packed.
        tried: False if no small model could be built and run, which may be different next time.
    """

    reason: str | None = None
    positions: Positions = "padded"
    pool: bool = False
    head: Head | None = None
    holes: bool = True
    embeds: bool = True
    token_types: bool = True
    tried: bool = True

    @property
    def is_valid(self) -> bool:
        """Whether the fields have values that they can have; a file of the cache may have others."""
        flags = (self.pool, self.holes, self.embeds, self.token_types, self.tried)
        return (
            (self.reason is None or isinstance(self.reason, str))
            and self.positions in POSITIONS
            and self.head in (None, *families.HEADS)
            and all(isinstance(flag, bool) for flag in flags)
        )


class NotProven(Exception):
    """The packed run of a twin is wrong. The message says why."""


def prove(kind: type[PreTrainedModel], config: Any, parts: frozenset[str], family: Family) -> Proof:
    """Prove on a twin how models of a class and a config can be packed, or why they can't.

    Takes up to some seconds. The random state of the caller stays as it is.

    Args:
        kind: the class.
        config: its config.
        parts: the classes of its modules, as from `parts_of`.
        family: what is known about the family.
    """
    with isolated():
        try:
            twin = build_twin(kind, config, parts)
        except CannotBuild as error:
            return Proof(f"no small model of its class can be built and run, to try it: {error}", tried=False)
        try:
            return _Trial(twin, family).prove()
        except NotProven as failure:
            reason = str(failure)
            if twin.config._attn_implementation == "sdpa" and "differs" in reason:  # it ignores some options
                with suppress(Exception):
                    twin.set_attn_implementation("eager")
                    return _Trial(twin, family).prove()
            return Proof(reason)
        except Exception as error:  # the unpatched model can't run these inputs
            reason = f"a small model of its class raises an error without the patch: {_first_line(error)}"
            return Proof(reason, tried=False)


class Batch:
    """A batch of four sequences, with padding on the right, on the left, or between the tokens.

    A long batch also has special ids, such as those of beginnings and ends.
    """

    def __init__(self, side: str, vocabulary: int, padding: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = LONG if side == "long" else LENGTHS
        self.mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        if side == "left":
            self.mask = self.mask.flip(1)
        if side == "holes":
            self.mask[3] = self.mask[3].roll(5).logical_or(torch.arange(max(LENGTHS)) < 2)
            self.lengths = tuple(self.mask.sum(1).tolist())
        first = padding + 1 if side == "long" else 6
        tokens = torch.randint(first, vocabulary, (sum(self.lengths),), generator=generator)
        self.ids = torch.full(self.mask.shape, padding).masked_scatter(self.mask, tokens)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask.long()}

    def rows(self) -> list[dict[str, Tensor]]:
        """The inputs of each sequence alone, without padding."""
        alone = [ids[mask][None] for ids, mask in zip(self.ids, self.mask, strict=True)]
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in alone]

    def values(self, out: Any) -> dict[str, Tensor]:
        """The outputs of a padded run: (T, …) for tokens, (B, …) for rows."""
        found = {}
        for name, value in _tensors(out):
            if value.shape[:2] == self.mask.shape:
                found[name] = value[self.mask]
            elif value.dim() and value.numel() % len(self.ids) == 0:
                found[name] = value.reshape(len(self.ids), -1)
        return found

    def values_alone(self, outs: list[Any]) -> dict[str, Tensor]:
        """The same, from the runs of each sequence alone."""
        found: dict[str, Tensor] = {}
        by_name = [dict(_tensors(out)) for out in outs]
        for name, first in by_name[0].items():
            parts = [tensors[name] for tensors in by_name]
            per_token = first.dim() > 1 and all(x.shape[1] == n for x, n in zip(parts, self.lengths, strict=True))
            if per_token:
                found[name] = torch.cat([part[0] for part in parts])
            elif first.dim():
                found[name] = torch.cat([part.reshape(1, -1) for part in parts])
        return found


def _tensors(out: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, by name. Of a tuple or a list they are numbered."""
    for name, value in out.items():
        if name in ("past_key_values", "loss"):
            continue
        parts = enumerate(value) if isinstance(value, tuple | list) else [("", value)]
        for number, part in parts:
            if isinstance(part, Tensor):
                yield f"{name}{number}", part.double() if not part.is_floating_point() else part


class _Handle:
    """A handle for a twin: a call that does not run packed is an error."""

    active = True

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def change(self, name: str, description: str) -> None: ...
    def change_layers(self, name: str, layers: dict[str, str]) -> None: ...
    def leave(self, name: str, reason: str) -> None: ...

    def on_remove(self, undo: Callable[[], None]) -> None:
        self.undo.append(undo)

    def count(self, reason: str | None) -> None: ...

    def fall_back(self, reason: str, what: str = "this call") -> None:
        raise NotProven(f"can't run packed: {reason}")


class _Trial:
    """The proof of one twin."""

    def __init__(self, twin: PreTrainedModel, family: Family) -> None:
        self.twin: Any = twin
        self.base: Any = families.base_model(twin)
        self.family = family
        self.tolerance = TOLERANCE[next(iter(twin.parameters())).dtype]
        # Unpatched, such RoPE is scaled for the longest row of a batch, so a padded batch is no reference.
        self.scaled_by_length = any(scales_by_length(module) for module in twin.modules())
        parameters = inspect.signature(twin.forward).parameters.values()
        self.names = {p.name for p in parameters}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            self.names |= {"labels", "start_positions", "end_positions"}
        # its inputs have the shape (B / 2, 2, L)
        self.choices = type(twin).__name__.endswith("ForMultipleChoice")

    def prove(self) -> Proof:
        has_head = self.base is not self.twin
        family = self._find_positions()
        proof = Proof(positions=family.positions or "padded", pool=family.pool is not None)
        head: Head | None = None
        if has_head or "logits" in self._run(self.twin, self._batch("right").inputs):
            head = self._find_head(family)
        else:
            self._check_training(family, None)
        self._check_long(family)
        return dataclasses.replace(
            proof,
            head=head,
            holes=self._holes(family),
            embeds=self._embeds(family),
            token_types=self._token_types(family),
        )

    def _batch(self, side: str) -> Batch:
        return Batch(side, vocabulary_of(self.twin), padding_of(self.twin))

    # Runs

    @torch.no_grad()
    def _run(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        return model(**self._form(model, inputs))

    def _form(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs in the form that the model takes."""
        if not self.choices or model is self.base:
            return inputs
        choices = min(2, len(inputs["input_ids"]))
        return {name: x if name == "labels" else x.unflatten(0, (-1, choices)) for name, x in inputs.items()}

    @contextmanager
    def _patched(self, family: Family, head: Head | None) -> Iterator[None]:
        handle = _Handle()
        try:
            set_attention(self.twin, handle)
            make_padding_free(self.twin, family, head, handle, "padded")
            yield
        finally:
            handle.active = False
            while handle.undo:
                handle.undo.pop()()

    def _packed(self, model: Any, inputs: dict[str, Tensor], family: Family, head: Head | None) -> Any:
        with self._patched(family, head), torch.no_grad():
            return self._call(model, inputs)

    def _call(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        try:
            return model(**self._form(model, inputs))
        except NotProven:
            raise
        except Exception as error:
            where = diagnosis.raised_in(model, error)
            mask = "(0)" in str(error)  # the mask of a packed row has no elements
            why = "uses the attention mask, which a packed row does not have, or does not pass on its cu_seq_lens"
            raise NotProven(f"{where} {why if mask else f'raises {_first_line(error)}'}") from error

    # Checks

    def _find_positions(self) -> Family:
        """Find how positions are counted, on the base model in evaluation."""
        batch, left = self._batch("right"), self._batch("left")
        alone = batch.values_alone([self._run(self.base, row) for row in batch.rows()])
        padded = left.values(self._run(self.base, left.inputs))
        if self.scaled_by_length:
            padded = alone
        failure = None
        for positions in [self.family.positions] if self.family.positions else POSITIONS:
            family = dataclasses.replace(self.family, positions=positions)
            if family.pool is None and getattr(self.base, "pooler", None) is not None and "pooler_output" in alone:
                family = dataclasses.replace(family, pool=families.pool_first)
            wrong = self._different(batch.values(self._packed(self.base, batch.inputs, family, None)), alone)
            if wrong is None:
                self._check_unpatched(batch, alone)
                got = left.values(self._packed(self.base, left.inputs, family, None))
                wrong = self._different(got, _of_tokens(padded))
                if wrong is None:
                    return family
                wrong = f"{wrong} with padding on the left"
            failure = failure or (family, wrong)
        assert failure is not None
        raise self._refusal(failure[0], failure[1])

    def _check_unpatched(self, batch: Batch, alone: dict[str, Tensor]) -> None:
        """Check that a padded batch gives the same as each sequence alone without the patch, for tokens."""
        unpatched = batch.values(self._run(self.base, batch.inputs))
        wrong = None if self.scaled_by_length else self._different(unpatched, _of_tokens(alone))
        if wrong is not None:
            raise NotProven(f"without the patch, its {wrong} of a padded batch is not that of each sequence alone")

    def _refusal(self, family: Family, output: str) -> NotProven:
        """Why an output differs from that of each sequence alone."""
        with self._patched(family, None):
            reason = diagnosis.diagnose(self.base)
        return NotProven(reason or f"its {output} differs between a packed row and each sequence alone")

    def _find_head(self, family: Family) -> Head:
        shape = self._run(self.twin, self._batch("right").inputs)
        failure = None
        for head in families.HEADS:
            if (head == "span") != ("start_logits" in shape) and head != "sequence":
                continue
            if head == "sequence" and self.base is self.twin:
                continue
            try:
                self._check_training(family, head)
                return head
            except NotProven as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _check_training(self, family: Family, head: Head | None) -> None:
        """Compare outputs and gradients in training with those of each sequence alone."""
        batch = self._batch("right")
        self.twin.train()
        try:
            try:
                want = batch.values_alone([self.twin(**self._form(self.twin, row)) for row in batch.rows()])
            except Exception as error:
                raise self._refusal(family, f"output ({_first_line(error)})") from error
            again = batch.values_alone([self.twin(**self._form(self.twin, row)) for row in batch.rows()])
            if self._different(again, want) is not None:
                raise NotProven("in training its values are random, though dropout is 0, and can't be compared")
            weights = {name: _weights(value) for name, value in want.items()}
            want_gradients = self._gradients(want, weights)
            with self._patched(family, head):
                got = batch.values(self._call(self.twin, batch.inputs))
                wrong = self._different(got, want)
                gradients = {} if wrong else self._gradients(got, weights)
            if wrong:
                raise self._refusal(family, f"{wrong} in training")
            self._compare_gradients(gradients, want_gradients)
            if head is not None:
                self._check_loss(family, head, "right")
                self._check_buffers(family, head)
                if head in ("token", "next token"):  # other heads read padding if it is on the left
                    self._check_loss(family, head, "left")
        finally:
            self.twin.eval()

    def _check_loss(self, family: Family, head: Head, side: str) -> None:
        batch = self._batch(side)
        labels = self._labels(batch, head)
        if labels is None:
            return
        inputs = {**batch.inputs, **labels}
        with self._patched(family, head):
            got = self._call(self.twin, inputs).get("loss")
            gradients = {} if got is None else self._gradients({"loss": got}, {"loss": torch.ones(())})
        if got is None:
            return
        try:
            # Question answering counts the logits of padding in the loss of a padded batch.
            alone = self._loss_alone(batch, labels, head) if head == "span" or self.scaled_by_length else None
            want = self._loss_padded(inputs) if alone is None else alone
        except Exception as error:
            raise NotProven(f"unpatched, it takes no labels of this form: {_first_line(error)}") from error
        if self._error(got, want) > self.tolerance:
            raise NotProven("its loss of a packed row differs from that of a padded batch")
        self._compare_gradients(gradients, self._gradients({"loss": want}, {"loss": torch.ones(())}))

    def _check_buffers(self, family: Family, head: Head | None) -> None:
        """Check that training updates buffers, such as running means, as without the patch."""
        batch, before = self._batch("right"), copy.deepcopy(self.twin.state_dict())
        self._run(self.twin, batch.inputs)
        want = dict(copy.deepcopy(list(self.twin.named_buffers())))
        self.twin.load_state_dict(before, strict=False)
        with self._patched(family, head), torch.no_grad():
            self._call(self.twin, batch.inputs)
        for name, buffer in self.twin.named_buffers():
            if buffer.is_floating_point() and self._error(buffer, want[name]) > self.tolerance:
                raise NotProven(f"training updates its buffer {name} from all positions, with padding")

    def _loss_padded(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.twin(**self._form(self.twin, inputs)).loss
        return loss

    def _loss_alone(self, batch: Batch, labels: dict[str, Tensor], head: Head) -> Tensor | None:
        """The mean loss of all labels, from the losses of each sequence alone. None if a row alone has no loss."""
        if head == "sequence" and (self.choices or labels["labels"].shape == batch.mask.shape):
            return None
        total, count = torch.zeros(()), 0
        for n, (row, mask) in enumerate(zip(batch.rows(), batch.mask, strict=True)):
            if head in ("token", "next token"):
                own = {name: x[n][mask][None] for name, x in labels.items()}
                counted = int((own["labels"][:, 1 if head == "next token" else 0 :] != -100).sum())
            else:
                own, counted = {name: x[n : n + 1] for name, x in labels.items()}, 1
            if counted:
                total = total + counted * self.twin(**row, **own).loss
                count += counted
        return total / max(count, 1)

    def _labels(self, batch: Batch, head: Head) -> dict[str, Tensor] | None:
        """Labels that the head takes, or None if it takes none."""
        generator = torch.Generator().manual_seed(1)
        if head == "span":
            last = torch.tensor(batch.lengths) - 1
            return {"start_positions": last // 2, "end_positions": last} if "start_positions" in self.names else None
        if "labels" not in self.names:
            return None
        logits = self._run(self.twin, batch.inputs).get("logits")
        if logits is None:
            return None
        per_token = torch.randint(logits.shape[-1], batch.mask.shape, generator=generator)
        per_token = per_token.masked_fill(~batch.mask, -100)
        if head == "next token" and batch.mask[0, -1]:  # it is predicted from padding
            first = batch.mask.int().argmax(1)
            per_token[torch.arange(len(first)), first] = -100
        per_row = torch.randint(logits.shape[-1], (len(logits),), generator=generator)
        if head in ("token", "next token"):
            return {"labels": per_token}
        for labels in (per_row, per_row.to(logits.dtype), torch.rand(logits.shape, dtype=logits.dtype), per_token):
            try:
                if self._run(self.twin, {**batch.inputs, "labels": labels}).loss is not None:
                    return {"labels": labels}
            except Exception:  # the head takes labels of another form
                continue
        return None

    def _check_long(self, family: Family) -> None:
        """Compare long sequences, and special ids."""
        batch = self._batch("long")
        try:
            # copies, because RoPE that is scaled by length keeps the scale of a longer sequence
            bases = [copy.deepcopy(self.base) if self.scaled_by_length else self.base for _ in LONG]
            alone = batch.values_alone([self._run(*pair) for pair in zip(bases, batch.rows(), strict=True)])
        except Exception:  # unpatched, it does not take sequences of this length
            return
        wrong = self._different(batch.values(self._packed(self.base, batch.inputs, family, None)), alone)
        if wrong is not None:
            raise self._refusal(family, f"{wrong} of long sequences, or with special ids,")

    def _token_types(self, family: Family) -> bool:
        """Whether `token_type_ids` give the same packed and padded."""
        if "token_type_ids" not in inspect.signature(self.base.forward).parameters:
            return True
        batch = self._batch("right")
        types = (torch.arange(batch.mask.shape[1]) % 5 > 2).long().expand(batch.mask.shape)
        inputs = {**batch.inputs, "token_type_ids": types}
        try:
            want = batch.values(self._run(self.base, inputs))
        except Exception:  # unpatched, it does not take them either
            return True
        return self._gives(family, batch, inputs, want)

    def _holes(self, family: Family) -> bool:
        """Whether rows with padding between tokens give the same packed and padded."""
        batch = self._batch("holes")
        want = batch.values(self._run(self.base, batch.inputs))
        return self._gives(family, batch, batch.inputs, want)

    def _embeds(self, family: Family) -> bool:
        """Whether `inputs_embeds` give the same packed and padded."""
        if "inputs_embeds" not in inspect.signature(self.base.forward).parameters:
            return True
        batch = self._batch("left")
        inputs = batch.inputs
        by_ids = batch.values(self._run(self.base, inputs))
        packed_by_ids = batch.values(self._packed(self.base, inputs, family, None))
        inputs["inputs_embeds"] = self.base.get_input_embeddings()(inputs.pop("input_ids")).detach()
        try:
            want = batch.values(self._run(self.base, inputs))
        except Exception:  # unpatched, it does not take them either
            return True
        if self._different(want, _of_tokens(by_ids)) is None:
            want = packed_by_ids  # the same as `want`, but for RoPE that is scaled by length
        return self._gives(family, batch, inputs, want)

    def _gives(self, family: Family, batch: Batch, inputs: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
        try:
            got = batch.values(self._packed(self.base, inputs, family, None))
        except NotProven:
            return False
        return self._different(got, _of_tokens(want)) is None

    def _gradients(self, values: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = [(value * weights[name]).sum() for name, value in values.items() if value.requires_grad]
        total = torch.stack(parts).sum()
        parameters = {name: p for name, p in self.twin.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    def _compare_gradients(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        largest = max(float(gradient.abs().max()) for gradient in want.values() if gradient.numel())
        for name, gradient in want.items():
            if self._error(got[name], gradient, 1e-3 * largest) > self.tolerance:
                raise NotProven(f"the gradient of {name} differs between packed rows and each sequence alone")

    def _different(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> str | None:
        """The name of an output that differs, or None."""
        for name, value in want.items():
            if name not in got or got[name].shape != value.shape or self._error(got[name], value) > self.tolerance:
                return name
        return None

    def _error(self, got: Tensor, want: Tensor, least: float = 1e-6) -> float:
        """The largest error, relative to the largest value. NaN and infinity count as an error."""
        if not want.numel():
            return 0.0
        error = (got - want).detach().abs().max() / want.detach().abs().max().clamp(min=least)
        return float(error.nan_to_num(float("inf")))


def _of_tokens(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the values for each row, such as a pooled output, which models read from padding if it is on the left."""
    return {name: value for name, value in values.items() if len(value) > len(LENGTHS)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"


def _weights(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(value.shape, generator=generator, dtype=value.dtype)

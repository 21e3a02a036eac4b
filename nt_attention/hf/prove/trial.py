"""Proves on a twin of a Hugging Face model that it can be packed, and finds out how.

The twin (`twin.py`) runs a batch with padding packed, and each sequence alone without a patch. Both must give the same
outputs and gradients, in evaluation and in training. For the losses, for padding on the left, for padding between
tokens and for `inputs_embeds`, the packed run is compared with the unpatched padded run.

Dimensions: B rows of a padded batch, L positions in a row.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import families
from ..pack.attention_code import has_adapter
from ..pack.convolutions import classes_with_convolutions
from ..pack.islands import group_by_length
from ..proof import Extra, Form, Head, Positions, Proof
from . import diagnosis
from .trial_batch import (
    LENGTHS,
    LONG_PACKED_ROW,
    LONG_ROW,
    LONGEST_PACKED_ROW,
    LONGEST_ROW,
    WITH_PREFIX,
    Batch,
    special_ids,
)  # fmt: skip
from .trial_runs import MOST_ISLANDS, NeedsPackage, NotProven, Runs, first_line, of_tokens, relative_error, takes_any
from .twin import padding_of

UNPATCHED_IS_WRONG = "without the patch"  # the reason begins with it if padded batches are wrong even then


class Trial(Runs):
    """The proof of one twin.

    Attributes:
        mixes: why it can't be packed without islands, or None.
    """

    mixes: NotProven | None = None

    def prove(self) -> Proof:
        """Find how the twin is packed.

        Raises:
            NotProven: it can't be packed.
        """
        with self.draws() if self.draws else nullcontext():
            return self._prove()

    def _prove(self) -> Proof:
        proof = self.find_way()
        heads = self._heads()
        try:
            proof = self._find_head(proof, heads) if heads else self._check_modes(proof)
            self._check_long(proof)
            self._check_counters()
        except NotProven as failure:
            raise (self.mixes if proof.equal_lengths and self.mixes else failure) from None
        if self.pairs:
            return replace(proof, holes=False)
        return replace(
            proof, holes=self._holes(proof), embeds=self._embeds(proof), token_types=self._token_types(proof)
        )

    def check_prefixes(self, proof: Proof) -> None:
        """Compare rows whose shared prefix is computed once with each row alone, and the gradients of the base model.

        Raises:
            NotProven: an output or a gradient differs.
        """
        batch = Batch("right", self.vocabulary, padding_of(self.twin), (), WITH_PREFIX)
        batch.ids[:-1, : WITH_PREFIX[0]] = batch.ids[0, : WITH_PREFIX[0]]
        alone = batch.values_alone([self._forward(self.base, row) for row in batch.rows()], batch.rows())
        weights = {name: torch.randn_like(value) for name, value in alone.items()}
        want = self._gradients(alone, weights)
        with self._patched(proof, shared_prefixes=True) as handle:
            values = batch.values(self._call(self.base, batch.inputs))
            got = self._gradients(values, weights)
        if (wrong := self._different(values, alone)) is not None:
            raise NotProven(f"its {wrong} differs between rows with a shared prefix and each row alone")
        self._compare_gradients(proof, got, want)
        assert handle.prefixes is not None
        if reasons := [reason for reason in handle.prefixes.calls if reason is not None]:
            raise NotProven(reasons[0])

    def find_way(self) -> Proof:
        """Find how the model gets the layout and how positions are counted, on the base model in evaluation.

        A module that mixes the tokens of the row is tried as a padded island; if it reads padding, with rows of equal
        lengths.
        """
        islands: tuple[str, ...] = ()
        equal_lengths, as_island = False, None
        while True:
            try:
                return self._find_way(islands, equal_lengths)
            except NotProven as failure:
                self.mixes = self.mixes or failure
                mixer = None if failure.mixer in islands else failure.mixer
                if self.known is not None or self.pairs or len(islands) == MOST_ISLANDS:
                    raise self.mixes from None
                if mixer is None:
                    as_island = as_island or failure
                    if not islands or equal_lengths or self.has_user_code:
                        raise _first_and(self.mixes, as_island) from None
                islands += () if mixer is None else (mixer,)
                equal_lengths |= mixer is None

    def _find_way(self, islands: tuple[str, ...], equal_lengths: bool) -> Proof:
        batch = self._batch("right")
        alone = self._alone(self.base, batch)
        pools = getattr(self.base, "pooler", None) is not None and "pooler_output" in alone
        convolutions = classes_with_convolutions(self.base)
        failures: list[tuple[Proof, NotProven | str]] = []
        for way in self._ways(pools and self.family.pool is None):
            proof = way
            if not self.known:
                apart = tuple(name for name in convolutions if name not in islands)
                proof = replace(way, islands=islands, equal_lengths=equal_lengths, convolutions=apart)
            try:
                if (wrong := self._wrong(proof, batch, alone)) is None:
                    return replace(proof, reads_padding=bool(self.no_reference) and not self.scaled_by_length)
                failures.append((proof, wrong))
            except NeedsPackage:
                raise
            except NotProven as failure:
                failures.append((proof, failure))
        first, why = failures[0]
        if first.mask is not None:  # an error of one form of the mask says less than wrong values
            first, why = next((x for x in failures if isinstance(x[1], str)), failures[0])
        raise why if isinstance(why, NotProven) else self._refusal(first, why)

    def _wrong(self, proof: Proof, batch: Batch, alone: dict[str, Tensor]) -> str | None:
        """The output of the base model that differs, or None."""
        if (wrong := self._different(batch.values(self._packed(self.base, batch.inputs, proof)), alone)) is not None:
            return wrong
        unpatched = batch.values(self._run(self.base, batch.inputs))
        wrong = None if "right" in self.no_reference else self._different(unpatched, of_tokens(alone))
        if wrong is not None and (not proof.mixers or self.has_user_code):
            raise NotProven(f"{UNPATCHED_IS_WRONG}, its {wrong} of a padded batch is not that of each sequence alone")
        if self.pairs:
            inputs = {**batch.inputs, "encoder_outputs": self.base.get_encoder()(**batch.source_inputs)}
            del inputs["input_ids"]
            wrong_output = self._different(batch.values(self._packed(self.base, inputs, proof)), alone)
            if wrong_output is not None:
                return f"{wrong_output} with encoder_outputs given"
        left = self._batch("left")
        got = left.values(self._packed(self.base, left.inputs, proof))
        sides = {"right"} if wrong is not None else set()
        if "left" not in self.no_reference:
            wrong = self._different(got, of_tokens(left.values(self._run(self.base, left.inputs))))
            sides |= {"left"} if wrong is not None else set()
        differs = wrong is not None and proof.mixers and proof.positions != "ids"
        if "left" in self.no_reference or differs:
            # Unpatched, states read padding. Users may mean that. Positions that count ids must be the unpatched
            # ones: for one padding id, a constant offset gives the same.
            wrong = self._different(got, of_tokens(alone))
            if wrong is None and differs and self.has_user_code:
                raise NotProven(f"{UNPATCHED_IS_WRONG}, it reads padding on the left, which may be meant")
        if wrong is not None:
            return f"{wrong} with padding on the left"
        self.no_reference |= sides
        return None

    def _ways(self, pool: bool) -> Iterator[Proof]:
        """The ways to pack the model that are tried, the usual ones first."""
        if self.known is not None:
            yield replace(self.known, head=None, holes=True, embeds=True, token_types=True)
            return
        positions = [self.family.positions] if self.family.positions else get_args(Positions)
        if self.pairs:
            yield from (Proof(positions=each, mask="pairs") for each in positions)
            return
        forms = get_args(Form)
        windows: list[Extra | None] = []
        if families.routes_attention(self.twin) and not has_adapter(self.twin):
            extras: list[Extra | None] = [None]
            if takes_any(self.base):
                windows = ["sliding_window"] if _has_window(self.base) else []
                extras += ["seq_idx", *windows]
            yield from (Proof(positions=each, pool=pool, extra=extra) for extra in extras for each in positions)
            forms = ("pairs",)
        for extra, form, is_causal, each in itertools.product([None, *windows], forms, (False, True), positions):
            yield Proof(positions=each, pool=pool, mask=form, is_causal=is_causal, extra=extra)

    def _refusal(self, proof: Proof, output: str) -> NotProven:
        """Why an output differs from that of each sequence alone."""
        if self.pairs:
            return NotProven(f"its {output} differs between packed rows and each pair of sequences alone")
        with self._patched(replace(proof, head=None)):
            reason = diagnosis.diagnose(self.base, proof.islands)
        if reason is None:
            return NotProven(f"its {output} differs between a packed row and each sequence alone")
        return NotProven(*reason)

    def _heads(self) -> list[Head]:
        """How the head of the model may run. Empty if it has none."""
        if self.pairs:
            return ["token"] if "labels" in inspect.signature(self.twin.forward).parameters else []
        batch = self._batch("right")
        out = self._run(self.twin, batch.inputs)
        if self.base is self.twin and "logits" not in out:
            return []
        if self.known is not None and self.known.head is not None:
            return [self.known.head]
        logits, has_base = out.get("logits"), self.base is not self.twin
        if has_base and isinstance(logits, Tensor) and logits.shape[:2] != batch.mask.shape:
            return ["sequence"]
        heads: list[Head] = ["span"] if "start_logits" in out else ["next token", "token"]
        return [*heads, "sequence"] if has_base else heads

    def _find_head(self, proof: Proof, heads: list[Head]) -> Proof:
        failure = None
        for head in heads:
            try:
                return self._check_modes(replace(proof, head=head))
            except NotProven as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _check_modes(self, proof: Proof) -> Proof:
        """Compare the model in training and in evaluation, with its losses. Returns the proof."""
        batch = self._batch("right")
        try:
            for training in (True, False):
                self.twin.train(training)
                self._check_outputs(proof, batch, training)
                if training:
                    self._check_draws(proof, batch)
                    self._check_buffers(proof)
                if proof.head is not None:
                    self._check_loss(proof, batch)
                    if training and proof.head in ("token", "next token"):  # others read padding if it is on the left
                        self._check_loss(proof, self._batch("left"))
        finally:
            self.twin.eval()
        return proof

    def _check_outputs(self, proof: Proof, batch: Batch, training: bool) -> None:
        """Compare outputs, and gradients in training, with those of each sequence alone."""
        unpatched = self._unpatched_in_training(batch) if training else self._run(self.twin, batch.inputs)
        want = self._known_values(proof, batch, unpatched)
        if not want:
            want = self._alone_in_training(proof, batch) if training else self._alone(self.twin, batch)
        weights = {name: _weights(value) for name, value in want.items()}
        want_gradients = self._gradients(want, weights) if training else {}
        with self._patched(proof), torch.set_grad_enabled(training):
            out = self._call(self.twin, batch.inputs)
            got = {name: value for name, value in batch.values(out).items() if name in want}
            wrong = self._different(got, want)
            gradients = self._gradients(got, weights) if training and not wrong else {}
        if wrong:
            raise self._refusal(proof, f"{wrong} in {'training' if training else 'evaluation'}")
        self._compare_gradients(proof, gradients, want_gradients)
        self._compare_numbers(out, unpatched)

    def _known_values(self, proof: Proof, batch: Batch, unpatched: Any) -> dict[str, Tensor]:
        """The values of a padded batch, if it is known from another twin that they are those of each sequence alone."""
        is_known = self.known is not None and proof.head != "sequence" and proof.head != "span"
        return of_tokens(batch.values(unpatched)) if is_known and batch.side not in self.no_reference else {}

    def _alone_in_training(self, proof: Proof, batch: Batch) -> dict[str, Tensor]:
        rows = batch.rows()
        try:
            want = batch.values_alone([self._forward(self.twin, row) for row in rows], rows)
        except Exception as error:
            raise self._refusal(proof, f"output ({first_line(error)})") from error
        if self._different(self._alone(self.twin, batch), want) is not None:
            raise NotProven("in training its values are random, though dropout is 0, and can't be compared")
        return want

    def _unpatched_in_training(self, batch: Batch) -> Any:
        """Run the padded batch, and see which random numbers are drawn."""
        if self.draws is None:
            return self._run(self.twin, batch.inputs)
        self.draws.shapes = [x.mask.shape for x in (batch, batch.target) if x is not None]
        out = self._padded(batch.inputs)
        self.draws.shapes = []
        if self.draws.by_row is not None:
            raise NotProven(
                f"in training it draws random numbers with {self.draws.by_row} that are not of single tokens, such as "
                "for each row (stochastic depth), and a packed batch has one row"
            )
        return out

    def _check_loss(self, proof: Proof, batch: Batch) -> None:
        head = proof.head
        assert head is not None
        labels = self._labels(batch, head)
        if labels is None:
            return
        inputs, one = {**batch.source_inputs, **labels}, {"loss": torch.ones(())}
        with self._patched(proof):
            out = self._call(self.twin, {name: x.clone() for name, x in inputs.items()})
            if (got := out.get("loss")) is None:
                return
            gradients = self._gradients({"loss": got}, one)
        try:
            # Question answering counts the logits of padding in the loss of a padded batch.
            alone = self._loss_alone(batch, labels, head) if head == "span" or batch.side in self.no_reference else None
            padded = self._padded(inputs)
            want = padded.loss if alone is None else alone
        except Exception as error:
            raise NotProven(f"unpatched, it takes no labels of this form: {first_line(error)}") from error
        if relative_error(got, want) > self.tolerance:
            raise NotProven("its loss of a packed row differs from that of a padded batch")
        self._compare_gradients(proof, gradients, self._gradients({"loss": want}, one))
        if alone is None:
            self._compare_numbers(out, padded)

    def _check_draws(self, proof: Proof, batch: Batch) -> None:
        """Compare values in training for low and high random numbers, if there are any: code may branch on them."""
        if self.draws is None or not self.draws.any or "right" in self.no_reference:
            return
        for level in (0.001, 0.999):
            self.draws.level = level
            unpatched = self._run(self.twin, batch.inputs)
            out = self._packed(self.twin, batch.inputs, proof)
            self.draws.level = 0.5
            self._compare_numbers(out, unpatched)
            wrong = self._different(of_tokens(batch.values(out)), of_tokens(batch.values(unpatched)))
            if wrong is not None:
                raise NotProven(f"its {wrong} in training, for some random numbers, is not that of a padded batch")

    def _check_counters(self) -> None:
        """Check that no module counts its calls, because later calls may depend on it."""
        if self.known is None:
            return
        inputs, states = self._batch("right").inputs, []
        self.twin.train()
        for _ in range(2):
            self._run(self.twin, inputs)
            states.append(_numbers_of(self.twin))
        self.twin.eval()
        changed = next((name for name, value in states[1].items() if states[0].get(name) != value), None)
        if changed is not None:
            raise NotProven(f"each call changes its {changed}, on which the values of later calls may depend")

    def _check_buffers(self, proof: Proof) -> None:
        """Check that training updates buffers, such as running means, as without the patch."""
        batch, before = self._batch("right"), copy.deepcopy(self.twin.state_dict())
        self._run(self.twin, batch.inputs)
        want = dict(copy.deepcopy(list(self.twin.named_buffers())))
        self.twin.load_state_dict(before, strict=False)
        with self._patched(proof), torch.no_grad():
            self._call(self.twin, batch.inputs)
        for name, buffer in self.twin.named_buffers():
            if relative_error(buffer, want[name]) > self.tolerance:
                raise NotProven(f"training updates its buffer {name} from all positions, with padding")

    def _loss_alone(self, batch: Batch, labels: dict[str, Tensor], head: Head) -> Tensor | None:
        """The mean loss of all labels, from the losses of each sequence alone. None if a row alone has no loss."""
        mask = batch.mask if batch.target is None else batch.target.mask
        if head == "sequence" and (self.choices or labels["labels"].shape == batch.mask.shape):
            return None
        total, count = torch.zeros(()), 0
        for n, row in enumerate(batch.rows()):
            if head in ("token", "next token"):
                own = {name: x[n][mask[n]][None] for name, x in labels.items()}
                counted = int((own["labels"][:, 1 if head == "next token" else 0 :] != -100).sum())
            else:
                own, counted = {name: x[n : n + 1].clone() for name, x in labels.items()}, 1
            if counted:
                total = total + counted * self._forward(self.twin, {**row, **own}).loss
                count += counted
        return total / max(count, 1)

    def _labels(self, batch: Batch, head: Head) -> dict[str, Tensor] | None:
        """Labels that the head takes, or None if it takes none."""
        if batch.target is not None:
            return {"labels": batch.target.ids.masked_fill(~batch.target.mask, -100)}
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
        if logits.shape[-1] > int(batch.ids.max()):  # most labels of users are the ids of the row
            per_token = per_token.where(torch.rand(batch.mask.shape, generator=generator) < 0.5, batch.ids)
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

    def _check_long(self, proof: Proof) -> None:
        """Compare long sequences, rows longer than any number of the config and the code, and special ids."""
        batch = self._long_batch()
        is_per_token = proof.head in ("token", "next token")
        with_head = (  # else, its logits need much memory
            self.has_user_code and is_per_token and batch.ids.numel() * self.vocabulary < 3e7
        )
        model = self.twin if with_head else self.base
        # Other batches have tested islands with much padding, which takes long here.
        packed = functools.partial(self._packed, model, batch.inputs, proof, group_by_length)
        alone = self._alone(model, batch, batch.groups())
        if (wrong := self._different(batch.values(packed()), alone)) is not None:
            raise self._refusal(proof, f"{wrong} of long sequences, or with special ids,")
        if self.known is None:
            return
        self.twin.train()
        try:
            got = batch.values(packed())
            # most models give the same as in evaluation, because there is no dropout
            wrong = self._different(got, alone) and self._different(got, self._alone(model, batch, batch.groups()))
        finally:
            self.twin.eval()
        if wrong:
            raise self._refusal(proof, f"{wrong} of long sequences, or with special ids, in training")

    def _long_batch(self) -> Batch:
        """A batch with sequences as long as the twin takes.

        Raises:
            NotProven: the twin raises an error for ids that it has, or for batches of many rows.
        """
        row = max([LONG_ROW, *(number + 9 for number in self.lengths if number + 9 <= LONGEST_ROW)])
        limit = self.twin.config.get_text_config().to_dict().get("max_position_embeddings")
        row = min(row, limit) if isinstance(limit, int) and limit > max(LENGTHS) else row
        packed_row = max([LONG_PACKED_ROW, *(n + 9 for n in self.lengths if n + 9 <= LONGEST_PACKED_ROW)])
        special = special_ids(self.numbers, self.vocabulary, 500)

        def batch(length: int, most: int) -> Batch:
            long = Batch.long(self.vocabulary, padding_of(self.twin), special, length, most)
            long.target = long if self.pairs else None
            return long

        if self._raised(batch(row, row)) is None:
            return batch(row, packed_row)
        takes, raises = max(LENGTHS), row
        if (error := self._raised(batch(takes, LONG_ROW))) is not None:
            raise NotProven(f"a small model raises an error without the patch, for some ids: {first_line(error)}")
        while raises - takes > 1:
            middle = (takes + raises) // 2
            takes, raises = (middle, raises) if self._raised(batch(middle, middle)) is None else (takes, middle)
        return batch(takes, packed_row)

    def _raised(self, batch: Batch) -> Exception | None:
        """The error that the unpatched base model raises for the sequences of a batch, or None."""
        try:
            self._alone(self.base, batch, batch.groups())
        except Exception as error:  # whatever the class raises for a length that it does not take
            return error
        return None

    def _token_types(self, proof: Proof) -> bool:
        """Whether `token_type_ids` give the same packed and padded."""
        if "token_type_ids" not in inspect.signature(self.base.forward).parameters:
            return True
        batch = self._batch("right")
        types = (torch.arange(batch.mask.shape[1]) % 5 > 2).long().expand(batch.mask.shape)
        for several in (types, torch.zeros_like(types)):  # it may have a single type
            inputs = {**batch.inputs, "token_type_ids": several}
            try:
                want = self._expected(batch, inputs)
            except Exception:  # unpatched, it takes other ones
                continue
            return self._gives(proof, batch, inputs, want)
        return False

    def _expected(self, batch: Batch, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values of the unpatched base model: of a padded batch or, if it reads padding, of each sequence alone."""
        if batch.side not in self.no_reference:
            return batch.values(self._run(self.base, inputs))
        rows = [{name: x[n][batch.mask[n]][None] for name, x in inputs.items()} for n in range(len(batch.mask))]
        return batch.values_alone([self._run(self.base, row) for row in rows], rows)

    def _holes(self, proof: Proof) -> bool:
        """Whether rows with padding between tokens give the same packed and padded."""
        batch = self._batch("holes")
        want = batch.values(self._run(self.base, batch.inputs))
        return self._gives(proof, batch, batch.inputs, want)

    def _embeds(self, proof: Proof) -> bool:
        """Whether `inputs_embeds` give the same packed and padded."""
        if "inputs_embeds" not in inspect.signature(self.base.forward).parameters:
            return True
        batch = self._batch("left")
        inputs = batch.inputs
        by_ids = batch.values(self._run(self.base, inputs))
        packed_by_ids = batch.values(self._packed(self.base, inputs, proof))
        ids = inputs.pop("input_ids").to(self.base.device)
        inputs["inputs_embeds"] = self.base.get_input_embeddings()(ids).detach()
        try:
            want = batch.values(self._run(self.base, inputs))
        except Exception:  # unpatched, it does not take them either, or not of this form
            return False
        if self._different(want, of_tokens(by_ids)) is None:
            want = packed_by_ids  # the same as `want`, but for RoPE that is scaled by length
        return self._gives(proof, batch, inputs, want)

    def _gives(self, proof: Proof, batch: Batch, inputs: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
        try:
            got = batch.values(self._packed(self.base, inputs, proof))
        except NotProven:
            return False
        return self._different(got, of_tokens(want)) is None


def _first_and(mixes: NotProven, as_island: NotProven) -> NotProven:
    """Why a packed row is wrong, and why padded rows in its modules don't help."""
    if str(as_island) == str(mixes):
        return mixes
    return NotProven(f"{mixes}; on padded rows, {as_island}", mixes.mixer)


def _numbers_of(model: PreTrainedModel) -> dict[str, float]:
    """The numbers and small buffers of the modules of a model, but for parameters, by name."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float) and name != "training":
                found[f"{path}.{name}".lstrip(".")] = value
    return found | {name: float(x) for name, x in model.named_buffers() if x.numel() == 1}


def _has_window(model: PreTrainedModel) -> bool:
    """Whether the config has one window for all layers."""
    fields = model.config.to_dict()
    return isinstance(fields.get("sliding_window"), int) and not fields.get("per_layer_config")


def _weights(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(value.shape, generator=generator, dtype=value.dtype)

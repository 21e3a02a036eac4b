"""Proves on a twin of a Hugging Face model that it can be packed, and finds out how.

The twin (`twin.py`) runs a batch with padding packed, and each sequence alone without a patch. Both must give the same
outputs and gradients, in evaluation and in training. For the losses, for padding on the left, for padding between
tokens and for `inputs_embeds`, the packed run is compared with the unpatched padded run.

Dimensions: B rows of a padded batch, L positions in a row.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...graphs.cache import CapturedCalls
from .. import families
from ..families import Family
from ..pack.attention_code import has_adapter
from ..pack.change_model import make_padding_free, set_attention
from ..pack.deferred_scores import CannotDeferError
from ..proof import Extra, Form, Head, Positions, Proof
from ..route.packed_mask import CannotMaskError, MixesSequencesError
from ..route.rope import scales_by_length
from . import diagnosis
from .trial_batch import LENGTHS, LONG_PACKED_ROW, LONG_ROW, LONGEST_PACKED_ROW, LONGEST_ROW, Batch, special_ids
from .trial_draws import Draws
from .twin import VOCABULARY, padding_of, vocabulary_of

UNPATCHED_IS_WRONG = "without the patch"  # the reason begins with it if padded batches are wrong even then
# The largest error, relative to the largest value. Many models compute norms in float32 even if they are in float64.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


class NotProven(Exception):
    """The packed run of a twin is wrong. The message says why."""


class NeedsPackage(NotProven):
    """A layer can keep packed sequences apart only with a package that is not installed."""


class _Handle:
    """A handle for a twin: a call that does not run packed is an error."""

    active = True
    graphs: CapturedCalls | None = None
    mesh = None

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def change(self, name: str, description: str) -> None: ...
    def change_layers(self, name: str, layers: dict[str, str]) -> None: ...
    def skip(self, name: str, reason: str) -> None: ...

    def on_remove(self, undo: Callable[[], None]) -> None:
        self.undo.append(undo)

    def count(self, reason: str | None) -> None: ...

    def fall_back(self, reason: str, what: str = "this call") -> None:
        raise NotProven(f"can't run packed: {reason}")


class Trial:
    """The proof of one twin.

    Args:
        twin: the twin.
        family: what is known about its family.
        numbers: ids of tokens that its code or config may compare with.
        lengths: lengths of rows that its code may compare with. A packed row is always longer than 4,096.
        is_own: whether it has code that is not from torch or transformers.
        proof: what was proven with another twin. Only this is tried, with random numbers that are constants.
    """

    def __init__(
        self,
        twin: PreTrainedModel,
        family: Family,
        numbers: Iterable[int] = (),
        lengths: Iterable[int] = (),
        is_own: bool = False,
        proof: Proof | None = None,
    ) -> None:
        self.twin: Any = twin
        self.base: Any = families.base_model(twin)
        self.family, self.numbers, self.lengths = family, set(numbers), set(lengths)
        self.is_own, self.known = is_own, proof
        self.vocabulary = vocabulary_of(twin, None if proof else VOCABULARY)
        self.draws = Draws(self.twin, self.base) if is_own else None
        self.tolerance = TOLERANCE[next(iter(twin.parameters())).dtype]
        # Unpatched, such RoPE is scaled for the longest row of a batch, so a padded batch is no reference.
        self.scaled_by_length = any(scales_by_length(module) for module in twin.modules())
        self.names = set(inspect.signature(twin.forward).parameters)
        if _takes_any(twin):
            self.names |= {"labels", "start_positions", "end_positions"}
        # its inputs have the shape (B / 2, 2, L)
        self.choices = type(twin).__name__.endswith("ForMultipleChoice")

    def prove(self) -> Proof:
        """Find how the twin is packed.

        Raises:
            NotProven: it can't be packed.
        """
        with self.draws() if self.draws else nullcontext():
            return self._prove()

    def _prove(self) -> Proof:
        has_head = self.base is not self.twin
        proof = self._find_way()
        if has_head or "logits" in self._run(self.twin, self._batch("right").inputs):
            proof = self._find_head(proof)
        else:
            self._check_training(proof)
        self._check_long(proof)
        self._check_counters()
        return replace(
            proof, holes=self._holes(proof), embeds=self._embeds(proof), token_types=self._token_types(proof)
        )

    def _batch(self, side: str) -> Batch:
        special = special_ids(self.numbers, self.vocabulary, 12) if self.known else ()
        return Batch(side, self.vocabulary, padding_of(self.twin), special)

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
    def _patched(self, proof: Proof) -> Iterator[None]:
        handle = _Handle()
        try:
            if families.routes_attention(self.twin):
                set_attention(self.twin, handle)
            make_padding_free(self.twin, proof, self.family, handle, "padded", "always")
            yield
        finally:
            handle.active = False
            while handle.undo:
                handle.undo.pop()()

    def _packed(self, model: Any, inputs: dict[str, Tensor], proof: Proof) -> Any:
        with self._patched(proof), torch.no_grad():
            return self._call(model, inputs)

    def _call(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        try:
            return model(**self._form(model, inputs))
        except NotProven:
            raise
        except Exception as error:
            where = diagnosis.raised_in(model, error)
            if isinstance(error, CannotDeferError | CannotMaskError):
                raise NotProven(f"{where} {error}") from error
            if isinstance(error, MixesSequencesError):
                raise NotProven(f"{where} computes attention over the whole row") from error
            if "packed sequences apart without" in str(error):  # from transformers' functions that use such packages
                raise NeedsPackage(f"in {where}, {str(error).splitlines()[0]}") from error
            mask = "(0)" in str(error)  # the mask of a packed row has no elements
            why = "uses the attention mask, which a packed row does not have, or does not pass on its cu_seq_lens"
            raise NotProven(f"{where} {why if mask else f'raises {first_line(error)}'}") from error

    # Checks

    def _find_way(self) -> Proof:
        """Find how the model gets the layout and how positions are counted, on the base model in evaluation."""
        batch, left = self._batch("right"), self._batch("left")
        alone = batch.values_alone([self._run(self.base, row) for row in batch.rows()])
        padded = left.values(self._run(self.base, left.inputs))
        if self.scaled_by_length:
            padded = alone
        pools = getattr(self.base, "pooler", None) is not None and "pooler_output" in alone
        failures: list[tuple[Proof, NotProven | str]] = []
        for proof in self._ways(pools and self.family.pool is None):
            try:
                wrong = self._different(batch.values(self._packed(self.base, batch.inputs, proof)), alone)
                if wrong is None:
                    self._check_unpatched(batch, alone)
                    got = left.values(self._packed(self.base, left.inputs, proof))
                    wrong = self._different(got, _of_tokens(padded))
                    if wrong is None:
                        return proof
                    wrong = f"{wrong} with padding on the left"
                failures.append((proof, wrong))
            except NeedsPackage:
                raise
            except NotProven as failure:
                failures.append((proof, failure))
        first, why = failures[0]
        if first.mask is not None:  # an error of one form of the mask says less than wrong values
            first, why = next((x for x in failures if isinstance(x[1], str)), failures[0])
        raise why if isinstance(why, NotProven) else self._refusal(first, why)

    def _ways(self, pool: bool) -> Iterator[Proof]:
        """The ways to pack the model that are tried, the usual ones first."""
        if self.known is not None:
            yield replace(self.known, head=None, holes=True, embeds=True, token_types=True)
            return
        positions = [self.family.positions] if self.family.positions else get_args(Positions)
        forms = get_args(Form)
        if has_adapter(self.twin):
            forms = get_args(Form)
        elif families.routes_attention(self.twin):
            extras: list[Extra | None] = [None]
            if _takes_any(self.base):
                extras += ["seq_idx", "sliding_window"] if _has_window(self.base) else ["seq_idx"]
            yield from (Proof(positions=each, pool=pool, extra=extra) for extra in extras for each in positions)
            forms = ("pairs",)
        for form, is_causal, each in itertools.product(forms, (False, True), positions):
            yield Proof(positions=each, pool=pool, mask=form, is_causal=is_causal)

    def _check_unpatched(self, batch: Batch, alone: dict[str, Tensor]) -> None:
        """Check that a padded batch gives the same as each sequence alone without the patch, for tokens."""
        unpatched = batch.values(self._run(self.base, batch.inputs))
        wrong = None if self.scaled_by_length else self._different(unpatched, _of_tokens(alone))
        if wrong is not None:
            raise NotProven(f"{UNPATCHED_IS_WRONG}, its {wrong} of a padded batch is not that of each sequence alone")

    def _refusal(self, proof: Proof, output: str) -> NotProven:
        """Why an output differs from that of each sequence alone."""
        with self._patched(replace(proof, head=None)):
            reason = diagnosis.diagnose(self.base)
        return NotProven(reason or f"its {output} differs between a packed row and each sequence alone")

    def _find_head(self, proof: Proof) -> Proof:
        shape = self._run(self.twin, self._batch("right").inputs)
        failure = None
        for head in get_args(Head) if self.known is None else (self.known.head,):
            if (head == "span") != ("start_logits" in shape) and head != "sequence":
                continue
            if head == "sequence" and self.base is self.twin:
                continue
            try:
                self._check_training(replace(proof, head=head))
                return replace(proof, head=head)
            except NotProven as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _check_training(self, proof: Proof) -> None:
        """Compare outputs and gradients in training with those of each sequence alone."""
        batch = self._batch("right")
        self.twin.train()
        try:
            unpatched = self._unpatched_in_training(batch)
            if self.known and proof.head in (None, "token", "next token") and not self.scaled_by_length:
                want = _of_tokens(batch.values(unpatched))  # which another twin gave for each sequence alone
            else:
                want = self._alone_in_training(proof, batch)
            weights = {name: _weights(value) for name, value in want.items()}
            want_gradients = self._gradients(want, weights)
            with self._patched(proof):
                out = self._call(self.twin, batch.inputs)
                got = {name: value for name, value in batch.values(out).items() if name in want}
                wrong = self._different(got, want)
                gradients = {} if wrong else self._gradients(got, weights)
            if wrong:
                raise self._refusal(proof, f"{wrong} in training")
            self._compare_gradients(gradients, want_gradients)
            self._compare_numbers(out, unpatched)
            self._check_draws(proof, batch)
            self._check_evaluation(proof)
            self._check_buffers(proof)
            if proof.head is not None:
                self._check_loss(proof, "right")
                if proof.head in ("token", "next token"):  # other heads read padding if it is on the left
                    self._check_loss(proof, "left")
        finally:
            self.twin.eval()

    def _alone_in_training(self, proof: Proof, batch: Batch) -> dict[str, Tensor]:
        try:
            want = batch.values_alone([self.twin(**self._form(self.twin, row)) for row in batch.rows()])
        except Exception as error:
            raise self._refusal(proof, f"output ({first_line(error)})") from error
        again = batch.values_alone([self._run(self.twin, row) for row in batch.rows()])
        if self._different(again, want) is not None:
            raise NotProven("in training its values are random, though dropout is 0, and can't be compared")
        return want

    def _unpatched_in_training(self, batch: Batch) -> Any:
        """Run the padded batch, and see which random numbers are drawn."""
        if self.draws is None:
            return self._run(self.twin, batch.inputs)
        rows, length = batch.mask.shape
        self.draws.shape = rows, length
        out = self._padded(batch.inputs)
        self.draws.shape = None
        if self.draws.by_row is not None:
            raise NotProven(
                f"in training it draws random numbers with {self.draws.by_row} that are not of single tokens, such as "
                "for each row (stochastic depth), and a packed batch has one row"
            )
        return out

    def _check_loss(self, proof: Proof, side: str) -> None:
        batch, head = self._batch(side), proof.head
        assert head is not None
        labels = self._labels(batch, head)
        if labels is None:
            return
        inputs = {**batch.inputs, **labels}
        with self._patched(proof):
            out = self._call(self.twin, {name: x.clone() for name, x in inputs.items()})
            got = out.get("loss")
            gradients = {} if got is None else self._gradients({"loss": got}, {"loss": torch.ones(())})
        if got is None:
            return
        try:
            # Question answering counts the logits of padding in the loss of a padded batch.
            alone = self._loss_alone(batch, labels, head) if head == "span" or self.scaled_by_length else None
            padded = self._padded(inputs)
            want = padded.loss if alone is None else alone
        except Exception as error:
            raise NotProven(f"unpatched, it takes no labels of this form: {first_line(error)}") from error
        if self._error(got, want) > self.tolerance:
            raise NotProven("its loss of a packed row differs from that of a padded batch")
        self._compare_gradients(gradients, self._gradients({"loss": want}, {"loss": torch.ones(())}))
        if alone is None:
            self._compare_numbers(out, padded)

    def _compare_numbers(self, out: Any, unpatched: Any) -> None:
        for name, value in unpatched.items():
            is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())
            if is_number and self._error(torch.as_tensor(out[name]), torch.as_tensor(value)) > self.tolerance:
                raise NotProven(f"its {name} is a number of all positions of the batch, with padding")

    def _check_evaluation(self, proof: Proof) -> None:
        """Compare outputs in evaluation, also numbers of the whole batch, and the loss."""
        batch = self._batch("right")
        self.twin.eval()
        try:
            unpatched = self._run(self.twin, batch.inputs)
            if self.known and proof.head in (None, "token", "next token") and not self.scaled_by_length:
                alone = _of_tokens(batch.values(unpatched))
            else:
                alone = batch.values_alone([self._run(self.twin, row) for row in batch.rows()])
            out = self._packed(self.twin, batch.inputs, proof)
            if (wrong := self._different(batch.values(out), alone)) is not None:
                raise NotProven(f"its {wrong} in evaluation differs between a packed row and each sequence alone")
            self._compare_numbers(out, unpatched)
            if proof.head is not None:
                self._check_loss(proof, "right")
        finally:
            self.twin.train()

    def _check_draws(self, proof: Proof, batch: Batch) -> None:
        """Compare values in training for low and high random numbers, if there are any: code may branch on them."""
        if self.draws is None or not self.draws.any or self.scaled_by_length:
            return
        for level in (0.001, 0.999):
            self.draws.level = level
            unpatched = self._run(self.twin, batch.inputs)
            out = self._packed(self.twin, batch.inputs, proof)
            self.draws.level = 0.5
            self._compare_numbers(out, unpatched)
            wrong = self._different(_of_tokens(batch.values(out)), _of_tokens(batch.values(unpatched)))
            if wrong is not None:
                raise NotProven(f"its {wrong} in training, for some random numbers, is not that of a padded batch")

    def check_values(self) -> None:
        """Compare outputs of the base model in evaluation only.

        Raises:
            NotProven: they differ.
        """
        self._find_way()

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
            if self._error(buffer.double(), want[name].double()) > self.tolerance:
                raise NotProven(f"training updates its buffer {name} from all positions, with padding")

    def _padded(self, inputs: dict[str, Tensor]) -> Any:
        copies = {name: x.clone() for name, x in inputs.items()}  # some losses change positions in place
        return self.twin(**self._form(self.twin, copies))

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
                own, counted = {name: x[n : n + 1].clone() for name, x in labels.items()}, 1
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
        # with the head, if its logits need little memory
        is_small = self.is_own and proof.head in ("token", "next token") and batch.ids.numel() * self.vocabulary < 3e7
        model = self.twin if is_small else self.base
        alone = self._in_groups(model, batch)
        if (wrong := self._different(batch.values(self._packed(model, batch.inputs, proof)), alone)) is not None:
            raise self._refusal(proof, f"{wrong} of long sequences, or with special ids,")
        if self.known is None:
            return
        self.twin.train()
        try:
            got = batch.values(self._packed(model, batch.inputs, proof))
            # most models give the same as in evaluation, because there is no dropout
            wrong = self._different(got, alone) and self._different(got, self._in_groups(model, batch))
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
            return Batch.long(self.vocabulary, padding_of(self.twin), special, length, most)

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
            self._in_groups(self.base, batch)
        except Exception as error:  # whatever the class raises for a length that it does not take
            return error
        return None

    def _in_groups(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The values of each sequence without padding, in batches of equal lengths."""
        groups = batch.groups()
        # copies, because RoPE that is scaled by length keeps the scale of a longer sequence
        models = [copy.deepcopy(model) if self.scaled_by_length else model for _ in groups]
        return batch.values_alone([self._run(*pair) for pair in zip(models, groups, strict=True)], groups)

    def _token_types(self, proof: Proof) -> bool:
        """Whether `token_type_ids` give the same packed and padded."""
        if "token_type_ids" not in inspect.signature(self.base.forward).parameters:
            return True
        batch = self._batch("right")
        types = (torch.arange(batch.mask.shape[1]) % 5 > 2).long().expand(batch.mask.shape)
        for several in (types, torch.zeros_like(types)):  # it may have a single type
            inputs = {**batch.inputs, "token_type_ids": several}
            try:
                want = batch.values(self._run(self.base, inputs))
            except Exception:  # unpatched, it takes other ones
                continue
            return self._gives(proof, batch, inputs, want)
        return False

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
        inputs["inputs_embeds"] = self.base.get_input_embeddings()(inputs.pop("input_ids")).detach()
        try:
            want = batch.values(self._run(self.base, inputs))
        except Exception:  # unpatched, it does not take them either, or not of this form
            return False
        if self._different(want, _of_tokens(by_ids)) is None:
            want = packed_by_ids  # the same as `want`, but for RoPE that is scaled by length
        return self._gives(proof, batch, inputs, want)

    def _gives(self, proof: Proof, batch: Batch, inputs: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
        try:
            got = batch.values(self._packed(self.base, inputs, proof))
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
            if self._error(got[name], gradient, 1e-2 * largest) > self.tolerance:
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


def _numbers_of(model: PreTrainedModel) -> dict[str, float]:
    """The numbers and small buffers of the modules of a model, but for parameters, by name."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float) and name != "training":
                found[f"{path}.{name}".lstrip(".")] = value
    return found | {name: float(x) for name, x in model.named_buffers() if x.numel() == 1}


def _takes_any(model: PreTrainedModel) -> bool:
    """Whether the forward of a model takes any keyword arguments."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def _has_window(model: PreTrainedModel) -> bool:
    """Whether the config has one window for all layers."""
    fields = model.config.to_dict()
    return isinstance(fields.get("sliding_window"), int) and not fields.get("per_layer_config")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"


def _weights(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(value.shape, generator=generator, dtype=value.dtype)

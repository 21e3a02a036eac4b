"""Proves on a twin of a Hugging Face encoder-decoder that it can be packed, as `trial.py` does for other models.

Dimensions: B rows, Ls and Lt positions of a padded source and target.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from ..pack.encoder_decoder import OF_SOURCE
from ..proof import Positions, Proof
from .trial import Trial
from .trial_batch import Batch
from .trial_runs import NotProven
from .twin import padding_of

_TARGETS = (5, 9, 1, 14)  # lengths


class EncoderDecoderTrial(Trial):
    """The proof of one twin of an encoder-decoder."""

    def find_way(self) -> Proof:
        self.source = self._batch("right")
        self._set_targets()
        failure = None
        for positions in get_args(Positions) if self.known is None else (self.known.positions,):
            proof = Proof(positions=positions, mask="pairs")
            try:
                self._check_base(proof)
                return proof
            except NotProven as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _prove(self) -> Proof:
        proof = self.find_way()
        with_loss = "labels" in inspect.signature(self.twin.forward).parameters
        if with_loss:
            proof = replace(proof, head="token")
        for training in (True, False):
            self._check_gradients(proof, training)
            if with_loss:
                self._check_target_loss(proof, training)
        self._check_long_source(proof)
        return replace(proof, holes=False)

    def _set_targets(self) -> None:
        tokens = torch.arange(max(_TARGETS)) < torch.tensor(_TARGETS)[:, None]
        generator = torch.Generator().manual_seed(4)
        drawn = torch.randint(6, self.vocabulary, tokens.shape, generator=generator)
        self.target_mask, self.target = tokens, drawn.masked_fill(~tokens, padding_of(self.twin))

    def _inputs(self, source: Batch) -> dict[str, Tensor]:
        given = {"decoder_input_ids": self.target, "decoder_attention_mask": self.target_mask.long()}
        return {**source.inputs, **given}

    def _rows(self) -> list[dict[str, Tensor]]:
        targets = [ids[mask][None] for ids, mask in zip(self.target, self.target_mask, strict=True)]
        return [{**row, "decoder_input_ids": ids} for row, ids in zip(self.source.rows(), targets, strict=True)]

    def _of_tokens(self, out: Any, source: Batch) -> dict[str, Tensor]:
        masks = dict.fromkeys(OF_SOURCE, source.mask)
        found = {name: x for name, x in out.items() if isinstance(x, Tensor) and x.dim() > 1}
        return {name: x[masks.get(name, self.target_mask)] for name, x in found.items()}

    def _alone(self, outs: list[Any]) -> dict[str, Tensor]:
        names = [name for name, x in outs[0].items() if isinstance(x, Tensor) and x.dim() > 1]
        return {name: torch.cat([out[name][0] for out in outs]) for name in names}

    def _check_base(self, proof: Proof) -> None:
        """Compare outputs in evaluation, for padding on the right and on the left of the source."""
        alone = self._alone([self._run(self.base, row) for row in self._rows()])
        inputs = self._inputs(self.source)
        self._require(self._of_tokens(self._packed(self.base, inputs, proof), self.source), alone, "")
        encoded = self.base.get_encoder()(**self.source.inputs)
        given = {**inputs, "encoder_outputs": encoded}
        del given["input_ids"]
        got = self._of_tokens(self._packed(self.base, given, proof), self.source)
        self._require(got, alone, " with encoder_outputs given")
        left = self._batch("left")
        want = self._of_tokens(self._run(self.base, self._inputs(left)), left)
        got = self._of_tokens(self._packed(self.base, self._inputs(left), proof), left)
        self._require(got, want, " with padding on the left")

    def _check_gradients(self, proof: Proof, training: bool) -> None:
        """Compare outputs and gradients with those of each pair of sequences alone."""
        self.twin.train(training)
        try:
            want = self._alone([self.twin(**row) for row in self._rows()])
            weights = {
                name: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for name, x in want.items()
            }
            want_gradients = self._gradients(want, weights)
            with self._patched(proof):
                got = self._of_tokens(self._call(self.twin, self._inputs(self.source)), self.source)
                gradients = self._gradients(got, weights)
        finally:
            self.twin.eval()
        self._require(got, want, " in training" if training else "")
        self._compare_gradients(gradients, want_gradients)

    def _check_target_loss(self, proof: Proof, training: bool) -> None:
        """Compare the loss of labels, from which the model makes the decoder's input, and its gradients."""
        inputs = {**self.source.inputs, "labels": self.target.masked_fill(~self.target_mask, -100)}
        one = {"loss": torch.ones(())}
        self.twin.train(training)
        try:
            want = self.twin(**inputs).loss
            want_gradients = self._gradients({"loss": want}, one)
            with self._patched(proof):
                got = self._call(self.twin, inputs).loss
                gradients = self._gradients({"loss": got}, one)
        finally:
            self.twin.eval()
        if self._error(got, want) > self.tolerance:
            raise NotProven("its loss of packed rows differs from that of a padded batch")
        self._compare_gradients(gradients, want_gradients)

    def _check_long_source(self, proof: Proof) -> None:
        """Compare outputs for long rows, whose attention may be windowed or sparse, and for special ids."""
        self.source = self._long_batch()
        self.target, self.target_mask = self.source.ids, self.source.mask
        for training in (False, True) if self.known else (False,):
            self.twin.train(training)
            alone = self._in_groups(self.base, self.source)
            got = self._of_tokens(self._packed(self.base, self._inputs(self.source), proof), self.source)
            self.twin.eval()
            self._require(got, alone, " for long sources, or with special ids")

    def _in_groups(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The values of each pair of equal sequences, in batches of equal lengths."""
        outs = [self._run(model, {**x, "decoder_input_ids": x["input_ids"]}) for x in batch.groups()]
        names = [name for name, x in outs[0].items() if isinstance(x, Tensor) and x.dim() > 1]
        return {name: torch.cat([out[name].flatten(0, 1) for out in outs]) for name in names}

    def _require(self, got: dict[str, Tensor], want: dict[str, Tensor], when: str) -> None:
        if (wrong := self._different(got, want)) is not None:
            raise NotProven(f"its {wrong} differs between packed rows and each pair of sequences alone{when}")

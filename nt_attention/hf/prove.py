"""Proves how a Hugging Face model can be packed, or why it can't, on a twin of the model."""

from __future__ import annotations

from contextlib import suppress

from transformers import PreTrainedModel

from . import families
from .families import Family
from .proof import Proof
from .trial import UNPATCHED_IS_WRONG, NotProven, Trial, first_line
from .trial_encoder_decoder import EncoderDecoderTrial
from .twin import CannotBuild, build_twin, isolated


def prove(model: PreTrainedModel, family: Family) -> Proof:
    """Prove on a twin how a model can be packed, or why it can't.

    Takes up to some seconds. The random state of the caller stays as it is.

    Args:
        model: the model. It does not run.
        family: what is known about its family.
    """
    with isolated():
        try:
            twin = build_twin(model)
        except CannotBuild as error:
            return Proof(f"no small model of its class can be built and run, to try it: {error}", tried=False)
        trial = EncoderDecoderTrial if families.is_encoder_decoder(twin) else Trial
        try:
            return trial(twin, family).prove()
        except NotProven as failure:
            reason = str(failure)
            if twin.config._attn_implementation == "sdpa" and "differs" in reason:  # it ignores some options
                with suppress(Exception):
                    twin.set_attn_implementation("eager")
                    return _prove_or_in_float32(trial, twin, family)
            return Proof(reason)
        except Exception as error:  # the unpatched model can't run these inputs
            reason = f"a small model of its class raises an error without the patch: {first_line(error)}"
            return Proof(reason, tried=False)


def _prove_or_in_float32(
    trial: type[Trial] | type[EncoderDecoderTrial], twin: PreTrainedModel, family: Family
) -> Proof:
    """The proof of a twin. It is in float32 if the unpatched twin is wrong: masks of float64 overflow in its softmax.

    Raises:
        NotProven: the twin can't be packed.
    """
    try:
        return trial(twin, family).prove()
    except NotProven as failure:
        if not str(failure).startswith(UNPATCHED_IS_WRONG):
            raise
    return trial(twin.float(), family).prove()

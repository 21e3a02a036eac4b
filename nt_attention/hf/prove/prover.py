"""Proves how a Hugging Face model can be packed, or why it can't, on a twin of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import families
from ..families import Family
from ..pack.encoder_layers import why_no_layers
from ..proof import Proof
from ..transformers_private import attention_of
from .layer_trial import prove_layers
from .trial import UNPATCHED_IS_WRONG, Trial
from .trial_runs import NotProven, NotTried, first_line
from .twin import CannotBuild, build_twin, isolated
from .user_code import UserCode, leaves_of, user_code_of
from .whole_twin import build_whole_twin, whole_fields

MakeTrial = Callable[..., Trial]


def prove(model: PreTrainedModel, family: Family) -> Proof:
    """Prove on a twin how a model can be packed, or why it can't.

    A model with code that is not from torch or transformers is also tried with its own config, or one that differs from
    it in widths only, because its code may compare with any field. Takes up to some seconds. The random state of the
    caller stays as it is.

    Args:
        model: the model. It does not run.
        family: what is known about its family.
    """
    if families.why_not_packed(model) is not None and why_no_layers(model) is None:
        with isolated():
            return prove_layers(model)
    code = user_code_of(model)
    fields = whole_fields(families.config_of(model), code)
    of_config = {x for x in leaves_of(fields) if _is_integer(x)}
    tried: dict[str, Any] = {"numbers": code.numbers | of_config, "lengths": code.numbers, "has_user_code": code.exists}
    with isolated():
        try:
            twin = build_twin(model)
        except CannotBuild as error:
            return Proof(f"no small model of its class can be built and run, to try it: {error}", tried=False)
        try:
            make = functools.partial(Trial, family=family, **tried)
            proof = _prove(make, twin)
            return _confirm(model, twin, code, make, proof) if code.exists else proof
        except NotProven as failure:
            return Proof(str(failure), tried=not isinstance(failure, NotTried))
        except Exception as error:  # the unpatched model can't run these inputs
            reason = f"a small model of its class raises an error without the patch: {first_line(error)}"
            return Proof(reason, tried=False)


def why_prefixes_differ(model: PreTrainedModel, proof: Proof) -> str | None:
    """Why shared prefixes would change what a model gives, or None. Tried on a twin, as packing is."""
    with isolated():
        try:
            Trial(build_twin(model), families.family_of(model)).check_prefixes(replace(proof, head=None))
        except (CannotBuild, NotProven) as failure:
            return str(failure)
    return None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prove(make: MakeTrial, twin: PreTrainedModel) -> Proof:
    """The proof of a twin.

    Raises:
        NotProven: the twin can't be packed.
    """
    try:
        return make(twin).prove()
    except NotProven as failure:
        if attention_of(twin.config) != "sdpa" or "differs" not in str(failure):  # it ignores some options
            raise
        with suppress(Exception):
            twin.set_attn_implementation("eager")
            return _prove_or_in_float32(make, twin)
        raise


def _prove_or_in_float32(make: MakeTrial, twin: PreTrainedModel) -> Proof:
    """The proof of a twin. It is in float32 if the unpatched twin is wrong: masks of float64 overflow in its softmax.

    Raises:
        NotProven: the twin can't be packed.
    """
    try:
        return make(twin).prove()
    except NotProven as failure:
        if not str(failure).startswith(UNPATCHED_IS_WRONG):
            raise
    return make(twin.float()).prove()


def _confirm(model: PreTrainedModel, twin: PreTrainedModel, code: UserCode, make: MakeTrial, proof: Proof) -> Proof:
    """What is proven also with the model's own config, or one that differs in widths only.

    Raises:
        NotProven: this differs from `proof`, or can't be tried.
    """
    try:
        whole = build_whole_twin(model, code, next(twin.parameters()).dtype)
        if attention_of(twin.config) == "eager":
            whole.set_attn_implementation("eager")
    except CannotBuild as error:
        raise NotProven(
            f"no model of its class with all of its layers and ids can be built, to try it: {error}"
        ) from error
    of_whole = make(whole, proof=proof).prove()
    if next(whole.parameters()).dtype == torch.float64:  # code may ask for the dtype
        make(whole.float(), proof=proof).find_way()
    for dtype in (torch.bfloat16, torch.float16):
        if str(dtype).removeprefix("torch.") in code.names:
            make(whole.to(dtype), proof=proof).find_way()
    return replace(
        proof,
        holes=proof.holes and of_whole.holes,
        embeds=proof.embeds and of_whole.embeds,
        token_types=proof.token_types and of_whole.token_types,
    )

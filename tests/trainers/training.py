"""What the tests of trainers share: a run of a trainer, its losses and gradient norms, and what the patch did in it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from transformers import set_seed

import nt_attention as nta
from nt_attention import NotPackedWarning, PatchHandle

NOT_FALLBACKS = {None, "there is no padding to skip"}


def outcome_of(handle: PatchHandle) -> str:
    reasons = sorted(why for why in handle.calls if why not in NOT_FALLBACKS)
    packed = None in handle.calls
    if not reasons:
        return "packed" if packed else "nothing to pack"
    why = "; ".join(reasons)
    return f"packed, and in part padded: {why}" if packed else f"falls back: {why}"


@dataclass
class Ran:
    """What a trainer logged, step by step, the handle of the patch, if there was one, and what training added to each
    parameter."""

    losses: list[float]
    norms: list[float]
    handle: PatchHandle | None
    more: dict[str, float]
    changes: dict[str, torch.Tensor]


def run(make_model, make_trainer, when: str | None, **options) -> Ran:
    """Train what ``make_model()`` gives; patched "before" ``make_trainer(model)``, "after" it, or not at all.

    `options` are those of the patch.
    """
    set_seed(0)
    model = make_model()
    handle = nta.patch(model, packing="always", **options) if when == "before" else None
    trainer = make_trainer(model)
    if when == "after":
        handle = nta.patch(trainer.model, packing="always", **options)
    before = _trained(trainer.model)
    set_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPackedWarning)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    last = {key: value for entry in trainer.state.log_history if "loss" not in entry for key, value in entry.items()}
    changes = {name: x - before[name] for name, x in _trained(trainer.model).items()}
    return Ran([s["loss"] for s in steps], [s["grad_norm"] for s in steps], handle, last, changes)


def _trained(model) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}


def assert_same(got: Ran, want: Ran, tolerance: float = 1e-4) -> None:
    assert len(got.losses) == len(want.losses) > 0
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=10 * tolerance, atol=tolerance)
    assert torch.tensor(got.norms).isfinite().all()
    assert min(got.norms) > 0

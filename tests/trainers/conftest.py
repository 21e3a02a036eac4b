"""Real trainers on tiny models: what each step gives, patched before and after the trainer is built.

``record`` keeps what every test found; ``python tests/trainers/matrix.py`` writes it into the documentation.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

import nt_attention as nta  # noqa: E402
from nt_attention.patching.patch import NotPackedWarning, PatchHandle  # noqa: E402

ROWS: list[dict[str, str]] = []
NOT_FALLBACKS = {None, "there is no padding to skip", "it was packed already"}


@pytest.fixture
def record():
    """``record(library, task, when, handle)`` or ``record(library, task, when, "refused: …")``."""

    def keep(library: str, task: str, when: str, found: PatchHandle | str) -> None:
        outcome = found if isinstance(found, str) else outcome_of(found)
        ROWS.append({"library": library, "task": task, "patched": when, "outcome": outcome})

    return keep


def outcome_of(handle: PatchHandle) -> str:
    reasons = sorted(why for why in handle.calls if why not in NOT_FALLBACKS)
    packed = None in handle.calls or "it was packed already" in handle.calls
    if not reasons:
        return "packed" if packed else "nothing to pack"
    why = "; ".join(reasons)
    return f"packed, and in part padded: {why}" if packed else f"falls back: {why}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("NT_ATTENTION_TRAINERS_JSON")
    if path and ROWS:
        Path(path).write_text(json.dumps(ROWS, indent=1) + "\n")


@dataclass
class Ran:
    """What a trainer logged, step by step, and the handle of the patch, if there was one."""

    losses: list[float]
    norms: list[float]
    handle: PatchHandle | None
    more: dict[str, float]


def run(make_model, make_trainer, when: str | None) -> Ran:
    """Train a model that ``make_model()`` gives; patched "before" ``make_trainer(model)``, "after" it, or not (None)."""
    from transformers import set_seed

    set_seed(0)
    model = make_model()
    handle = nta.patch(model) if when == "before" else None
    trainer = make_trainer(model)
    if when == "after":
        handle = nta.patch(trainer.model)
    set_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPackedWarning)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    last = {key: value for entry in trainer.state.log_history if "loss" not in entry for key, value in entry.items()}
    return Ran([s["loss"] for s in steps], [s["grad_norm"] for s in steps], handle, last)


def assert_same(got: Ran, want: Ran, tolerance: float = 1e-4) -> None:
    assert len(got.losses) == len(want.losses) > 0
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=10 * tolerance, atol=tolerance)
    assert torch.tensor(got.norms).isfinite().all()
    assert min(got.norms) > 0


@pytest.fixture(autouse=True)
def _quiet(caplog):
    import logging

    caplog.set_level(logging.ERROR)

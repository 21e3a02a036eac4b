"""Real trainers on tiny models: what each step gives, patched before and after the trainer is built.

``record`` keeps what every test found; ``python tools/trainers_page.py`` writes it into the documentation.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)  # for shared_data
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
ROWS: list[dict[str, str]] = []


@pytest.fixture
def record():
    """``record(library, task, when, handle)`` or ``record(library, task, when, "refused: …")``."""

    def keep(library: str, task: str, when: str, found) -> None:
        from training import outcome_of

        outcome = found if isinstance(found, str) else outcome_of(found)
        ROWS.append({"library": library, "task": task, "patched": when, "outcome": outcome})

    return keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("NT_ATTENTION_TRAINERS_JSON")
    if path and ROWS:
        from trainers_page import merge

        before = json.loads(Path(path).read_text()) if Path(path).exists() else []
        Path(path).write_text(json.dumps(merge(before, ROWS), indent=1) + "\n")


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)

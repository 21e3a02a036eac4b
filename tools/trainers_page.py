"""Which trainers run packed, written into ``docs/reference/trainers.md`` from what their tests found.

``python tools/trainers_page.py`` runs them and writes both files; with ``--render`` it writes the page anew from
``tools/trainers_outcomes.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER, FOUND = ROOT / "tests" / "trainers", ROOT / "tools" / "trainers_outcomes.json"
PAGE = ROOT / "docs" / "reference" / "trainers.md"

INTRODUCTION = """# Trainers

Which calls of a trainer run packed after `nta.patch`. The guide [Fine-tune](../guides/fine_tune.md) shows how to use
the trainers.

Each result is from a test. The test compares the losses of every step with those of the unpatched model, or the outputs
if nothing is trained. SFT with `packing=True` is not compared, because on SDPA the unpatched model lets the sequences
of a row attend to each other. `python tools/trainers_page.py` runs the tests and writes this page.

"Patched before" means before the trainer was built or the adapter was added. The numbers in brackets are the
[reasons](#reasons) below.

- **packed**: every call with padding ran packed.
- **packed, in part**: the training steps of the base model ran packed. The reason is about the other calls: generation
  with a cache, or a head that the trainer had replaced before the patch. TRL's head reads padded hidden states in both
  columns. In the first column, the patch does not see it, so it is not counted.
- **falls back**: the calls ran padded, as before the patch.
- **refused**: an error is raised.
- **–**: not tested.

"""

SHARDED = """## Over several ranks

A model that is patched with `mesh=` divides its batch over several ranks. Tests compare losses, gradient norms,
evaluation, saved models, and parameters after some steps with those of one process. They use CPUs and gloo.

| | engine | how |
|---|---|---|
| own loop | FSDP2, DDP | `nta.patch(model, mesh=mesh["cp"])` |
| accelerate | FSDP2, with `ParallelismConfig` | `nta.patch(model, mesh=accelerator.torch_device_mesh["cp"])` |
| transformers' Trainer | DDP, or FSDP2 with `ParallelismConfig` | `nt_attention.hf.trainer.ShardedTrainer` |
| TRL's SFTTrainer | DDP | `nt_attention.hf.trainer.ShardedTrainerMixin` |

The guide [Several GPUs](../guides/several_gpus.md#long-sequences) shows how. `ShardedTrainer` is tested with
transformers 5.23. If the Trainer of your version does not fit, importing it raises an ImportError.

::: nt_attention.hf.trainer.ShardedTrainer
    options:
      show_bases: false
      heading_level: 3
      members: [context_mesh]

::: nt_attention.hf.trainer.ShardedTrainerMixin
    options:
      show_bases: false
      heading_level: 3
      members: []

"""

PLUGINS = """## Callbacks and plugins

They patch the model when a trainer is made or starts. They log how many tokens ran packed, and how many positions of
padding were not computed.

In Axolotl's config:

```text
plugins:
  - nt_attention.integrations.axolotl.Plugin
```

Axolotl 0.19 pins transformers 5.16.1, and this library needs 5.17, so the plugin was not run in Axolotl. The tests make
the calls that Axolotl makes, in their order, on a class in the place of its `BasePlugin`. By hand, it was also run on
the `BasePlugin` and `PluginManager` of 0.19.

::: nt_attention.integrations.trainer.PackingCallback
    options:
      heading_level: 3
      members: []

::: nt_attention.integrations.lightning.PackingCallback
    options:
      heading_level: 3
      members: []

"""


def merge(before: list[dict[str, str]], found: list[dict[str, str]]) -> list[dict[str, str]]:
    """What was found now, and what was found before for libraries and machines that did not run now."""

    def without_version(row: dict[str, str]) -> str:
        return re.sub(r" [\d.]+", "", row["library"])

    ran = {without_version(row) for row in found}
    return found + [row for row in before if without_version(row) not in ran]


def render(rows: list[dict[str, str]]) -> str:
    """A table for each library, in the order in which the tests ran."""
    by_library: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_library.setdefault(row["library"], {}).setdefault(row["task"], {})[row["patched"]] = row["outcome"]
    lines, notes = [INTRODUCTION], {}
    for library in sorted(by_library, key=str.lower):
        lines.append(f"## {library}\n\n| | patched before | patched after |\n|---|---|---|\n")
        for task, found in by_library[library].items():
            cells = (_cell(found.get(when), notes) for when in ("before", "after"))
            lines.append(f"| {task} | {' | '.join(cells)} |\n")
        lines.append("\n")
    lines += [PLUGINS, SHARDED]
    lines.append("## Reasons\n\n")
    lines += [f"{number}. {reason}\n" for reason, number in notes.items()]
    return "".join(lines)


def _cell(outcome: str | None, notes: dict[str, int]) -> str:
    if outcome is None:
        return "–"
    what, _, why = outcome.partition(": ")
    numbers = [notes.setdefault(reason, len(notes) + 1) for reason in why.split("; ") if reason]
    short = what.replace("packed, and in part padded", "packed, in part")
    return f"{short} ({', '.join(map(str, numbers))})" if numbers else short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="the page alone, from what was found before")
    options = parser.parse_args()
    status = 0
    if not options.render:
        os.environ["NT_ATTENTION_TRAINERS_JSON"] = str(FOUND)
        status = int(
            pytest.main(
                [str(FOLDER), "--whole-sweeps", f"--ignore={FOLDER / 'test_matrix.py'}", "-p", "no:cacheprovider"]
            )
        )
    PAGE.write_text(render(json.loads(FOUND.read_text())))
    return status


if __name__ == "__main__":
    sys.exit(main())

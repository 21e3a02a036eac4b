"""What held on a card: the table that ``check`` prints, and the file that ``kernels/support.py`` reads."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels import support
from ..kernels.select import BACKENDS
from .cases import Case, Finding
from .environment import device_name, versions


@dataclass(frozen=True)
class Table:
    """What held, as ``kernels/support.py`` reads it; printed as a table."""

    card: str
    capability: tuple[int, int] | None
    versions: dict[str, str]
    held: dict[str, dict[str, dict[str, dict[str, str]]]]
    told: dict[str, list[str]]

    @classmethod
    def of(cls, findings: Iterable[Finding], device: torch.device) -> Table:
        held: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        told: dict[str, list[str]] = {}
        order = ("no", "forward", "both")
        for finding in sorted(findings, key=lambda found: _place(found.case)):
            case = finding.case
            dtype = str(case.dtype).removeprefix("torch.")
            row = held.setdefault(case.backend, {}).setdefault(dtype, {}).setdefault(case.kind, {})
            row[case.which] = min(row.get(case.which, "both"), finding.held, key=order.index)
            if finding.held != "both":
                told.setdefault(case.backend, []).append(
                    f"{dtype}, {case.kind} {case.which} at {case.head_dim}/{case.value_dim}: {finding.told}"
                )
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(device_name(device), capability, versions(), held, told)

    def __str__(self) -> str:
        lines = [f"{self.card}; {', '.join(f'{name} {version}' for name, version in self.versions.items())}"]
        for name, by_dtype in self.held.items():
            lines.append(f"\n{name}: {BACKENDS[name].about}")
            for dtype, kinds in by_dtype.items():
                for kind, row in kinds.items():
                    for state, words in (
                        ("both", "right"),
                        ("forward", "right without gradients"),
                        ("no", "not right"),
                    ):
                        which = [one for one, held in row.items() if held == state]
                        if which:
                            lines.append(f"  {dtype:<9} {kind:<10} {words}: {', '.join(which)}")
            lines += [f"    {line}" for line in self.told.get(name, [])]
        return "\n".join(lines)

    def write(self, file: Path, command: str) -> None:
        if file == Path():
            assert self.capability is not None
            file = Path(support.__file__).parent / "verified" / "sm{}{}.json".format(*self.capability)
        held = json.loads(file.read_text())["results"] if file.exists() else {}  # what was not run today stays
        for name, by_dtype in self.held.items():
            for dtype, kinds in by_dtype.items():
                for kind, row in kinds.items():
                    held.setdefault(name, {}).setdefault(dtype, {}).setdefault(kind, {}).update(row)
        written = {
            "command": command,
            "date": str(datetime.date.today()),
            "gpu": self.card,
            "versions": self.versions,
            "results": held,
        }
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(written, indent=1) + "\n")
        print(f"\nwritten to {file}")


def _place(case: Case) -> tuple[object, ...]:
    which = case.which.partition("/")
    number = int(which[0]) if which[0].isdigit() else 0
    return list(BACKENDS).index(case.backend), str(case.dtype), case.kind, number, case.which

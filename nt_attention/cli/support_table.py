"""Verified support: the table that ``check`` prints, and the file that ``kernels/support.py`` reads."""

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

Results = dict[str, dict[str, dict[str, dict[str, str]]]]
RESULTS = {"both": "right", "forward": "right without gradients", "no": "not right"}


@dataclass(frozen=True)
class SupportTable:
    """The results of ``check``, which print as a table.

    Attributes:
        device: its name.
        capability: of a CUDA device, else None.
        versions: of the packages that were run.
        results: backend → dtype → "head dims" or "features" → which one → a key of ``RESULTS``.
        details: of the results that are not "both", by backend.
    """

    device: str
    capability: tuple[int, int] | None
    versions: dict[str, str]
    results: Results
    details: dict[str, list[str]]

    @classmethod
    def of(cls, findings: Iterable[Finding], device: torch.device) -> SupportTable:
        results: Results = {}
        details: dict[str, list[str]] = {}
        for finding in sorted(findings, key=lambda finding: _sort_key(finding.case)):
            case = finding.case
            dtype = str(case.dtype).removeprefix("torch.")
            row = results.setdefault(case.backend, {}).setdefault(dtype, {}).setdefault(case.kind, {})
            row[case.which] = max(row.get(case.which, "both"), finding.result, key=list(RESULTS).index)  # the worst
            if finding.result != "both":
                details.setdefault(case.backend, []).append(
                    f"{dtype}, {case.kind} {case.which} at {case.head_dim}/{case.value_dim}: {finding.details}"
                )
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(device_name(device), capability, versions(), results, details)

    def __str__(self) -> str:
        lines = [f"{self.device}; {', '.join(f'{name} {version}' for name, version in self.versions.items())}"]
        for name, by_dtype in self.results.items():
            lines.append(f"\n{name}: {BACKENDS[name].about}")
            for dtype, kinds in by_dtype.items():
                for kind, row in kinds.items():
                    for state, words in RESULTS.items():
                        which = [one for one, result in row.items() if result == state]
                        if which:
                            lines.append(f"  {dtype:<9} {kind:<10} {words}: {', '.join(which)}")
            lines += [f"    {line}" for line in self.details.get(name, [])]
        return "\n".join(lines)

    def write(self, file: Path, command: str) -> None:
        if file == Path():
            assert self.capability is not None
            file = Path(support.__file__).parent / "verified" / "sm{}{}.json".format(*self.capability)
        results = json.loads(file.read_text())["results"] if file.exists() else {}  # what was not run this time stays
        for name, by_dtype in self.results.items():
            for dtype, kinds in by_dtype.items():
                for kind, row in kinds.items():
                    results.setdefault(name, {}).setdefault(dtype, {}).setdefault(kind, {}).update(row)
        written = {
            "command": command,
            "date": str(datetime.date.today()),
            "gpu": self.device,
            "versions": self.versions,
            "results": results,
        }
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(written, indent=1) + "\n")
        print(f"\nwritten to {file}")


def _sort_key(case: Case) -> tuple[object, ...]:
    which = case.which.partition("/")
    number = int(which[0]) if which[0].isdigit() else 0
    return list(BACKENDS).index(case.backend), str(case.dtype), case.kind, number, case.which

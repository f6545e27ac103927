# SPDX-License-Identifier: Apache-2.0
"""What a step of the hardware check leaves behind: a file that the report is made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["STEPS", "Check", "Result", "Step", "read_step", "write_step"]

#: In the order in which they are made and told of.
STEPS: Final = ("facts", "correctness", "sweep", "drill")

#: ``shown`` is a figure without a limit.
Result = Literal["passed", "failed", "skipped", "shown"]


@dataclass(frozen=True)
class Check:
    """One line of the summary.

    Attributes:
        check: what was looked at.
        result: what became of it.
        figure: what was found, in a few words.
        limit: what it had to be, or ``""``.
        detail: what one has to know where it failed or was skipped, or ``""``.
    """

    check: str
    result: Result
    figure: str = ""
    limit: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """What one step found.

    Attributes:
        checks: lines of the summary.
        data: everything else, as JSON values.
    """

    checks: list[Check]
    data: dict[str, Any]


def write_step(folder: Path, name: str, step: Step) -> None:
    """Write the file of a step. What is written again replaces it, so that a step that is cut short leaves a part."""
    part = folder / f"{name}.json.part"
    part.write_text(json.dumps({"checks": [asdict(check) for check in step.checks], "data": step.data}), "utf-8")
    part.replace(folder / f"{name}.json")


def read_step(folder: Path, name: str) -> Step | None:
    """Return what a step wrote, or None where it wrote nothing."""
    try:
        fields = json.loads((folder / f"{name}.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    return Step([Check(**check) for check in fields["checks"]], fields["data"])

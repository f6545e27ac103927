# SPDX-License-Identifier: Apache-2.0
"""One report: Markdown and JSON for files, a table for the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from moonpool.bench.doctor import document, examine
from moonpool.bench.gpu.driver import Driver
from moonpool.bench.gpu.run import Run

__all__ = ["SCHEMA", "facts", "show", "write"]

SCHEMA: Final = 1
_WORDS: Final = {"passed": "pass", "failed": "**FAIL**", "skipped": "skipped", "shown": "not judged"}
_COLOURS: Final = {"passed": "green", "failed": "bold red", "skipped": "yellow", "shown": "cyan"}


def facts(driver: Driver) -> dict[str, Any]:
    """Return what the device and the host are."""
    return {
        "device": driver.text("cuDeviceGetName"),
        "pci": driver.text("cuDeviceGetPCIBusId"),
        "driver_cuda": driver.version(),
        "compute_capability": f"{driver.attribute(75)}.{driver.attribute(76)}",
        "doctor": document(examine()),
    }


def cell(value: object) -> str:
    """Return a value as a cell of a table in Markdown."""
    return " ".join(str(value).split()).replace("|", "\\|")


def markdown(run: Run, about: dict[str, Any], *, passed: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    counts = Counter(check.result for check in run.checks)
    version = about["driver_cuda"]
    yield from ("# Moonpool GPU check", "", f"**{'PASSED' if passed else 'FAILED'}**: " + ", ".join(
        f"{count} {result}" for result, count in counts.items()) + ".", "")  # fmt: skip
    yield f"{about['device']} at {about['pci']}, driver for CUDA {version // 1000}.{version % 1000 // 10}."
    yield from ("", "| check | result | figure | limit |", "| --- | --- | --- | --- |")
    for check in run.checks:
        cells = (check.check, _WORDS[check.result], check.figure, check.limit)
        yield "| " + " | ".join(map(cell, cells)) + " |"
    if details := [check for check in run.checks if check.detail]:
        yield from ("", "What stands behind these:", "")
        yield from (f"* {cell(check.check)} ({check.result}): {cell(check.detail)}" for check in details)
    yield from ("", "## Doctor", "", "| what | status | found | fix |", "| --- | --- | --- | --- |")
    for one in about["doctor"]["checks"]:
        yield f"| {cell(one['name'])} | {one['status']} | {cell(one['found'])} | {cell(one['fix'])} |"


def show(run: Run, *, passed: bool) -> None:
    """Print the table of checks."""
    table = Table("check", "result", "figure", "limit", title="Moonpool GPU check")
    for check in run.checks:
        colour = _COLOURS[check.result]
        table.add_row(check.check, f"[{colour}]{check.result}[/]", check.figure or check.detail[:80], check.limit)
    console = Console(stderr=True)
    console.print(table)
    console.print("[green]PASSED[/]" if passed else "[bold red]FAILED[/]")


def write(run: Run, about: dict[str, Any], report: Path) -> bool:
    """Write the report and its JSON form; return whether nothing failed."""
    passed = not any(check.result == "failed" for check in run.checks)
    found = {
        "schema": SCHEMA,
        "passed": passed,
        "checks": [asdict(check) for check in run.checks],
        "rows": run.rows,
        "facts": about,
    }
    report.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    report.write_text("\n".join(markdown(run, about, passed=passed)) + "\n", "utf-8")
    return passed

# SPDX-License-Identifier: Apache-2.0
"""One report of all steps: Markdown for people, and the same as JSON beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from moonpool.bench.errors import BenchError
from moonpool.bench.hardware.steps import STEPS, Check, Step, read_step
from moonpool.bench.rails import Rail
from moonpool.units import format_bytes

__all__ = ["SCHEMA", "write_report"]

#: Of the JSON form.
SCHEMA: Final = 1
_LOG_LINES: Final = 12
_WORDS: Final = {"passed": "pass", "failed": "**FAIL**", "skipped": "skipped", "shown": "not judged"}


def write_report(folder: Path, file: Path, made: Collection[str] = STEPS) -> bool:
    """Write the report and its JSON form; return whether no check failed.

    Args:
        folder: what the steps have left behind.
        file: of the Markdown; the JSON has its name with the suffix ``.json``.
        made: the steps that were asked for.

    Raises:
        BenchError: it cannot be written.
    """
    steps = {name: read_step(folder, name) for name in STEPS}
    checks = [check for name in STEPS for check in _checks(folder, name, steps[name], made)]
    passed = not any(check.result == "failed" for check in checks)
    text = "\n".join(_lines(checks, steps, passed=passed)) + "\n"
    document = {
        "schema": SCHEMA,
        "passed": passed,
        "checks": [asdict(check) for check in checks],
        **{name: None if step is None else step.data for name, step in steps.items()},
    }
    try:
        file.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        file.write_text(text, "utf-8")
    except OSError as error:
        raise BenchError(
            f"the report {file} cannot be written", cause=str(error), hint="another --report, on a disk with room"
        ) from error
    return passed


def _checks(folder: Path, name: str, step: Step | None, made: Collection[str]) -> Iterator[Check]:
    if name not in made:
        yield Check(name, "skipped", "", "", "not among --steps")
        return
    if step is not None:
        yield from step.checks
    # What the script writes about a step that did not end by itself, or not well.
    try:
        ended = (folder / f"{name}.ended").read_text("utf-8").strip()
    except FileNotFoundError:
        ended = "" if step is not None else "it was not made"
    if ended:
        yield Check(name, "failed", ended, "", _last_words(folder / f"{name}.log"))


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return " / ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())


def _lines(checks: list[Check], steps: dict[str, Step | None], *, passed: bool) -> Iterator[str]:
    counts = Counter(check.result for check in checks)
    said = ", ".join(
        f"{counts[result]} {result}" for result in ("passed", "failed", "skipped", "shown") if counts[result]
    )
    yield from ("# Moonpool hardware check", "", f"**{'PASSED' if passed else 'FAILED'}**: {said}.", "")
    yield from _table(("check", "result", "figure", "limit"), [
        (check.check, _WORDS[check.result], check.figure, check.limit) for check in checks
    ])  # fmt: skip
    if details := [check for check in checks if check.detail]:
        yield from ("", "What stands behind these:", "")
        yield from (f"* {_cell(check.check)} ({check.result}): {_cell(check.detail)}" for check in details)
    if (facts := steps["facts"]) is not None:
        yield from _facts(facts.data)
    if (sweep := steps["sweep"]) is not None and sweep.data.get("rows"):
        yield from _sweep(sweep.data["rows"])
    if (drill := steps["drill"]) is not None and drill.data.get("scenarios"):
        yield from _drill(drill.data)


def _table(titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + " --- |" * len(titles)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"


def _cell(value: Any) -> str:
    return " ".join(str("" if value is None else value).split()).replace("|", "\\|")


def _facts(data: dict[str, Any]) -> Iterator[str]:
    sides = [data["here"], data["target"]]
    rows = [
        ("time", *(side["time"] for side in sides)),
        *((name, *(side["doctor"]["environment"][key] for side in sides)) for name, key in (
            ("host", "host"), ("CPU", "cpu"), ("cores", "cores"), ("kernel", "kernel"), ("moonpool", "moonpool"),
            ("commit", "revision"), ("Python", "python"),
        )),
        ("NUMA nodes", *(side["numa_nodes"] for side in sides)),
        ("locked memory", *(_limit(side["locked_memory_bytes"]) for side in sides)),
        ("perftest", *(side["perftest"] or "not installed" for side in sides)),
        ("GPUs", *(", ".join(side["gpus"]) or "none" for side in sides)),
        ("rails", *("; ".join(map(_rail, side["rails"])) for side in sides)),
    ]  # fmt: skip
    yield from ("", "## Hosts", "")
    yield from _table(("", "here", "target"), rows)
    given = ", ".join(
        f"{name} {data[key] or 'all'}" for name, key in (("here", "devices"), ("target", "target_devices"))
    )
    yield from ("", f"Devices asked for: {given}.{' A quick run: ratios are not judged.' if data['quick'] else ''}")
    yield "GPU memory is not part of this check: Moonpool moves host memory only."
    yield from ("", "## Devices", "")
    yield from _table(
        ("side", "port", "state", "rate", "link layer", "MTU", "firmware", "NUMA node"),
        [
            (
                where, f"{device['device']}:{port['port']}", port["state"], port["rate"], port["link_layer"],
                f"{port['mtu']} of {port['mtu_max']}", device["firmware"], device["numa_node"],
            )
            for where, side in zip(("here", "target"), sides, strict=True)
            for device in side["doctor"]["rdma"]
            for port in device["ports"]
        ],
    )  # fmt: skip


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == -1 else format_bytes(nbytes)


def _rail(fields: dict[str, Any]) -> str:
    rail = Rail(**fields)
    return f"{rail.name} {rail.gid if rail.up else 'not up: ' + rail.reason}"


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _sweep(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", "## Sweep", "", "GB/s are medians of the rounds, and so is the ratio to perftest.", "")
    yield from _table(
        ("op", "block", "batch", "GB/s", "p50 µs", "p99 µs", "perftest", "its GB/s", "ratio", "of rounds", "bytes"),
        [
            (
                row["op"], format_bytes(row["block_bytes"]), row["batch"], _digits(row["gbytes_per_s"]),
                _digits(row["p50_us"]), _digits(row["p99_us"]), row["limit"], _digits(row["limit_gbytes_per_s"]),
                _digits(row["ratio"]),
                ", ".join(f"{ratio:.2f}" for ratio in row["ratios"]), "right" if row["verified"] else "WRONG",
            )
            for row in rows
        ],
    )  # fmt: skip


def _drill(data: dict[str, Any]) -> Iterator[str]:
    how = "by hand" if data["by_hand"] else "by `ip link set`"
    yield from ("", "## Failover drill", "", f"The rail that is taken down, {how}: {data['rail']}.")
    for story in data["scenarios"]:
        yield from ("", f"### {story['scenario']}", "")
        yield from _table(
            ("phase", "over", "GB/s", "MB of each rail", "why not RDMA"),
            [
                (
                    phase["phase"], phase["over"], f"{phase['gbytes_per_s']:.4g}",
                    ", ".join(f"{rail} {moved / 1e6:.1f}" for rail, moved in phase["rail_bytes"].items()),
                    phase["fallback"],
                )
                for phase in story["phases"]
            ],
        )  # fmt: skip
        if story["error"] is not None:
            yield from ("", f"Ended with {story['error']['type']}: {_cell(story['error']['text'])}")

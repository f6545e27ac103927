# SPDX-License-Identifier: Apache-2.0
"""The command line of ``deploy/gpu_check.py``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import click

from moonpool.bench.gpu.correctness import check_bytes, move_tensor
from moonpool.bench.gpu.driver import Driver, DriverError
from moonpool.bench.gpu.other import Other, serve
from moonpool.bench.gpu.rates import gather, sweep
from moonpool.bench.gpu.report import facts, show, write
from moonpool.bench.gpu.run import FULL, MIB, QUICK, Plan, Run
from moonpool.bench.hardware.steps import Result
from moonpool.units import format_bytes

__all__ = ["main"]

_HELP: Final = """Check Moonpool on a GPU: every byte of every path between two processes, and rates beside those of
the driver. Nothing on the host is changed. It ends by itself, within --seconds and a little."""


def check(device: int, plan: Plan, seconds: float, report: Path) -> bool:
    """Make the whole check; return whether nothing failed."""
    driver = Driver(device)
    try:
        run, about = Run(driver, plan, time.monotonic() + seconds), facts(driver)
        missing = [one["name"] for one in about["doctor"]["checks"] if one["needed"] and one["status"] == "missing"]
        run.note("doctor", "failed" if missing else "passed", "", "nothing needed is missing", ", ".join(missing))
        other = Other(device, plan.nbytes)
        try:
            before = driver.unused()
            check_bytes(run, other)
            run.make("gather and scatter", lambda: gather(run))
            run.make("rates", lambda: sweep(run, other))
            lost = before - driver.unused()
            # The driver keeps some of what it has compiled.
            result: Result = "passed" if lost <= 8 * MIB else "failed"
            run.note(
                "memory of the device that stays in use", result, format_bytes(max(0, lost)), format_bytes(8 * MIB)
            )
        finally:
            other.close()
    finally:
        driver.close()
    passed = write(run, about, report)
    show(run, passed=passed)
    return passed


def _check_places(report: Path) -> None:
    """See that there is room for a report, before anything takes minutes."""
    if report.suffix == ".json":
        raise click.BadParameter("the same as JSON has that suffix", param_hint="--report")
    for place in (report, report.with_suffix(".json")):
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise click.BadParameter(f"{place} cannot be written", param_hint="--report")


@click.command(help=_HELP)
@click.option("--device", type=click.IntRange(0), default=0, show_default=True, help="CUDA ordinal of the GPU.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), default=Path("moonpool-gpu-report.md"),
              show_default=True, help="Where the report goes; the same as JSON has the suffix .json.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(10), default=420.0, show_default=True,
              help="After so long nothing more is begun.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Less of everything, and ratios that are not judged.")
@click.option("--serve", "serving", is_flag=True, hidden=True)
@click.option("--nbytes", type=int, default=0, hidden=True)
@click.option("--torch", "torch_address", hidden=True)
def main(*, device: int, report: Path, seconds: float, quick: bool, serving: bool, nbytes: int,
         torch_address: str | None) -> None:  # fmt: skip
    """Be one of the processes of the check."""
    try:
        if serving:
            serve(device, nbytes)
        elif torch_address is not None:
            move_tensor(torch_address, device)
        else:
            _check_places(report)
            sys.exit(0 if check(device, QUICK if quick else FULL, seconds, report) else 1)
    except DriverError as error:
        raise click.ClickException(f"{error}. Is there a GPU here? See docs/gpu.md") from error


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench hardware``: the steps of ``deploy/hardware_check.sh``, each a process of its own."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from moonpool.address import Address
from moonpool.bench.backends import Place
from moonpool.bench.errors import ControlError, ExitStatus, UsageError
from moonpool.bench.examined import Host
from moonpool.bench.hardware import correctness as exchanging
from moonpool.bench.hardware import drill as drilling
from moonpool.bench.hardware import sweep as sweeping
from moonpool.bench.hardware.facts import examine
from moonpool.bench.hardware.links import ByHand, Link, Switch, netdev_of, why_not
from moonpool.bench.hardware.report import write_report
from moonpool.bench.hardware.steps import STEPS, Check, Step, read_step, write_step
from moonpool.bench.listening import serve_until_dismissed
from moonpool.bench.options import ADDRESS, SECRET, Choices
from moonpool.bench.perform import say
from moonpool.bench.rails import Rail
from moonpool.bench.targets import RemoteTarget
from moonpool.bench.work import Tuning
from moonpool.errors import MoonpoolError

__all__ = ["hardware"]

_EXAMINE_S = 120.0

_secret = click.option("--secret", type=SECRET, envvar="MOONCAKE_BENCH_SECRET", metavar="TEXT|@FILE")
_target = click.option("--target", type=ADDRESS, required=True)
_folder = click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
_quick = click.option("--quick", is_flag=True, help="A few minutes less, and ratios that are not judged.")


def _step(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a step."""
    devices = click.option("--devices"), click.option("--target-devices")
    for option in (_secret, _target, _folder, _quick, *devices):
        command = option(command)
    return command


@click.group(hidden=True)
@click.pass_context
def hardware(ctx: click.Context) -> None:
    """Steps of deploy/hardware_check.sh, which is what to use."""
    # A deadline ends a step as Ctrl-C does: links come up again, and the other side is let go.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except MoonpoolError as error:
        say(str(error))
        sys.exit(ExitStatus.FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)


@contextmanager
def _calling(target: Address, secret: bytes | None) -> Iterator[tuple[RemoteTarget, Place]]:
    place = Place(target.host, secret)
    try:
        remote = RemoteTarget(target, place)
    except ControlError as error:
        if error.retryable:
            error.hint = "`hardware_check.sh target --listen HOST:PORT` on the other host first"
        raise
    try:
        yield remote, place
        remote.goodbye()
    finally:
        remote.close()


@hardware.command()
@click.option("--listen", type=ADDRESS, required=True)
@_secret
@click.option("--insecure", is_flag=True)
def serve(listen: Address, secret: bytes | None, insecure: bool) -> None:
    """Be the target of run after run, until the other side says that it was the last."""
    with _ending():
        sys.exit(serve_until_dismissed(listen, secret, insecure=insecure))


@hardware.command()
@_step
def facts(**given: Any) -> None:
    """Look at both hosts; fail where the devices cannot be used."""
    with _ending():
        with _calling(given["target"], given["secret"]) as (remote, _):
            examining = remote.start("examine", _EXAMINE_S, devices=given["target_devices"])
            here = examine(given["devices"])
            there = examining()
        checks = [_doctor(name, side["doctor"]) for name, side in (("here", here), ("target", there))]
        if here["doctor"]["environment"]["moonpool"] != there["doctor"]["environment"]["moonpool"]:
            checks.append(Check("versions", "failed", "", "the same on both hosts", "install one version of moonpool"))
        data = {
            "here": here,
            "target": there,
            "devices": given["devices"],
            "target_devices": given["target_devices"],
            "quick": given["quick"],
        }
        write_step(given["folder"], "facts", Step(checks, data))


def _doctor(name: str, document: dict[str, Any]) -> Check:
    found = [one for one in document["checks"] if one["status"] == "degraded"]
    figure = f"{len(found)} degraded" if found else "nothing degraded"
    missing = [one["name"] for one in document["checks"] if one["status"] == "missing" and one["needed"]]
    details = "; ".join(f"{one['name']}: {one['fix']}" for one in found if one["fix"])
    return Check(f"doctor: {name}", "failed" if missing else "passed", figure, "nothing needed is missing", details)


@hardware.command()
@_step
@click.option("--seed", type=int, default=lambda: secrets.randbits(32))
def correctness(seed: int, **given: Any) -> None:
    """Move blocks of awkward sizes, and look at every byte."""
    with _ending():
        with _calling(given["target"], given["secret"]) as (remote, place):
            step = exchanging.correctness(
                remote, place, exchanging.QUICK if given["quick"] else exchanging.FULL,
                Tuning(given["devices"], given["target_devices"]), seed, _noting(given, "correctness"),
            )  # fmt: skip
        _noting(given, "correctness")(step)


@hardware.command()
@_step
def sweep(**given: Any) -> None:
    """Measure rates beside perftest."""
    with _ending():
        rails = _rails(given["folder"])
        bars = sweeping.QUICK if given["quick"] else sweeping.FULL
        options = replace(bars.options, target=given["target"], secret=given["secret"])
        tuning = Tuning(given["devices"], given["target_devices"])
        note = _noting(given, "sweep")
        note(sweeping.sweep(options, bars, tuning, rails[0].setting, len(rails), note))


@hardware.command()
@_step
@click.option("--how", type=click.Choice(["auto", "link", "manual", "skip"]), required=True)
@click.option("--why", default="", help="Why it is skipped.")
def drill(how: str, why: str, **given: Any) -> None:
    """Take a rail down under traffic."""
    with _ending():
        rails = _rails(given["folder"])
        host, rail = Host(), rails[0]
        netdev = netdev_of(host, rail)
        switch: Switch = ByHand(rail, netdev, click.echo)
        if how == "manual":
            why = ""
        elif how == "skip":
            why = why or "--drill skip"
        else:
            why = why_not(host, rail, given["target"], careful=how == "auto")
            switch = Link(rail, netdev or "", given["folder"] / "link-is-down")
        note = _noting(given, "drill")
        if why:
            note(Step([Check("drill", "skipped", "", "", why)], {}))
            return
        load = drilling.QUICK if given["quick"] else drilling.FULL
        options = replace(load.options, target=given["target"], secret=given["secret"])
        tuning = Tuning(given["devices"], given["target_devices"])
        note(drilling.drill(options, load, tuning, rails, switch, note))


@hardware.command()
@_step
@click.option("--report", "file", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--steps", type=Choices("name", STEPS[1:]), required=True)
def report(file: Path, steps: list[str], **given: Any) -> None:
    """Let the target go, and write what all steps have found."""
    with _ending():
        try:
            with _calling(given["target"], given["secret"]) as (remote, _):
                remote.call("dismiss")
        except MoonpoolError as error:
            say(f"the target could not be told that it is over: {error}", style="yellow")
        passed = write_report(given["folder"], file, ["facts", *steps])
        sys.exit(ExitStatus.OK if passed else ExitStatus.NOT_VERIFIED)


def _noting(given: dict[str, Any], name: str) -> Callable[[Step], None]:
    return lambda step: write_step(given["folder"], name, step)


def _rails(folder: Path) -> list[Rail]:
    """Return those of this side that are up, as the first step found them."""
    step = read_step(folder, "facts")
    if step is None:
        raise UsageError(f"{folder} has no facts", hint="`mooncake-bench hardware facts` first")
    return [rail for rail in (Rail(**fields) for fields in step.data["here"]["rails"]) if rail.up]

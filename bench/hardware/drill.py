# SPDX-License-Identifier: Apache-2.0
"""The failover drill: rows whose bytes are checked while a rail goes down, is down, and is up again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from moonpool.bench.backends import NETWORK, InitiatorSide
from moonpool.bench.errors import BenchError
from moonpool.bench.hardware.links import Switch
from moonpool.bench.hardware.steps import Check, Step
from moonpool.bench.rails import Rail
from moonpool.bench.results import RowResult
from moonpool.bench.runner import OpenRow, Options, Runner
from moonpool.bench.work import Tuning, Work
from moonpool.errors import MoonpoolError

__all__ = ["FULL", "QUICK", "Load", "drill"]

_MIB: Final = 1 << 20
_POLL_S: Final = 0.005
#: Until a window has moved its first bytes.
_BEGIN_S: Final = 60.0
#: Until a rail that is up again carries bytes: the longest back-off and a handshake, with room to spare.
_BACK_S: Final = 30.0
_RETRY_S: Final = 0.2


@dataclass(frozen=True)
class Load:
    """What is moved meanwhile.

    Attributes:
        block_bytes: bytes of a block.
        batch: blocks of a transfer, which are enough for all rails.
        footprint_bytes: memory on each side.
        slice_bytes: the least that a lane takes at once; None: as the engine is set.
        options: of the windows.
        scenarios: how many of them.
    """

    block_bytes: int
    batch: int
    footprint_bytes: int
    slice_bytes: int | None
    options: Options
    scenarios: int


FULL: Final = Load(_MIB, 64, 256 * _MIB, None, Options(duration=2.0, warmup=0.2, only="engine"), 4)
#: One row of the other rail, one of TCP, one of an error.
QUICK: Final = Load(64 << 10, 16, 4 * _MIB, 64 << 10, Options(duration=0.3, warmup=0.02, only="engine"), 3)


@dataclass(frozen=True)
class _Scenario:
    title: str
    op: str
    transport: str
    alone: bool
    expects: Literal["rail", "tcp", "error"]


_SCENARIOS: Final = (
    _Scenario("one rail of several down, write", "write", NETWORK, False, "rail"),
    _Scenario("the only rail down, write", "write", NETWORK, True, "tcp"),
    _Scenario("the only rail down, rdma required", "write", "rdma", True, "error"),
    _Scenario("one rail of several down, read", "read", NETWORK, False, "rail"),
)
_LIMITS: Final = {
    "rail": "over the other rails",
    "tcp": "over TCP",
    "error": "a typed error that names the rail",
}


@dataclass
class _Story:
    """What happened in one scenario."""

    scenario: str
    phases: list[dict[str, Any]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    error: dict[str, str] | None = None
    went_down: bool = False
    came_up: bool = False
    back_s: float | None = None
    failure: str = ""


class _Stream:
    """A row that is measured window by window."""

    def __init__(self, row: OpenRow, result: RowResult, story: _Story) -> None:
        self._row = row
        self._result = result
        self._story = story
        self.side: InitiatorSide = row.sides["engine"]

    def moved(self) -> int:
        """Return what all rails of this side have carried."""
        return sum((self.side.rail_bytes or {}).values())

    def window(self, phase: str) -> dict[str, int]:
        """Take one window; return what each rail has carried for it."""
        before = dict(self.side.rail_bytes or {})
        known = len(self._result.complaints)
        try:
            window = self._row.measure("engine")
        finally:
            self._story.complaints += self._result.complaints[known:]
        carried = {rail: moved - before.get(rail, 0) for rail, moved in (self.side.rail_bytes or {}).items()}
        self._story.phases.append(
            {
                "phase": phase,
                "gbytes_per_s": float(f"{window.gbytes_per_s:.6g}"),
                "payload_bytes": window.payload_bytes,
                # Nothing else was allowed, and what rails carry is counted.
                "over": "rdma" if any(carried.values()) else "tcp",
                "fallback": self.side.fallback,
                "rail_bytes": carried,
            }
        )
        return carried


@contextmanager
def _streaming(runner: Runner, work: Work, story: _Story) -> Iterator[_Stream]:
    result = RowResult(work, "moonpool")
    with runner.opened(result) as row:
        yield _Stream(row, result, story)


def drill(
    options: Options, load: Load, tuning: Tuning, rails: list[Rail], switch: Switch, note: Callable[[Step], None]
) -> Step:
    """Let a rail fail under every kind of traffic.

    Args:
        options: where the target is.
        load: what is moved.
        tuning: the devices.
        rails: those of this side that are up, the one that fails first.
        switch: takes that one down.
        note: is given what is known so far.
    """
    checks: list[Check] = []
    stories: list[dict[str, Any]] = []
    step = Step(checks, {"rail": rails[0].name, "by_hand": switch.by_hand, "scenarios": stories})
    done = 0
    for scenario in _SCENARIOS[: load.scenarios]:
        if not scenario.alone and len(rails) < 2:
            reason = "this side has one rail"
        elif switch.by_hand and done:
            reason = "by hand the rail is taken down once only"
        else:
            story = _play(options, load, tuning, rails, switch, scenario)
            stories.append(asdict(story))
            checks.extend(_judged(scenario, story, rails[0].name, by_hand=switch.by_hand))
            done += 1
            note(step)
            continue
        checks.append(Check(f"drill: {scenario.title}", "skipped", "", _LIMITS[scenario.expects], reason))
    return step


def _play(
    options: Options, load: Load, tuning: Tuning, rails: list[Rail], switch: Switch, scenario: _Scenario
) -> _Story:
    story = _Story(scenario.title)
    rail = rails[0].name
    devices = rails[0].setting if scenario.alone else tuning.devices
    work = Work(
        scenario.transport, scenario.op, load.block_bytes, load.batch, "sequential", 1, None, load.footprint_bytes,
        "registered", replace(tuning, devices=devices, slice_bytes=load.slice_bytes),
    )  # fmt: skip
    try:
        with Runner(options) as runner, switch:
            if not switch.wait_up():
                raise BenchError(f"{rail} is not ACTIVE")
            _until_back(runner, work, story, rail, "before")
            _fail(runner, work, story, switch, scenario)
            switch.up()
            story.came_up = switch.wait_up()
            if story.went_down and story.came_up:
                story.back_s = _until_back(runner, work, story, rail, "after")
    except MoonpoolError as error:
        story.failure = str(error)
    return story


def _until_back(runner: Runner, work: Work, story: _Story, rail: str, phase: str) -> float | None:
    """Move bytes until the rail carries some; return how many seconds that took, or None where it did not."""
    begin = time.monotonic()
    while True:
        late = time.monotonic() - begin > _BACK_S
        try:
            with _streaming(runner, work, story) as stream:
                if stream.window(phase).get(rail, 0) > 0:
                    return time.monotonic() - begin
        except MoonpoolError as error:
            # A path that has to be made anew may fail once more; what is wrong with the benchmark itself stays wrong.
            if late or isinstance(error, BenchError):
                raise
        if late:
            return None
        time.sleep(_RETRY_S)


def _fail(runner: Runner, work: Work, story: _Story, switch: Switch, scenario: _Scenario) -> None:
    """Move bytes, take the rail down meanwhile, and go on."""
    try:
        with _streaming(runner, work, story) as stream:
            with _cutting(switch, stream):
                stream.window("failing")
            end = time.monotonic() + switch.patience[0]
            while switch.is_up():
                if time.monotonic() > end:
                    return
                stream.window("failing")
            story.went_down = True
            stream.window("down")
    except MoonpoolError as error:
        if scenario.expects != "error" or isinstance(error, BenchError):
            raise
        story.went_down = not switch.is_up()
        story.error = {"type": type(error).__name__, "code": error.code, "text": str(error)}


@contextmanager
def _cutting(switch: Switch, stream: _Stream) -> Iterator[None]:
    """Take the rail down as soon as the stream has moved bytes."""
    before = stream.moved()
    failures: list[BaseException] = []
    over, ended_well = threading.Event(), False

    def cut() -> None:
        end = time.monotonic() + _BEGIN_S
        try:
            while stream.moved() == before and time.monotonic() < end and not over.is_set():
                time.sleep(_POLL_S)
            if ended_well or not over.is_set():
                switch.down()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    try:
        yield
        ended_well = True
    finally:
        over.set()
        cutter.join()
    if failures:
        raise BenchError(f"the rail could not be taken down: {failures[0]}") from failures[0]


def _judged(scenario: _Scenario, story: _Story, rail: str, *, by_hand: bool) -> list[Check]:
    title, limit = f"drill: {scenario.title}", _LIMITS[scenario.expects]
    if story.failure:
        return [Check(title, "failed", "", limit, story.failure)]
    if not story.went_down:
        return [Check(title, "skipped" if by_hand else "failed", "", limit, f"{rail} did not go down")]
    windows = len(story.phases)
    checks = [
        Check(
            f"{title}: bytes", "failed" if story.complaints else "passed", f"{windows} windows",
            "every byte of both memories", "; ".join(story.complaints[:1]),
        ),
        _moved_on(scenario, story, rail, f"{title}: traffic", limit),
    ]  # fmt: skip
    if not story.came_up:
        back = Check(f"{title}: back", "failed", "", f"{_BACK_S:.0f} s", f"{rail} did not become ACTIVE again")
    elif story.back_s is None:
        back = Check(f"{title}: back", "failed", "carries nothing though it is up", f"{_BACK_S:.0f} s")
    else:
        back = Check(f"{title}: back", "passed", f"carries bytes {story.back_s:.1f} s after", f"{_BACK_S:.0f} s")
    return [*checks, back]


def _moved_on(scenario: _Scenario, story: _Story, rail: str, title: str, limit: str) -> Check:
    if scenario.expects == "error":
        if story.error is None:
            return Check(title, "failed", "transfers went on", limit)
        named = rail.partition(":")[0] in story.error["text"] and story.error["code"] != "INTERNAL"
        figure = f"{story.error['type']}, {story.error['code']}"
        return Check(title, "passed" if named else "failed", figure, limit, "" if named else story.error["text"])
    before = [phase for phase in story.phases if phase["phase"] == "before"][-1]
    down = next(phase for phase in story.phases if phase["phase"] == "down")
    carried = down["rail_bytes"]
    if scenario.expects == "rail":
        good = down["over"] == "rdma" and carried.get(rail, 0) == 0
    else:
        good = down["over"] == "tcp" and bool(down["fallback"])
    figure = (
        f"over {down['over']} while down; {_rails(before)} before, {_rails(down)} while down; "
        f"{before['gbytes_per_s']:.2f}, then {down['gbytes_per_s']:.2f} GB/s"
    )
    return Check(title, "passed" if good else "failed", figure, limit)


def _rails(phase: dict[str, Any]) -> str:
    return ", ".join(f"{rail} {moved / 1e6:.1f} MB" for rail, moved in phase["rail_bytes"].items())

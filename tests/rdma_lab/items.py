# SPDX-License-Identifier: Apache-2.0
"""Tests of `inside/` as they appear outside: collected here like any other, run in the machine, reported here.

They are collected by pytest itself, so names, parameters, -k and marks are what they always are. What only exists
inside (pyverbs) is replaced by a stand-in for that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from rdma_lab import image
from rdma_lab.inside.runner import TEST_LIMIT
from rdma_lab.machine import Machine, MachineError, boot

INSIDE = Path(__file__).parent / "inside"
# Seconds. Several times of what a busy machine needs.
BOOT_LIMIT = 180.0
SLACK = 15.0  # of a test that is over its time, until its machine is ended from inside, and again from outside
RUN_LIMIT = 900.0
# A test that brings the machine down costs a boot; a fault that always does must not cost one for every test.
BOOTS_MAX = 3


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds pyverbs and its modules where there are none; everything in them is a mock."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "pyverbs":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        mock = MagicMock(name=module.__name__)
        module.__getattr__ = lambda name: getattr(mock, name)  # type: ignore[method-assign]


class Lab:
    """The machine of one run, booted when the first test needs it."""

    def __init__(
        self,
        start: Callable[[], Machine],
        unavailable: Callable[[], str | None] = image.missing,
        *,
        slack: float = SLACK,
    ) -> None:
        self._slack = slack
        self._start = start
        self._unavailable = unavailable
        self._machine: Machine | None = None
        self._boots = 0
        self._no_boot: Exception | None = None
        self._broken: list[str] = []

    def run(self, config: pytest.Config, test: str, following: str | None, limit: float) -> Iterator[pytest.TestReport]:
        """Run a test inside, where pytest gives it `limit` seconds, and yield its reports as they come."""
        hangs = limit + self._slack
        machine = self._ready()
        try:
            machine.send({"run": test, "next": following, "limit": hangs})
            while (message := machine.receive(hangs + SLACK))["event"] == "report":
                yield config.hook.pytest_report_from_serializable(config=config, data=_revived(message["report"]))
        except MachineError:
            self.close()
            raise
        if not message["known"]:
            raise MachineError("\n".join([f"inside the machine there is no {test}", *self._broken]))

    def _ready(self) -> Machine:
        if self._machine is None:
            if self._no_boot is None and self._boots == BOOTS_MAX:
                self._no_boot = MachineError(f"the emulated machine was booted {BOOTS_MAX} times; see what ended it")
            if self._no_boot is not None:
                raise self._no_boot
            if reason := self._unavailable():
                pytest.skip(reason)
            self._boots += 1
            try:
                self._machine = self._start()
                self._broken = self._machine.receive(BOOT_LIMIT)["broken"]
            except (MachineError, image.ImageError) as error:
                self._no_boot = error
                self.close()
                raise
        return self._machine

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None


def _revived(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with tuples where pytest had them; JSON has lists only."""
    for name in ("sections", "user_properties"):
        report[name] = [tuple(pair) for pair in report[name]]
    report["location"] = tuple(report["location"])
    if isinstance(report["longrepr"], list):  # where and why a test was skipped
        report["longrepr"] = tuple(report["longrepr"])
    return report


def start() -> Machine:
    """Boot the machine with the runner in it."""
    return boot("python3 -m rdma_lab.inside.runner", limit=RUN_LIMIT)


class InsideItem(pytest.Item):
    """A test that runs inside. Its phases are those of the test there, with the reports they had there."""

    def __init__(self, *, lab: Lab, **rest: Any) -> None:
        super().__init__(**rest)
        self._lab = lab
        self._place = (self.path, 0, self.name)
        self._limit: float = TEST_LIMIT
        self._lost: Exception | None = None
        self.following: str | None = None
        self.reports: dict[str, pytest.TestReport] = {}

    @classmethod
    def of(cls, item: pytest.Item, lab: Lab) -> InsideItem:
        assert item.parent is not None
        made: InsideItem = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid, lab=lab)
        path, line, name = item.reportinfo()
        made._place = (Path(path), line or 0, name)
        if mark := item.get_closest_marker("timeout"):
            made._limit = mark.args[0]
        return made

    def iter_markers_with_node(self, name: str | None = None) -> Iterator[tuple[pytest.Item, pytest.Mark]]:
        """Marks are for inside. Outside there is one: the first test may make the image and boots."""
        if name in (None, "timeout"):
            yield self, pytest.mark.timeout(RUN_LIMIT).mark

    def reportinfo(self) -> tuple[Path, int, str]:
        return self._place

    def setup(self) -> None:
        self.reports.clear()
        try:
            for report in self._lab.run(self.config, self.nodeid, self.following, self._limit):
                self.reports[report.when] = report
        except (MachineError, image.ImageError) as error:
            self._lost = error
        self._phase("setup")

    def runtest(self) -> None:
        self._phase("call")

    def teardown(self) -> None:
        self._phase("teardown")

    def _phase(self, phase: str) -> None:
        """Fail once, in the phase in which the machine was lost."""
        if phase not in self.reports and self._lost is not None:
            lost, self._lost = self._lost, None
            pytest.fail(str(lost), pytrace=False)


class Plugin:
    """What makes tests of `folder` run in the machine."""

    def __init__(self, lab: Lab, folder: Path = INSIDE) -> None:
        self._lab = lab
        self._folder = folder

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Last: what selects and orders tests has then seen them as they are."""
        items[:] = [
            InsideItem.of(item, self._lab) if item.path.is_relative_to(self._folder) else item for item in items
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if isinstance(item, InsideItem):
            item.following = nextitem.nodeid if isinstance(nextitem, InsideItem) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """Return the report from inside, unless something went wrong outside."""
        if isinstance(item, InsideItem) and call.excinfo is None:
            return item.reports.get(call.when)
        return None

    def pytest_sessionfinish(self) -> None:
        self._lab.close()

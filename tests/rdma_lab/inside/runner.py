# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder one by one as it is told, and answers with pytest's own reports.

Each line that comes is a JSON object: {"run": a test, "next": the one after it or null, "limit": seconds after which
it hangs}. Each line that goes has an "event": "ready" (with what failed while tests were collected), "report" (of one
phase of a test) or "end".
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

PORT = "moonpool.lab"
# Seconds for a test without a mark. pytest-timeout ends what Python can end, with a traceback as in any other failure.
# For a test that hangs in native code, all stacks go to the console and the machine ends.
TEST_LIMIT = 60
HERE = Path(__file__).parent


def open_port() -> int:
    """Return a descriptor of the port of the machine that leads outside."""
    for port in Path("/sys/class/virtio-ports").iterdir():
        if (port / "name").read_text().strip() == PORT:
            return os.open(f"/dev/{port.name}", os.O_RDWR)
    sys.exit(f"no virtio port is called {PORT}")


class Served:
    """The pytest plugin that takes the place of its loop over all tests."""

    def __init__(self, descriptor: int) -> None:
        self._in = os.fdopen(descriptor, "rb")
        self._out = os.fdopen(os.dup(descriptor), "wb")
        self._console = os.dup(2)  # before pytest takes the descriptor to capture what tests write
        self._broken: list[str] = []

    def _send(self, event: str, **content: Any) -> None:
        self._out.write(json.dumps({"event": event, **content}).encode() + b"\n")
        self._out.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._config = session.config
        self._send("ready", broken=self._broken)
        for line in self._in:
            message = json.loads(line)
            item, following = items.get(message["run"]), items.get(message["next"])
            if item is not None:
                faulthandler.dump_traceback_later(message["limit"], exit=True, file=self._console)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                faulthandler.cancel_dump_traceback_later()
            self._send("end", known=item is not None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", report=data)


def main(descriptor: int, folder: Path = HERE) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-p", "pytest_timeout", "-o", f"timeout={TEST_LIMIT}", "-o", "timeout_method=signal"]
    quiet = ["-p", "no:cacheprovider", "--quiet", "--no-header", "--no-summary"]
    return pytest.main([*options, *quiet, str(folder)], plugins=[Served(descriptor)])


if __name__ == "__main__":
    sys.exit(main(open_port()))

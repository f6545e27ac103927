# SPDX-License-Identifier: Apache-2.0
"""T10.

What people met: a benchmark reported more than line rate: it timed the enqueue, or counted after the window.

What must happen instead: barrier, warm-up, count what completed inside the window, verify the bytes; both sides' exit
status says whether they matched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moonpool.bench import backends, commands
from moonpool.bench.backends import InitiatorSide, RowSide
from moonpool.bench.backends.moonpool_engine import MoonpoolLocal, run_threads
from moonpool.bench.errors import ExitStatus
from moonpool.bench.measure import Samples, Window, drive

TINY = "--block-size 4KiB --batch 2 --footprint 64KiB --duration 1ms --warmup 1ms --rounds 1"


class CountsTheSubmission(MoonpoolLocal):
    """Transfers count when they are submitted, as if they had taken no time; the window ends before they arrive."""

    class Side(InitiatorSide):
        def run(self, seconds: float) -> Window:
            self.next_batch[0] += 1000
            return Window(seconds, 1000, 1000 * 8192, None)

        def close(self) -> None:
            pass

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        return self.Side(1)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_rate_without_the_bytes_is_not_accepted(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setitem(backends.ENGINES, "local", CountsTheSubmission)
    options = ["--transport", "local", "--only", "engine", "--op", op, "--json", "-", *TINY.split()]
    result = CliRunner().invoke(commands.cli, ["transfer", *options])
    assert result.exit_code == ExitStatus.NOT_VERIFIED
    (row,) = json.loads(result.stdout)["rows"]
    assert not row["verified"]
    assert "16 of 16 blocks are wrong" in row["complaints"][0]


def test_the_window_ends_with_the_last_completion_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def transfer(index: int) -> None:
        nonlocal now
        now += 40

    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    begin, end, count = drive(transfer, 0, 100, array("i", [0]), Samples(10))
    # Begun inside the window, the third transfer ends after it: if its bytes count, its time counts.
    assert (begin, end, count) == (0, 120, 3)


class Side(InitiatorSide):
    def run(self, seconds: float) -> Window:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_all_threads_begin_together_and_the_slowest_ends_the_window() -> None:
    threads = 3
    running = threading.Barrier(threads)
    slow_may_end = threading.Event()
    ended: list[int] = []

    def transfer_of(thread: int) -> Callable[[int], None]:
        def transfer(index: int) -> None:
            running.wait(10.0)  # broken unless all of them are in a transfer at the same time
            if thread == 0:
                slow_may_end.wait(10.0)
            ended.append(time.monotonic_ns())
            if len(ended) == threads - 1:
                slow_may_end.set()

        return transfer

    side = Side(threads)
    window = run_threads(side, [transfer_of(thread) for thread in range(threads)], 4096, 0.0)
    assert (window.transfers, window.payload_bytes, list(side.next_batch)) == (3, 3 * 4096, [1, 1, 1])
    assert window.seconds * 1e9 >= max(ended) - min(ended)


def test_both_exit_statuses_say_whether_the_bytes_matched(tmp_path: Path) -> None:
    honest = [sys.executable, "-m", "moonpool.bench.cli", "transfer"]
    damaging = tmp_path / "damaging.py"
    damaging.write_text(
        "from moonpool.bench import cli, session\n"
        "check = session.TargetSession.check\n"
        "def damage(self, window, done):\n"
        "    self._row_side.memory[4096] ^= 1\n"
        "    return check(self, window, done)\n"
        "session.TargetSession.check = damage\n"
        "cli.main()\n",
        encoding="utf-8",
    )
    for there_command, status in ((honest, 0), ([sys.executable, str(damaging), "transfer"], 1)):
        with subprocess.Popen([*there_command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as there:
            assert there.stderr is not None
            match = re.search(r"listening on (\S+)", there.stderr.readline())
            assert match is not None
            here = subprocess.run([*honest, "--target", match[1], *TINY.split()], check=False, capture_output=True)
            there.stderr.read()
            assert (here.returncode, there.wait(60)) == (status, status)

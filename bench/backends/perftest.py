# SPDX-License-Identifier: Apache-2.0
"""perftest, the usual measure of RDMA devices: the limit for everything that goes over verbs.

Its two programs move memory of their own, between the same two ports: the target runs the one that waits, and this side
the one that measures.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shutil
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from moonpool.bench.backends.base import Backend, InitiatorSide, Place, RowSide, TargetSide
from moonpool.bench.errors import AGAIN, NO_LIMIT, BenchError
from moonpool.bench.measure import Percentiles, Window
from moonpool.bench.rails import Rail, find_rails

if TYPE_CHECKING:
    from moonpool.bench.work import Work

__all__ = ["Perftest", "tool_of", "window_of"]

#: Single blocks up to this size are a matter of latency.
_SMALL_BYTES: Final = 4096
#: What every device has room for.
_DEPTH_MAX: Final = 4096
_ITERATIONS_MIN: Final = 5
_FIRST_ITERATIONS: Final = 1000
_FIRST_BYTES: Final = 4 << 20
#: perftest keeps a time for each.
_ITERATIONS_MAX: Final = 2_000_000
#: To start a program, and for its two ends to find each other.
_START_S: Final = 30.0
#: A run may take so many times as long as it was meant to: the first one is a guess.
_SLOWER: Final = 20.0
_MIB: Final = 1 << 20


def tool_of(work: Work) -> str:
    """Return the program that measures what a row moves."""
    small = work.block_bytes <= _SMALL_BYTES and work.blocks_under_way == 1
    return f"ib_{work.op}_{'lat' if small else 'bw'}"


def command_of(work: Work, rail: Rail, port: int, iterations: int) -> list[str]:
    """Return the command of the side that waits; the other one adds where that is."""
    tool = tool_of(work)
    options = {"-d": rail.device, "-i": rail.port, "-x": rail.gid_index, "-s": work.block_bytes, "-n": iterations}
    if tool.endswith("bw"):
        options["-t"] = min(work.blocks_under_way, _DEPTH_MAX)
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    return [tool, *words, "-p", str(port), "-F"]


def window_of(work: Work, output: str) -> Window:
    """Read the report of the measuring side.

    Raises:
        BenchError: it is none.
    """
    numbers = re.findall(r"^\s*(\d+(?:[ \t]+(?:\d+(?:\.\d+)?|-?inf|-?nan)){3,})[ \t]*$", output, re.MULTILINE)
    if not numbers:
        raise _failed(tool_of(work), output)
    size, iterations, *figures = (float(number) for number in numbers[-1].split())
    payload = int(size * iterations)
    if tool_of(work).endswith("lat"):
        # t_min, t_max, t_typical, t_avg, t_stdev, 99 %, 99.9 %
        latency = Percentiles(figures[2], figures[5], figures[6])
        seconds = figures[3] * iterations / 1e6
    else:
        # peak and average rate, messages
        latency = None
        seconds = payload / (figures[1] * _MIB) if figures[1] else 0.0
    if not (math.isfinite(seconds) and seconds > 0.0):
        # It compares the clock of the processor with that of the system, and on a busy machine they may not agree.
        raise BenchError(f"{tool_of(work)} could not measure the frequency of the processor", code=AGAIN)
    return Window(seconds, int(iterations) // work.batch, payload, latency)


def _failed(tool: str, output: str) -> BenchError:
    lines = [line.strip() for line in output.splitlines() if line.strip(" -")]
    return BenchError(
        f"the limit could not be measured: {tool} says: {'; '.join(lines[-3:]) or 'nothing'}",
        hint="--only engine, to do without it",
    )


class _Program:
    """A running perftest, with a deadline. It ends in any case."""

    def __init__(self, command: list[str], seconds: float) -> None:
        self._tool = command[0]
        self._output: str | None = None
        self._deadline = time.monotonic() + seconds
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def listens(self, port: int) -> None:
        """Wait until it does.

        Raises:
            BenchError: it ended instead, or took too long.
        """
        while not _is_listened_on(port):
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                raise _failed(self._tool, self.end())
            time.sleep(0.01)

    def result(self) -> str:
        """Wait for its end, and return what it printed.

        Raises:
            BenchError: it failed, or took too long.
        """
        try:
            self._output, _ = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            raise BenchError(
                f"the limit could not be measured: {self._tool} did not end in time",
                hint="--only engine, to do without it",
            ) from None
        if self._process.returncode:
            raise _failed(self._tool, self._output)
        return self._output

    def end(self) -> str:
        """End it if it still runs, and return what it printed. Idempotent."""
        if self._output is None:
            self._process.kill()
            self._output, _ = self._process.communicate()
        return self._output


def _is_listened_on(port: int) -> bool:
    # Not by connecting: whoever connects is taken for the other side.
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        # local address, remote address, state; 0A is LISTEN
        if any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in map(str.split, lines)):
            return True
    return False


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Perftest(Backend):
    """`ib_write_bw` and `ib_read_bw`, and `ib_write_lat` and `ib_read_lat` for single small blocks."""

    name: ClassVar[str] = "perftest"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._rails: dict[str | None, list[Rail]] = {}

    def target(self, row: RowSide) -> TargetSide:
        """Offer the rails of this side."""
        return _Target(row, self._usable(row.work, row.work.tuning.target_devices), self.place.limit_port)

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Choose the two ends."""
        rails = self._usable(row.work, row.work.tuning.devices)
        return _Initiator(row, rails[0], [Rail(**rail) for rail in offer["rails"]], offer["port"], self.place.host)

    def _usable(self, work: Work, devices: str | None) -> list[Rail]:
        tool = tool_of(work)
        if shutil.which(tool) is None:
            raise BenchError(f"{tool} of perftest is not installed", code=NO_LIMIT, hint="apt-get install perftest")
        if devices not in self._rails:
            self._rails[devices] = find_rails(devices)
        if usable := [rail for rail in self._rails[devices] if rail.up]:
            return usable
        reasons = "; ".join(f"{rail.device}:{rail.port}: {rail.reason}" for rail in self._rails[devices])
        raise BenchError(f"no RDMA port can be used: {reasons}", hint="`mooncake-bench doctor`")


class _Target(TargetSide):
    def __init__(self, row: RowSide, rails: list[Rail], port: int) -> None:
        self._work = row.work
        self._rails = rails
        self._port = port or _free_port()
        self._program: _Program | None = None
        self.offer = {"rails": [asdict(rail) for rail in rails], "port": self._port}

    def arm(self, order: dict[str, Any]) -> None:
        command = command_of(self._work, self._rails[int(order["rail"])], self._port, int(order["iterations"]))
        self._program = _Program(command, _START_S + _SLOWER * float(order["seconds"]))
        self._program.listens(self._port)

    def finish(self) -> None:
        if self._program is not None:
            self._program.result()
            self._program = None

    def close(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None


class _Initiator(InitiatorSide):
    def __init__(self, row: RowSide, rail: Rail, remote: list[Rail], port: int, host: str) -> None:
        super().__init__(row.work.threads)
        self._work = row.work
        self._rail = rail
        self._remote = max(range(len(remote)), key=lambda index: _common_bits(rail.gid, remote[index].gid))
        self._port = port
        self._host = host
        self._iterations = 0
        self._per_s: float | None = None
        self._program: _Program | None = None

    def order(self, seconds: float) -> dict[str, Any]:
        batch = self._work.batch
        if self._per_s is None:
            # Nothing is known before the first run, which is a warm-up.
            wanted = max(
                2 * self._work.blocks_under_way, min(_FIRST_ITERATIONS, _FIRST_BYTES // self._work.block_bytes)
            )
        else:
            wanted = int(seconds * self._per_s)
        wanted = max(_ITERATIONS_MIN, min(_ITERATIONS_MAX, wanted))
        self._iterations = wanted + -wanted % batch
        return {"rail": self._remote, "iterations": self._iterations, "seconds": seconds}

    def run(self, seconds: float) -> Window:
        command = [*command_of(self._work, self._rail, self._port, self._iterations), self._host]
        self._program = _Program(command, _START_S + _SLOWER * seconds)
        output = self._program.result()
        self._program = None
        window = window_of(self._work, output)
        self._per_s = self._iterations / window.seconds
        return window

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None


def _common_bits(first: str, second: str) -> int:
    numbers = []
    for text in (first, second):
        address = ipaddress.ip_address(text)
        numbers.append((0xFFFF << 32) + int(address) if address.version == 4 else int(address))
    return 128 - (numbers[0] ^ numbers[1]).bit_length()

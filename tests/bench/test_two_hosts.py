# SPDX-License-Identifier: Apache-2.0
"""Two hosts, played by two processes that share nothing but an address and a secret."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import pytest

from moonpool.bench.errors import ExitStatus

if TYPE_CHECKING:
    from typing_extensions import Self

Bench = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-W", "error", "-m", "moonpool.bench.cli"]


class Listening:
    """``mooncake-bench transfer --listen`` in a process of its own."""

    def __init__(self, host: str = "127.0.0.1", *options: str, port: int = 0, command: list[str] = COMMAND) -> None:
        self._process = subprocess.Popen(
            [*command, "transfer", "--listen", f"{host}:{port}", *options], stderr=subprocess.PIPE, text=True
        )
        line = self.stderr.readline()
        match = re.search(r"listening on (\S+) for one run", line)
        assert match is not None, line
        self.address = match[1]

    @property
    def stderr(self) -> IO[str]:
        assert self._process.stderr is not None
        return self._process.stderr

    def ended(self) -> tuple[int, str]:
        """Return the exit status and the rest of what it said."""
        said = self.stderr.read()
        return self._process.wait(60), said

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self.stderr.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_both_sides_verify_and_say_so(bench: Bench, tiny: list[str], host: str) -> None:
    with Listening(host, "--secret", "s3cret") as there:
        done = bench("transfer", "--target", there.address, "--secret", "s3cret", *tiny, "--json", "-")
        assert (done.returncode, done.stderr) == (0, "")
        result = json.loads(done.stdout)
        assert {row["transport"] for row in result["rows"]} == {"tcp"}
        assert all(row["verified"] for row in result["rows"])
        assert result["environment"]["target"]["moonpool"] == result["environment"]["moonpool"]
        status, said = there.ended()
    assert status == ExitStatus.OK
    # Two windows in each of two rounds.
    assert f"{len(result['rows']) * 4} checks of this side's memory: all bytes right" in said


def test_a_wrong_secret_moves_nothing_and_the_listener_goes_on(bench: Bench, tiny: list[str]) -> None:
    with Listening("127.0.0.1", "--secret", "right") as there:
        wrong = bench("transfer", "--target", there.address, "--secret", "wrong", *tiny)
        assert wrong.returncode == ExitStatus.FAILED
        assert "different secrets" in wrong.stderr
        right = bench(
            "transfer", "--target", there.address, *tiny, "--only", "engine",
            environ={"MOONCAKE_BENCH_SECRET": "right"},
        )  # fmt: skip
        assert right.returncode == 0
        assert there.ended()[0] == ExitStatus.OK


def test_a_run_that_breaks_off_is_status_3_there(bench: Bench) -> None:
    with Listening() as there:
        done = bench("transfer", "--target", there.address, "--footprint", "4096TiB")
        assert done.returncode == ExitStatus.FAILED
        status, said = there.ended()
    assert status == ExitStatus.FAILED
    assert "did not end in good order" in said


def test_an_address_that_is_taken_is_status_3(bench: Bench) -> None:
    with Listening() as there:
        done = bench("transfer", "--listen", there.address)
    assert done.returncode == ExitStatus.FAILED
    assert "cannot listen on" in done.stderr


def test_wrong_bytes_on_the_far_side_show_in_both_exit_statuses(bench: Bench, tiny: list[str], tmp_path: Path) -> None:
    # A target whose memory is damaged once, between a window and its check.
    script = tmp_path / "damaged.py"
    script.write_text(
        "from moonpool.bench import cli, session\n"
        "check = session.TargetSession.check\n"
        "def damage(self, window, done):\n"
        "    self._row_side.memory[12345] ^= 1\n"
        "    session.TargetSession.check = check\n"
        "    return check(self, window, done)\n"
        "session.TargetSession.check = damage\n"
        "cli.main()\n",
        encoding="utf-8",
    )
    with Listening(command=[sys.executable, str(script)]) as there:
        done = bench("transfer", "--target", there.address, *tiny, "--op", "write", "--order", "random")
        assert done.returncode == ExitStatus.NOT_VERIFIED
        assert re.search(r"NOT VERIFIED: tcp write 4KiB × 1 random: \w+, round 1, target: 1 of 256 blocks", done.stdout)
        assert "byte 12345 of the memory" in " ".join(done.stdout.split())
        status, said = there.ended()
    assert status == ExitStatus.NOT_VERIFIED
    assert "BYTES WERE WRONG" in said


def three_free_ports() -> int:
    # Below the range that the kernel gives out by itself, so that nobody takes one of them meanwhile.
    for port in range(20_000, 30_000, 3):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(port, port + 3):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise AssertionError("no three free ports in a row")


def test_fixed_ports_follow_each_other(bench: Bench, tiny: list[str]) -> None:
    # What a firewall has to let through: the named port for control, the next two for the data.
    port = three_free_ports()
    with Listening(port=port) as there, socket.create_server(("127.0.0.1", port + 2)):
        assert there.address == f"127.0.0.1:{port}"
        done = bench("transfer", "--target", there.address, *tiny)
        assert done.returncode == ExitStatus.FAILED
        assert f"listen on 127.0.0.1 port {port + 2}" in done.stderr
    with Listening(port=port) as there:
        done = bench("transfer", "--target", there.address, *tiny)
        assert (done.returncode, done.stderr) == (0, "")
        assert there.ended()[0] == ExitStatus.OK

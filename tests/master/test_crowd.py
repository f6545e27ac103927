# SPDX-License-Identifier: Apache-2.0
"""A thousand clients, of which half are killed: what they held is given back, and nothing of them is kept (M12)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from master_testing import Member, eventually

from moonpool.master import Master
from moonpool.proto import pool_pb2 as pb

PROCESSES, EACH = 4, 250
TIMEOUT = 6.0


class Crowd:
    """A process of many sessions."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "master_testing.crowd", address, str(EACH)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def chunks(self) -> bytes:
        assert self._process.stdout is not None
        return bytes.fromhex(self._process.stdout.readline().decode())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_thousand_clients_of_which_half_are_killed(
    start_master: Callable[..., Master], join: Callable[..., Member]
) -> None:
    master = start_master(session_timeout=TIMEOUT, heartbeat_interval=2.0)
    node, witness = join(master, pb.NODE, host="node-0"), join(master)
    node.mount(64 << 20)
    core = master.server.core
    with contextlib.ExitStack() as stack:
        crowds = [Crowd(master.address) for _ in range(PROCESSES)]
        for crowd in crowds:
            stack.callback(crowd.kill)
        chunks = [crowd.chunks() for crowd in crowds]
        status, everybody, half = witness.status(), PROCESSES * EACH, PROCESSES * EACH // 2
        assert (status["clients"], status["pins"]) == (everybody + 1, everybody)
        assert status["index"]["writing"] == everybody
        replies = core.replays.bytes
        used = status["index"]["used_bytes"]
        for crowd in crowds[::2]:
            crowd.kill()

        def settled() -> bool:
            status = witness.status()
            index = status["index"]
            now = (status["clients"], status["pins"], index["writing"], index["condemned_bytes"])
            return now == (half + 1, half, half, 0)

        eventually(settled, "their pins, writes and sessions are over, and their space was fenced and is free")
        assert witness.status()["index"]["used_bytes"] == used * 3 // 4, "of two extents of each, one of each is back"
        assert len({fence.incarnation for fence in node.fences}) == half, "of those who are gone, and of nobody else"
        # Nothing is kept of who is gone.
        eventually(lambda: len(core.sessions.by_owner) == half + 2, "sessions")
        assert not core.sessions.ended
        assert core.replays.bytes <= replies * 0.51
        # Who is alive has lost nothing, and what the others put is there and no longer held.
        assert witness.exists(b"".join(chunks)) == bytes(everybody)
        assert witness.remove(chunks[1]) == bytes([pb.IN_USE] * EACH)
        assert witness.remove(chunks[0]) == bytes(EACH)
        assert witness.status()["healthy"]

# SPDX-License-Identifier: Apache-2.0
"""A master in this process with short times, and members of its pool that end with the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from master_testing import Member
from moonpool.master import Master
from moonpool.proto import pool_pb2 as pb

__all__ = ["OPTIONS", "join", "start_master"]

#: Short, so that tests need not wait; a machine that pauses for less changes nothing.
OPTIONS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "http": "127.0.0.1:0",
    "store": "memory",
    "heartbeat_interval": 0.2,
    "session_timeout": 10.0,
    "put_begin": 0.2,
    "ramp_up": 0.0,
}


async def _look_up() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 0)


# Its threads for look-ups and a pipe for signals stay with the process. They are no leak of the test that comes first.
uvloop.run(_look_up())


@pytest.fixture
def start_master() -> Iterator[Callable[..., Master]]:
    masters: list[Master] = []

    def start(**options: Any) -> Master:
        masters.append(Master(**{**OPTIONS, **options}))
        return masters[-1]

    yield start
    # What is still named here would keep threads of gRPC.
    while masters:
        masters.pop().close()


@pytest.fixture
def join() -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def join_(master: Master | str, kind: int = pb.CLIENT, **options: Any) -> Member:
        members.append(Member(master if isinstance(master, str) else master.address, kind, **options))
        return members[-1]

    yield join_
    while members:
        members.pop().vanish()

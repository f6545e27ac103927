# SPDX-License-Identifier: Apache-2.0
"""M8.

What people met: client races killed the master: an assertion on client input.

What must happen instead: concurrent duplicate puts, commits after abort, foreign ids, garbage bytes: typed errors,
master stays up.

Calls that make no sense and garbage on the port: `test_garbage_on_the_port_harms_nobody` in
tests/master/test_running.py, and tests/master/test_chunks.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from master_testing import Member, call, hashes

from moonpool.master import Master
from moonpool.master.errors import SessionUnknownError
from moonpool.proto import pool_pb2 as pb


def test_clients_that_do_everything_wrong_at_once(
    start_master: Callable[..., Master], join: Callable[..., Member]
) -> None:
    master = start_master()
    join(master, pb.NODE, host="node-0").mount(8 << 20)
    clients, chunks = [join(master) for _ in range(4)], hashes(32)
    known = {pb.OK, pb.ALREADY, pb.WRITING, pb.NOT_OWNER, pb.CONFLICT}
    seen: list[int] = []

    def race(one: Member, other: Member) -> None:
        for round_ in range(15):
            given = one.start(chunks, 500 + round_ % 2)
            seen.extend(other.commit(given))
            if round_ % 3 == 0:
                seen.extend(one.abort(given, settled=round_ % 2 == 0))
            seen.extend(one.commit(given))
            given.generations = os.urandom(len(given.generations))
            seen.extend(one.commit(given))
            seen.extend(one.remove(chunks[: 32 * 8]))
            one.unpin(round_)

    threads = [
        threading.Thread(target=race, args=(one, other))
        for one, other in zip(clients, clients[1:] + clients[:1], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) <= known | {pb.NOT_FOUND, pb.IN_USE}
    with pytest.raises(SessionUnknownError):
        call(clients[0].pool.Pin, pb.PinRequest(session=os.urandom(16), namespace="ns", hashes=chunks))
    assert clients[0].status()["healthy"]
    assert master.server.core.index.check() == ""

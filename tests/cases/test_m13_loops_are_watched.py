# SPDX-License-Identifier: Apache-2.0
"""M13.

What people met: the eviction thread died of an exception and nobody noticed.

What must happen instead: supervised loops with a liveness gauge; health fails when one stops.

`test_a_loop_that_fails_goes_on_and_one_that_stays_dead_is_seen` in tests/master/test_running.py looks at what
/healthz and /metrics say.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from master_testing import Member, eventually

from moonpool.master import Master

LOOPS = ("sessions", "fences", "reclaim", "sweep", "evict", "segments")


def broken() -> None:
    raise RuntimeError("on purpose")


def test_a_loop_that_fails_shows_and_goes_on_when_it_can(
    start_master: Callable[..., Master], join: Callable[..., Member], caplog: pytest.LogCaptureFixture
) -> None:
    master = start_master()
    client, loops = join(master), master.server.core.supervisor.loops
    assert set(LOOPS) <= set(loops)
    works = {name: loops[name]._work for name in LOOPS}
    for name in LOOPS:
        loops[name]._work = broken
    eventually(lambda: set(master.server.core.supervisor.dead) >= set(LOOPS), "each shows")
    assert not client.status()["healthy"]
    for name in LOOPS:
        loops[name]._work = works[name]
    eventually(lambda: client.status()["healthy"], "each goes on")
    assert "on purpose" in caplog.text

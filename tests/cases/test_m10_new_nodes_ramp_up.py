# SPDX-License-Identifier: Apache-2.0
"""M10.

What people met: a new empty node drew all puts at once; while it joined, puts stalled for minutes.

What must happen instead: no work over all chunks on the request path; placement ramps a new segment up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from master_testing import Member, hashes

from moonpool.master import Master
from moonpool.proto import pool_pb2 as pb

MIB = 1 << 20
PUTS = 300


def test_a_new_node_takes_a_small_share_at_first(
    start_master: Callable[..., Master], join: Callable[..., Member]
) -> None:
    master = start_master()
    client = join(master)
    old = join(master, pb.NODE, host="old").mount(256 * MIB)
    client.put(hashes(1000))
    # As if it had been there for long: without a ramp of its own.
    core = master.server.core
    core.settings = dataclasses.replace(core.settings, ramp_up=3600.0)
    before = client.segments()[old].chunks
    new = join(master, pb.NODE, host="new").mount(256 * MIB)
    for _ in range(PUTS):
        assert client.put(hashes(1)) == bytes(1)
    shares = {number: segment.chunks for number, segment in client.segments().items()}
    assert shares[old] - before + shares[new] == PUTS
    # A sixteenth, by chance; an even share would be half of them.
    assert shares[new] < PUTS / 4

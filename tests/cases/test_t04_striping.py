# SPDX-License-Identifier: Apache-2.0
"""T4.

What people met: one large request never used more than one connection or one NIC.

What must happen instead: one transfer is striped over all lanes and rails.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine.testing import FaultProxy

LANES = 4
NBYTES = 64 << 20


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("items", [1, 1024])
def test_one_transfer_uses_every_lane(open_engine: OpenEngine, op: str, items: int) -> None:
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None, lanes=LANES)
    region = server.allocate(NBYTES, name="kv")
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local = client.allocate(NBYTES)
        source, target = (region, local) if op == "read" else (local, region)
        fill(source)
        # The pieces are not neighbours on the other side, so that they stay pieces.
        blocks = np.arange(items) * (NBYTES // items)
        call = getattr(client, op)
        # The first transfer opens the lanes that are not there yet.
        for _ in range(2):
            before = list(network.connection_bytes)
            call(peer, local, peer.regions["kv"], blocks, blocks[::-1].copy(), NBYTES // items).wait()
        after = network.connection_bytes
        carried = [now - then for now, then in zip(after, [*before, *[0] * LANES], strict=False)]
        busy = [nbytes for nbytes in carried if nbytes >= 1 << 20]
        assert len(busy) == LANES, f"bytes per connection: {carried}"
        expected = np.frombuffer(pattern(NBYTES), dtype=np.uint8).reshape(items, -1)[::-1]
        np.testing.assert_array_equal(np.frombuffer(target, dtype=np.uint8).reshape(items, -1), expected)
        peer.close()

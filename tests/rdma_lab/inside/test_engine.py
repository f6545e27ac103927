# SPDX-License-Identifier: Apache-2.0
"""The engine as it is installed, inside."""

from __future__ import annotations

from moonpool.transfer_engine import TransferEngine


def test_engines_move_bytes_over_tcp() -> None:
    with TransferEngine("server", transports="tcp") as server, TransferEngine("client", transports="tcp") as client:
        region = server.allocate(1 << 20, name="kv")
        memoryview(region)[:] = bytes(range(256)) * 4096
        local = client.allocate(1 << 20)
        assert server.address is not None
        peer = client.connect(server.address, timeout=20.0)
        client.read(peer, local, peer.regions["kv"]).wait(timeout=20.0)
        assert bytes(local) == bytes(range(256)) * 4096

# SPDX-License-Identifier: Apache-2.0
"""T8.

What people met: one batch with a bad item failed or hid the others.

What must happen instead: per-item status.
"""

from __future__ import annotations

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import BatchError, OutOfRangeError, Status, TransferState

NBYTES = 1 << 20


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_every_kind_of_bad_item_beside_good_ones(open_engine: OpenEngine, op: str, transports: str) -> None:
    client = open_engine(listen=None, transports=transports)
    with Target({"kv": NBYTES, "gone": 4096}, transports=transports) as target:
        target.ask("register", name="constant", nbytes=4096, writable=False)
        peer = client.connect(target.address)
        kv, gone = peer.regions["kv"], peer.regions["gone"]
        constant = peer.regions.wait("constant", 90.0)
        target.ask("release", name="gone")
        assert eventually(lambda: "gone" not in peer.regions)
        local = client.allocate(NBYTES)
        frozen = client.register(pattern(4096), writable=False)
        released = client.allocate(4096)
        released.release()
        fill(local, seed=1)
        reading = op == "read"
        rows = [
            ((local, 0, kv, 0, 4096), Status.OK),
            ((local, 4096, kv, NBYTES - 1, 2), Status.OUT_OF_RANGE),
            ((local, 8192, gone, 0, 64), Status.REGION_RELEASED),
            ((local, 12288, kv, 12288, 4096), Status.OK),
            ((local, 16384, constant, 0, 64), Status.OK if reading else Status.REGION_READ_ONLY),
            ((frozen, 0, kv, 20480, 64), Status.REGION_READ_ONLY if reading else Status.OK),
            ((released, 0, kv, 0, 64), Status.REGION_RELEASED),
            ((local, NBYTES - 10, kv, 0, 11), Status.OUT_OF_RANGE),
            ((local, 24576, kv, 24576, 0), Status.OUT_OF_RANGE),
            ((local, 28672, kv, 28672, 4096), Status.OK),
        ]
        transfer = getattr(client, op)(peer, [row for row, _ in rows])
        with pytest.raises(BatchError) as caught:
            transfer.wait()
        assert transfer.state is TransferState.FAILED
        assert [Status(status) for status in transfer.statuses] == [status for _, status in rows]
        assert caught.value.statuses == transfer.statuses
        assert caught.value.failed == [index for index, (_, status) in enumerate(rows) if status != Status.OK]
        # The error tells the first cause in words.
        assert isinstance(caught.value.__cause__, OutOfRangeError)
        assert caught.value.item == 1
        for offset in (0, 12288, 28672):
            seed = 0 if reading else 1
            wanted = pattern(NBYTES, seed)[offset : offset + 4096]
            if reading:
                assert bytes(memoryview(local)[offset : offset + 4096]) == wanted
            else:
                assert target.ask("content", name="kv", offset=offset, length=4096) == wanted.hex()
        assert target.ask("intact", name="constant")
        peer.close()


@pytest.mark.parametrize(("transports", "kind"), [("tcp", "copied"), ("shm", "copied"), ("shm", "mapped")])
def test_a_region_released_during_the_transfer_spoils_its_items_only(
    open_engine: OpenEngine, transports: str, kind: str
) -> None:
    """The client cannot know yet, so the target refuses item by item."""
    client = open_engine(listen=None, transports=transports)
    with Target(transports=transports) as target:
        target.add("a", NBYTES, kind)
        target.add("b", NBYTES, kind)
        peer = client.connect(target.address)
        first, second = peer.regions.wait("a", 90.0), peer.regions.wait("b", 90.0)
        local = client.allocate(2 * NBYTES)
        for _ in range(5):
            transfer = client.read(
                peer, [(local, 4096 * i, (first, second)[i % 2], 4096 * (i // 2), 4096) for i in range(512)]
            )
            target.ask("release", name="b")
            statuses = b""
            try:
                statuses = transfer.result()
            except BatchError as error:
                statuses = error.statuses
            assert set(statuses[0::2]) == {Status.OK}
            assert set(statuses[1::2]) <= {Status.OK, Status.REGION_RELEASED}
            target.add("b", NBYTES, kind)
            assert eventually(lambda old=second: peer.regions.get("b") not in (None, old))
            second = peer.regions["b"]
        peer.close()

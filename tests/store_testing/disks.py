# SPDX-License-Identifier: Apache-2.0
"""A pool whose memory is small, with disks below it, and what is put there and looked at."""

from __future__ import annotations

import threading
from typing import Any

from engine_testing.leaks import eventually

from moonpool.cluster import local_cluster
from moonpool.store_client import Outcome, StoreClient
from store_testing import content

SPACE = "ssd"
LENGTH = 300_000
#: So small that what is put twice over does not fit into memory, and short leases, so that it can go.
OPTIONS = {
    "high_watermark": "0.6",
    "low_watermark": "0.4",
    "lease_max": "200ms",
    "put_begin": "300ms",
    "put_deadline": "5s",
    "heartbeat_interval": "100ms",
    "session_timeout": "1s",
    "ramp_up": "0s",
}
CLIENT = {"lease": 0.2, "staging_bytes": "16MiB", "locations_max": 0}


def cluster_of(**how: Any) -> Any:
    options = {"nodes": 1, "dram": "8MiB", "ssd": "32MiB", "store": "sqlite", "master_options": OPTIONS, **how}
    return local_cluster(**options)


def fill(client: StoreClient, hashes: list[bytes], *, uses: int = 2) -> None:
    """Put chunks a few at a time, and use them, so that eviction in the background keeps up."""
    for at in range(0, len(hashes), 5):
        missing = hashes[at : at + 5]
        while missing:
            client.put(SPACE, missing, [content(one, LENGTH) for one in missing]).require()
            # What was never used is the first to go, if need be before it is used.
            found = check(client, missing) if uses > 1 else [Outcome.OK] * len(missing)
            missing = [one for one, outcome in zip(missing, found, strict=True) if outcome != Outcome.OK]
        assert eventually(lambda: used(client) < 0.62 * (8 << 20), 30)


def used(client: StoreClient) -> int:
    found: int = client.master_stats()["index"]["used_bytes"]
    return found


def count(client: StoreClient, what: str) -> int:
    found: int = client.master_stats()["counts"][what]
    return found


def on_disk(client: StoreClient) -> int:
    """Return how many chunks are on disks only."""
    found: int = client.master_stats()["index"]["on_disk"]
    return found


def no_failures(client: StoreClient, hashes: list[bytes]) -> bool:
    """Return whether the memory of a node that is gone is not asked any more, in time."""
    return eventually(lambda: Outcome.FAILED not in check(client, hashes), 30)


def wait_for_writes(client: StoreClient) -> None:
    before = count(client, "demoted_items")
    assert eventually(lambda: count(client, "demoted_items") > before, 30)


def check(client: StoreClient, hashes: list[bytes], *, at_once: int = 4) -> list[int]:
    """Get chunks; what is there is what was put. Returns the outcomes."""
    outcomes: list[int] = []
    for at in range(0, len(hashes), at_once):
        some = hashes[at : at + at_once]
        found = client.get(SPACE, some)
        for hash_, value in zip(some, found, strict=True):
            assert value is None or value == content(hash_, LENGTH)
        outcomes += found.outcomes
    return outcomes


def there_again(client: StoreClient, hashes: list[bytes]) -> None:
    """What is on disks is found, as soon as memory takes chunks again."""
    assert eventually(lambda: client.exists(SPACE, hashes).all(), 30)
    missing = set(hashes)

    def found() -> bool:
        asked = sorted(missing)
        missing.difference_update(
            hash_ for hash_, outcome in zip(asked, check(client, asked), strict=True) if outcome == Outcome.OK
        )
        return not missing

    assert eventually(found, 30)


def write(client: StoreClient, hashes: list[bytes], over: threading.Event) -> None:
    while not over.is_set():
        for at in range(0, len(hashes), 5):
            some = hashes[at : at + 5]
            client.put(SPACE, some, [content(one, LENGTH) for one in some])
            check(client, some)

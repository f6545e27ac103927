# SPDX-License-Identifier: Apache-2.0
"""What must be true of a pool when nothing is done to it any more, and when nobody uses it any more."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from engine_testing.leaks import eventually
from store_testing import key
from store_testing.workload import KEYS, NAMESPACE

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome, StoreClient
from pool_chaos.place import NODES

#: For everything that is to come back by itself.
SECONDS = 90.0
#: What a process may hold whatever has happened, by its kind. What a node lends is in its RSS.
USAGE_MAX = {
    "master": {"rss_bytes": 320 << 20, "threads": 64, "sockets": 128},
    "node": {"rss_bytes": 320 << 20, "threads": 96, "sockets": 128},
    "client": {"rss_bytes": 320 << 20, "threads": 96, "sockets": 128},
    "etcd": {"rss_bytes": 640 << 20, "threads": 96, "sockets": 256},
}


def usage_of(pid: int) -> dict[str, int]:
    """Return what a process holds of the system."""
    proc = Path(f"/proc/{pid}")
    targets = []
    for entry in (proc / "fd").iterdir():
        # It may be closed between the listing and the look.
        with contextlib.suppress(FileNotFoundError):
            targets.append(str(entry.readlink()))
    return {
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": len(list((proc / "task").iterdir())),
        "mappings": len((proc / "maps").read_text().splitlines()),
        "rss_bytes": int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def too_much(usage: dict[str, dict[str, int]]) -> list[str]:
    """Name the processes that hold more than their kind may."""
    return [
        f"{name} has {held[what]} {what}, more than {limit}"
        for name, held in usage.items()
        for what, limit in USAGE_MAX[name.split()[0]].items()
        if held[what] > limit
    ]


def well_again(overseer: StoreClient) -> list[str]:
    """Take back what is drained, and wait until all nodes are there with memory and disk. Returns what is not well."""
    last: list[str] = []

    def well() -> bool:
        last.clear()
        try:
            segments = overseer.segments()
            for segment in segments:
                if segment.HasField("draining"):
                    overseer.drain(segment.segment, undo=True)
            active = sum(segment.state == pb.ACTIVE for segment in segments)
            last.extend(f"segment {one.segment}: {one.trouble}" for one in segments if one.state != pb.ACTIVE)
            last.extend(overseer.master_stats()["wrong"])
            if active != 2 * NODES:
                last.append(f"{active} segments of {2 * NODES} take chunks")
        except MoonpoolError as error:
            last.append(str(error))
        return not last

    return [] if eventually(well, SECONDS) else [f"not well after {SECONDS:.0f} s: {what}" for what in last]


def nothing_left(overseer: StoreClient) -> list[str]:
    """Remove every chunk when nobody else uses the pool. Returns the gauges that do not return to 0."""
    hashes = [key(number) for number in range(KEYS)]
    left: dict[str, Any] = {}

    def nothing() -> bool:
        left.clear()
        try:
            removed = overseer.remove(NAMESPACE, hashes)
            left["failed removals"] = sum(outcome == Outcome.FAILED for outcome in removed.outcomes)
            left.update(gauges_of(overseer.master_stats()))
        except MoonpoolError as error:
            left[str(error)] = 1
        return not any(left.values())

    return [] if eventually(nothing, SECONDS) else [f"{what} stays at {value}" for what, value in left.items() if value]


def gauges_of(status: dict[str, Any]) -> dict[str, int]:
    """Return what is 0 in a pool without chunks that one client looks at, by name."""
    index, segments = status["index"], status["segments"]
    return {
        # What was read under a lease, or written by whoever is gone, is condemned until that is known to be over.
        **{what: index[what] for what in ("chunks", "on_disk", "writing", "moving", "pinned")},
        **{what: index[what] for what in ("used_bytes", "condemned_bytes")},
        **{what: status[what] for what in ("pins", "fences_outstanding", "copies", "writers_before_restart")},
        "other clients": status["clients"] - 1,
        "bytes in segments": sum(segment["used_bytes"] for segment in segments),
        "segments that are not active": sum(segment["state"] != "ACTIVE" for segment in segments),
        "things wrong": len(status["wrong"]),
    }

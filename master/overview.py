# SPDX-License-Identifier: Apache-2.0
"""What people and programs are told about the whole: segments, figures, events, health."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import moonpool
from moonpool.master.core import Core, now_ms
from moonpool.master.segments import Segment
from moonpool.proto import pool_pb2 as pb

__all__ = ["OverviewCalls", "gauges", "health", "status"]


class OverviewCalls:
    """ListSegments, Stats, WatchEvents."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ListSegments(self, request: pb.ListSegmentsRequest) -> pb.ListSegmentsReply:
        """Return every segment that is not lost."""
        del request
        return pb.ListSegmentsReply(header=self._core.header, segments=_segments(self._core))

    def Stats(self, request: pb.StatsRequest) -> pb.StatsReply:
        """Return what /status answers."""
        del request
        return pb.StatsReply(header=self._core.header, json=json.dumps(status(self._core)))

    async def WatchEvents(self, request: pb.WatchEventsRequest) -> AsyncIterator[pb.Event]:
        """Yield what happens, from a cursor on."""
        core, events = self._core, self._core.events
        cursor = request.cursor
        if not request.boot_id:
            cursor = events.cursor
        elif request.boot_id != core.boot_id:
            cursor = -1
        while True:
            entries = events.since(cursor)
            if entries is None:
                cursor = events.cursor
                yield pb.Event(header=core.header, cursor=cursor, kind=pb.Event.LOST_EVENTS)
                continue
            for entry in entries:
                cursor += 1
                for message in events.messages(entry, cursor, core.header):
                    yield message
            core.check_open()
            await events.wait(cursor)


def _segments(core: Core) -> list[pb.Segment]:
    """Return every segment that is not lost."""
    return [_segment(core, segment) for segment in core.segments.all.values() if not segment.row.lost]


def _segment(core: Core, segment: Segment) -> pb.Segment:
    row = segment.row
    figures = core.segments.figures(segment)
    return pb.Segment(
        segment=row.segment,
        node=row.node,
        host_id=row.host_id,
        address=row.address,
        region=row.region,
        incarnation=row.incarnation,
        capacity_bytes=row.capacity_bytes,
        used_bytes=figures["used_bytes"],
        chunks=figures["extents"],
        found_chunks=figures["chunks"],
        state=segment.state,
        largest_free_bytes=figures["largest_free_bytes"],
        draining=core.drains.told(segment),
        away=not segment.connected,
        trouble=_trouble(core, segment),
        medium=pb.DISK if row.disk else pb.DRAM,
    )


def _trouble(core: Core, segment: Segment) -> str:
    """Return why a segment cannot be used as its state says; empty: nothing."""
    node, now = segment.session, now_ms()
    if node is None and segment.row.disk:
        gone_ms, grace = max(segment.gone_ms, core.started_ms), core.settings.disk_grace
        return f"its node is not back since {_ago(gone_ms)} (lost after {grace:g} s)"
    if node is None:
        grace = core.settings.segment_grace
        return f"its node is not back since the master was started {_ago(core.started_ms)} (lost after {grace:g} s)"
    silent_s, timeout = (now - node.seen_ms) / 1000, core.settings.session_timeout
    silent = node.outbox is None or silent_s > 3 * core.settings.heartbeat_interval
    why = [f"its node has not been heard for {silent_s:.0f} s (lost after {timeout:g} s)"] * silent
    if segment.note:
        why.append(segment.note)
    if segment.quarantined:
        why.insert(0, f"quarantined {_ago(segment.quarantined_ms)}: {segment.cause or 'it could not be reached'}")
    return "; ".join(why)


def _ago(when_ms: int) -> str:
    return f"{(now_ms() - when_ms) / 1000:.0f} s ago"


def _disks(core: Core) -> dict[str, int]:
    """Return the capacity of the disks that are there, and what is used of it."""
    there = [segment for segment in core.segments.all.values() if segment.row.disk and segment.session is not None]
    return {
        "capacity_bytes": sum(segment.row.capacity_bytes for segment in there),
        "used_bytes": sum(core.segments.figures(segment)["used_bytes"] for segment in there),
    }


def health(core: Core) -> list[str]:
    """Return what is wrong; nothing: all is well."""
    wrong = [] if (lost := core.store.lost) is None else [f"{lost.code}: {lost}"]
    dead = core.supervisor.dead
    wrong += [f"the loop {name!r} stands still: {core.supervisor.loops[name].error}" for name in dead]
    if core.waiting_for_store:
        wrong.append(f"the store has not taken the removal of {core.waiting_for_store} chunks")
    if not core.store.leading:
        wrong.append("the store does not answer: it cannot tell whether it still leads")
    if core.closing.is_set():
        wrong.append("it is being stopped")
    return wrong


def status(core: Core) -> dict[str, Any]:
    """Return what `moonpool status` shows, for JSON."""
    sessions = core.sessions.alive.values()
    counts = core.metrics.counts
    looked = counts["lookups_items"]
    wrong = health(core)
    return {
        "version": moonpool.__version__,
        "cluster": core.settings.cluster,
        "cluster_id": core.header.cluster_id.hex(),
        "boot_id": core.boot_id.hex(),
        "epoch": core.header.epoch,
        "uptime_s": (now_ms() - core.started_ms) / 1000,
        "healthy": not wrong,
        "wrong": wrong,
        "index": core.index.stats(),
        "hit_rate": counts["lookup_hits_items"] / looked if looked else None,
        "counts": dict(counts) | _more_counts(core),
        "clients": sum(session.kind == pb.CLIENT for session in sessions),
        "nodes": sum(session.kind == pb.NODE for session in sessions),
        "pins": sum(len(session.pins) for session in sessions),
        "fences_outstanding": core.fences.outstanding,
        "copies": len(core.copies.under_way),
        "writers_before_restart": len(core.old_writers),
        "restored_chunks": core.restored_chunks,
        "namespaces": len(core.namespaces),
        "store": {"kind": core.settings.store.partition(":")[0], **core.store.stats()},
        "loops": {
            name: {"alive": loop.alive, "rounds": loop.rounds, "failures": loop.failures, "error": loop.error}
            for name, loop in core.supervisor.loops.items()
        },
        "segments": [
            {
                "segment": message.segment,
                "node": message.node,
                "medium": pb.Medium.Name(message.medium),
                "host_id": message.host_id,
                "address": message.address,
                "capacity_bytes": message.capacity_bytes,
                "used_bytes": message.used_bytes,
                "chunks": message.found_chunks,
                "largest_free_bytes": message.largest_free_bytes,
                "state": pb.SegmentState.Name(message.state),
                "draining": _progress(message),
                "trouble": message.trouble,
            }
            for message in _segments(core)
        ],
    }


def _progress(segment: pb.Segment) -> dict[str, Any] | None:
    if not segment.HasField("draining"):
        return None
    draining = segment.draining
    return {
        "moved": draining.moved,
        "moving": draining.moving,
        "stuck": draining.stuck,
        "cause": draining.cause,
    }


def _more_counts(core: Core) -> dict[str, int]:
    return {
        "fences_sent": core.fences.sent,
        "fences_done": core.fences.done_count,
        "fenced_bytes": core.fences.freed_bytes,
        "segments_lost": core.segments.lost,
        "segments_quarantined": core.segments.quarantines,
    }


def gauges(core: Core) -> dict[str, float | dict[str, float]]:
    """Return what is measured when somebody looks, for Prometheus."""
    index = core.index.stats()
    sessions = core.sessions.alive.values()
    disks = _disks(core)
    chunks = index["chunks"]
    loops = core.supervisor.loops.items()
    store = core.store.stats()
    return {
        "chunks": chunks,
        "chunks_max": index["chunks_max"],
        "chunks_writing": index["writing"],
        "chunks_pinned": index["pinned"],
        "index_memory_bytes": index["memory_bytes"],
        "index_memory_per_chunk_bytes": index["memory_bytes"] / chunks if chunks else 0,
        "capacity_bytes": index["capacity_bytes"],
        "used_bytes": index["used_bytes"],
        "free_bytes": index["free_bytes"],
        "condemned_bytes": index["condemned_bytes"],
        "refused_records_total": index["refused_records"],
        "sessions": {
            'kind="client"': sum(session.kind == pb.CLIENT for session in sessions),
            'kind="node"': sum(session.kind == pb.NODE for session in sessions),
        },
        "pins": sum(len(session.pins) for session in sessions),
        "leading": float(core.store.leading),
        "fences_outstanding": core.fences.outstanding,
        "chunks_moving": index["moving"],
        "chunks_on_disk": index["on_disk"],
        "disk_capacity_bytes": disks["capacity_bytes"],
        "disk_used_bytes": disks["used_bytes"],
        "copies": len(core.copies.under_way),
        "copies_bytes": sum(copy.nbytes for copy in core.copies.under_way.values()),
        "copies_overdue": core.copies.overdue(),
        "segments": {
            f'state="{pb.SegmentState.Name(state).lower()}"': sum(s.state == state for s in core.segments.all.values())
            for state in pb.SegmentState.values()
        },
        "store_waiting_changes": store["waiting"],
        "store_transactions_total": store["transactions"],
        "store_rows_written_total": store["writes"],
        "store_rows_deleted_total": store["deletes"],
        "store_failures_total": store["failures"],
        "store_rows_refused_total": {
            f'table="{table}"': store[f"refused_{table}"] for table in ("segments", "namespaces", "writers", "chunks")
        },
        "loop_alive": {f'loop="{name}"': float(loop.alive) for name, loop in loops},
        "loop_failures_total": {f'loop="{name}"': loop.failures for name, loop in loops},
        "loop_restarts_total": core.supervisor.restarts,
        "uptime_seconds": (now_ms() - core.started_ms) / 1000,
    } | {f"{name}_total": float(count) for name, count in _more_counts(core).items()}

# SPDX-License-Identifier: Apache-2.0
"""The ring of events is bounded by what its events name, not by how many there are."""

from __future__ import annotations

from moonpool.master.events import Entry, Events
from moonpool.proto import pool_pb2 as pb


def committed(chunks: int) -> Entry:
    return Entry(pb.Event.COMMITTED, bytes(36 * chunks))


def test_large_events_push_out_more_than_small_ones() -> None:
    events = Events(100, str)
    for _ in range(100):
        events.add(committed(1))
    assert len(events.since(0) or ()) == 100
    events.add(committed(60))
    assert events.since(59) is None
    assert len(events.since(60) or ()) == 41
    events.add(Entry(pb.Event.SEGMENT, segment=1))
    assert events.since(60) is None
    assert len(events.since(61) or ()) == 41


def test_the_newest_event_is_kept_however_much_it_names() -> None:
    events = Events(16, str)
    events.add(committed(1))
    events.add(committed(1000))
    assert events.since(0) is None
    assert events.since(1) == [committed(1000)]
    events.add(committed(1))
    assert events.since(2) == [committed(1)]

# SPDX-License-Identifier: Apache-2.0
"""Whether a segment can be reached: the master moves no bytes, so it asks nodes to read there. For the event loop.

Up to two other nodes are asked, and the node itself. What one of the others says counts: one that could read is enough
for the segment, one that could not, and none that could, is enough against it. Only when none of them answers, that the
node itself is silent or cannot read counts against it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moonpool.master.metrics import Metrics
from moonpool.master.segments import Segment, Segments
from moonpool.master.sessions import Session
from moonpool.proto import pool_pb2 as pb

__all__ = ["Probes"]

_log = logging.getLogger("moonpool.master")
# What a node has for connecting and reading, and when the master makes up its mind, in seconds: within a second of the
# report.
_READ: Final = 0.4
_VERDICT: Final = 0.6
_LATE: Final = 0.1
# Nodes that are asked beside the one that was reported.
_OTHERS: Final = 2
# Probes of different segments at once. Beyond it two reporters still count.
_AT_ONCE: Final = 64
# Between two probes of one segment, however often it is reported.
_PAUSE: Final = 0.2


@dataclass(eq=False)
class _Probe:
    number: int
    segment: Segment
    node: Session
    #: Who was asked -> what they said.
    answers: dict[Session, bool | None]
    tell: Callable[[bool], None]
    again: Callable[[bool], None] | None = None

    @property
    def complete(self) -> bool:
        # A stream that broke brings no answer.
        return all(answer is not None or who.outbox is None for who, answer in self.answers.items())

    @property
    def works(self) -> bool:
        others = [answer for who, answer in self.answers.items() if who is not self.node and answer is not None]
        if others:
            return any(others)
        return bool(self.answers.get(self.node))


class Probes:
    """Every probe that is under way: at most one for each segment.

    Args:
        segments: among which the nodes are that can be asked.
        metrics: counts them.
    """

    def __init__(self, segments: Segments, metrics: Metrics) -> None:
        self._segments = segments
        self._metrics = metrics
        self._number = 0
        self._under_way: dict[int, _Probe] = {}
        self._by_segment: dict[int, _Probe] = {}

    @property
    def under_way(self) -> int:
        """Probes that are not decided."""
        return len(self._under_way)

    def begin(self, segment: Segment, tell: Callable[[bool], None]) -> None:
        """Find out, and tell whether the segment can be reached. Nothing is told when it is lost meanwhile."""
        number = segment.row.segment
        known = self._by_segment.get(number)
        if known is not None:
            # It may have broken after that one had looked.
            known.again = tell
            return
        node = segment.session
        if node is None or len(self._under_way) >= _AT_ONCE:
            return
        self._number += 1
        asked = [who for who in (*self._others(segment), node) if who.outbox is not None]
        probe = _Probe(self._number, segment, node, dict.fromkeys(asked), tell)
        self._under_way[probe.number] = self._by_segment[number] = probe
        self._metrics.counts["probes"] += 1
        order = pb.Probe(
            probe=probe.number,
            address=segment.row.address,
            region=segment.row.region,
            incarnation=segment.row.incarnation,
            timeout_ms=round(_READ * 1000),
        )
        for who in asked:
            assert who.outbox is not None
            who.outbox.put(probe=order)
        self._later(probe)

    def _later(self, probe: _Probe) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_VERDICT, self._due, probe, loop.time() + _VERDICT)

    def _due(self, probe: _Probe, due: float) -> None:
        if asyncio.get_running_loop().time() - due > _LATE:
            # This process stood still. That others were silent meanwhile says nothing about them.
            self._later(probe)
        else:
            self._end(probe)

    def done(self, who: Session, answer: pb.ProbeDone) -> None:
        """A node has answered. What nobody has asked of it says nothing."""
        probe = self._under_way.get(answer.probe)
        if probe is None or who not in probe.answers:
            return
        probe.answers[who] = answer.works
        if not answer.works:
            _log.info("%r cannot read segment %d: %s", who.name, probe.segment.row.segment, answer.cause[:500])
        if probe.complete:
            self._end(probe)

    def _others(self, segment: Segment) -> list[Session]:
        found = list(
            {
                other.session
                for other in self._segments.all.values()
                if other.session is not None
                and other.session is not segment.session
                and other.session.outbox is not None
                and not (other.quarantined or other.reports)
            }
        )
        random.shuffle(found)
        # Those of other hosts first: they come over the network, as clients do.
        found.sort(key=lambda who: who.host_id == segment.row.host_id)
        return found[:_OTHERS]

    def _end(self, probe: _Probe) -> None:
        if self._under_way.pop(probe.number, None) is None:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(_PAUSE, self._again, probe)
        segment = probe.segment
        if segment.session is not probe.node:
            return
        if not probe.works:
            self._metrics.counts["probes_failed"] += 1
        probe.tell(probe.works)

    def _again(self, probe: _Probe) -> None:
        del self._by_segment[probe.segment.row.segment]
        if probe.again is not None:
            self.begin(probe.segment, probe.again)

# SPDX-License-Identifier: Apache-2.0
"""What is under which key, and how it is written.

Everything is below ``/PREFIX/CLUSTER``:

========================  ==============================================================================
``/leader``               who leads, under its lease. Every change is made on condition that it is as it was
``/epoch``                of the last leader, who that was, and what etcd looked like then
``/cluster_id``           32 hexadecimal digits, drawn when the store was made
``/segments/<number>``    a segment, as JSON
``/segment_last``         the highest number that a segment ever had
``/namespaces/<number>``  its name
``/writers/<session>``    the incarnation of its transfer engine
``/chunks/<slot>``        a record, as the index packs it, with its length before it
========================  ==============================================================================

Numbers have eight hexadecimal digits, so that keys sort as their numbers do.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from moonpool.master.store.base import SegmentRow

__all__ = ["Layout", "end_of", "name_of", "namespace_row", "number_of", "segment_row", "segment_value", "writer_row"]

_NUMBER: Final = re.compile(rb"[0-9a-f]{8}")
_SEGMENT_FIELDS: Final = (
    "node",
    "host_id",
    "address",
    "region",
    "incarnation",
    "capacity_bytes",
    "draining",
    "lost",
)


class Layout:
    """The keys below a root, such as ``/moonpool/production``."""

    def __init__(self, root: str) -> None:
        self.root = root.encode()
        self.leader = self.root + b"/leader"
        self.epoch = self.root + b"/epoch"
        self.cluster_id = self.root + b"/cluster_id"
        self.segment_last = self.root + b"/segment_last"
        self.segments = self.root + b"/segments/"
        self.namespaces = self.root + b"/namespaces/"
        self.writers = self.root + b"/writers/"
        self.chunks = self.root + b"/chunks/"

    def chunk(self, slot: int) -> bytes:
        """Return the key of a record; b"" for a slot that is none, beyond the last."""
        return b"" if slot >> 32 else self.chunks + b"%08x" % slot

    def segment(self, number: int) -> bytes:
        """Return the key of a segment."""
        return self.segments + b"%08x" % number

    def namespace(self, number: int) -> bytes:
        """Return the key of a namespace."""
        return self.namespaces + b"%08x" % number

    def writer(self, session: bytes) -> bytes:
        """Return the key of a writer."""
        return self.writers + session.hex().encode()


def end_of(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with `prefix`, whose last byte is none that has no successor."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def name_of(key: bytes) -> bytes:
    """Return the last part of a key."""
    return key.rpartition(b"/")[2]


def number_of(key: bytes) -> int:
    """Return the number in the last part of a key; -1: there is none."""
    name = name_of(key)
    return int(name, 16) if _NUMBER.fullmatch(name) else -1


def segment_value(row: SegmentRow) -> bytes:
    """Return a segment as it is kept."""
    fields: dict[str, Any] = {name: getattr(row, name) for name in _SEGMENT_FIELDS}
    return json.dumps({**fields, "incarnation": row.incarnation.hex()}).encode()


def segment_row(key: bytes, value: bytes) -> tuple[Any, ...]:
    """Return the row of a segment, for `Rows.segments`; None for what cannot be read."""
    try:
        fields = json.loads(value)
        found = [fields.get(name) for name in _SEGMENT_FIELDS]
    except (ValueError, AttributeError):
        found = [None] * len(_SEGMENT_FIELDS)
    found[4] = _id(found[4])
    return (number_of(key), *found)


def namespace_row(key: bytes, value: bytes) -> tuple[int, Any]:
    """Return the row of a namespace, for `Rows.namespaces`."""
    try:
        return number_of(key), value.decode()
    except UnicodeDecodeError:
        return number_of(key), value


def writer_row(key: bytes, value: bytes) -> tuple[Any, Any]:
    """Return the row of a writer, for `Rows.writers`."""
    return _id(name_of(key).decode(errors="replace")), _id(value.decode(errors="replace"))


def _id(text: Any) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        return None

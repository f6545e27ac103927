# SPDX-License-Identifier: Apache-2.0
"""What comes out of the database, looked at before anybody believes it: a disk may flip bits in any cell.

SQLite has no checksums, and a cell may be of any type whatever its column says. A row that makes no sense is refused by
itself, and counted; the rest of the store is as good as before.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from typing import Any, Final

from moonpool.master.store.base import SegmentRow, Writer

__all__ = ["Rows", "text_or_bytes"]

_log = logging.getLogger("moonpool.master")
_ID_BYTES: Final = 16
_SLOT_END: Final = 1 << 32
_SEGMENT_END: Final = (1 << 32) - 1
_CAPACITY_MAX: Final = 1 << 46
# Namespaces are numbered from 1 on, without gaps. Whatever is beyond this is no number of one.
_NAMESPACE_END: Final = 1 << 30
# A record that the index refuses as damaged, and then names among those whose rows are to be deleted.
_NO_RECORD: Final = bytes(4)


def text_or_bytes(value: bytes) -> Any:
    """Return a cell's text; bytes, which no column of texts takes, when it is no UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


class Rows:
    """Reads rows, and counts those that are damaged.

    Attributes:
        refused: table -> rows of it that were refused.
        stray_slots: slots of rows that are to be deleted, and that no index has.
    """

    def __init__(self) -> None:
        self.refused = {"segments": 0, "namespaces": 0, "writers": 0, "chunks": 0}
        self.stray_slots: list[int] = []

    def segments(self, rows: Iterable[tuple[Any, ...]]) -> list[SegmentRow]:
        """Return segments. One that is damaged is lost, so that its chunks are given up and its number stays used."""
        found = []
        for row in rows:
            number, node, host_id, address, region, incarnation, capacity, draining, lost = row
            good = all(isinstance(text, str) for text in (node, host_id, address, region)) and _is_id(incarnation)
            good = good and _within(capacity, 1, _CAPACITY_MAX + 1) and draining in (0, 1) and lost in (0, 1)
            if not _within(number, 1, _SEGMENT_END):
                self._refuse("segments")
            elif good:
                found.append(
                    SegmentRow(
                        number, node, host_id, address, region, incarnation, capacity, bool(draining), bool(lost)
                    )
                )
            else:
                self._refuse("segments")
                found.append(SegmentRow(number, "", "", "", "", bytes(_ID_BYTES), 1, lost=True))
        return found

    def namespaces(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, int]:
        """Return namespaces. A number whose name is damaged stays used, or a new name would get its chunks."""
        found = {}
        for number, name in rows:
            if not _within(number, 1, _NAMESPACE_END):
                self._refuse("namespaces")
                # Nobody knows which number is missing, so new ones come after all that there can have been.
                found[f"\ufffd{_NAMESPACE_END}"] = _NAMESPACE_END
            elif isinstance(name, str):
                found[name] = number
            else:
                self._refuse("namespaces")
                found[f"\ufffd{number}"] = number
        return found

    def writers(self, rows: Iterable[tuple[Any, ...]]) -> list[Writer]:
        """Return writers."""
        found = []
        for session, incarnation in rows:
            if _is_id(session) and _is_id(incarnation):
                found.append(Writer(session, incarnation))
            else:
                self._refuse("writers")
        return found

    def chunks(self, rows: list[tuple[int, Any]]) -> tuple[bytes, bytes]:
        """Return slots and records, as `MetadataStore.load` does. In the place of a damaged one is an empty one."""
        slots, records = [], []
        for slot, found in rows:
            if not 0 <= slot < _SLOT_END:
                self._refuse("chunks")
                self.stray_slots.append(slot)
                continue
            good = isinstance(found, bytes) and int.from_bytes(found[:4], "little") == len(found) - 4
            if not good:
                self._refuse("chunks")
            slots.append(slot)
            records.append(found if good else _NO_RECORD)
        return array("I", slots).tobytes(), b"".join(records)

    def warn(self, path: object) -> None:
        """Say how many were refused, if any were."""
        if refused := ", ".join(f"{count} of {table}" for table, count in self.refused.items() if count):
            _log.warning("%s has damaged rows, which are refused: %s", path, refused)

    def _refuse(self, table: str) -> None:
        self.refused[table] += 1


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == _ID_BYTES


def _within(value: Any, first: int, end: int) -> bool:
    return isinstance(value, int) and first <= value < end

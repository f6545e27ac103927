# SPDX-License-Identifier: Apache-2.0
"""What a metadata store does. `tests/master/test_stores.py` is the contract as a suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from moonpool.master.errors import StoreLostError

__all__ = ["EPOCH_MAX", "Identity", "MetadataStore", "SegmentRow", "Writer"]

#: The upper 24 bits of a generation hold the epoch.
EPOCH_MAX: Final = (1 << 24) - 1


@dataclass(frozen=True)
class Identity:
    """What `MetadataStore.open` returns.

    Attributes:
        cluster_id: 16 bytes, drawn when the store was made.
        epoch: of the leader. Larger than every one before, and durable when it is returned.
    """

    cluster_id: bytes
    epoch: int


@dataclass(frozen=True)
class SegmentRow:
    """A segment as it is kept over a restart.

    Attributes:
        segment: its number, never used twice.
        node: the name of the node, for people.
        host_id: of its host.
        address: of its transfer engine.
        region: its name there; empty for a disk, which nobody reaches through an engine.
        incarnation: of that engine, or of what is kept on the disk, 16 bytes.
        capacity_bytes: its size.
        draining: takes nothing new.
        lost: its node is gone; the row stays until no record of a chunk names it.
    """

    segment: int
    node: str
    host_id: str
    address: str
    region: str
    incarnation: bytes
    capacity_bytes: int
    draining: bool = False
    lost: bool = False

    @property
    def disk(self) -> bool:
        """Whether it is a disk."""
        return not self.region


@dataclass(frozen=True)
class Writer:
    """A client session that may have begun to write: it is fenced before a later master hands out space.

    Attributes:
        session: 16 bytes.
        incarnation: of its transfer engine, 16 bytes.
    """

    session: bytes
    incarnation: bytes


class MetadataStore(ABC):
    """Keeps what a master must know after a restart: segments, namespaces, writers, and a record for each chunk.

    Everything that changes it returns a future, which is done when the change is durable, or has failed with
    `StoreUnavailableError` and has changed nothing, or with `StoreLostError`, after which every other change fails with
    that too and nobody knows what came of this one. Changes are carried out in the order in which they were asked for,
    but changes of different slots by `apply` may become durable in any order, and one of many slots in parts.
    Thread-safe, but for `open`, `wait_for_turn` and `close`, which are called by one thread at a time.

    Attributes:
        lost: why nothing can be durable any more, and what was need not be; None: all is well. It stays.
    """

    #: Whether several masters may be up for it, of which one has it open. The others wait for their turn.
    shared: ClassVar[bool] = False

    lost: StoreLostError | None = None

    def look(self) -> None:  # noqa: B027 - one in memory cannot get lost
        """See whether what is durable is still there; `lost` says what was found. It may wait for a disk."""

    @abstractmethod
    def open(self, address: str = "") -> Identity:
        """Open it, or make it. Once, but for a shared one that was busy.

        Args:
            address: of this master, for those that wait for it to end.

        Raises:
            StoreBusyError: another process has it open. A shared one may be opened again after `wait_for_turn`.
            StoreDamagedError: it cannot be read.
            StoreUnavailableError: it cannot be made or written.
        """

    def wait_for_turn(self, seconds: float) -> None:
        """Of a shared one that was busy: wait until it may be free, or for so long."""
        raise NotImplementedError(f"{type(self).__name__} is not shared")

    @property
    def leading(self) -> bool:
        """Whether this process is the only one that can change the store, as far as can be known at this moment.

        Where it is False another master may serve the pool by now, so this one answers nobody.
        """
        return True

    @property
    def taken(self) -> Future[StoreLostError] | None:
        """Done when another process has taken a shared store over; None: that cannot be."""
        return None

    @abstractmethod
    def segments(self) -> list[SegmentRow]:
        """Return every segment, in the order of the numbers."""

    @abstractmethod
    def namespaces(self) -> dict[str, int]:
        """Return the number of each namespace."""

    @abstractmethod
    def writers(self) -> list[Writer]:
        """Return every writer that was not removed."""

    @abstractmethod
    def load(self, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record, up to `page` at a time: (slots: n x u32, records: each with a u32 length before it).

        Raises:
            StoreDamagedError: it cannot be read any further.
        """

    @abstractmethod
    def apply(self, slots: bytes, records: bytes, deletes: bytes) -> Future[None]:
        """Write records under their slots, replacing what is there, and delete the records of other slots.

        Args:
            slots: n x u32.
            records: n of them, each with a u32 length before it.
            deletes: m x u32. A slot without a record is none to delete, and no error.
        """

    @abstractmethod
    def put_segment(self, row: SegmentRow) -> Future[None]:
        """Write a segment, replacing the row of its number."""

    @abstractmethod
    def new_segment(self) -> int:
        """Return a number that no segment of this store has ever had, from 1 up. `put_segment` uses it up."""

    @abstractmethod
    def remove_segment(self, segment: int) -> Future[None]:
        """Remove the row of a segment. Its number stays used."""

    @abstractmethod
    def put_namespace(self, name: str, number: int) -> Future[None]:
        """Name a namespace."""

    @abstractmethod
    def remove_namespaces(self, numbers: list[int]) -> Future[None]:
        """Forget namespaces. No record names them any more, and after the next `open` their numbers may come again."""

    @abstractmethod
    def put_writer(self, writer: Writer) -> Future[None]:
        """Remember a writer, replacing the one of its session."""

    @abstractmethod
    def remove_writers(self, sessions: list[bytes]) -> Future[None]:
        """Forget writers."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return counters: writes, deletes, transactions, failures, waiting, and refused_<table>.

        The last are rows that are damaged and were not taken, of segments, namespaces, writers and chunks.
        """

    @abstractmethod
    def close(self) -> None:
        """Carry out what waits, and close. Afterwards every change fails with `StoreUnavailableError`."""

# SPDX-License-Identifier: Apache-2.0
"""A store in etcd, fenced by the key of its leader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from moonpool.master.errors import StoreBusyError, StoreDamagedError, StoreLostError, StoreUnavailableError
from moonpool.master.store.base import Identity, MetadataStore, SegmentRow, Writer
from moonpool.master.store.etcd.calls import Members, RefusedError, library
from moonpool.master.store.etcd.follower import Follower
from moonpool.master.store.etcd.layout import (
    Layout,
    end_of,
    namespace_row,
    number_of,
    segment_row,
    segment_value,
    writer_row,
)
from moonpool.master.store.etcd.options import EtcdOptions
from moonpool.master.store.etcd.owner import Change, Owner
from moonpool.master.store.etcd.upkeep import Upkeep
from moonpool.master.store.etcd.view import View
from moonpool.master.store.etcd.writing import Writing
from moonpool.master.store.packing import split_records
from moonpool.master.store.rows import Rows

__all__ = ["EtcdOptions", "EtcdStore"]

T = TypeVar("T")
# Keys of one range. Their records may have kilobytes each.
_PAGE_MAX: Final = 4096
# For the last changes of the leader before. Beyond it everything is read anew.
_CATCH_UP_S: Final = 2.0
_SEGMENT_END: Final = (1 << 32) - 1


class EtcdStore(MetadataStore):
    """Keeps everything in an etcd, for as long as nobody else leads.

    Changes of which parts have no answer stay under way until it is known what came of them, or that this master leads
    no more: then they fail with `StoreLostError`, as does everything after them.

    Args:
        options: where it is.
    """

    shared = True

    def __init__(self, options: EtcdOptions) -> None:
        library()
        options.credentials()
        self._options = options
        self._layout = Layout(options.root)
        self._rows = Rows()
        self._last_segment = 0
        self._taken: Future[StoreLostError] = Future()
        # Whoever waits for it may end that, and is not to cancel it.
        self._taken.set_running_or_notify_cancel()
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._owner: Owner | None = None
        self._members: Members | None = None
        self._writing: Writing | None = None
        self._upkeep: Upkeep | None = None
        #: While another master leads.
        self._follower: Follower | None = None
        self._following: Future[None] | None = None

    # ---------------------------------------------------------------- opening

    def open(self, address: str = "") -> Identity:
        """Connect, and lead; raises StoreBusyError where somebody else does, and can be called again then."""
        if self._thread is None:
            self._connect()
        assert self._owner is not None
        self._owner.address = address
        try:
            return self._call(self._lead())
        except StoreBusyError:
            raise
        except BaseException:
            self.close()
            raise

    def wait_for_turn(self, seconds: float) -> None:
        """Wait until nobody leads, or for so long."""
        assert self._owner is not None, "open() comes first"
        assert self._members is not None
        if self._follower is None:
            self._follower = Follower(self._members, self._layout)
            self._following = self._begin(self._follower.follow())
        self._call(self._owner.wait(seconds))

    def _connect(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name="moonpool-store", daemon=True)
        self._thread.start()
        try:
            self._call(self._make())
        except BaseException:
            self.close()
            raise

    async def _make(self) -> None:
        self._members = Members(self._options)
        self._owner = Owner(self._members, self._options, self._layout, self._taken.set_result)
        self._upkeep = Upkeep(self._members, self._options.upkeep)
        self._writing = Writing(self._owner, self._loop, self._upkeep.full)

    async def _lead(self) -> Identity:
        assert self._owner is not None
        assert self._writing is not None
        assert self._upkeep is not None
        identity = await self._owner.campaign()
        for work in (self._owner.keep(), self._writing.watch(), self._upkeep.work()):
            self._tasks.append(self._loop.create_task(self._until_lost(work)))
        found = await self._owner.read(self._layout.segment_last)
        largest = max((row.segment for row in await self._segments()), default=0)
        last = 0 if found is None else number_of(b"/" + found.value)
        if not largest <= last < _SEGMENT_END:
            # A number that is given twice would name memory of another node.
            raise StoreDamagedError(
                f"{self._layout.segment_last.decode()} does not say which segments there were", hint="another prefix"
            )
        self._last_segment = last
        return identity

    async def _until_lost(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._owner is not None
        try:
            await work
        except StoreLostError:
            return  # whoever has to know is told by the owner
        except Exception as error:  # noqa: BLE001  # a fault of this program, after which nobody keeps the lease
            self._owner.give_up(error)

    @property
    def leading(self) -> bool:
        """Whether nobody else can have taken over by now."""
        return self._owner is not None and self._owner.leads

    @property
    def lost(self) -> StoreLostError | None:  # type: ignore[override]
        """What ended it, once somebody else has taken over."""
        return self._taken.result() if self._taken.done() else None

    @property
    def taken(self) -> Future[StoreLostError]:
        """Done when somebody else has taken over."""
        return self._taken

    # ---------------------------------------------------------------- reading

    def segments(self) -> list[SegmentRow]:
        """Return every segment."""
        return self._call(self._segments())

    async def _segments(self) -> list[SegmentRow]:
        return self._rows.segments(segment_row(*pair) for pair in await self._list(self._layout.segments))

    def namespaces(self) -> dict[str, int]:
        """Return the number of each namespace."""
        rows = self._call(self._list(self._layout.namespaces))
        return self._rows.namespaces(namespace_row(key, value) for key, value in rows)

    def writers(self) -> list[Writer]:
        """Return every writer."""
        return self._rows.writers(writer_row(key, value) for key, value in self._call(self._list(self._layout.writers)))

    def load(self, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record."""
        stray: list[Change] = []
        for found in self._followed(page) or self._read(page):
            rows = [(number_of(key), value) for key, value in found]
            stray += [(key, None) for (number, _), (key, _) in zip(rows, found, strict=True) if number < 0]
            yield self._rows.chunks(rows)
        self._rows.warn(self._layout.root.decode())
        if stray:
            self._submit(stray)

    def _followed(self, page: int) -> Iterator[list[tuple[bytes, bytes]]] | None:
        """Return pages of what was followed while another one led; None: nothing was, or not up to now."""
        follower, following = self._follower, self._following
        if follower is None or following is None:
            return None
        assert self._owner is not None
        # Nobody else can have written after this master's key, which is seen by the follower too.
        records = self._call(follower.caught_up(self._owner.mark, _CATCH_UP_S))
        following.cancel()
        self._follower = self._following = None
        if records is None:
            return None
        pairs = sorted(records.items())
        return (pairs[first : first + page] for first in range(0, len(pairs), page))

    def _read(self, page: int) -> Iterator[list[tuple[bytes, bytes]]]:
        pages = self._view(self._layout.chunks).pages(self._layout, min(page, _PAGE_MAX))
        coming = self._begin(_next(pages))
        while (found := coming.result()) is not None:
            # The next one is on its way while the index takes this one.
            coming = self._begin(_next(pages))
            yield found

    async def _list(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Return all keys below a prefix with their values, for those of which there are thousands at most."""
        end, after, found = end_of(prefix), prefix, []
        view = self._view(prefix)
        while reply := await view.range(after, end, _PAGE_MAX):
            found += reply
            after = reply[-1][0] + b"\0"
        return found

    def _view(self, prefix: bytes) -> View:
        assert self._members is not None
        return View(self._members, prefix)

    # ---------------------------------------------------------------- writing

    def apply(self, slots: bytes, records: bytes, deletes: bytes) -> Future[None]:
        """Write and delete records."""
        prefix = self._layout.chunks  # with the key of `Layout.chunk`, which would be a call for each
        numbers, texts = memoryview(slots).cast("I"), split_records(records)
        if len(numbers) != len(texts):
            raise ValueError(f"{len(numbers)} slots and {len(texts)} records")
        changes: dict[bytes, bytes | None] = {
            prefix + b"%08x" % slot: text for slot, text in zip(numbers, texts, strict=True)
        }
        for slot in memoryview(deletes).cast("I"):
            changes[prefix + b"%08x" % slot] = None
        return self._submit(list(changes.items()))

    def new_segment(self) -> int:
        """Return a number that no segment has ever had."""
        return self._last_segment + 1

    def put_segment(self, row: SegmentRow) -> Future[None]:
        """Write a segment."""
        self._last_segment = max(self._last_segment, row.segment)
        last = (self._layout.segment_last, b"%08x" % self._last_segment)
        return self._submit([(self._layout.segment(row.segment), segment_value(row)), last], alone=True)

    def remove_segment(self, segment: int) -> Future[None]:
        """Remove a segment."""
        return self._submit([(self._layout.segment(segment), None)], alone=True)

    def put_namespace(self, name: str, number: int) -> Future[None]:
        """Name a namespace."""
        return self._submit([(self._layout.namespace(number), name.encode())], alone=True)

    def remove_namespaces(self, numbers: list[int]) -> Future[None]:
        """Forget namespaces."""
        return self._submit([(self._layout.namespace(number), None) for number in dict.fromkeys(numbers)])

    def put_writer(self, writer: Writer) -> Future[None]:
        """Remember a writer."""
        return self._submit([(self._layout.writer(writer.session), writer.incarnation.hex().encode())], alone=True)

    def remove_writers(self, sessions: list[bytes]) -> Future[None]:
        """Forget writers."""
        return self._submit([(self._layout.writer(session), None) for session in dict.fromkeys(sessions)])

    def _submit(self, changes: list[Change], *, alone: bool = False) -> Future[None]:
        assert self._writing is not None, "open() comes first"
        return self._writing.submit(changes, alone=alone)

    # ---------------------------------------------------------------- the rest

    def stats(self) -> dict[str, int]:
        """Return counters: those of every store, and what etcd met."""
        assert self._members is not None
        assert self._owner is not None
        assert self._writing is not None
        assert self._upkeep is not None
        refused = {f"refused_{table}": count for table, count in self._rows.refused.items()}
        met = {"unanswered": self._members.unanswered, "fences": self._owner.fences, **self._upkeep.stats()}
        return {**self._writing.stats(), **refused, **met}

    def close(self) -> None:
        """Carry out what waits, let the next one lead, and close. An `open` in another thread ends with an error."""
        with self._closing:
            if self._loop.is_closed():
                return
            if self._thread is not None:
                if self._writing is not None:
                    self._writing.stop_taking()
                self._begin(self._end()).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        until = time.monotonic() + self._options.closing
        if self._writing is not None:
            # Half of the time is for the end of the lease, which spares the next leader the rest of it.
            await self._writing.drain(self._options.closing / 2)
        # Those that were begun for good, and whatever another thread waits for.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._owner is not None:
            # Without it the next leader waits until the lease is over. TimeoutError: two classes before Python 3.11.
            with contextlib.suppress(
                StoreUnavailableError, RefusedError, StoreDamagedError, TimeoutError, asyncio.TimeoutError
            ):
                await asyncio.wait_for(self._owner.resign(), max(0.0, until - time.monotonic()))
        if self._members is not None:
            self._members.close()
        await self._loop.shutdown_asyncgens()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._begin(work).result()
        except CancelledError as error:
            raise StoreUnavailableError("the metadata store was closed") from error


async def _next(pages: AsyncIterator[T]) -> T | None:
    return await anext(pages, None)

# SPDX-License-Identifier: Apache-2.0
"""What the leader writes, as it writes it, so that the next one need not read all of it when its turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import grpc

from moonpool.master.errors import StoreDamagedError, StoreUnavailableError
from moonpool.master.store.etcd.calls import Members, RefusedError, UnansweredError
from moonpool.master.store.etcd.layout import Layout, end_of
from moonpool.master.store.etcd.view import View

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Follower"]

_log = logging.getLogger("moonpool.master")
_PAGE: Final = 4096
# A stream on which nothing came for so long is left. Etcd is asked for a sign of life this often.
_SILENT_S: Final = 5.0
_ASK_S: Final = 1.0
_AGAIN_S: Final = 0.5


class Follower:
    """Keeps a copy of the records of chunks. Used from one event loop.

    Args:
        members: of the etcd.
        layout: the keys.

    Attributes:
        records: key -> value, as of `revision`.
        revision: of the last change that is in `records`; 0: they are not complete.
    """

    def __init__(self, members: Members, layout: Layout) -> None:
        self.records: dict[bytes, bytes] = {}
        self.revision = 0
        self._members = members
        self._layout = layout
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """Read everything, then take what changes, for ever; from the beginning where that breaks."""
        while True:
            try:
                await self._take_changes(await self._read_all())
            except (UnansweredError, RefusedError, StoreUnavailableError, StoreDamagedError, grpc.RpcError) as error:
                _log.info("etcd is read again: %s", error)
            self.revision = 0
            await asyncio.sleep(_AGAIN_S)

    async def caught_up(self, revision: int, seconds: float) -> dict[bytes, bytes] | None:
        """Return the records with every change up to a revision in them; None: they are not there in time.

        Args:
            revision: of a change below the root, so that it is seen here.
            seconds: how long to wait.
        """
        end = time.monotonic() + seconds
        while 0 < self.revision < revision and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                await asyncio.wait_for(self._changed.wait(), left)
        return self.records if self.revision >= revision else None

    async def _read_all(self) -> int:
        """Read the records as of one moment, and return its revision."""
        view = View(self._members, self._layout.chunks, alone=False)
        records: dict[bytes, bytes] = {}
        async for page in view.pages(self._layout, _PAGE):
            records.update(page)
        self.records = records
        return view.revision

    async def _take_changes(self, revision: int) -> None:
        """Take what changes after a revision, until the stream breaks."""
        rpc = self._members.rpc
        root = self._layout.root + b"/"
        create = rpc.WatchCreateRequest(key=root, range_end=end_of(root), start_revision=revision + 1)
        with _Stream(self._members, rpc.WatchRequest(create_request=create)) as stream:
            while True:
                reply = await stream.next(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
                if reply.canceled:
                    raise UnansweredError(f"the watch was ended: {reply.cancel_reason}")
                for event in reply.events:
                    self._take(event)
                if reply.created:
                    self.revision = max(self.revision, revision)
                self._changed.set()

    def _take(self, event: Any) -> None:
        pair = event.kv
        if pair.key.startswith(self._layout.chunks):
            if event.type == event.DELETE:
                self.records.pop(pair.key, None)
            else:
                self.records[pair.key] = pair.value
        self.revision = pair.mod_revision


class _Stream:
    """A stream of watch answers from one member, read on a thread of its own."""

    def __init__(self, members: Members, first: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Any] = asyncio.Queue()
        self._asking: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking.put(first)
        self._call = members.watch(iter(self._asking.get, None))
        self._thread = threading.Thread(target=self._read, name="moonpool-store-follower", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._tell(reply)
            self._tell(UnansweredError("etcd ended the stream"))
        except grpc.RpcError as error:
            self._tell(error)

    def _tell(self, what: Any) -> None:
        # The loop may have ended, when the store was closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._coming.put_nowait, what)

    async def next(self, sign_of_life: Any) -> Any:
        """Return the next answer, and ask for a sign of life while none comes."""
        end = time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            try:
                found = await asyncio.wait_for(self._coming.get(), _ASK_S)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                self._asking.put(sign_of_life)
                continue
            if isinstance(found, Exception):
                raise found
            return found
        raise UnansweredError(f"nothing came for {_SILENT_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.put(None)
        self._call.cancel()
        self._thread.join()

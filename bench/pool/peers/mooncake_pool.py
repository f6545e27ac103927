# SPDX-License-Identifier: Apache-2.0
"""Mooncake's store with its own master, through its Python interface, when it is installed.

Two ways to use it on one host: a client with an engine of its own (``mooncake``), whose bytes go over TCP, and one
without (``mooncake-dummy``, as the project calls it), which shares memory with the process that lends and has it copy.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from moonpool.bench.backends.installed import imported, version_of
from moonpool.bench.errors import BenchError
from moonpool.bench.memory import allocate
from moonpool.bench.pool.peers.base import ASKED_BYTES, GROUPS, FreshRow, LookRow, PeerOptions, PoolBackend, PoolRow
from moonpool.bench.pool.peers.mooncake_servers import HOST, MooncakeServers
from moonpool.bench.pool.windows import CallSide, Checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.bench.measure import Window
    from moonpool.bench.work import Work

__all__ = ["MooncakeDummyPool", "MooncakePool"]

_DISTRIBUTIONS: Final = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
#: For what its client stages itself, which is nothing here: all memory is registered.
_LOCAL_BYTES: Final = 64 << 20
#: Of what is lent, so much is written once before anything is measured; from 0.9 on its master would evict.
_TOUCHED: Final = 0.85
_TOUCH_BYTES: Final = 1 << 20
_READY_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.05


class MooncakePool(PoolBackend):
    """A client with an engine of its own."""

    path: ClassVar[str] = "tcp"

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Keep connections, copy where the bytes are in the same process, stay on this host, and log only errors."""
        return {
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_STORE_MEMCPY": "1",
            "MC_TCP_BIND_ADDRESS": HOST,
            "MC_LOG_LEVEL": "ERROR",
            "GLOG_minloglevel": "2",
            "GLOG_logtostderr": "1",
        }

    def __init__(self, options: PeerOptions) -> None:
        self._store: Any = imported("mooncake.store", "mooncake").MooncakeDistributedStore()
        self._servers = MooncakeServers(options.dram, options.calls)
        try:
            self.memory = self._open(options)
            _check(self._store.register_buffer(self.memory.ctypes.data, len(self.memory)), "register_buffer")
            self._await_segment()
            self._touch(options.dram)
        except BenchError as error:
            said = self._servers.said()
            self._servers.close()
            raise BenchError(error.message, cause=said or error.cause) from error
        except BaseException:
            self._servers.close()
            raise

    def version(self) -> str | None:
        """Return the version of the wheel."""
        return version_of(*_DISTRIBUTIONS)

    def row(self, work: Work, number: Callable[[], int]) -> PoolRow:
        """See `PoolBackend`."""
        if work.transport == "master":
            return _PutStartRow(work, self._store) if work.op == "put" else self._looking(work)
        return (_PutRow if work.op == "put" else _GetRow)(work, number, self._store, self.memory, self.path)

    def close(self) -> None:
        """See `PoolBackend`."""
        self._store.close()
        self._servers.close()

    def _open(self, options: PeerOptions) -> NDArray[np.uint8]:
        """Connect; return memory that the engine may register."""
        _check(
            self._store.setup(HOST, "P2PHANDSHAKE", 0, _LOCAL_BYTES, "tcp", "", self._servers.master), "setup"
        )  # fmt: skip
        return allocate(options.memory_bytes)

    def _await_segment(self) -> None:
        """Return when the master has room to give."""
        deadline = time.monotonic() + _READY_SECONDS
        while status := self._store.put_from("ready", self.memory.ctypes.data, 8):
            if time.monotonic() > deadline:
                _check(status, "the first put")
            time.sleep(_LOOK_SECONDS)
        _check(self._store.remove("ready", True), "remove")

    def _touch(self, dram: int) -> None:
        """Write nearly all of what is lent once, so that no window meets memory for the first time."""
        length = min(_TOUCH_BYTES, len(self.memory))
        for index in range(int(dram * _TOUCHED) // length):
            _check(self._store.put_from(f"touch-{index}", self.memory.ctypes.data, length), "put_from")
        self._store.remove_all(True)

    def _looking(self, work: Work) -> PoolRow:
        groups = _keys(GROUPS, work.batch)
        pointers, lengths = [self.memory.ctypes.data] * work.batch, [ASKED_BYTES] * work.batch
        for keys in groups:
            _all(self._store.batch_put_from(keys, pointers, lengths), 0, "batch_put_from")
        there = [1] * work.batch
        store = self._store
        return LookRow(
            work, lambda keys: bool(store.batch_is_exist(keys) == there), groups, lambda: _clear(store)
        )  # fmt: skip


class MooncakeDummyPool(MooncakePool):
    """A client that has the process that lends do everything, in memory that both share."""

    path = "shm"

    def _open(self, options: PeerOptions) -> NDArray[np.uint8]:
        # Whole huge pages, and what the client takes for itself.
        pool = -(-(options.memory_bytes + 2 * _LOCAL_BYTES) // (2 << 20)) * (2 << 20)
        _check(self._store.setup_dummy(pool, _LOCAL_BYTES, self._servers.client), "setup_dummy")
        address = self._store.alloc_from_mem_pool(options.memory_bytes)
        if not address:
            raise BenchError("Mooncake: alloc_from_mem_pool gave no memory")
        memory = (ctypes.c_ubyte * options.memory_bytes).from_address(address)
        return np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)


# ---------------------------------------------------------------- rows that move bytes


class _MovingRow(Checked):
    """Chunks of a layout in memory that is registered."""

    def __init__(self, work: Work, number: Callable[[], int], store: Any, memory: NDArray[np.uint8], path: str) -> None:
        super().__init__(work, memory, number)
        self.path: str | None = path
        self._work = work
        self._store = store
        self._pointers = (self._layout.offsets + memory.ctypes.data).tolist()
        self._lengths = [work.block_bytes] * work.batch

    def _side(self, post: Callable[..., list[int]], good: int, keys: list[str], *, once: bool) -> CallSide:
        """Return threads that call `post` with their batches, everything it takes made before the window."""
        work, lengths, expected = self._work, self._lengths, [good] * self._work.batch
        calls: list[Callable[[int], object]] = []
        for thread in range(work.threads):
            blocks = [self._layout.batch(thread, index) for index in range(work.batches)]
            given = [(keys[some], self._pointers[some]) for some in blocks]

            def call(index: int, given: list[tuple[list[str], list[int]]] = given, count: int = len(given)) -> None:
                names, pointers = given[index % count]
                statuses = post(names, pointers, lengths)
                if statuses != expected:
                    _all(statuses, good, f"a batch of {work.op}")

            calls.append(call)
        return CallSide(calls, work.batches, work.batch_bytes, once=once)

    def _fresh(self) -> list[str]:
        return _keys(1, self._work.blocks)[0]

    def _each(self, method: str, good: int, keys: list[str], done: list[int]) -> None:
        """Call a method of the client with the first `done` batches of each thread, one after the other."""
        post: Callable[..., list[int]] = getattr(self._store, method)
        for thread, end in enumerate(done):
            for index in range(end):
                some = self._layout.batch(thread, index)
                _all(post(keys[some], self._pointers[some], self._lengths), good, method)


class _PutRow(_MovingRow):
    """Puts chunks with fresh keys. A window ends when the footprint has been put once, or its time is over."""

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `PoolRow`. What was put is got again for its verification."""
        del warmup
        keys, content = self._fresh(), self._number()
        self._pattern.fill(content)
        side = self._side(self._store.batch_put_from, 0, keys, once=True)
        try:
            window = side.run(seconds)
            self._check_own("source of the put")
            self._pattern.fill(self._number())
            done = [int(end) for end in side.next_batch]
            self._each("batch_get_into", self._work.block_bytes, keys, done)
            self._pattern.expect(content, [(0, end) for end in done])
            self._check_own("put, got again")
        finally:
            side.close()
            _clear(self._store)
        return window

    def close(self) -> None:
        """Nothing is left."""


class _GetRow(_MovingRow):
    """Gets chunks that were put before."""

    def __init__(self, work: Work, number: Callable[[], int], store: Any, memory: NDArray[np.uint8], path: str) -> None:
        super().__init__(work, number, store, memory, path)
        keys = self._fresh()
        self._content = number()
        self._pattern.fill(self._content)
        self._each("batch_put_from", 0, keys, [work.batches] * work.threads)
        self._gets = self._side(store.batch_get_into, work.block_bytes, keys, once=False)

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `PoolRow`."""
        return self._got("get", self._gets, self._content, seconds, warmup)

    def close(self) -> None:
        """See `PoolRow`."""
        self._gets.close()
        _clear(self._store)


# ---------------------------------------------------------------- rows of the master alone


class _PutStartRow(FreshRow):
    """Room for chunks, and the word that they are written, without the bytes: its put session has both."""

    def __init__(self, work: Work, store: Any) -> None:
        super().__init__(work)
        self._store = store
        self._lengths, self._good = [ASKED_BYTES] * work.batch, [0] * work.batch

    def _fresh(self) -> Sequence[list[str]]:
        return _keys(self._work.batches, self._work.batch)

    def _put(self, batch: list[str]) -> None:
        started = self._store.batch_put_session_start(batch, self._lengths)
        ended = self._store.batch_put_session_end(batch)
        if started != self._good or ended != self._good:
            _all([*started, *ended], 0, "a put session")

    def _settle(self, put: Sequence[list[str]]) -> None:
        for keys in put:
            if self._store.batch_is_exist(keys) != [1] * self._work.batch:
                self._complain("a chunk that was put was not there")
        _clear(self._store)


def _keys(groups: int, count: int) -> list[list[str]]:
    """Return fresh keys, each of which says as much as a hash of 32 bytes."""
    text = os.urandom(32 * groups * count).hex()
    keys = [text[begin : begin + 64] for begin in range(0, len(text), 64)]
    return [keys[begin : begin + count] for begin in range(0, len(keys), count)]


def _clear(store: Any) -> None:
    store.remove_all(True)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise BenchError(f"Mooncake: {what} returned {status}")


def _all(statuses: list[int], good: int, what: str) -> None:
    for index, status in enumerate(statuses):
        if status != good:
            raise BenchError(f"Mooncake: {what} returned {status} for item {index} of {len(statuses)}")

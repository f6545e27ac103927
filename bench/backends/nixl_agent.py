# SPDX-License-Identifier: Apache-2.0
"""NIXL with its UCX backend, through its Python interface, when it is installed."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, Place, RowSide, TargetSide
from moonpool.bench.backends.driving import run_threads
from moonpool.bench.backends.installed import imported, version_of
from moonpool.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moonpool.bench.measure import Window
    from moonpool.bench.work import Layout

__all__ = ["Nixl"]


class Nixl(Backend):
    """One agent on each side; transfers are prepared once and posted again and again, as its own benchmark does."""

    name: ClassVar[str] = "nixl"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._nixl = imported("nixl._api", "nixl")
        self._agent: Any = None
        self._registered: Any = None
        self._memory: NDArray[np.uint8] | None = None
        self._synchronized = False
        self._remote: tuple[str, str] | None = None

    @classmethod
    def environment(cls, transport: str) -> dict[str, str]:
        """Restrict UCX to TCP where that is compared; otherwise it chooses, as it comes."""
        quiet = {"NIXL_LOG_LEVEL": "WARN"}
        return quiet | {"UCX_TLS": "tcp"} if transport == "tcp" else quiet

    def version(self) -> str | None:
        """Return the version of the wheel."""
        return version_of("nixl")

    def target(self, row: RowSide) -> TargetSide:
        """Register the memory, and hand out the agent's metadata."""
        # Over TCP a target answers only while something drives it: its progress thread, which is NIXL's default.
        agent = self._ready(row, progress=True)
        return PassiveTarget({"metadata": agent.get_agent_metadata().hex(), "base": row.memory.ctypes.data})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Load the metadata, connect, and prepare every transfer of the row."""
        # The threads that wait drive the transfers. A progress thread beside them would only take their locks and,
        # where cores are few, their core: every figure was better without.
        agent = self._ready(row, progress=False)
        metadata = offer["metadata"]
        if self._remote is None or self._remote[0] != metadata:
            if self._remote is not None:
                agent.remove_remote_agent(self._remote[1])
            self._remote = metadata, _text(agent.add_remote_agent(bytes.fromhex(metadata)))
            agent.make_connection(self._remote[1])
        return _Initiator(agent, row, self._remote[1], int(offer["base"]))

    def close(self) -> None:
        """Give back the memory and end the agent."""
        if self._agent is not None:
            if self._remote is not None:
                self._agent.remove_remote_agent(self._remote[1])
            self._agent.deregister_memory(self._registered)
        self._agent = self._registered = self._memory = self._remote = None

    def _ready(self, row: RowSide, *, progress: bool) -> Any:
        # Locks where several threads use the agent, none where one does.
        synchronized = row.work.threads > 1
        if self._memory is not row.memory or self._synchronized != synchronized:
            self.close()
            modes = self._nixl.nixl_thread_sync_t
            mode = modes.NIXL_THREAD_SYNC_RW if synchronized else modes.NIXL_THREAD_SYNC_NONE
            config = self._nixl.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"], sync_mode=mode)
            self._agent = self._nixl.nixl_agent(f"mooncake-bench-{os.getpid()}-{uuid.uuid4().hex[:8]}", config)
            if "UCX" not in self._agent.backends:
                self._agent = None
                raise BenchError("NIXL has no UCX backend here")
            self._registered = self._agent.register_memory([(row.memory.ctypes.data, len(row.memory), 0, "")], "DRAM")
            self._memory = row.memory
            self._synchronized = synchronized
        return self._agent


class _Initiator(InitiatorSide):
    def __init__(self, agent: Any, row: RowSide, remote: str, base: int) -> None:
        super().__init__(row.work.threads)
        self._row = row
        work = row.work
        ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _blocks(row.local, row.memory.ctypes.data), "DRAM")
        theirs = agent.prep_xfer_dlist(remote, _blocks(row.remote, base), "DRAM")
        self._lists = [ours, theirs]
        self._handles: list[Any] = []
        numbers = np.arange(work.blocks, dtype=np.int32)
        post, check = agent.transfer, agent.check_xfer_state

        self._transfers: list[Callable[[int], object]] = []
        for thread in range(work.threads):
            handles = [
                agent.make_prepped_xfer(work.op.upper(), ours, numbers[blocks], theirs, numbers[blocks])
                for blocks in (row.local.batch(thread, index) for index in range(work.batches))
            ]
            self._handles.extend(handles)

            def transfer(index: int, handles: list[Any] = handles, count: int = len(handles)) -> None:
                handle = handles[index % count]
                state = post(handle)
                # NIXL has no call that waits.
                while state == "PROC":
                    state = check(handle)
                if state != "DONE":
                    raise BenchError(f"NIXL: a transfer ended in state {state}")

            self._transfers.append(transfer)

    @property
    def path(self) -> str | None:
        # Which of its transports UCX took for which message is not to be had.
        return "tcp" if self._row.work.transport == "tcp" else None

    def run(self, seconds: float) -> Window:
        return run_threads(self, self._transfers, self._row.work.batch_bytes, seconds)

    def close(self) -> None:
        self._transfers.clear()
        for handle in (*self._handles, *self._lists):
            handle.release()
        self._handles.clear()
        self._lists.clear()


def _blocks(layout: Layout, base: int) -> NDArray[np.uint64]:
    """Address, length and device of every block."""
    blocks = np.zeros((layout.work.blocks, 3), dtype=np.uint64)
    blocks[:, 0] = layout.offsets.astype(np.uint64) + np.uint64(base)
    blocks[:, 1] = layout.work.block_bytes
    return blocks


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name

# SPDX-License-Identifier: Apache-2.0
"""Everything that can be measured, by what it is measured as and by transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from moonpool.bench.backends.base import Backend, InitiatorSide, Place, RowSide, TargetSide
from moonpool.bench.backends.cuda_copy import CudaCopy
from moonpool.bench.backends.mapped import MappedCopy
from moonpool.bench.backends.memcpy import Memcpy
from moonpool.bench.backends.mooncake_engine import Mooncake
from moonpool.bench.backends.moonpool_engine import (
    MoonpoolAuto,
    MoonpoolCudaIpc,
    MoonpoolLocal,
    MoonpoolNetwork,
    MoonpoolRdma,
    MoonpoolShm,
    MoonpoolTcp,
)
from moonpool.bench.backends.nixl_agent import Nixl
from moonpool.bench.backends.perftest import Perftest
from moonpool.bench.backends.process_vm import ProcessVm
from moonpool.bench.backends.sockets import RawSockets
from moonpool.bench.work import has_gpu

if TYPE_CHECKING:
    from moonpool.bench.work import Work

__all__ = [
    "COMPARED",
    "ENGINES",
    "IN_PROCESS",
    "NETWORK",
    "SAME_HOST",
    "Backend",
    "InitiatorSide",
    "Place",
    "RowSide",
    "TargetSide",
    "backend_of",
]

#: The engine for each transport, in the order of the table.
ENGINES: Final[dict[str, type[Backend]]] = {
    "tcp": MoonpoolTcp,
    "rdma": MoonpoolRdma,
    "shm": MoonpoolShm,
    "local": MoonpoolLocal,
}
#: What a row is over whose bytes may take either way between hosts; not in the table, because it has no limit.
NETWORK: Final = "rdma,tcp"
#: The limit of memory that a caller has, for each transport.
_LIMITS: Final[dict[str, type[Backend]]] = {"tcp": RawSockets, "rdma": Perftest, "shm": ProcessVm, "local": Memcpy}
#: Transports whose two sides are one process.
IN_PROCESS: Final = frozenset({"local"})
#: Transports whose two sides are processes of one host.
SAME_HOST: Final = frozenset({"shm", "local"})

#: What `mooncake-bench compare` knows, by the name it has there, then by what the comparison goes over.
COMPARED: Final[Mapping[str, Mapping[str, type[Backend]]]] = {
    "moonpool": {"tcp": MoonpoolTcp, "auto": MoonpoolAuto},
    "sockets": {"tcp": RawSockets, "auto": RawSockets},
    "memcpy": {"auto": MappedCopy},
    "process_vm": {"auto": ProcessVm},
    "mooncake": {"tcp": Mooncake, "auto": Mooncake},
    "nixl": {"tcp": Nixl, "auto": Nixl},
}


def backend_of(kind: str, work: Work) -> type[Backend]:
    """Return what is measured.

    Args:
        kind: ``engine``, ``limit``, or a name in `COMPARED`.
        work: the row.
    """
    if has_gpu(work.memory) and kind in ("engine", "limit"):
        if kind == "limit":
            return CudaCopy
        return MoonpoolCudaIpc if work.transport == "shm" else ENGINES[work.transport]
    if kind == "engine":
        return MoonpoolNetwork if work.transport == NETWORK else ENGINES[work.transport]
    if kind == "limit":
        mapped = work.transport == "shm" and work.memory == "allocated"
        return MappedCopy if mapped else _LIMITS[work.transport]
    return COMPARED[kind][work.transport]

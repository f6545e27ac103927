# SPDX-License-Identifier: Apache-2.0
"""Everything that can be measured, by transport."""

from __future__ import annotations

from typing import Final

from moonpool.bench.backends.base import Backend, InitiatorSide, Place, RowSide, TargetSide
from moonpool.bench.backends.memcpy import Memcpy
from moonpool.bench.backends.moonpool_engine import MoonpoolLocal, MoonpoolTcp
from moonpool.bench.backends.sockets import RawSockets

__all__ = ["ENGINES", "IN_PROCESS", "LIMITS", "Backend", "InitiatorSide", "Place", "RowSide", "TargetSide"]

#: The engine for each transport, in the order of the table.
ENGINES: Final[dict[str, type[Backend]]] = {"tcp": MoonpoolTcp, "local": MoonpoolLocal}
#: The limit each is compared with.
LIMITS: Final[dict[str, type[Backend]]] = {"tcp": RawSockets, "local": Memcpy}
#: Transports whose two sides are one process.
IN_PROCESS: Final = frozenset({"local"})

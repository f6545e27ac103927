# SPDX-License-Identifier: Apache-2.0
"""The master of a pool: knows which chunk of KV cache is where, and never touches its bytes.

``moonpool master`` runs one; `Master` is one within a program, for tests and notebooks::

    with Master(listen="127.0.0.1:0", http=None, store="memory") as master:
        print(master.address)
"""

from moonpool.master.errors import (
    ListenError,
    StartError,
    StoreBusyError,
    StoreDamagedError,
    StoreLostError,
    StoreUnavailableError,
)
from moonpool.master.server import Master, MasterServer
from moonpool.master.settings import MasterOptions, MasterSettings

__all__ = [
    "ListenError",
    "Master",
    "MasterOptions",
    "MasterServer",
    "MasterSettings",
    "StartError",
    "StoreBusyError",
    "StoreDamagedError",
    "StoreLostError",
    "StoreUnavailableError",
]

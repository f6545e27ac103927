# SPDX-License-Identifier: Apache-2.0
"""Blocks that a prefill engine lends: a decode engine reads them where they lie, without a pool between the two.

Peers read memory and ask nobody, so what makes that safe is in memory too. Each lease has a slot in a table that peers
read: a token that nobody can guess, and a digest of which blocks are lent and what is in them. It is wiped before any
of the blocks is used for something else. Who has read blocks, and finds token and digest in the slot *afterwards*, has
read them while they were lent, and they are the blocks of that digest.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from moonpool.connector.jobs import TOKEN_BYTES
from moonpool.errors import MoonpoolError
from moonpool.store_client.packing import HASH_BYTES
from moonpool.transfer_engine import ClosedError, Region

if TYPE_CHECKING:
    from moonpool.connector.jobs import LendJob
    from moonpool.connector.layout import PagedCache
    from moonpool.transfer_engine import TransferEngine

__all__ = ["CACHE", "FORM", "RENEWED", "RETURNED", "SLOTS", "SLOT_BYTES", "TABLE", "Lending"]

_log = logging.getLogger("moonpool.connector")
#: Names of regions: the table, what peers have to know of the cache, and the storages of the cache with their numbers.
TABLE: Final = "moonpool-leases"
FORM: Final = "moonpool-form"
CACHE: Final = "moonpool-cache-"
#: Leases at the same time.
SLOTS: Final = 4096
#: Of a slot: the token, then the digest.
SLOT_BYTES: Final = TOKEN_BYTES + HASH_BYTES
#: What peers say of a lease: one byte, then its token.
RENEWED: Final = b"+"
RETURNED: Final = b"-"
#: Until the thread looks whether it is to end.
_LOOK_SECONDS: Final = 0.5


class Lending:
    """What one worker lends. Methods are those of its main thread; a thread hears what peers say.

    Args:
        engine: that peers connect to.
        cache: what is lent.
        namespace: of what is in it.
    """

    def __init__(self, engine: TransferEngine, cache: PagedCache, namespace: str) -> None:
        self._engine = engine
        self._table = engine.allocate(SLOTS * SLOT_BYTES, TABLE, writable=False)
        form = json.dumps({"namespace": namespace, **cache.form()}).encode()
        self._form = engine.allocate(len(form), FORM, writable=False)
        memoryview(self._form).cast("B")[:] = form
        # The same memory as the cache's own regions, which nobody else may reach.
        self._regions: list[Region] = [
            engine.register((region.address, region.nbytes), f"{CACHE}{number}", writable=False)
            for number, region in enumerate(cache.regions)
        ]
        self._lock = threading.Lock()
        self._renewed: set[bytes] = set()
        self._returned: set[bytes] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="moonpool-lending", daemon=True)
        self._thread.start()

    def lend(self, jobs: Iterable[LendJob]) -> None:
        """Lend blocks, which stay as they are until the slot is wiped."""
        for job in jobs:
            self._slot(job.slot)[:] = np.frombuffer(job.token + job.digest, dtype=np.uint8)

    def wipe(self, slots: Iterable[int]) -> None:
        """Lend them no more: who reads them from now on does not find the token."""
        for slot in slots:
            self._slot(slot)[:] = 0

    def heard(self) -> tuple[set[bytes], set[bytes]]:
        """Return the tokens of leases (that somebody still needs, that nobody needs any more), since the last time."""
        if not self._renewed and not self._returned:
            return set(), set()
        with self._lock:
            heard = self._renewed, self._returned
            self._renewed, self._returned = set(), set()
        return heard

    def close(self) -> None:
        """End the thread. The regions go with the engine."""
        self._closing.set()
        self._thread.join()

    # ---------------------------------------------------------------- inside

    def _slot(self, slot: int) -> npt.NDArray[np.uint8]:
        there = np.frombuffer(memoryview(self._table), dtype=np.uint8)
        return there[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                heard = self._engine.notifications(_LOOK_SECONDS)
            except ClosedError:
                return
            except MoonpoolError as error:
                # Leases end by themselves.
                _log.error("moonpool: what decode engines say is not heard any more: %s", error)
                return
            with self._lock:
                for one in heard:
                    token = one.payload[1:]
                    if len(token) == TOKEN_BYTES and one.payload[:1] in (RENEWED, RETURNED):
                        (self._renewed if one.payload[:1] == RENEWED else self._returned).add(token)

# SPDX-License-Identifier: Apache-2.0
"""Random calls of a client, each of which is checked: ``python -m store_testing.workload MASTER SECRET SEED FILE``."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.store_client import MasterUnavailableError, Outcome, StoreClient
from moonpool.transfer_engine import Region
from store_testing import content, key

KEYS = 400
NAMESPACE = "workload"
LENGTH_MAX = 60_000
#: Of the pages in which a chunk lies scattered: as many as hold the largest, of a few times as many.
PAGE = 4096
PAGES = -(-LENGTH_MAX // PAGE)
PAGES_ALL = 12 * PAGES
# A put may find the master away and its node dead, one after the other.
TIMEOUT = 60.0
#: What a call may take beyond its time before it counts as one that hangs: machines that run tests are busy.
LATE = 10.0
#: What it does, and how often each.
KINDS = {"put": 12, "get": 12, "into": 4, "spans": 4, "range": 4, "remove": 2, "pin": 2, "move": 4, "drain": 1}
# What is made of several calls has as long as all of them.
_CALLS = {"pin": 3, "drain": 3, "move": 2}


def length(number: int) -> int:
    return 1 + (number * number * 977) % LENGTH_MAX


class Workload:
    """Puts, gets and removes, through one client after the other.

    Args:
        master: address of one or several.
        secret: of the cluster.
        seed: of all choices.
        timeouts: seconds that calls have, those of each client one of these.
        clock: seconds; one that stands still with the process, where it is stopped and goes on.
        without: some of `KINDS`.

    Attributes:
        seen: how often each outcome and error was met.
        wrong: every get that gave other bytes than were put, and every call that did not end in its time.
    """

    def __init__(
        self,
        master: str,
        secret: str,
        seed: int,
        timeouts: Sequence[float] = (TIMEOUT,),
        clock: Callable[[], float] = time.monotonic,
        without: Collection[str] = (),
    ) -> None:
        self._master = master
        self._secret = secret
        self._random = random.Random(seed)
        self._timeouts = timeouts
        self._clock = clock
        self._kinds = {kind: weight for kind, weight in KINDS.items() if kind not in without}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._region: Region | None = None  # of the client that there is

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            timeout = self._random.choice(self._timeouts)
            try:
                with self._in_time("open", timeout):
                    client = self._open(timeout)
            except MasterUnavailableError:
                self.seen["open raised MasterUnavailableError"] += 1
                continue
            try:
                self._region = client.allocate(PAGES_ALL * PAGE)
                for _ in range(self._random.randrange(20, 200)):
                    if over.is_set():
                        break
                    self._step(client, timeout)
            finally:
                with self._in_time("close", timeout):
                    client.close()

    def _open(self, timeout: float) -> StoreClient:
        return StoreClient(
            self._master,
            secret=self._secret,
            timeout=timeout,
            startup_timeout=timeout,
            staging_bytes="4MiB",
            lease=self._random.choice((0.05, 0.5)),
        )

    @contextlib.contextmanager
    def _in_time(self, what: str, timeout: float) -> Iterator[None]:
        """Note a call that takes longer than it may."""
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            if took > timeout + LATE:
                self.wrong.append(f"{what} took {took:.1f} s and had {timeout:g} s")

    def _step(self, client: StoreClient, timeout: float) -> None:
        numbers = self._random.sample(range(KEYS), self._random.randrange(1, 12))
        hashes = [key(number) for number in numbers]
        what = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
        try:
            with self._in_time(what, _CALLS.get(what, 1) * timeout):
                self._do(client, what, numbers, hashes)
        except MoonpoolError as error:
            self.seen[f"{what} raised {type(error).__name__}"] += 1

    def _do(self, client: StoreClient, what: str, numbers: list[int], hashes: list[bytes]) -> None:
        if what == "put":
            values = [content(hash_, length(number)) for hash_, number in zip(hashes, numbers, strict=True)]
            given = values if self._random.random() < 0.5 else self._scattered(values)
            results = client.put(NAMESPACE, hashes, given, replicas=self._random.choice((1, 1, 2)))
            self.seen.update(f"put {Outcome(outcome).name}" for outcome in results.outcomes)
            self.seen.update(f"put {type(error).__name__}" for error in results.errors.values())
        elif what == "remove":
            client.remove(NAMESPACE, hashes[:2])
        elif what in ("move", "drain"):
            self._rearrange(client, what, hashes)
        elif what == "pin":
            with client.pin(NAMESPACE, hashes[:3]):
                self._get(client, "get", numbers[:3], hashes[:3])
        else:
            self._get(client, what, numbers, hashes)

    def _scattered(self, values: list[bytes]) -> Any:
        """Return the values in pages here and there of registered memory."""
        counts = [-(-len(value) // PAGE) for value in values]
        pages = np.array(self._random.sample(range(PAGES_ALL), sum(counts)), dtype=np.int64)
        lengths = np.full(len(pages), PAGE, dtype=np.int64)
        lengths[np.cumsum(counts) - 1] = [
            len(value) - PAGE * (count - 1) for value, count in zip(values, counts, strict=True)
        ]
        memory, joined = self._memory(), np.frombuffer(b"".join(values), dtype=np.uint8)
        ends = np.cumsum(lengths)
        for page, end, nbytes in zip(pages.tolist(), ends.tolist(), lengths.tolist(), strict=True):
            memory[page, :nbytes] = joined[end - nbytes : end]
        return self._region, PAGE * pages, lengths, np.array(counts)

    def _memory(self) -> Any:
        assert self._region is not None
        return np.frombuffer(memoryview(self._region), dtype=np.uint8).reshape(PAGES_ALL, PAGE)

    def _rearrange(self, client: StoreClient, what: str, hashes: list[bytes]) -> None:
        segments = client.segments()
        if not segments:
            return
        number = self._random.choice(segments).segment
        if what == "move":
            results = client.move(NAMESPACE, hashes, segment=number, timeout=1.0)
            self.seen.update(f"move {Outcome(outcome).name}" for outcome in results.outcomes)
        else:
            # Whoever comes next may stop it in the middle.
            client.drain(number)
            time.sleep(self._random.random() / 10)
            client.drain(number, undo=True)

    def _get(self, client: StoreClient, what: str, numbers: list[int], hashes: list[bytes]) -> None:
        wanted = [content(hash_, length(number)) for hash_, number in zip(hashes, numbers, strict=True)]
        if what == "range":
            results = client.get(NAMESPACE, hashes, ranges=(0, 1))
            values, wanted = list(results), [value[:1] for value in wanted]
        elif what == "into":
            room = [bytearray(LENGTH_MAX) for _ in hashes]
            results = client.get_into(NAMESPACE, hashes, room)
            values = [bytes(one[:n]) for one, n in zip(room, results.lengths, strict=True)]
        elif what == "spans":
            pages = np.array(self._random.sample(range(PAGES_ALL), PAGES * len(hashes)), dtype=np.int64)
            results = client.get_into(NAMESPACE, hashes, (self._region, PAGE * pages, PAGE, PAGES))
            found = self._memory()[pages].reshape(len(hashes), PAGES * PAGE)
            values = [found[index, :n].tobytes() for index, n in enumerate(results.lengths)]
        else:
            results = client.get(NAMESPACE, hashes)
            values = list(results)
        self.seen.update(f"get {Outcome(outcome).name}" for outcome in results.outcomes)
        self.seen.update(f"get {type(error).__name__}" for error in results.errors.values())
        for index in results.where(Outcome.OK):
            if values[index] != wanted[index]:
                self.wrong.append(f"{what} of {numbers[index]}: {values[index]!r:.50} != {wanted[index]!r:.50}")


def main() -> None:
    master, secret, seed, path = sys.argv[1:5]
    work = Workload(master, secret, int(seed))
    over = threading.Event()

    def tell() -> None:
        # Whoever started this kills it some day, so what it has found out is written down all the time.
        while not over.wait(0.1):
            Path(path).write_text(json.dumps([dict(work.seen), work.wrong]), encoding="utf-8")

    threading.Thread(target=tell, daemon=True).start()
    threading.Thread(target=lambda: (time.sleep(300), over.set()), daemon=True).start()
    work.run(over)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Random transfers of one thread, each checked when it has ended."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos.model import Model
from chaos.places import AREA_BYTES, KINDS, WINDOW_BYTES, Item, Place, Window, region_name
from chaos.words import content
from moonpool.transfer_engine import (
    BatchError,
    MoonpoolError,
    Peer,
    PeerState,
    Region,
    Status,
    Transfer,
    TransferEngine,
    TransferState,
    WaitTimeoutError,
    digest,
)

#: Failures that networks, deadlines and processes that go away explain. Any other one is a fault of the engine.
EXPLAINED = {
    "PEER_LOST", "CONNECT", "DEADLINE", "CANCELLED", "REGION_STALE", "REGION_RELEASED", "REGION_UNKNOWN", "CLOSED",
}  # fmt: skip
#: Only bounds a hang: whatever has not ended so long after its deadline never will.
PATIENCE_SECONDS = 100.0
_IN_FLIGHT_MAX = 5
# Of each kind of memory. Transfers that are not settled keep theirs.
_WINDOWS = 6
_PLAN_ITEMS = 48
_PLAN_ITEM_BYTES = 2048
_VIOLATIONS_MAX = 10
_EVENTS_KEPT = 40


@dataclass
class Flight:
    """A transfer that has not been checked yet."""

    transfer: Transfer
    place: Place
    window: Window
    items: list[Item]
    write: bool
    sequence: int
    digest: bool
    notify: bool
    #: Whether its last item, which is not in `items`, is out of range.
    bad_item: bool
    latest: float
    sources: list[np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=list)


@dataclass
class Ledger:
    """Notifications to one incarnation of a peer: those it must have, and those it must never have."""

    must: list[int] = field(default_factory=list)
    must_not: list[int] = field(default_factory=list)


class Traffic:
    """Runs in a thread of its own from `start` to `calm`.

    Args:
        engine: the engine of this process.
        owner: number of this process. generation: how often it was started. thread: number of this thread in it.
        seed: of everything that is left to chance.
    """

    def __init__(self, engine: TransferEngine, owner: int, generation: int, thread: int, seed: int) -> None:
        self._engine = engine
        self._owner, self._generation, self._number = owner, generation, thread
        self._chance = random.Random(f"{seed}.{owner}.{generation}.{thread}")
        self._targets: dict[int, str] = {}
        self._peers: dict[int, Peer] = {}
        self._places: dict[tuple[int, str], Place] = {}
        regions = [engine.allocate(_WINDOWS * WINDOW_BYTES), engine.register(bytearray(_WINDOWS * WINDOW_BYTES))]
        self._windows = [
            Window(region, index * WINDOW_BYTES, self._chance) for region in regions for index in range(_WINDOWS)
        ]
        self._plan_windows: dict[tuple[int, str], Window] = {}
        for window in self._windows:
            window.mark()
        self._flights: list[Flight] = []
        self._unsettled: list[Flight] = []
        self._sequence = 0
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.ledgers: dict[str, Ledger] = {}

    # ---------------------------------------------------------------- from outside

    def start(self, targets: dict[int, str]) -> None:
        """Begin, with these peers: their numbers and addresses."""
        self._targets = targets
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name=f"traffic-{self._number}")
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more, and return when everything has ended and was checked."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def settle(self) -> None:
        """With peers that answer: leave no byte in doubt, and look at every byte."""
        for flight in self._unsettled:
            self._end(flight)
        self._unsettled.clear()
        for target in self._targets:
            self._peer_of(target, PATIENCE_SECONDS).ensure(PATIENCE_SECONDS)
            for kind in KINDS:
                place = self._place(target, kind, PATIENCE_SECONDS)
                for start, end in place.model.doubtful():
                    self._heal(place, start, end)
                self._look_at_all(place)

    def expected(self) -> dict[str, int]:
        """Return the digest of each area that this thread has written, by incarnation, key and place of the area."""
        return {
            f"{place.remote.incarnation} {place.remote.key} {place.base}": digest(place.model.certain())
            for place in self._places.values()
        }

    def report(self) -> dict[str, Any]:
        """Return what was counted, the ledgers and the violations since the last report."""
        report = {
            "counts": dict(self.counts),
            "violations": self.violations[:_VIOLATIONS_MAX],
            "ledgers": {key: vars(ledger) for key, ledger in self.ledgers.items()},
        }
        self.counts, self.violations, self.ledgers = Counter(), [], {}
        return report

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and len(self.violations) < _VIOLATIONS_MAX:
                self._poll_unsettled()
                if len(self._flights) < _IN_FLIGHT_MAX and self._chance.random() < 0.7:
                    self._begin()
                self._reap_one(0.01)
            while self._flights:
                self._reap_one(1.0)
        except Exception as error:
            self.violations.append(f"the traffic itself failed: {type(error).__name__}: {error}\n" + self._story())
            raise

    def _begin(self) -> None:
        target = self._chance.choice(list(self._targets))
        peer = self._peers.get(target)
        if peer is not None and peer.state is not PeerState.READY and self._chance.random() < 0.9:
            # Connecting takes time that the other peers can use.
            self._stopping.wait(0.002)
            return
        try:
            place = self._place(target, self._chance.choice(KINDS), 0.5)
            if self._chance.random() < 0.02:
                self._leave(target)
            elif self._chance.random() < 0.2:
                self._post(place)
            else:
                self._submit(place)
        except MoonpoolError as error:
            self._refused(error)

    def _refused(self, error: MoonpoolError) -> None:
        """Nothing was begun."""
        self.counts[f"refused {error.code}"] += 1
        if error.code not in EXPLAINED:
            self._violation(f"a call failed with {error!r}", None)
        if error.code == "CONNECT":
            # The engine has its own back-off; this keeps a peer that is away from taking all of the thread's time.
            self._stopping.wait(0.02)

    def _leave(self, target: int) -> None:
        """Close the peer and connect anew. Only when no write of it is in doubt: a new session knows nothing of it."""
        mine = [place for place in self._places.values() if place.target == target]
        if any(place.busy or place.model.doubtful() for place in mine):
            return
        self._peers.pop(target).close()
        peer = self._peer_of(target, 0.5)
        for place in mine:
            place.peer, place.plan = peer, None
        self.counts["peers left and joined"] += 1

    def _peer_of(self, target: int, timeout: float) -> Peer:
        peer = self._peers.get(target)
        if peer is None:
            peer = self._peers[target] = self._engine.connect(self._targets[target], timeout)
        return peer

    def _place(self, target: int, kind: str, timeout: float) -> Place:
        peer = self._peer_of(target, timeout)
        remote = peer.regions.wait(region_name(self._owner, self._generation, kind), timeout)
        place = self._places.get((target, kind))
        if place is None or place.remote != remote:
            base = self._number * AREA_BYTES
            place = Place(target, kind, peer, remote, base, Model(AREA_BYTES))
            self._places[target, kind] = place
        place.peer = peer
        return place

    # ---------------------------------------------------------------- beginning a transfer

    def _shape(self) -> tuple[int, int]:
        """Return the number of items, and the most bytes of one."""
        return self._chance.choice([(1, 64), (1, 4096), (1, WINDOW_BYTES), (4, 1 << 17), (32, 512), (32, 16384)])

    def _submit(self, place: Place) -> None:
        items = place.choose(self._chance, *self._shape())
        if not items or not self._windows:
            return
        window = self._windows.pop(self._chance.randrange(len(self._windows)))
        bad_item = self._chance.random() < 0.03
        rows = items + [Item(place.remote.nbytes - 1, 0, 2)] * bad_item
        locals_, starts, lengths = (
            [item.local + window.offset for item in rows], [item.start for item in rows], [item.length for item in rows]
        )  # fmt: skip
        as_list = self._chance.random() < 0.2

        def begin(write: bool, options: dict[str, Any]) -> Transfer:
            call = self._engine.write if write else self._engine.read
            if as_list:
                rows_of = zip(locals_, starts, lengths, strict=True)
                return call(place.peer, [(window.region, a, place.remote, b, c) for a, b, c in rows_of], **options)
            arrays = [np.array(values, np.int64) for values in (locals_, starts, lengths)]
            return call(place.peer, window.region, place.remote, *arrays, **options)

        try:
            self._launch(place, window, items, self._chance.random() < 0.5, bad_item, begin)
        except MoonpoolError:
            window.mark()
            self._windows.append(window)
            raise

    def _post(self, place: Place) -> None:
        if place.plan is None:
            items = place.choose(self._chance, _PLAN_ITEMS, _PLAN_ITEM_BYTES)
            if not items:
                return
            window = self._plan_window(place)
            columns = [[item[index] for item in items] for index in range(3)]
            arrays = [np.array(column, np.int64) for column in columns]
            place.plan = self._engine.prepare(
                place.peer, window.region, place.remote, arrays[1] + window.offset, arrays[0], arrays[2]
            )
            place.plan_items = items
        window = self._plan_window(place)
        free = [index for index, item in enumerate(place.plan_items) if place.free(item.start, item.length)]
        indices = self._chance.sample(free, min(len(free), self._chance.randint(1, _PLAN_ITEMS)))
        if not indices or any(flight.window is window for flight in [*self._flights, *self._unsettled]):
            return
        plan = place.plan

        def begin(write: bool, options: dict[str, Any]) -> Transfer:
            return self._engine.post(plan, indices, "write" if write else "read", **options)

        try:
            chosen = [place.plan_items[index] for index in indices]
            self._launch(place, window, chosen, self._chance.random() < 0.5, False, begin)
        except MoonpoolError:
            place.plan = None
            window.mark()
            raise

    def _plan_window(self, place: Place) -> Window:
        key = place.target, place.kind
        if key not in self._plan_windows:
            region: Region = self._engine.allocate(WINDOW_BYTES)
            self._plan_windows[key] = Window(region, 0, self._chance)
            self._plan_windows[key].mark()
        return self._plan_windows[key]

    def _launch(self, place: Place, window: Window, items: list[Item], write: bool, bad_item: bool, begin: Any) -> None:
        self._sequence += 1
        chance = self._chance
        notify = chance.random() < 0.3
        options: dict[str, Any] = {
            "digest": chance.random() < 0.3,
            "deadline": chance.choice([0.02, 0.3, 2.0, 4.0, 4.0, 4.0]),
            "notify": self._announcement(place, items, write) if notify else None,
        }
        sources = []
        if write:
            for item in items:
                octets = content(self._sequence, item.start, item.length)
                window.octets(item)[:] = octets
                sources.append(octets)
        self._events.append(
            f"{'write' if write else 'read'} {self._sequence} at {place.target}.{place.kind} of {len(items)} items "
            f"from {items[0].start}, window {window.region.address + window.offset:#x}, {options['deadline']} s"
        )
        transfer = begin(write, options)
        place.busy += [(item.start, item.start + item.length) for item in items]
        latest = time.monotonic() + options["deadline"] + self._engine.settings.progress_timeout + PATIENCE_SECONDS
        self._flights.append(
            Flight(
                transfer, place, window, items, write, self._sequence, options["digest"], notify, bad_item, latest,
                sources,
            )
        )  # fmt: skip
        self.counts["begun"] += 1

    def _announcement(self, place: Place, items: list[Item], write: bool) -> bytes:
        ranges = [(item.start, item.length) for item in items[:4]] if write else []
        sender = f"{self._owner}.{self._generation}.{self._number}"
        return json.dumps([sender, self._sequence, place.remote.key, ranges]).encode()

    # ---------------------------------------------------------------- ending a transfer

    def _reap_one(self, patience: float) -> None:
        """Look for a transfer that has ended; wait for one of them for so long."""
        if not self._flights:
            return
        ended = [flight for flight in self._flights if flight.transfer.done()]
        flight = self._chance.choice(ended or self._flights)
        if not ended:
            if self._chance.random() < 0.02:
                try:
                    flight.transfer.cancel(0.0)
                except WaitTimeoutError:
                    self.counts["cancels not settled at once"] += 1
            try:
                flight.transfer.wait(patience)
            except WaitTimeoutError:
                if time.monotonic() < flight.latest:
                    return
                self._violation("a transfer runs on long after its deadline", flight)
            except MoonpoolError:
                pass  # looked at below
        self._flights.remove(flight)
        self._reap(flight)

    def _reap(self, flight: Flight) -> None:
        transfer = flight.transfer
        try:
            transfer.wait(0.0)
        except MoonpoolError as error:
            code = error.__cause__.code if isinstance(error.__cause__, MoonpoolError) else error.code
            self.counts[f"failed {code}"] += 1
            if code not in EXPLAINED and not (code == "OUT_OF_RANGE" and flight.bad_item):
                self._violation(f"a transfer failed with {error!r}", flight)
            if isinstance(error, BatchError) and not flight.bad_item and len(flight.items) == 1:
                self._violation("a batch error of one item", flight)
        else:
            self.counts["completed"] += 1
            self.counts["bytes"] += sum(item.length for item in flight.items)
        if transfer.settled:
            self._check(flight)
        else:
            self.counts["unsettled"] += 1
            self._unsettled.append(flight)

    def _poll_unsettled(self) -> None:
        for flight in [flight for flight in self._unsettled if flight.transfer.settled]:
            self._unsettled.remove(flight)
            self._check(flight)

    def _end(self, flight: Flight) -> None:
        """The peer answers again, so what was open must be known."""
        try:
            flight.transfer.cancel(PATIENCE_SECONDS)
        except WaitTimeoutError:
            self._violation("a transfer is not settled although its peer is back", flight)
            return
        self._check(flight)

    def _check(self, flight: Flight) -> None:
        """Hold a settled transfer to the model, and give back what it used."""
        transfer, place, window, items = flight.transfer, flight.place, flight.window, flight.items
        state, statuses = transfer.state, transfer.statuses
        good = [status == Status.OK for status in statuses[: len(items)]]
        self._events.append(f"  {flight.sequence} ended as {state.name}, {sum(good)} of {len(items)} good")
        all_good = all(status == Status.OK for status in statuses)
        # Every byte in place and yet not completed: the answer to its notification did not come.
        if (state is TransferState.COMPLETED) != all_good and not (all_good and flight.notify):
            self._violation(f"state {state.name} with statuses {sorted(set(statuses))}", flight)
        if flight.bad_item and statuses[-1] != Status.OUT_OF_RANGE:
            self._violation(f"an item out of range has the status {statuses[-1]}", flight)
        if flight.write:
            self._check_write(flight, good)
        else:
            self._check_read(flight, good)
        if flight.digest and state is TransferState.COMPLETED:
            digests = transfer.digests
            if digests is None or any(
                digests[index] != digest(window.octets(item).tobytes()) for index, item in enumerate(items)
            ):
                self._violation("digests are not those of the bytes", flight)
        self._note(flight, all_good)
        ranges = {(item.start, item.start + item.length) for item in items}
        place.busy = [busy for busy in place.busy if busy not in ranges]
        window.mark()
        if window is not self._plan_windows.get((place.target, place.kind)):
            self._windows.append(window)

    def _check_write(self, flight: Flight, good: list[bool]) -> None:
        model, base = flight.place.model, flight.place.base
        for item, octets, done in zip(flight.items, flight.sources, good, strict=True):
            if done:
                model.written(item.start - base, octets)
            else:
                model.may_be_written(item.start - base, octets)
            if (flight.window.octets(item) != octets).any():
                self._violation("the source of a write was changed", flight)
        self._no_stray(flight)

    def _check_read(self, flight: Flight, good: list[bool]) -> None:
        for item, done in zip(flight.items, good, strict=True):
            octets = flight.window.octets(item)
            wrong = flight.place.model.wrong(item.start - flight.place.base, octets) if done else None
            if wrong is not None:
                found = octets[wrong : wrong + 24].tobytes().hex()
                self._violation(f"read wrong bytes at {item.start + wrong} of {item}: {found}", flight)
        self._no_stray(flight)

    def _no_stray(self, flight: Flight) -> None:
        stray = flight.window.stray(flight.items)
        if stray is not None:
            self._violation(f"byte {stray} of the window was changed, which no item covers", flight)

    def _note(self, flight: Flight, all_good: bool) -> None:
        if not flight.notify:
            return
        ledger = self.ledgers.setdefault(flight.place.remote.incarnation, Ledger())
        if flight.transfer.state is TransferState.COMPLETED:
            ledger.must.append(flight.sequence)
        elif not all_good:
            ledger.must_not.append(flight.sequence)

    # ---------------------------------------------------------------- when it is calm

    def _heal(self, place: Place, start: int, end: int) -> None:
        """Write what is in doubt, so that it is not any more."""
        self._moved(place, True, start + place.base, end - start)

    def _look_at_all(self, place: Place) -> None:
        for start in range(0, AREA_BYTES, WINDOW_BYTES):
            self._moved(place, False, start + place.base, WINDOW_BYTES)
        for window in [*self._windows, *self._plan_windows.values()]:
            if window.stray([]) is not None:
                self._violation(f"a window of nobody was changed at {window.stray([])}", None)

    def _moved(self, place: Place, write: bool, start: int, length: int) -> None:
        window = self._windows.pop()
        item = Item(start, 0, length)

        def begin(write: bool, options: dict[str, Any]) -> Transfer:
            options["deadline"] = PATIENCE_SECONDS
            call = self._engine.write if write else self._engine.read
            return call(place.peer, window.region, place.remote, window.offset, start, length, **options)

        self._launch(place, window, [item], write, False, begin)
        flight = self._flights.pop()
        flight.transfer.wait()
        self._check(flight)

    # ---------------------------------------------------------------- violations

    def _violation(self, what: str, flight: Flight | None) -> None:
        if flight is not None:
            what += f" ({'write' if flight.write else 'read'} {flight.sequence}: {flight.transfer!r})"
        self.violations.append(
            f"process {self._owner}.{self._generation}, thread {self._number}: {what}\n{self._story()}"
        )

    def _story(self) -> str:
        return "\n".join(f"    {event}" for event in self._events)

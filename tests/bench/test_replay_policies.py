# SPDX-License-Identifier: Apache-2.0
"""Policies on small traces whose answer is known, and beside slow and plain programs that do the same."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import replay_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.bench.replay.native import NativePool
from moonpool.bench.replay.plain import S3Fifo
from moonpool.bench.replay.pool import Policy, SimulatedPool
from moonpool.bench.replay.prefix import Prefix, _mix
from moonpool.bench.replay.simulate import POLICIES, replay
from moonpool.bench.replay.trace import Trace, read_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl.gz"

#: LRU and optimum, computed by another program.
PUBLISHED_TABLE = {
    1_000: (0.0445, 0.1792),
    5_000: (0.1104, 0.3392),
    10_000: (0.2112, 0.3664),
    30_000: (0.3257, 0.3664),
    50_000: (0.3546, 0.3664),
    182_790: (0.3664, 0.3664),
}


def trees(depth: int = 6, width: int = 3, requests: int = 40) -> st.SearchStrategy[Trace]:
    """Traces in which a block is a path from the root of a tree, so that equal blocks have equal prefixes."""
    paths = st.lists(st.integers(0, width - 1), min_size=1, max_size=depth)

    def number(requests: list[list[int]]) -> Trace:
        # The names are spread over all numbers, as hashes are.
        ids = {
            path: _mix(index)
            for index, path in enumerate({tuple(path[:end]) for path in requests for end in range(1, len(path) + 1)})
        }
        return replay_traces.trace([[ids[tuple(path[:end])] for end in range(1, len(path) + 1)] for path in requests])

    return st.lists(paths, min_size=1, max_size=requests).map(number)


def ratio(trace: Trace, policy: str, capacity: int) -> float:
    (row,) = replay(trace, [policy], [capacity], lambda served: None)
    return row.hit_ratio


def hits(trace: Trace, policy: str, capacity: int) -> list[int]:
    pool = POLICIES[policy](trace, capacity)
    return [pool.request(request) for request in trace.requests]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_that_holds_everything_misses_only_first_uses(policy: str) -> None:
    trace = replay_traces.trace([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [9], [1, 2, 4]])
    assert hits(trace, policy, 100) == [0, 2, 3, 0, 3]


def test_lru_evicts_the_beginning_of_a_long_request_and_prefix_its_end() -> None:
    trace = replay_traces.trace([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert hits(trace, "lru", 3) == [0, 0, 0]
    assert hits(trace, "prefix", 3) == [0, 3, 3]


def test_a_block_behind_a_hole_is_no_hit() -> None:
    trace = replay_traces.trace([[1, 2], [3], [1, 2]])
    # LRU has dropped 1 and kept 2, which is of no use.
    assert hits(trace, "lru", 2) == [0, 0, 0]
    assert hits(trace, "prefix", 2) == [0, 0, 1]


def test_the_optimum_evicts_beginnings_and_the_bound_does_not() -> None:
    trace = replay_traces.trace([[1, 2, 3], [1, 2, 3]])
    assert hits(trace, "optimum", 2) == [0, 0]
    assert hits(trace, "bound", 2) == [0, 2]


def test_scans_do_not_wash_out_what_was_used_again() -> None:
    prompt = list(range(10))
    once = itertools.count(100)
    requests = [[*prompt, next(once)] for _ in range(5)]
    for _ in range(40):
        requests += [[next(once) for _ in range(10)], [next(once) for _ in range(10)], prompt]
    trace = replay_traces.trace(requests)
    assert sum(hits(trace, "lru", 25)[5:]) == 0
    assert sum(hits(trace, "prefix", 25)[5:]) == 400


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(1, 20))
def test_lru_is_lru(trace: Trace, capacity: int) -> None:
    order: OrderedDict[int, bool] = OrderedDict()
    expected = []
    for request in trace.requests:
        expected.append(sum(1 for _ in itertools.takewhile(order.__contains__, request)))
        for block in request:
            order[block] = True
            order.move_to_end(block)
        while len(order) > capacity:
            order.popitem(last=False)
    assert hits(trace, "lru", capacity) == expected


class SlowS3Fifo(Policy):
    """The paper's words, on lists."""

    def __init__(self, capacity: int) -> None:
        self.small_max = max(1, capacity // 10)
        self.ghosts_max = capacity - self.small_max
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def on_insert(self, slot: int, parent: int | None) -> None:
        (self.main if slot in self.ghosts else self.small).append(slot)
        self.ghosts = [ghost for ghost in self.ghosts if ghost != slot]
        self.uses[slot] = 0

    def on_touch(self, slot: int) -> None:
        self.uses[slot] = min(3, self.uses[slot] + 1)

    def on_remove(self, slot: int) -> None:
        if slot in self.small:
            self.ghosts = [*self.ghosts, slot][-self.ghosts_max :] if self.ghosts_max else []
        (self.small if slot in self.small else self.main).remove(slot)

    def victim(self) -> int | None:
        while True:
            if self.small and (len(self.small) >= self.small_max or not self.main):
                first = self.small[0]
                if self.uses[first] <= 1:
                    return first
                self.main.append(self.small.pop(0))
                self.uses[first] = 0
            else:
                first = self.main[0]
                if not self.uses[first]:
                    return first
                self.main.append(self.main.pop(0))
                self.uses[first] -= 1


class SlowPrefix(Policy):
    """Decision 7 without a list, a ring or a count that is kept: everything is looked for when it is needed."""

    CLASS = (0, 0, 1, 2, 2, 3)

    def __init__(self, capacity: int, names: list[int]) -> None:
        self.capacity, self.names = capacity, names
        self.now = self.steps = 0
        self.next_choice = max(16, capacity)
        self.chosen = 1
        self.chunks: dict[int, list[int]] = {}  # slot -> clock, count, place in its list
        self.parents: dict[int, int | None] = {}
        self.parked: set[int] = set()
        self.ghosts: list[tuple[int, int, int]] = []  # slot, clock, count
        self.hits = [0] * 4
        self.threshold = [-1] * 4

    def sampled(self, slot: int) -> bool:
        return _mix(self.names[slot]) % 4 == 0

    def score(self, strength: int, clock: int, count: int) -> int:
        return clock + self.CLASS[count] * (0, 1, 4, 16)[strength] * self.capacity // 2

    def bucket(self, strength: int, clock: int, count: int) -> int:
        return self.score(strength, clock, count) // -(-self.capacity // 32)

    def settle(self) -> None:
        """Raise the thresholds until no shadow holds too much."""
        known = [(clock, count) for slot, (clock, count, _) in self.chunks.items() if self.sampled(slot)]
        known += [(clock, count) for _, clock, count in self.ghosts]
        for strength in range(4):
            scores = sorted((self.bucket(strength, *one) for one in known), reverse=True)
            most = max(1, self.capacity // 4)
            held = sum(score > self.threshold[strength] for score in scores)
            if held > most:
                self.threshold[strength] = scores[most]
            self.threshold[strength] = max(self.threshold[strength], self.now // -(-self.capacity // 32) - 7 * 32)

    def use(self, clock: int, count: int) -> None:
        for strength in range(4):
            self.hits[strength] += self.bucket(strength, clock, count) > self.threshold[strength]

    def place(self, slot: int, clock: int, count: int, *, first: bool = False) -> None:
        self.steps += 1
        self.parked.discard(slot)
        self.chunks[slot] = [clock, count, -self.steps if first else self.steps]
        if self.sampled(slot):
            self.settle()

    def on_insert(self, slot: int, parent: int | None) -> None:
        self.now += 1
        count = 1
        known = [ghost for ghost in self.ghosts if ghost[0] == slot]
        for ghost in known:
            count = min(5, ghost[2] + 1)
            self.use(*ghost[1:])
            self.ghosts.remove(ghost)
        self.parents[slot] = parent
        self.place(slot, self.now, count)
        while known and parent is not None and self.chunks[parent][1] < count:
            self.place(parent, self.chunks[parent][0], count)
            parent = self.parents[parent]
        if self.now >= self.next_choice:
            self.next_choice = self.now + max(16, self.capacity)
            present = self.hits[self.chosen]
            worth = [hits - (index > self.chosen) * (present // 32) for index, hits in enumerate(self.hits)]
            if max(worth) > present:
                self.chosen = worth.index(max(worth))
            self.hits = [hits // 2 for hits in self.hits]

    def on_touch(self, slot: int) -> None:
        clock, count, _ = self.chunks[slot]
        if self.sampled(slot):
            self.use(clock, count)
        self.place(slot, self.now, min(5, count + 1))

    def on_remove(self, slot: int) -> None:
        clock, count, _ = self.chunks.pop(slot)
        parent = self.parents.pop(slot)
        if self.sampled(slot):
            self.ghosts = [*self.ghosts, (slot, clock, count)][-self.capacity :]
        if parent in self.parked and parent not in self.parents.values():
            self.place(parent, max(clock, self.chunks[parent][0]), self.chunks[parent][1], first=True)

    def victim(self) -> int | None:
        while True:
            heads: dict[int, int] = {}
            for slot, (_, count, place) in self.chunks.items():
                rank = self.CLASS[count]
                if slot not in self.parked and (rank not in heads or place < self.chunks[heads[rank]][2]):
                    heads[rank] = slot
            best = min(heads, key=lambda rank: (self.score(self.chosen, *self.chunks[heads[rank]][:2]), rank))
            if heads[best] not in self.parents.values():
                return heads[best]
            self.parked.add(heads[best])


@pytest.mark.parametrize(
    ("policy", "slow"),
    [
        ("s3fifo", lambda capacity, names: SlowS3Fifo(capacity)),
        ("prefix", SlowPrefix),
    ],
)
@settings(max_examples=150, deadline=None)
@given(trace=trees(requests=80), capacity=st.integers(1, 50))
def test_policies_do_what_slow_and_plain_ones_do(
    policy: str, slow: Callable[[int, list[int]], Policy], trace: Trace, capacity: int
) -> None:
    pool = SimulatedPool(slow(capacity, trace.names), capacity, len(trace.names))
    assert hits(trace, policy, capacity) == [pool.request(request) for request in trace.requests]


def test_prefix_does_so_through_many_choices() -> None:
    trace = replay_traces.trace(replay_traces.shifts(3, 300, documents=20))
    for capacity in (37, 150):
        slow = SlowPrefix(capacity, trace.names)
        pool = SimulatedPool(slow, capacity, len(trace.names))
        assert hits(trace, "prefix", capacity) == [pool.request(request) for request in trace.requests]
        assert slow.now > 5 * capacity


def test_shadows_let_go_what_is_very_old() -> None:
    sampled = [name for name in range(4000) if _mix(name) % 4 == 0]
    others = [name for name in range(4000) if _mix(name) % 4]
    requests = [[sampled[0]] * 6]
    for round_ in range(40):
        requests += [[name] for name in others[round_ * 60 : round_ * 60 + 60]]
        requests += [[sampled[0]], [sampled[round_]]]
    trace = replay_traces.trace(requests)
    for capacity in (2, 9, 40):
        pool = SimulatedPool(SlowPrefix(capacity, trace.names), capacity, len(trace.names))
        assert hits(trace, "prefix", capacity) == [pool.request(request) for request in trace.requests]


class Watched(Prefix):
    """Looks at every victim."""

    def victim(self) -> int | None:
        slot = super().victim()
        assert slot is not None
        assert self._children[slot] == 0
        return slot


@settings(max_examples=100, deadline=None)
@given(trees(requests=80), st.integers(1, 30))
def test_prefix_never_makes_a_hole(trace: Trace, capacity: int) -> None:
    pool = SimulatedPool(Watched(capacity, trace.names), capacity, len(trace.names))
    for request in trace.requests:
        pool.request(request)
        assert sum(pool._there) <= capacity
        parents = {child: parent for blocks in trace.requests for parent, child in itertools.pairwise(blocks)}
        assert all(pool._there[parent] for child, parent in parents.items() if pool._there[child])


def test_what_has_children_that_cannot_go_is_no_victim() -> None:
    policy = Prefix(4, [0, 1, 2])
    assert policy.victim() is None
    policy.on_insert(0, None)
    policy.on_insert(1, 0)
    policy.on_insert(2, 0)
    assert [policy.victim(), policy.victim()] == [1, 1], "asking changes nothing"
    policy.on_remove(1)
    assert policy.victim() == 2
    policy.on_remove(2)
    assert policy.victim() == 0
    policy.on_remove(0)
    assert policy.victim() is None


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(1, 20))
def test_no_policy_has_more_hits_than_the_bound(trace: Trace, capacity: int) -> None:
    bound = sum(hits(trace, "bound", capacity))
    assert all(sum(hits(trace, policy, capacity)) <= bound for policy in POLICIES)


@settings(max_examples=100, deadline=None)
@given(trees(depth=3, width=2, requests=6), st.integers(1, 4))
def test_the_bound_is_reached_by_trying_everything(trace: Trace, capacity: int) -> None:
    # What may be held -> most hits so far.
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for held, best in states.items():
            now = best + sum(1 for _ in itertools.takewhile(held.__contains__, request))
            there = held | set(request)
            for kept in itertools.combinations(sorted(there), min(capacity, len(there))):
                following[frozenset(kept)] = max(now, following.get(frozenset(kept), 0))
        states = following
    assert sum(hits(trace, "bound", capacity)) == max(states.values())


@pytest.mark.parametrize("kind", replay_traces.KINDS)
def test_prefix_is_nowhere_clearly_worse_than_lru(kind: str) -> None:
    trace = replay_traces.trace(replay_traces.KINDS[kind](1, 3000))
    for share in (0.02, 0.05, 0.15, 0.3):
        capacity = int(len(trace.names) * share)
        assert ratio(trace, "prefix", capacity) >= 0.98 * ratio(trace, "lru", capacity), capacity


@pytest.mark.parametrize("kind", ["chats", "popular", "scans"])
@pytest.mark.parametrize("policy", ["lru", "s3fifo", "prefix"])
def test_the_index_of_the_master_does_what_its_model_does(kind: str, policy: str) -> None:
    """Nearly: it evicts ahead of a put and leaves first, and its ghosts are sets."""
    trace = replay_traces.trace(replay_traces.KINDS[kind](1, 600))
    capacity = len(trace.names) // 10
    native = hits(trace, f"native-{policy}", capacity)
    assert native == hits(trace, f"native-{policy}", capacity), "the same every time"
    assert sum(native) == pytest.approx(sum(hits(trace, policy, capacity)), rel=0.1)


def test_the_index_is_never_larger_than_it_may_be() -> None:
    trace = replay_traces.trace(replay_traces.scans(2, 200))
    pool = NativePool("prefix", 50, trace.names)
    for request in trace.requests:
        pool.request(request)
        assert pool._index.stats()["chunks"] <= 50
        assert pool._index.check() == ""


def test_s3fifo_without_room_for_ghosts() -> None:
    pool = SimulatedPool(S3Fifo(1), 1, 2)
    assert [pool.request([block]) for block in (0, 0, 1, 0)] == [0, 1, 0, 0]


def test_the_published_trace() -> None:
    if not PUBLISHED.exists():
        pytest.skip("the published trace is not beside this repository (../shared/data)")
    trace = read_trace(PUBLISHED)
    with gzip.open(PUBLISHED, "rt") as lines:
        assert [len(json.loads(line)["hash_ids"]) for line in lines] == [len(blocks) for blocks in trace.requests]
    assert (len(trace.requests), trace.references, len(trace.names)) == (12_031, 288_500, 182_790)
    rows = replay(trace, list(POLICIES), list(PUBLISHED_TABLE), lambda served: None)
    ratios = {(row.policy, row.capacity_blocks): row.hit_ratio for row in rows}
    for capacity, (lru, optimum) in PUBLISHED_TABLE.items():
        assert round(ratios["lru", capacity], 4) == lru
        assert round(ratios["optimum", capacity], 4) == optimum
        assert all(ratios[policy, capacity] <= ratios["optimum", capacity] for policy in ("lru", "s3fifo", "prefix"))
        assert ratios["optimum", capacity] <= ratios["bound", capacity]
        assert ratios["prefix", capacity] > ratios["lru", capacity] - 0.001
    assert ratios["prefix", 1_000] >= 0.065
    assert ratios["prefix", 5_000] >= 0.155
    assert ratios["prefix", 10_000] >= 0.222
    assert ratios["native-prefix", 1_000] >= 0.065
    assert ratios["native-prefix", 5_000] >= 0.150
    assert ratios["native-prefix", 10_000] >= 0.222

# SPDX-License-Identifier: Apache-2.0
"""The rdma transport between two engines, over one rail and over two."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import pytest

from rdma_lab.inside.pair import MIB, WAIT, Pair


@pytest.fixture(params=["a", "ab"], ids=["one-rail", "two-rails"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    try:
        yield made
    finally:
        made.close()


def test_the_path_is_rdma(pair: Pair) -> None:
    assert pair.peer.path == "rdma"
    assert pair.peer.fallback == ""


def test_a_write_puts_the_bytes_there(pair: Pair) -> None:
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)
    assert sum(rail["written_bytes"] for rail in pair.rails().values()) == 8 * MIB
    assert pair.client.stats()["paths"]["rdma"]["written_bytes"] == 8 * MIB


def test_a_read_brings_them(pair: Pair) -> None:
    pair.remote_memory[:] = np.random.default_rng(8).integers(0, 256, 8 * MIB, np.uint8)
    pair.client.read(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)


@pytest.mark.parametrize("length", [1, 64, 100, 4096, 65536 + 3])
def test_a_batch_of_scattered_pieces(pair: Pair, length: int) -> None:
    count = 300
    stride = 8 * MIB // count
    remote_offsets = np.random.default_rng(9).permutation(count) * stride + 5
    local_offsets = np.arange(count) * stride
    if length > stride - 5:
        length = stride - 5
    before = pair.local_memory.copy()
    pair.client.write(pair.peer, pair.local, pair.remote, local_offsets, remote_offsets, length).wait(WAIT)
    for local, remote in zip(local_offsets, remote_offsets, strict=True):
        assert np.array_equal(pair.remote_memory[remote : remote + length], before[local : local + length])
    pair.local_memory[:] = 0
    pair.client.read(pair.peer, pair.local, pair.remote, local_offsets, remote_offsets, length).wait(WAIT)
    for local in local_offsets:
        assert np.array_equal(pair.local_memory[local : local + length], before[local : local + length])


def test_a_region_larger_than_a_registration_is_split() -> None:
    pair = Pair("a", rdma_registration_bytes_max=2 * MIB)
    try:
        pair.client.write(pair.peer, pair.local, pair.remote, 100, 1000, 7 * MIB).wait(WAIT)
        assert np.array_equal(pair.remote_memory[1000 : 1000 + 7 * MIB], pair.local_memory[100 : 100 + 7 * MIB])
    finally:
        pair.close()


def test_both_rails_carry_large_transfers() -> None:
    pair = Pair("ab", nbytes=64 * MIB)
    try:
        # The rails share two processors with everything else here, so one of them may be faster for once.
        shares = []
        for _ in range(5):
            before = pair.rails()["rxea0:1"]["written_bytes"]
            pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
            shares.append((pair.rails()["rxea0:1"]["written_bytes"] - before) / (64 * MIB))
        assert np.array_equal(pair.remote_memory, pair.local_memory)
        assert 0.4 <= statistics.median(shares) <= 0.6, shares
        assert all(0.2 <= share <= 0.8 for share in shares), shares
    finally:
        pair.close()

# SPDX-License-Identifier: Apache-2.0
"""What was put comes back, in every form in which it can be given and taken."""

from __future__ import annotations

import numpy as np
import pytest
from store_testing import content, key, keys, locate, spoil

from moonpool.cluster import LocalCluster
from moonpool.store_client import (
    ROOT,
    ChunkConflictError,
    ChunkNotFoundError,
    ChunkRangeError,
    ClientClosedError,
    Outcome,
    StoreArgumentError,
    StoreClient,
)

SIZES = (1, 2, 63, 64, 65, 4095, 4096, 4097, 100_003, 262_144, 262_145, 1 << 20, (1 << 20) + 1, 16 << 20)


def test_every_size_comes_back(client: StoreClient, namespace: str) -> None:
    hashes = [key(namespace, size) for size in SIZES]
    values = [content(hash_, size) for hash_, size in zip(hashes, SIZES, strict=True)]
    assert client.put(namespace, hashes, values).outcomes == bytes([Outcome.OK] * len(SIZES))
    found = client.get(namespace, hashes)
    assert found.ok
    assert list(found) == values
    assert found.lengths == list(SIZES)


def test_a_batch_has_an_outcome_for_each_chunk(client: StoreClient, namespace: str) -> None:
    hashes = keys(300, namespace)
    values = [content(hash_, 1 + index * 7) for index, hash_ in enumerate(hashes)]
    client.put(namespace, hashes[::2], values[::2]).require()
    found = client.get(namespace, hashes)
    assert found.where(Outcome.MISS) == list(range(1, 300, 2))
    assert list(found) == [value if index % 2 == 0 else None for index, value in enumerate(values)]
    assert client.exists(namespace, hashes).tolist() == [True, False] * 150
    with pytest.raises(ChunkNotFoundError) as caught:
        found.require()
    assert caught.value.item == 1
    found.raise_for_errors()  # a miss is none
    again = client.put(namespace, hashes, values)
    assert again.outcomes == bytes([Outcome.ALREADY, Outcome.OK] * 150)


def test_namespaces_are_apart(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"one"]).require()
    client.put(namespace + "x", [hash_], [b"another"]).require()
    assert client.get(namespace, [hash_])[0] == b"one"
    assert client.get(namespace + "x", [hash_])[0] == b"another"
    assert client.get(namespace + "y", [hash_])[0] is None


def test_hashes_in_every_form(client: StoreClient, namespace: str) -> None:
    hashes = keys(5, namespace)
    packed = b"".join(hashes)
    client.put(namespace, packed, [b"x"] * 5).require()
    array = np.frombuffer(packed, dtype=np.uint8).reshape(5, 32)
    for form in (hashes, tuple(hashes), packed, bytearray(packed), memoryview(packed), array, array.copy("F")):
        assert client.exists(namespace, form).all()
        assert client.get(namespace, form).ok


def test_values_of_every_kind(client: StoreClient, namespace: str) -> None:
    array = np.arange(100, dtype=np.float32).reshape(10, 10)
    values = [b"bytes", bytearray(b"array"), memoryview(b"view"), array, array[2:4]]
    hashes = keys(len(values), namespace)
    client.put(namespace, hashes, values).require()
    assert list(client.get(namespace, hashes)) == [bytes(memoryview(value).cast("B")) for value in values]
    rows = keys(10, namespace, "rows")
    client.put(namespace, rows, array).require()
    assert list(client.get(namespace, rows)) == [row.tobytes() for row in array]


def test_registered_memory_in_and_out(client: StoreClient, namespace: str) -> None:
    count, size = 64, 5000
    source, target = client.allocate(count * size), client.allocate(count * 8192)
    hashes = keys(count, namespace)
    memory = np.frombuffer(memoryview(source), dtype=np.uint8)
    memory[:] = np.frombuffer(content(namespace.encode(), count * size), dtype=np.uint8)
    offsets = np.arange(count) * size
    lengths = np.arange(count) + size - count
    client.put(namespace, hashes, (source, offsets, lengths)).require()
    found = client.get_into(namespace, hashes, (target, np.arange(count) * 8192, 8192))
    assert found.ok
    assert found.lengths == lengths.tolist()
    got = np.frombuffer(memoryview(target), dtype=np.uint8).reshape(count, 8192)
    for index in range(count):
        start = int(offsets[index])
        assert (got[index, : lengths[index]] == memory[start : start + int(lengths[index])]).all()
    with pytest.raises(TypeError, match="destinations"):
        found[0]


def test_destinations_are_filled(client: StoreClient, namespace: str) -> None:
    hashes = keys(3, namespace)
    values = [content(hash_, 10_000) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    room = [bytearray(10_000), bytearray(b"." * 10_010), np.zeros(2500, dtype=np.int32)]
    assert client.get_into(namespace, hashes, room).ok
    assert [bytes(one)[:10_000] for one in room] == values
    assert room[1][10_000:] == b"." * 10
    small = [bytearray(9999), bytearray(10_000), bytearray(10_000)]
    found = client.get_into(namespace, hashes, small)
    assert found.outcomes == bytes([Outcome.FAILED, Outcome.OK, Outcome.OK])
    assert isinstance(found.errors[0], ChunkRangeError)
    assert small[0] == bytes(9999)


def test_a_chunk_larger_than_all_of_staging(shared_cluster: LocalCluster, namespace: str) -> None:
    with shared_cluster.client(staging_bytes="1MiB") as client:
        hashes = keys(12, namespace)
        values = [content(hash_, 3_000_000 if index == 5 else 300_000) for index, hash_ in enumerate(hashes)]
        client.put(namespace, hashes, values).require()
        assert list(client.get(namespace, hashes)) == values
        room = [bytearray(len(value)) for value in values]
        assert client.get_into(namespace, hashes, room).ok
        assert room == values
        assert client.stats()["staging_free_bytes"] == 1 << 20


@pytest.mark.parametrize("staging", ["1MiB", "8MiB"])  # less than the chunk, and more
def test_a_destination_changes_when_its_chunk_is_good(
    shared_cluster: LocalCluster, namespace: str, staging: str
) -> None:
    hash_, size = key(namespace), 3_000_000
    value = content(hash_, size)
    with shared_cluster.client(staging_bytes=staging) as client:
        client.put(namespace, [hash_], [value]).require()
        room = bytearray(b"." * (size + 10))
        assert client.get_into(namespace, [hash_], [room]).ok
        assert room == value + b"." * 10
        spoil(client, locate(client, namespace, [hash_])[0, 0], 64 + size // 2)
        room = bytearray(b"." * (size + 10))
        assert client.get_into(namespace, [hash_], [room]).outcomes == bytes([Outcome.CORRUPT])
        assert room == b"." * (size + 10)


def test_ranges_of_chunks(client: StoreClient, namespace: str) -> None:
    hashes = keys(4, namespace)
    values = [content(hash_, 1000 * (index + 1)) for index, hash_ in enumerate(hashes)]
    client.put(namespace, hashes, values).require()
    found = client.get(namespace, hashes, ranges=(17, 100))
    assert list(found) == [value[17:117] for value in values]
    found = client.get(namespace, hashes, ranges=([0, 1999, 5, 0], [1000, 1, 2996, 4000]))
    assert list(found) == [values[0], values[1][1999:], None, values[3]]
    assert isinstance(found.errors[2], ChunkRangeError)
    region = client.allocate(400)
    assert client.get_into(namespace, hashes, (region, np.arange(4) * 100, 100), ranges=(500, 100)).ok
    assert bytes(region) == b"".join(value[500:600] for value in values)


def test_shards_make_a_chunk_together(client: StoreClient, namespace: str) -> None:
    hashes = keys(3, namespace)
    parts = [[content(hash_ + bytes([shard]), 1000 + shard) for hash_ in hashes] for shard in range(3)]
    for shard in range(3):
        assert not client.exists(namespace, hashes).any()
        client.put(namespace, hashes, parts[shard], shard=shard, shards=3).require()
    assert client.exists(namespace, hashes).all()
    for shard in range(3):
        assert list(client.get(namespace, hashes, shard=shard)) == parts[shard]


def test_another_value_of_the_same_length_is_already_there(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"first"]).require()
    assert client.put(namespace, [hash_], [b"other"]).outcomes == bytes([Outcome.ALREADY])
    assert client.get(namespace, [hash_])[0] == b"first"
    assert client.put(namespace, [hash_], [b"first"], verify=True).ok
    checked = client.put(namespace, [hash_], [b"other"], verify=True)
    assert isinstance(checked.errors[0], ChunkConflictError)
    with pytest.raises(ChunkConflictError):
        checked.raise_for_errors()


def test_another_length_is_a_conflict(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"first"]).require()
    found = client.put(namespace, [hash_, key(namespace, 2)], [b"longer one", b"good"])
    assert found.outcomes == bytes([Outcome.FAILED, Outcome.OK])
    assert isinstance(found.errors[0], ChunkConflictError)
    assert client.get(namespace, [hash_])[0] == b"first"


def test_the_same_chunk_twice_in_a_batch(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    found = client.put(namespace, [hash_, hash_], [b"same", b"same"])
    assert found.ok
    assert sorted(found.outcomes) == [Outcome.OK, Outcome.ALREADY]
    assert list(client.get(namespace, [hash_] * 3)) == [b"same"] * 3


def test_removed_chunks_are_gone(client: StoreClient, namespace: str) -> None:
    hashes = keys(4, namespace)
    client.put(namespace, hashes[:3], [b"x" * 100] * 3).require()
    removed = client.remove(namespace, hashes[1:])
    assert removed.outcomes == bytes([Outcome.OK, Outcome.OK, Outcome.MISS])
    assert client.exists(namespace, hashes).tolist() == [True, False, False, False]
    client.put(namespace, hashes, [b"y" * 100] * 4).require()
    assert list(client.get(namespace, hashes)) == [b"x" * 100] + [b"y" * 100] * 3


def test_a_chain_is_matched_from_its_beginning(client: StoreClient, namespace: str) -> None:
    chain = keys(20, namespace)
    client.put(namespace, chain[:12], [b"x" * 50] * 12, parents=ROOT).require()
    client.put(namespace, chain[12:15], [b"x" * 50] * 3, parents=chain[11]).require()
    client.put(namespace, chain[16:], [b"x" * 50] * 4).require()
    assert client.match_prefix(namespace, chain) == 15
    assert client.match_prefix(namespace, chain, lease=1.0) == 15
    assert client.match_prefix(namespace, chain[15:]) == 0
    removed = client.remove_prefix(namespace, chain[10])
    assert removed.removed == 5
    assert client.match_prefix(namespace, chain) == 10
    assert client.exists(namespace, chain[16:]).all()


def test_calls_on_other_threads(client: StoreClient, namespace: str) -> None:
    hashes = keys(50, namespace)
    puts = [client.put_async(namespace, [hash_], [content(hash_, 2000)]) for hash_ in hashes]
    for put in puts:
        put.result(timeout=60).require()
    assert client.exists_async(namespace, hashes).result(60).all()
    assert client.match_prefix_async(namespace, hashes).result(60) == 50
    gets = [client.get_async(namespace, [hash_]) for hash_ in hashes]
    assert [get.result(60)[0] for get in gets] == [content(hash_, 2000) for hash_ in hashes]
    room = bytearray(2000)
    assert client.get_into_async(namespace, hashes[:1], [room]).result(60).ok
    assert room == content(hashes[0], 2000)
    assert client.remove_async(namespace, hashes).result(60).ok


def test_wrong_arguments_say_what_is_right(client: StoreClient, namespace: str) -> None:
    good = key(namespace)
    for call in (
        lambda: client.put(namespace, [b"short"], [b"x"]),
        lambda: client.put(namespace, "text", [b"x"]),  # type: ignore[arg-type]
        lambda: client.put(namespace, [good], []),
        lambda: client.put(namespace, [good], [b""]),
        lambda: client.put(namespace, [good], [7]),
        lambda: client.put(namespace, [good], 7),
        lambda: client.put(namespace, [good, good], [b"x", b"x"], parents=[good] * 3),
        lambda: client.get_into(namespace, [good], [b"read-only"]),
        lambda: client.get(namespace, [good], ranges=([1, 2], 3)),
        lambda: client.exists(namespace, b"x" * 33),
    ):
        with pytest.raises(StoreArgumentError) as caught:
            call()
        assert caught.value.hint
    region = client.allocate(100)
    with pytest.raises(ChunkRangeError):
        client.put(namespace, [good], (region, 50, 51))


def test_nothing_at_all(client: StoreClient, namespace: str) -> None:
    assert client.put(namespace, [], []).ok
    assert len(client.get(namespace, b"")) == 0
    assert client.exists(namespace, []).tolist() == []
    assert client.match_prefix(namespace, []) == 0


def test_a_closed_client_says_so(shared_cluster: LocalCluster, namespace: str) -> None:
    client = shared_cluster.client()
    client.close()
    client.close()
    for call in (client.get, client.exists, client.get_async):
        with pytest.raises(ClientClosedError):
            call(namespace, [key(namespace)])
    assert "closed" in repr(client)
    assert client.stats()["staging_free_bytes"] == 0

# SPDX-License-Identifier: Apache-2.0
"""A metadata file in which bits have flipped: what is damaged is refused and counted, and the rest is there."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from master_testing import Member, eventually, hashes

from moonpool.errors import MoonpoolError
from moonpool.master import Master
from moonpool.master.errors import StoreDamagedError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
COUNT = 300


@pytest.fixture
def made(tmp_path: Path, start_master: Start, join: Join) -> tuple[Path, Member, bytes, bytes]:
    """A closed store: its path, the node of its one segment, its chunks and their extents."""
    path = tmp_path / "master.db"
    master = start_master(store=f"sqlite:{path}")
    node = join(master, pb.NODE)
    assert node.mount(1 << 20) == 1
    client, chunks = join(master), hashes(COUNT)
    assert client.put(chunks) == bytes(COUNT)
    extents: bytes = client.locate(chunks).extents
    client.vanish()
    node.vanish()
    master.close()
    return path, node, chunks, extents


def change(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize(
    "damage",
    [
        "record = x'01000000' || substr(record, 5)",
        "record = x''",
        "record = 5",
        "record = CAST(x'ff00ff' AS TEXT)",
        "record = zeroblob(500)",
        "slot = slot - 100",
        "slot = slot + 4294967296",
        "slot = slot + 1000000",
    ],
)
def test_a_damaged_record_costs_one_chunk(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join, damage: str
) -> None:
    path, node, chunks, extents = made
    change(path, f"UPDATE chunks SET {damage} WHERE slot = 7")
    master = start_master(store=f"sqlite:{path}", chunks_max=100_000)
    back = join(master, pb.NODE, session=node.id, incarnation=node.incarnation)
    back.mount(1 << 20, segment=1)
    client = join(master)
    found = client.locate(chunks)
    there = [place for place in range(COUNT) if found.statuses[place] == pb.OK]
    assert len(there) == COUNT - 1
    assert all(found.extents[32 * place :][:32] == extents[32 * place :][:32] for place in there)
    status = client.status()
    assert status["index"]["refused_records"] + status["store"]["refused_chunks"] >= 1
    eventually(lambda: client.status()["loops"]["sweep"]["rounds"], "a sweep")
    master.close()
    database = sqlite3.connect(path)
    assert database.execute("SELECT count(*) FROM chunks").fetchone() == (COUNT - 1,), "its row is removed"
    database.close()


@pytest.mark.parametrize("damage", ["address = x'00'", "incarnation = 'x'", "capacity_bytes = 'much'", "lost = 7"])
def test_a_damaged_segment_is_lost(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join, damage: str
) -> None:
    path, _, chunks, _ = made
    change(path, f"UPDATE segments SET {damage}")
    master = start_master(store=f"sqlite:{path}")
    client = join(master)
    assert client.status()["store"]["refused_segments"] == 1
    assert client.exists(chunks) == bytes([pb.NOT_FOUND] * COUNT)
    assert join(master, pb.NODE).mount(1 << 20) == 2, "its number stays used"
    assert client.put(chunks) == bytes(COUNT)


def test_chunks_in_a_segment_whose_row_is_gone_are_given_up(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join
) -> None:
    path, _, chunks, _ = made
    change(path, "DELETE FROM segments")
    master = start_master(store=f"sqlite:{path}")
    client = join(master)
    assert join(master, pb.NODE).mount(1 << 20) == 2
    assert client.put(chunks) == bytes(COUNT)


@pytest.mark.parametrize("damage", ["name = CAST(x'ff' AS TEXT)", "number = 5000000000"])
def test_a_damaged_namespace_keeps_its_number(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join, damage: str
) -> None:
    path, node, chunks, _ = made
    change(path, f"UPDATE namespaces SET {damage}")
    master = start_master(store=f"sqlite:{path}", lease_max=0.1)
    back = join(master, pb.NODE, session=node.id, incarnation=node.incarnation)
    back.mount(1 << 20, segment=1)
    client = join(master)
    assert client.status()["store"]["refused_namespaces"] == 1
    eventually(lambda: client.put(hashes(1), namespace="new") == bytes(1), "room")
    assert client.exists(chunks, namespace="new") == bytes([pb.NOT_FOUND] * COUNT), "nobody else's chunks"


def test_after_a_writer_that_cannot_be_named_nothing_is_written_where_it_may_write(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join
) -> None:
    path, node, chunks, _ = made
    change(path, "DELETE FROM writers", "INSERT INTO writers VALUES (x'00', x'01')")
    master = start_master(store=f"sqlite:{path}")
    back = join(master, pb.NODE, session=node.id, incarnation=node.incarnation)
    back.mount(1 << 20, segment=1)
    client = join(master)
    assert client.exists(chunks) == bytes(COUNT)
    assert client.segments()[1].state == pb.DRAINING
    assert client.status()["store"]["refused_writers"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE meta SET value = 'x' WHERE key = 'epoch'",
        "UPDATE meta SET value = -1 WHERE key = 'epoch'",
        "UPDATE meta SET value = x'00' WHERE key = 'cluster_id'",
        "UPDATE sqlite_sequence SET seq = 'x'",
        "UPDATE sqlite_sequence SET seq = 0",
    ],
)
def test_a_file_that_says_too_little_is_one_error(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, damage: str
) -> None:
    path = made[0]
    change(path, damage)
    with pytest.raises(StoreDamagedError):
        start_master(store=f"sqlite:{path}")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_anywhere_are_an_error_or_cost_what_they_hit(
    made: tuple[Path, Member, bytes, bytes], start_master: Start, join: Join, seed: int
) -> None:
    path, _, chunks, extents = made
    intact = path.read_bytes()
    rng = random.Random(seed)
    for number in range(12):
        data = bytearray(intact)
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged = path.with_name(f"{number}.db")
        damaged.write_bytes(data)
        try:
            master = start_master(store=f"sqlite:{damaged}", http=None)
        except MoonpoolError:
            continue
        client = join(master)
        found = client.locate(chunks)
        for place, status in enumerate(found.statuses):
            assert status != pb.OK or found.extents[32 * place :][:32] == extents[32 * place :][:32]
        client.vanish()
        master.close()


def test_a_segment_that_only_chunks_name_is_lost_at_once(
    made: tuple[Path, Member, bytes, bytes], start_master: Start
) -> None:
    path, _, _, _ = made
    change(path, "DELETE FROM segments")
    master = start_master(store=f"sqlite:{path}")
    with pytest.raises(KeyError):
        master.server.core.index.segment_stats(1)

# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench ssd`` with a small file, and what it would say of a disk that gives other bytes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.bench.pool.ssd import SsdResult, SsdWork, measure
from moonpool.node.slab import Slab

Bench = Callable[..., subprocess.CompletedProcess[str]]


def test_reads_of_the_tier_stand_beside_raw_reads(bench: Bench, tmp_path: Path) -> None:
    options = ["--block-size", "4KiB,1MiB", "--depth", "1,3", "--footprint", "4MiB", "--rounds", "3", "--json", "-"]
    done = bench("ssd", "--path", str(tmp_path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert [(row["block_size"], row["depth"]) for row in result["rows"]] == [
        (4096, 1), (4096, 3), (1 << 20, 1), (1 << 20, 3)
    ]  # fmt: skip
    for row in result["rows"]:
        assert (row["rounds"], len(row["ratios"]), row["verified"]) == (3, 3, True)
        assert row["gbytes_per_s"] > 0
        assert row["limit_gbytes_per_s"] > 0
        assert row["ratio"] == sorted(row["ratios"])[1]
    assert list(tmp_path.iterdir()) == []


def test_people_are_shown_a_table(bench: Bench, tmp_path: Path) -> None:
    done = bench("ssd", "--path", str(tmp_path), "--footprint", "2MiB", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "raw" in done.stdout
    assert "1MiB" in done.stdout


@pytest.mark.parametrize("at", [100, 500_000])
def test_wrong_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    read = Slab.read

    def spoil(slab: Slab, offset: int, buffer: memoryview) -> None:
        read(slab, offset, buffer)
        buffer[at] ^= 1

    results: list[SsdResult] = []
    monkeypatch.setattr(Slab, "read", spoil)
    measure(tmp_path, [SsdWork(1 << 20, 2, 4 << 20)], 1, results, lambda _: None)
    assert len(results[0].complaints) == 2
    assert "4 chunks were not copied" in results[0].complaints[0]
    assert "not what was written" in results[0].complaints[1]


def test_a_disk_without_room_is_an_error_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    done = bench("ssd", "--path", str(tmp_path), "--footprint", "1000TiB", "--rounds", "1")
    assert done.returncode == 3
    assert "left" in done.stderr
    assert list(tmp_path.iterdir()) == []

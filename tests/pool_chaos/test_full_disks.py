# SPDX-License-Identifier: Apache-2.0
"""File systems that are really full: below the store of a master, and around the slab of a node."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from engine_testing.leaks import eventually
from store_testing import content, keys
from store_testing.disks import CLIENT, SPACE, check, cluster_of, count, fill, there_again

from moonpool.cluster import ClusterError, local_cluster
from moonpool.proto.errors import StoreUnavailableError
from moonpool.store_client import Outcome, StoreClient

SECONDS = 60.0
MIB = 1 << 20


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes file systems of so many bytes."""
    made: list[Path] = []

    def make(nbytes: int) -> Path:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root mounts a small file system")
        path = tmp_path / f"small{len(made)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
        made.append(path)
        return path

    yield make
    for path in made:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=SECONDS)


def _takes(file: IO[bytes], size: int) -> bool:
    try:
        file.write(bytes(size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Have somebody else take all that is left of a file system."""
    path = folder / "somebody-elses"
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            while _takes(file, size):
                pass
    try:
        yield
    finally:
        path.unlink()


def put(client: StoreClient, hashes: list[bytes]) -> bool:
    """Put small chunks. Returns whether they were taken; if not, it was said to be worth another try."""
    try:
        client.put("ns", hashes, [content(one, 100) for one in hashes], timeout=3.0).require()
    except StoreUnavailableError as error:
        return not error.retryable
    return True


def test_a_master_on_a_full_disk_refuses_puts_and_carries_on(tmpfs: Callable[[int], Path]) -> None:
    folder = tmpfs(8 * MIB)
    before, after = keys(200, "before"), keys(50, "after")
    with local_cluster(nodes=1, dram="64MiB", store=f"sqlite:{folder}/master.db") as cluster:
        with cluster.client() as client:
            assert put(client, before)
            taken = before
            with filled(folder):
                # What it has open has some room yet.
                batches = [keys(100, "during", number) for number in range(100)]
                refused = next(number for number, batch in enumerate(batches) if not put(client, batch))
                taken = sum(batches[:refused], before)
                assert list(client.get("ns", taken)) == [content(one, 100) for one in taken]
                assert cluster.pids.keys() == {"master 0", "node 0"}
            assert eventually(lambda: put(client, after), SECONDS)
            assert list(client.get("ns", taken)) == [content(one, 100) for one in taken]
        # And nothing of it is lost with the process.
        cluster.restart_master()
        with cluster.client(timeout=SECONDS) as client:
            assert eventually(lambda: client.exists("ns", taken + after).all(), SECONDS)


def test_a_node_whose_disk_others_fill_carries_on(
    tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmpfs(40 * MIB)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with cluster_of(store="memory") as cluster, cluster.client(**CLIENT, timeout=SECONDS) as client, filled(folder):
        hashes = keys(40, "kept")
        fill(client, hashes)
        fill(client, keys(60, "others"))
        assert count(client, "demoted_items") > 20
        assert count(client, "disk_failed_items") == 0
        there_again(client, [one for one in hashes if client.exists(SPACE, [one])[0]])
        # Its space is its own, also when it is started anew.
        cluster.kill_node(0)
        cluster.start_node(0)
        assert eventually(lambda: Outcome.OK in check(client, keys(60, "others")), SECONDS)


def test_a_disk_without_room_for_the_slab_is_refused_at_the_start(
    tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmpfs(24 * MIB)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ClusterError, match=r"file system has .* left"), cluster_of(store="memory"):
        pass

# SPDX-License-Identifier: Apache-2.0
"""A node joins only when its memory is good, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_testing.leaks import eventually, nothing_left_behind
from store_testing import content, key, keys

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.errors import ConfigError
from moonpool.node import NodeSettings, StoreNode
from moonpool.node.hostmemory import check_dram
from moonpool.node.selftest import SIZES, self_test
from moonpool.store_client import MasterUnavailableError, SelfTestError, StoreClient
from moonpool.transfer_engine import EngineSettings, TransferEngine
from moonpool.transfer_engine.testing import Faults, FaultyEngine


def test_a_node_in_this_process(namespace: str) -> None:
    with local_cluster(nodes=0) as cluster:
        with nothing_left_behind():
            with StoreNode(master=cluster.master, secret=cluster.secret, dram="16MiB", name="here") as node:
                assert node.mounted
                assert node.segment > 0
                assert "here" in repr(node)
                with cluster.client() as client:
                    (segment,) = client.segments()
                    assert (segment.node, segment.address) == ("here", node.address)
                    assert segment.incarnation.hex() == node.engine.incarnation
                    assert segment.capacity_bytes == 16 << 20
                    client.put(namespace, [key(0)], [b"x" * 1000]).require()
                    assert client.get(namespace, [key(0)])[0] == b"x" * 1000
            node.close()
        with cluster.client() as client:
            assert eventually(lambda: not client.segments() or not client.exists(namespace, [key(0)])[0], 30)


def test_no_more_memory_is_lent_than_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nothing_left_behind(), pytest.raises(ConfigError, match="this host has") as caught:
        StoreNode(master="127.0.0.1:9", dram=1 << 49)
    assert caught.value.hint
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\nHugePages_Total: 0\n")
    with caplog.at_level(logging.WARNING, logger="moonpool.node"):
        check_dram(2 << 20, meminfo)
        assert not caplog.records
        check_dram(4 << 20, meminfo)
    assert "available" in caplog.text
    with pytest.raises(ConfigError):
        check_dram((4 << 20) + 1, meminfo)
    check_dram(1 << 40, tmp_path / "not there")


def test_a_ready_descriptor_that_is_not_open_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moonpool.cli", "node", "--dram", "1MiB", "--ready-fd", "77"],
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PATH": ""},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "77 is no open descriptor" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_master_that_is_not_there() -> None:
    with nothing_left_behind(), pytest.raises(MasterUnavailableError) as caught:
        StoreNode(master="127.0.0.1:9", dram="1MiB", startup_timeout=0.3)
    assert caught.value.hint
    with nothing_left_behind(), pytest.raises(MasterUnavailableError):
        StoreClient("127.0.0.1:9", startup_timeout=0.3, staging_bytes="1MiB")


def test_the_self_test_passes_and_leaves_zeros() -> None:
    settings = EngineSettings.load({"name": "node"})
    with TransferEngine(settings=settings) as engine:
        for nbytes in (1, 4096, 3 << 20):
            region = engine.allocate(nbytes, name="pool")
            paths = self_test(settings, engine.address or "", region)
            assert "tcp" in paths
            assert bytes(region) == bytes(nbytes)
            region.release()
    assert max(SIZES) > 1 << 20


@pytest.mark.parametrize("faults", [Faults(corrupt=1.0), Faults(error=1.0), Faults(partial=1.0)])
def test_a_node_that_spoils_bytes_does_not_join(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings.load({"name": "node"})

    def faulty(*, settings: EngineSettings) -> FaultyEngine:
        return FaultyEngine(faults, settings=settings)

    with TransferEngine(settings=settings) as engine:
        region = engine.allocate(1 << 20, name="pool")
        monkeypatch.setattr("moonpool.node.selftest.TransferEngine", faulty)
        with pytest.raises(SelfTestError) as caught:
            self_test(settings, engine.address or "", region)
        assert str(caught.value)


def test_a_segment_of_another_size_is_noticed() -> None:
    settings = EngineSettings.load({"name": "node"})
    with TransferEngine(settings=settings) as engine, TransferEngine() as other:
        engine.allocate(8192, name="pool")
        mine = other.allocate(4096, name="pool")
        with pytest.raises(SelfTestError, match="8192"):
            self_test(settings, engine.address or "", mine)


def test_memory_that_is_given_up_is_lent_anew() -> None:
    with (
        local_cluster(nodes=0, store="memory") as cluster,
        StoreNode(master=cluster.master, secret=cluster.secret, dram="4MiB") as node,
    ):
        before = node.engine.incarnation
        cluster.restart_master()
        assert eventually(lambda: node.engine.incarnation != before and node.mounted, 60)
        with cluster.client() as client:
            hashes = keys(10)
            client.put("a", hashes, [content(hash_, 1000) for hash_ in hashes], timeout=60).require()
            assert list(client.get("a", hashes)) == [content(hash_, 1000) for hash_ in hashes]


def test_what_nobody_closed_is_closed_at_the_end() -> None:
    code = (
        "import sys\n"
        "from moonpool.node import StoreNode\n"
        "from moonpool.store_client import StoreClient\n"
        "node = StoreNode(master=sys.argv[1], secret=sys.argv[2], dram='4MiB', name='forgotten')\n"
        "client = StoreClient(sys.argv[1], secret=sys.argv[2])\n"
        "client.put('a', [bytes(32)], [b'x']).require()\n"
        "client.get_async('a', [bytes(32)] * 100)\n"
    )
    with local_cluster(nodes=1, dram="4MiB") as cluster:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, cluster.master, cluster.secret],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        with cluster.client() as client:
            # It has said goodbye, so nobody waits for it.
            assert {segment.node for segment in client.segments()} == {"node-0"}


def test_a_session_that_breaks_is_opened_again(shared_cluster: LocalCluster) -> None:
    with shared_cluster.client() as client:
        session = client._core.session
        for opened in (2, 3):
            session._call.cancel()
            assert eventually(lambda opened=opened: session.opened >= opened and session.alive, 30)
        assert client.put("sessions", [key(session.id)], [b"x"]).ok


def test_settings_of_a_node() -> None:
    settings = NodeSettings.load(
        {"dram": "2GiB"}, environ={"MOONPOOL_NODE_SECRET": "s", "MOONPOOL_NODE_LISTEN": "[::]:7"}
    )
    assert (settings.dram, settings.secret, settings.listen) == (2 << 30, b"s", "[::]:7")
    assert "s'" not in repr(settings)
    with pytest.raises(ConfigError, match="dram"):
        NodeSettings.load({"drum": 1})
    with pytest.raises(ConfigError):
        NodeSettings.load({"huge_pages": "always"})
    assert dataclasses.replace(settings, dram=5).dram == 5


def test_where_clients_reach_it() -> None:
    from moonpool.node.lending import _advertised

    def advertised(listening: str, **options: str) -> str:
        return _advertised(NodeSettings.load(options, environ={}), listening)

    assert advertised("10.0.0.1:77") == "10.0.0.1:77"
    assert advertised("0.0.0.0:77", master="127.0.0.1:1") == "127.0.0.1:77"
    assert advertised("[::]:77", master="[::1]:1") == "[::1]:77"
    assert advertised("0.0.0.0:77", advertise="node-7:0") == "node-7:77"
    assert advertised("0.0.0.0:77", advertise="node-7:99") == "node-7:99"

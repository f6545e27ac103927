# SPDX-License-Identifier: Apache-2.0
"""The commands for people who look after a pool."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner
from engine_testing.leaks import eventually
from store_testing import key, keys

from moonpool.cli import cli, main
from moonpool.cluster import LocalCluster, local_cluster
from moonpool.node import StoreNode
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import MasterError, StoreClient
from moonpool.store_client.commands.ls import troubles


@pytest.fixture
def run(shared_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_SECRET", shared_cluster.secret)
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_MASTER", shared_cluster.master)
    return CliRunner()


def output(run: CliRunner, *arguments: str, status: int = 0) -> str:
    done = run.invoke(cli, arguments)
    assert done.exit_code == status, done.output
    return done.output


def test_status_shows_segments_and_how_full_they_are(run: CliRunner, client: StoreClient, namespace: str) -> None:
    client.put(namespace, keys(10, namespace), [b"x" * 10_000] * 10).require()
    shown = output(run, "status")
    assert "node-0" in shown
    assert "node-1" in shown
    assert "░" in shown
    assert "256MiB" in shown
    assert "hit rate" in shown
    assert "healthy" in shown
    found = json.loads(output(run, "status", "--json"))
    assert {segment["node"] for segment in found["segments"]} == {"node-0", "node-1"}
    assert sum(segment["chunks"] for segment in found["segments"]) >= 10
    assert found["stats"]


def test_ls_lists_segments(run: CliRunner, client: StoreClient) -> None:
    assert "active" in output(run, "ls")
    listed = json.loads(output(run, "ls", "--json"))
    assert {segment["segment"] for segment in listed} == {segment.segment for segment in client.segments()}
    assert all(segment["state"] == "active" and segment["capacity_bytes"] == 256 << 20 for segment in listed)


def test_ls_into_a_pipe_keeps_every_word_whole(run: CliRunner, client: StoreClient) -> None:
    printed = output(run, "ls")
    for one in client.segments():
        (line,) = [line for line in printed.splitlines() if one.address in line]
        assert {one.node, one.host_id} <= set(line.split()), printed


def test_nodes_of_one_name_are_told() -> None:
    def segment(name: str, incarnation: bytes, **more: Any) -> pb.Segment:
        return pb.Segment(node=name, incarnation=incarnation, **more)

    some = [
        segment("a", b"1"),
        segment("a", b"2", medium=pb.DISK),
        segment("b", b"3"),
        segment("b", b"4", state=pb.LOST),
    ]
    assert troubles(some) == []
    (line,) = troubles([*some, segment("b", b"5")])
    assert line.startswith("2 nodes are called b")


def test_ls_counts_what_can_be_found() -> None:
    with local_cluster(nodes=1, dram="1MiB") as cluster, cluster.client() as client:
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )

        def counts() -> tuple[int, int, int]:
            (segment,) = client.segments()
            (listed,) = json.loads(output(run, "ls", "--json"))
            (told,) = client.master_stats()["segments"]
            return listed["chunks"], told["chunks"], segment.chunks

        hashes = keys(5)
        client.put("a", hashes, [b"x" * 1000] * 5).require()
        assert counts() == (5, 5, 5)
        assert client.get("a", hashes[:2], lease=60.0).ok
        client.remove("a", hashes[:3]).require()
        # What readers may still read is there, for whoever waits for a segment to be empty.
        assert counts() == (2, 2, 4)


def test_rm_removes_chunks(run: CliRunner, client: StoreClient, namespace: str) -> None:
    chain = keys(6, namespace)
    client.put(namespace, chain, [b"x"] * 6, parents=bytes(32)).require()
    assert "1 removed" in output(run, "rm", namespace, chain[5].hex())
    assert "were not there" in output(run, "rm", namespace, chain[5].hex(), key("never").hex())
    assert "3 removed" in output(run, "rm", "--prefix", namespace, chain[2].hex())
    assert client.exists(namespace, chain).tolist() == [True, True, False, False, False, False]
    with client.pin(namespace, chain[:1]):
        assert "pinned" in output(run, "rm", namespace, chain[0].hex(), status=1)
    assert "hexadecimal" in output(run, "rm", namespace, "12", status=2)
    for wrong in ("\udcff\udcfe", "", "x" * 256):  # bytes that are no UTF-8 come as half pairs
        for command in ("rm", "pin"):
            assert "UTF-8" in output(run, command, wrong, chain[0].hex(), status=2)


def test_drain_and_back() -> None:
    with local_cluster(nodes=2, dram="16MiB") as cluster, cluster.client() as client:
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )
        number = next(segment.segment for segment in client.segments() if segment.node == "node-1")
        assert "draining" in output(run, "drain", str(number))
        assert "no node" in output(run, "drain", "--", "-1", status=2)
        assert "draining" in output(run, "ls")
        client.put("a", keys(50), [b"x" * 1000] * 50).require()
        by_number = {segment.segment: segment for segment in client.segments()}
        assert by_number[number].chunks == 0
        assert "used again" in output(run, "drain", "--undo", str(number))
        assert "draining" not in output(run, "ls")


def test_a_number_that_is_also_the_name_of_a_node_is_not_guessed() -> None:
    with local_cluster(nodes=0) as cluster, cluster.client() as client:
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )

        def drained() -> list[str]:
            return [segment.node for segment in client.segments() if segment.HasField("draining")]

        options = {"master": cluster.master, "secret": cluster.secret, "dram": "4MiB"}
        with StoreNode(name="2", **options), StoreNode(name="1", **options), StoreNode(name="30", **options):
            assert sorted((segment.segment, segment.node) for segment in client.segments()) == [
                (1, "2"),
                (2, "1"),
                (3, "30"),
            ]
            refused = output(run, "drain", "1", status=2)
            assert "--segment or --node" in refused
            assert drained() == []
            output(run, "drain", "--node", "1")
            output(run, "drain", "3")
            assert sorted(drained()) == ["1", "30"]
            output(run, "drain", "--undo", "--segment", "2")
            output(run, "drain", "--undo", "30")
            assert drained() == []
            assert isinstance(run.invoke(cli, ["drain", "9"]).exception, MasterError)
            for wrong in ((), ("1", "--node", "1")):
                assert "one of" in output(run, "drain", *wrong, status=2)


def test_a_node_that_was_started_anew_has_one_segment() -> None:
    with local_cluster(nodes=1, dram="4MiB", master_options={"session_timeout": "60s"}) as cluster:
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )
        cluster.kill_node(0)
        cluster.start_node(0)
        assert "segment 2 is draining" in output(run, "drain", "node-0")


def test_pin_holds_until_it_is_told(shared_cluster: LocalCluster, client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"x"]).require()
    environment = shared_cluster._environment("STORE_CLIENT", {"master": shared_cluster.master})
    command = [sys.executable, "-m", "moonpool.cli", "pin", namespace, hash_.hex()]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "1 of 1" in process.stdout.readline()
        assert not client.remove(namespace, [hash_]).ok
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert eventually(lambda: client.remove(namespace, [hash_]).ok, 30)


def test_what_failed_has_another_status_than_a_mistake(
    run: CliRunner, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, status in (["pin", namespace, "00" * 32], 3), (["drain", "nobody"], 2):
        monkeypatch.setattr(sys, "argv", ["moonpool", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
    assert "there is no node 'nobody'" in capsys.readouterr().err


def test_a_master_that_is_not_there_is_one_line() -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "moonpool.cli", "ls", "--master", "127.0.0.1:9", "--timeout", "300ms"],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:9" in done.stderr
    assert time.monotonic() - begin < 60

# SPDX-License-Identifier: Apache-2.0
"""A master whose etcd is not there: at its start, and at its end."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from etcd_testing import SECONDS, Cluster, put
from master_testing import eventually

from moonpool.master import Master
from moonpool.master.errors import StoreUnavailableError
from moonpool.master.store import EtcdStore

Start = Callable[..., Cluster]
STOP = 1.5


def page(address: str, name: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{name}", timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_master_ends_in_its_time_while_etcd_is_away(
    start: Start, start_master: Callable[..., Master], how: str
) -> None:
    cluster = start()
    master = start_master(store=f"etcd:{cluster.endpoints}", http=None, stop_timeout=STOP)
    server = master.server
    assert isinstance(server._store, EtcdStore)
    cluster.kill() if how == "killed" else cluster.members[0].stop()
    waiting = [put(server._store, {slot: b"x"}) for slot in range(500)]
    began = time.monotonic()
    master.close()
    # With some more for a machine that is busy; calls, changes and the end of the lease would take 16 s.
    assert time.monotonic() - began < STOP + 6
    assert all(isinstance(change.exception(0), StoreUnavailableError) for change in waiting)


def test_a_start_that_waits_for_etcd_can_be_given_up() -> None:
    command = [sys.executable, "-m", "moonpool.cli", "master", "--listen", "127.0.0.1:0", "--http", "none", "-v"]
    with subprocess.Popen([*command, "--store", "etcd:127.0.0.1:1"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "no answer" in process.stderr.readline()
        process.terminate()
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_start_without_etcd_waits_for_it(
    start: Start, start_master: Callable[..., Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.master.store.etcd.owner._ANSWER", 0.5)
    cluster = start()
    cluster.kill()
    master = start_master(store=f"etcd:{cluster.endpoints}")
    assert page(master.http_address, "/livez") == (200, "ok\n")
    code, said = page(master.http_address, "/healthz")
    assert (code, "etcd did not answer" in said) == (503, True)
    assert "etcd did not answer" in page(master.http_address, "/leader")[1]
    cluster.start()
    cluster.await_ready()
    eventually(lambda: master.server.role.leads, "it leads")
    assert page(master.http_address, "/healthz") == (200, "ok\n")


def test_one_that_had_trouble_and_waits_for_its_turn_is_well(
    start: Start, start_master: Callable[..., Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.master.store.etcd.owner._ANSWER", 0.5)
    cluster = start()
    cluster.kill()
    pair = [start_master(store=f"etcd:{cluster.endpoints}") for _ in range(2)]
    assert [page(master.http_address, "/healthz")[0] for master in pair] == [503, 503]
    cluster.start()
    cluster.await_ready()
    eventually(lambda: any(master.server.role.leads for master in pair), "one leads")
    eventually(lambda: all(page(master.http_address, "/healthz")[0] == 200 for master in pair), "both are well")


def test_a_leader_goes_on_living_while_etcd_is_away(start: Start, start_master: Callable[..., Master]) -> None:
    cluster = start()
    master = start_master(store=f"etcd:{cluster.endpoints}", etcd_lease=1.0)
    cluster.members[0].stop()
    eventually(lambda: page(master.http_address, "/healthz")[0] == 503, "it cannot tell whether it leads")
    assert page(master.http_address, "/livez") == (200, "ok\n")
    cluster.members[0].go_on()
    eventually(lambda: page(master.http_address, "/healthz")[0] == 200, "it goes on")
    assert master.server.role.turns == 1

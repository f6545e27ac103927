# SPDX-License-Identifier: Apache-2.0
"""A cluster for notebooks ends with whoever started it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from engine_testing.leaks import eventually, nothing_left_behind
from store_testing import key

import moonpool
from moonpool.cluster import ClusterError, TiedProcess, local_cluster

_STARTED = """
import sys, time
import moonpool
with moonpool.local_cluster(nodes=1, dram="16MiB") as cluster:
    print(*[process.popen.pid for process in [*cluster._masters, *cluster._nodes]], flush=True)
    time.sleep(300)
"""


def gone(pid: int) -> bool:
    # A process that nobody has reaped yet is a zombie, and as good as gone.
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_is_there_at_once_and_leaves_nothing() -> None:
    with local_cluster(nodes=0):
        pass  # what gRPC makes once per process
    with nothing_left_behind(), moonpool.local_cluster(nodes=1, dram="16MiB") as cluster:
        pids = [process.popen.pid for process in [*cluster._masters, *cluster._nodes] if process is not None]
        client = cluster.client()
        client.put("a", [key(0)], [b"x"]).require()
        assert client.get("a", [key(0)])[0] == b"x"
    assert all(gone(pid) for pid in pids)


def test_it_ends_with_its_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", _STARTED], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        parent.kill()
    assert eventually(lambda: all(gone(pid) for pid in pids), 60)


def test_its_client_fits_it_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[store_client]\ntls_name = "elsewhere"\ntls_ca = "elsewhere.pem"\n')
    monkeypatch.setenv("MOONPOOL_CONFIG", str(file))
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_TLS_CERT", "elsewhere.pem")
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_SECRET", "another")
    with local_cluster(nodes=0) as cluster, cluster.client(staging_bytes="1MiB") as client:
        assert client.segments() == []


@pytest.mark.parametrize("what", ["master", "node 0", "node 1"])
def test_ctrl_c_while_it_starts_leaves_no_process(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TiedProcess] = []
    real = TiedProcess.wait_ready

    def wait_ready(process: TiedProcess, deadline: float) -> str:
        started.append(process)
        if process.what == what:
            monkeypatch.setattr(select, "select", interrupt)
        return real(process, deadline)

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(TiedProcess, "wait_ready", wait_ready)
    with pytest.raises(KeyboardInterrupt), local_cluster(nodes=2, dram="16MiB"):
        pass
    assert started[-1].what == what
    assert all(process.popen.returncode is not None for process in started), "reaped"


def test_a_master_that_is_interrupted_while_it_starts_again_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with local_cluster(nodes=0) as cluster:
        cluster.kill_master()
        monkeypatch.setattr(select, "select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cluster.start_master()
        cluster.start_master()  # at the same address, so nobody is there


def test_a_process_that_does_not_start_says_why() -> None:
    with (
        nothing_left_behind(),
        pytest.raises(ClusterError, match="NO_SUCH_SETTING"),
        local_cluster(nodes=0, master_options={"no_such_setting": "1"}),
    ):
        pytest.fail("it started")
    with pytest.raises(ClusterError, match="node 0"), local_cluster(nodes=1, dram="3 bytes"):
        pytest.fail("it started")


def test_the_base_package_stays_light() -> None:
    code = "import sys, moonpool; print([name for name in ('grpc', 'numpy', 'subprocess') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert callable(moonpool.local_cluster)
    with pytest.raises(AttributeError):
        moonpool.no_such_thing  # noqa: B018

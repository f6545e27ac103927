# SPDX-License-Identifier: Apache-2.0
"""deploy/systemd: systemd understands the units, and the units leave Moonpool what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.master import MasterSettings
from moonpool.master.store.etcd import EtcdOptions
from moonpool.node.settings import NodeSettings
from moonpool.node.slab import SlabPlace

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = ("moonpool-master.service", "moonpool-node.service")
# Of systemd's scale from 0 to 10, times 10. What is left is the network, and for nodes what the units name.
EXPOSURE_MAX = 20
# What the engine and the SQLite store cannot do without, beside what every program calls.
SYSCALLS = {
    "fallocate", "fdatasync", "ftruncate", "madvise", "mbind", "memfd_create", "move_pages", "pidfd_open",
    "process_vm_readv", "process_vm_writev", "sched_getaffinity",
}  # fmt: skip


def directives(unit: str) -> dict[str, list[str]]:
    """Return the values of each directive, all sections together."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / unit).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture(scope="module")
def analyze() -> Callable[..., str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")

    def run(*arguments: str | Path) -> str:
        done = subprocess.run([tool, "--no-pager", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_it(unit: str, analyze: Callable[..., str], tmp_path: Path) -> None:
    text = (FOLDER / unit).read_text(encoding="utf-8")
    here = tmp_path / unit
    # A program that is on this machine.
    here.write_text(text.replace("ExecStart=/opt/moonpool/bin/moonpool", f"ExecStart={sys.executable}"), "utf-8")
    assert "Unknown" not in analyze("verify", here)
    analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", here)


@pytest.mark.parametrize("unit", UNITS)
def test_no_call_of_the_system_is_missing(unit: str, analyze: Callable[..., str]) -> None:
    sets: dict[str, set[str]] = {}
    for line in analyze("syscall-filter").splitlines():
        if line.startswith("@"):
            sets[line.strip()] = current = set()
        elif line.startswith("    ") and not line.strip().startswith("#"):
            current.add(line.strip())

    def calls(name: str) -> set[str]:
        return {one for member in sets[name] for one in (calls(member) if member.startswith("@") else {member})}

    allowed: set[str] = set()
    for value in directives(unit)["SystemCallFilter"]:
        allowed = allowed - calls(value[1:]) if value.startswith("~") else allowed | calls(value)
    assert allowed >= SYSCALLS


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_and_its_file(unit: str, parse: Callable[..., Any], tmp_path: Path) -> None:
    found = directives(unit)
    (line,) = found["ExecStart"]
    program, *words = line.split()
    assert Path(program).name == "moonpool"
    name, given = parse(words)
    assert unit == f"moonpool-{name}.service"
    assert str(given["config"]) == f"/etc/moonpool/{(FOLDER / 'moonpool.toml').name}"

    (credential,) = found["LoadCredential"]
    (variable,) = found["Environment"]
    key, _, value = variable.partition("=")
    assert value == f"@%d/{credential.partition(':')[0]}"
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n", encoding="ascii")
    settings = {"master": MasterSettings, "node": NodeSettings}[name].load(
        {}, file=FOLDER / "moonpool.toml", environ={key: f"@{secret}"}
    )
    assert settings.secret == b"s3cret"


def test_settings_that_are_commented_out_are_settings() -> None:
    text = (FOLDER / "moonpool.toml").read_text(encoding="utf-8")
    shown = re.findall(r'^# (\w+) = "(.*)"$', text, re.MULTILINE)
    assert shown
    assert {name for name, _ in shown} == {"store", "ssd"}
    for name, value in shown:
        if name == "ssd":
            place = SlabPlace.parse(NodeSettings.load({name: value}, environ={}).ssd or "")
            assert f"# ReadWritePaths={place.path}\n" in (FOLDER / "moonpool-node.service").read_text(encoding="utf-8")
            continue
        settings = MasterSettings.load({name: value}, environ={})
        kind, _, where = settings.store.partition(":")
        assert (kind, len(EtcdOptions.parse(where, settings).endpoints)) == ("etcd", 3)


@pytest.mark.parametrize("unit", UNITS)
def test_it_comes_back_and_ends_in_good_order(unit: str) -> None:
    found = directives(unit)
    # It sends no notification: systemd would wait for one, and end it.
    assert found["Type"] == ["exec"]
    assert found["Restart"] == ["always"]
    assert found["StartLimitIntervalSec"] == ["0"]
    assert found["TimeoutStopSec"] == ["30s"]


def test_nodes_keep_shared_memory_rdma_and_the_look_at_memory() -> None:
    found = directives("moonpool-node.service")
    assert not {"PrivateNetwork", "PrivateUsers", "PrivateDevices", "PrivateIPC", "ProcSubset"} & set(found)
    assert found["DeviceAllow"] == ["char-infiniband_verbs rw"]
    assert found["LimitMEMLOCK"] == ["infinity"]
    # Addresses are asked of the kernel over netlink, and local peers are met at a Unix socket.
    assert set(found["RestrictAddressFamilies"][0].split()) == {"AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"}

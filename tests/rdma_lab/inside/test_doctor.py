# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of RDMA devices is what others say of them."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from pyverbs.device import Context

from moonpool.transfer_engine import TransferEngine
from rdma_lab.inside.links import DEVICES, Links, run, state, wait_until
from rdma_lab.inside.peer import GID_INDEX, PORT

DOCTOR = ("python3.11", "-m", "moonpool.bench.cli", "doctor", "--json", "-")
LIMIT = 60.0
pytestmark = pytest.mark.timeout(150)


def examined() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*DOCTOR, limit=LIMIT))
    return document


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return examined()


@pytest.fixture(scope="module")
def port(found: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    ports = {device["device"]: device["ports"] for device in found["rdma"]}

    def of(device: str) -> dict[str, Any]:
        (one,) = ports[device]
        assert one["port"] == PORT
        return dict(one)

    return of


def test_every_device_is_there_and_in_order(found: dict[str, Any]) -> None:
    assert [device["device"] for device in found["rdma"]] == list(DEVICES)
    checks = {check["name"]: check for check in found["checks"]}
    for device in DEVICES:
        assert checks[f"RDMA {device}"]["status"] == checks[f"RDMA {device}:{PORT}"]["status"] == "OK"
        assert "virtual" in checks[f"RDMA {device}"]["found"]
    assert checks["transport rdma"]["status"] == "OK"
    assert (checks["locked memory"]["status"], checks["locked memory"]["found"]) == ("OK", "unlimited")
    assert "nvidia_peermem: not loaded" in checks["GPU memory over RDMA"]["found"]


@pytest.mark.parametrize("device", DEVICES)
def test_it_agrees_with_ibv_devinfo(device: str, port: Callable[[str], dict[str, Any]]) -> None:
    facts = dict(re.findall(r"^\s*(\w+):\s+(\S+)", run("ibv_devinfo", "-d", device), re.MULTILINE))
    one = port(device)
    assert (f"PORT_{one['state']}", one["link_layer"]) == (facts["state"], facts["link_layer"])
    assert (one["mtu"], one["mtu_max"]) == (int(facts["active_mtu"]), int(facts["max_mtu"]))


@pytest.mark.parametrize("device", DEVICES)
def test_it_agrees_with_pyverbs_on_the_addresses(device: str, port: Callable[[str], dict[str, Any]]) -> None:
    with Context(name=device) as context:
        indices = [entry.gid_index for entry in context.query_gid_table(16)]
        table = [(index, str(context.query_gid(PORT, index))) for index in indices]
        mtu = 128 << context.query_port(PORT).active_mtu
    one = port(device)
    assert one["mtu"] == mtu
    shown = [(row["index"], ipaddress.ip_address(row["gid"])) for row in one["gids"]]
    expected = [(index, ipaddress.IPv6Address(gid)) for index, gid in table]
    assert shown == [(index, address.ipv4_mapped or address) for index, address in expected]
    assert {row["kind"] for row in one["gids"]} == {"RoCE v2"}
    assert {row["netdev"] for row in one["gids"]} == {device.removeprefix("rxe")}


def test_the_chosen_address_is_the_engines(port: Callable[[str], dict[str, Any]]) -> None:
    with TransferEngine("doctor", transports="rdma,tcp") as engine:
        rails = {rail["rail"]: rail for rail in engine.stats()["rails"]}
    for device in DEVICES:
        one = port(device)
        (chosen,) = (row for row in one["gids"] if row["chosen"])
        rail = rails[f"{device}:{PORT}"]
        assert (chosen["index"], chosen["gid"], one["reason"]) == (GID_INDEX, rail["gid"], rail["reason"])


def test_a_port_that_is_down_and_an_mtu_that_is_small(links: Links) -> None:
    links.mtu("b0", 1500)
    links.down("a0")
    wait_until(lambda: state("rxea0") == "DOWN", "rxea0 DOWN")
    document = examined()
    checks = {check["name"]: check for check in document["checks"]}
    down, small = checks[f"RDMA rxea0:{PORT}"], checks[f"RDMA rxeb0:{PORT}"]
    assert (down["status"], down["found"].startswith("DOWN"), "ip link set up" in down["fix"]) == (
        "degraded",
        True,
        True,
    )
    assert (small["status"], "MTU 1024 of 4096" in small["found"]) == ("degraded", True)
    assert "ip link set dev b0 mtu 4200" in small["fix"]
    assert document["healthy"]

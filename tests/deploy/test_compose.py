# SPDX-License-Identifier: Apache-2.0
"""deploy/compose.yaml: its commands are commands, its settings settings, and what refers to something finds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.address import parse_address, parse_addresses
from moonpool.master import MasterSettings
from moonpool.master.store.etcd import EtcdOptions
from moonpool.node.settings import NodeSettings
from moonpool.store_client.settings import StoreClientSettings

MASTERS = ("master-0", "master-1")
NODES = ("node-0", "node-1")
FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def services(read: Callable[[str], Any]) -> dict[str, Any]:
    found: dict[str, Any] = read("compose.yaml")["services"]
    return found


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[Any], Any]:
    """Put a secret of this test where the file of the container is named."""
    file = tmp_path / "cluster"
    file.write_text("s3cret\n", encoding="ascii")

    def here(values: dict[str, Any]) -> dict[str, Any]:
        return {name: str(value).replace("/run/secrets/cluster", str(file)) for name, value in values.items()}

    return here


def test_there_are_etcd_two_masters_and_two_nodes(services: dict[str, Any]) -> None:
    assert set(services) == {"etcd", *MASTERS, *NODES, "cli"}


@pytest.mark.parametrize("name", MASTERS)
def test_masters(name: str, services: dict[str, Any], parse: Callable[..., Any], secret: Callable[..., Any]) -> None:
    service = services[name]
    command, given = parse(service["command"])
    assert command == "master"
    settings = MasterSettings.load(secret(given), environ=secret(service["environment"]))
    assert settings.secret == b"s3cret"
    assert settings.advertise == f"{name}:{parse_address(settings.listen).port}"
    kind, _, where = settings.store.partition(":")
    assert (kind, [str(one) for one in EtcdOptions.parse(where, settings).endpoints]) == ("etcd", ["etcd:2379"])
    assert "--listen-client-urls=http://0.0.0.0:2379" in services["etcd"]["command"]
    assert settings.http is not None
    assert f"http://127.0.0.1:{parse_address(settings.http).port}/healthz" in service["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", NODES)
def test_nodes(
    name: str,
    services: dict[str, Any],
    parse: Callable[..., Any],
    words_of: Callable[[str], list[str]],
    secret: Callable[..., Any],
) -> None:
    service = services[name]
    *shell, line = service["entrypoint"]
    assert shell == ["/bin/sh", "-c"]
    # Without it the shell would be process 1, and SIGTERM would not reach the node.
    assert line.startswith("exec moonpool ")
    words = words_of(line)
    command, given = parse(words)
    assert command == "node"
    (file,) = re.findall(rf" {given.pop('ready_fd')}>(\S+)", line)
    assert service["healthcheck"]["test"] == ["CMD", "test", "-s", file]
    assert [Path(one.partition(":")[0]) for one in service["tmpfs"]] == [Path(file).parent]

    settings = NodeSettings.load(given, environ=secret(service["environment"]))
    assert settings.secret == b"s3cret"
    assert [str(one) for one in parse_addresses(settings.master)] == [f"{master}:7600" for master in MASTERS]
    limit = int(service["mem_limit"].removesuffix("m")) << 20
    assert settings.dram + (256 << 20) <= limit


def test_commands(services: dict[str, Any], secret: Callable[..., Any]) -> None:
    settings = StoreClientSettings.load({}, environ=secret(services["cli"]["environment"]))
    assert settings.master == "master-0:7600,master-1:7600"
    assert settings.secret == b"s3cret"


def test_what_is_named_is_there(read: Callable[[str], Any], services: dict[str, Any]) -> None:
    whole = read("compose.yaml")
    volumes = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert volumes == set(whole["volumes"])
    assert {secret for service in services.values() for secret in service.get("secrets", [])} == set(whole["secrets"])
    for service in services.values():
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in services[other]
        if "dockerfile" in service["build"]:
            context = FILE.parent / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()


def test_who_serves_ends_in_good_order_and_comes_back(services: dict[str, Any]) -> None:
    for name in (*MASTERS, *NODES, "etcd"):
        assert services[name]["restart"] == "unless-stopped"
        assert services[name]["stop_grace_period"] == "30s"

# SPDX-License-Identifier: Apache-2.0
"""Settings of the transport rdma, and what a host without an RDMA device says to those who ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine

from moonpool.transfer_engine import (
    ConfigError,
    EngineSettings,
    TransferEngine,
    TransportInfo,
    TransportUnavailableError,
    probe,
)

MIB = 1 << 20


def rdma() -> TransportInfo:
    (info,) = (info for info in probe() if info.name == "rdma")
    return info


@pytest.fixture
def missing() -> str:
    """Why there is no RDMA on this host."""
    if rdma().available:
        pytest.skip("this host has RDMA devices")
    return rdma().reason


@pytest.mark.parametrize(
    "options",
    [
        {"rdma_queue_pairs": 0},
        {"rdma_queue_pairs": 17},
        {"rdma_queue_pairs_max": 0},
        {"rdma_queue_pairs_max": 65537},
        {"rdma_queue_depth": 15},
        {"rdma_queue_depth": 16385},
        {"rdma_inline_bytes": -1},
        {"rdma_inline_bytes": "8KiB"},
        {"rdma_service_level": 16},
        {"rdma_traffic_class": 256},
        {"rdma_pkey_index": 65536},
        {"rdma_registration_bytes_max": "1MiB"},
        {"rdma_registration_bytes_max": "2TiB"},
        {"rdma_devices": 0},
        {"rdma_queue_pairs": "two"},
    ],
)
def test_an_impossible_value_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(**options)
    assert next(iter(options)) in str(caught.value)
    assert caught.value.hint


def test_sizes_may_have_units_from_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text('[engine]\nrdma_registration_bytes_max = "1GiB"\nrdma_queue_pairs = 3\n', encoding="utf-8")
    monkeypatch.setenv("MOONPOOL_CONFIG", str(file))
    monkeypatch.setenv("MOONPOOL_ENGINE_RDMA_INLINE_BYTES", "1KiB")
    monkeypatch.setenv("MOONPOOL_ENGINE_RDMA_TRAFFIC_CLASS", "104")
    settings = EngineSettings.load({"rdma_queue_depth": 64})
    assert (settings.rdma_registration_bytes_max, settings.rdma_inline_bytes) == (1 << 30, 1024)
    assert (settings.rdma_queue_pairs, settings.rdma_queue_depth, settings.rdma_traffic_class) == (3, 64, 104)


@pytest.mark.parametrize(
    "devices", ["mlx5_0:", "mlx5_0:0", "mlx5_0@256", "mlx5_0,,mlx5_1", "@3", "mlx5_0 mlx5_1", "/dev/infiniband/uverbs0"]
)
def test_what_names_no_device_is_refused_with_the_form(devices: str) -> None:
    with pytest.raises(ConfigError, match="rdma_devices") as caught:
        TransferEngine(rdma_devices=devices)
    assert "NAME:PORT@GID_INDEX" in caught.value.hint


def test_devices_without_the_transport_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'rdma_devices="mlx5_0".* not among the transports') as caught:
        TransferEngine(transports="tcp", rdma_devices="mlx5_0")
    assert "transports" in caught.value.hint


def test_settings_of_rdma_are_no_mistake_where_it_is_not_used(open_engine: OpenEngine) -> None:
    engine = open_engine(transports="tcp", rdma_queue_pairs=4, rdma_traffic_class=104)
    assert engine.stats()["rails"] == []


# ---------------------------------------------------------------- hosts without a device


def test_the_reason_is_one_that_can_be_acted_on(missing: str) -> None:
    assert any(word in missing for word in ("ib_uverbs", "/dev/infiniband", "libibverbs", "RDMA devices")), missing


def test_a_device_of_a_host_without_devices(missing: str) -> None:
    with pytest.raises(ConfigError, match="mlx5_0") as caught:
        TransferEngine(rdma_devices="mlx5_0")
    assert missing in str(caught.value)


@pytest.mark.parametrize("options", [{"transports": "rdma"}, {"transports": "rdma,tcp"}, {"require": "rdma"}])
def test_what_is_asked_for_by_name_is_never_replaced(missing: str, options: dict[str, Any]) -> None:
    with pytest.raises(TransportUnavailableError, match="rdma") as caught:
        TransferEngine(**options)
    assert missing in str(caught.value)
    assert "doctor" in caught.value.hint


def test_auto_goes_without_it(missing: str, open_engine: OpenEngine) -> None:
    server, client = open_engine(transports="auto"), open_engine(transports="auto", listen=None)
    server.allocate(MIB, name="kv")
    peer = client.connect(server.address or "")
    client.read(peer, client.allocate(MIB), peer.regions["kv"]).wait()
    assert "rdma" not in peer.fallback, missing
    assert client.stats()["paths"]["rdma"]["transfers"] == 0

# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine: strict, from four sources, and honoured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine

from moonpool.transfer_engine import ConfigError, EngineSettings, TransferEngine, TransportUnavailableError
from moonpool.transfer_engine.settings import EngineOptions


def test_the_options_of_the_type_checker_are_the_settings() -> None:
    fields = {field.name for field in dataclasses.fields(EngineSettings)}
    assert set(EngineOptions.__annotations__) == fields - {"name"}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lane": 2}, "lanes"),
        ({"iothreads": 2}, "io_threads"),
        ({"dead_line": 2}, "deadline"),
        ({"Listen": "127.0.0.1:0"}, "listen"),
    ],
)
def test_an_unknown_option_names_the_nearest(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(**options)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "options",
    [
        {"name": 7},
        {"listen": 7700},
        {"listen": b"127.0.0.1:0"},
        {"transports": ["tcp"]},
        {"transports": 1},
        {"require": 1},
        {"secret": 12345},
        {"secret": ["a"]},
        {"insecure": "perhaps"},
        {"insecure": 2},
        {"lanes": "many"},
        {"lanes": 1.5},
        {"lanes": True},
        {"connect_timeout": "soon"},
        {"slice_bytes": "1MB"},
    ],
)
def test_a_wrong_type_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(**options)
    assert next(iter(options)) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"name": "x" * 64},
        {"lanes": 0},
        {"lanes": 65},
        {"io_threads": -1},
        {"io_threads": 65},
        {"slice_bytes": 1},
        {"slice_bytes": "64MiB"},
        {"spin_us": -1},
        {"spin_us": 10_001},
        {"connect_timeout": 0},
        {"progress_timeout": -1.0},
        {"deadline": 0.0},
        {"deadline": "25h"},
        {"deadline": float("nan")},
        {"regions_max": 0},
        {"peers_max": 0},
        {"notifications_max": 0},
        {"secret": b""},
    ],
)
def test_an_impossible_value_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(**options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"transports": "tpc"}, "tcp"),
        ({"transports": "local,tpc"}, "tcp"),
        ({"transports": "quic"}, "local, shm, cuda_ipc, rdma, tcp, auto"),
        ({"require": "locla"}, "local"),
        ({"require": "auto"}, "local, shm, cuda_ipc, rdma, tcp"),
    ],
)
def test_a_transport_that_does_not_exist_names_the_choices(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        TransferEngine(**options)
    assert caught.value.hint == hint


@pytest.mark.parametrize("transports", ["", " ", ",", "shm,,tcp", "shm, ,tcp", "tcp,", ",tcp"])
def test_an_empty_name_of_a_transport_is_refused(transports: str) -> None:
    with pytest.raises(ConfigError, match="which has an empty name") as caught:
        TransferEngine(transports=transports)
    assert "or auto" in caught.value.hint


def test_requiring_what_is_left_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves out"):
        TransferEngine(transports="local", require="tcp")


def test_a_secret_is_never_shown() -> None:
    settings = EngineSettings.load({"secret": b"hush-hush"})
    assert "hush" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        TransferEngine(secret=31337)  # type: ignore[arg-type]
    assert "31337" not in str(caught.value)


def test_arguments_come_before_environment_before_file_before_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text('[engine]\nname = "from-file"\nlanes = 2\ndeadline = "30s"\nlisten = "none"\n', encoding="utf-8")
    monkeypatch.setenv("MOONPOOL_CONFIG", str(file))
    monkeypatch.setenv("MOONPOOL_ENGINE_LANES", "3")
    monkeypatch.setenv("MOONPOOL_ENGINE_LISTEN", "127.0.0.1:0")
    with TransferEngine("given") as engine:
        settings = engine.settings
    assert (settings.name, settings.lanes, settings.deadline, settings.listen) == ("given", 3, 30.0, "127.0.0.1:0")
    with TransferEngine(listen=None) as engine:
        assert (engine.address, engine.name) == (None, "from-file")


def test_settings_read_before_can_be_given_as_one_object(open_engine: OpenEngine) -> None:
    settings = EngineSettings.load({"name": "ready-made", "lanes": 2})
    engine = TransferEngine(settings=settings)
    try:
        assert engine.settings is settings
        assert engine.name == "ready-made"
    finally:
        engine.close()
    with pytest.raises(ValueError, match="lanes"):
        TransferEngine(settings=settings, lanes=4)


def test_durations_and_sizes_may_carry_units(open_engine: OpenEngine) -> None:
    settings = open_engine(connect_timeout="250ms", slice_bytes="2MiB", deadline=3).settings
    assert (settings.connect_timeout, settings.slice_bytes, settings.deadline) == (0.25, 2 << 20, 3.0)


def test_every_bound_is_one_that_the_core_accepts(open_engine: OpenEngine) -> None:
    """The bounds in the reference are the core's own."""
    for field in dataclasses.fields(EngineSettings):
        for bound in (field.metadata["minimum"], field.metadata["maximum"]):
            if bound is not None:
                open_engine(**{field.name: bound}).close()


def test_native_arguments_count_in_milliseconds() -> None:
    arguments = EngineSettings.load({"connect_timeout": 0.0012, "deadline": 1.5}).native_arguments()
    assert (arguments["connect_timeout_ms"], arguments["deadline_ms"]) == (1, 1500)
    assert (arguments["lanes"], arguments["spin_us"]) == (0, 2**32 - 1)

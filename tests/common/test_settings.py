# SPDX-License-Identifier: Apache-2.0
"""The settings loader: order of sources, strictness, texts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool import ConfigError
from moonpool.settings import describe, load, setting


@dataclass(frozen=True)
class Sample:
    """Settings of a made-up component."""

    lanes: int = setting(4, "Connections per peer.", minimum=0, maximum=64)
    slice_bytes: int = setting(1 << 20, "Smallest slice.", unit="bytes", minimum=4096)
    timeout: float = setting(5.0, "How long to wait.", unit="seconds", minimum=0.001)
    factor: float = setting(1.5, "A plain number.")
    listen: str | None = setting("127.0.0.1:0", "Where to listen.")
    mode: str = setting("auto", "Which way.", choices=["auto", "local", "tcp"])
    insecure: bool = setting(False, "Allow it.")
    secret: bytes | None = setting(None, "The secret.", secret=True)


def read(
    arguments: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> Sample:
    return load(Sample, "engine", arguments, environ=environ or {}, file=file)


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "moonpool.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults() -> None:
    settings = read()
    assert settings == Sample()
    with pytest.raises(FrozenInstanceError):
        settings.lanes = 5  # type: ignore[misc]


def test_argument_before_environment_before_file_before_default(toml) -> None:
    file = toml("[engine]\nlanes = 1\nslice_bytes = '8KiB'\ntimeout = 2\n")
    settings = read({"lanes": 3}, {"MOONPOOL_ENGINE_LANES": "2", "MOONPOOL_ENGINE_SLICE_BYTES": "16KiB"}, file)
    assert (settings.lanes, settings.slice_bytes, settings.timeout, settings.factor) == (3, 16384, 2.0, 1.5)


def test_the_environment_names_the_file(toml) -> None:
    assert read(environ={"MOONPOOL_CONFIG": str(toml("[engine]\nlanes = 7\n"))}).lanes == 7
    assert read(environ={"MOONPOOL_CONFIG": ""}).lanes == 4


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lanes", "0", 0),
        ("slice_bytes", "1.5MiB", 3 << 19),
        ("timeout", "250ms", 0.25),
        ("timeout", "3", 3.0),
        ("factor", "0.5", 0.5),
        ("listen", "[::1]:7700", "[::1]:7700"),
        ("listen", "none", None),
        ("mode", "tcp", "tcp"),
        ("insecure", "yes", True),
        ("insecure", "0", False),
        ("secret", "grüß", "grüß".encode()),
        ("secret", "", None),
    ],
)
def test_texts_of_the_environment(name: str, text: str, value: Any) -> None:
    assert getattr(read(environ={f"MOONPOOL_ENGINE_{name.upper()}": text}), name) == value


def test_an_argument_of_none_is_not_given_unless_none_is_a_value() -> None:
    settings = read({"lanes": None, "listen": None}, {"MOONPOOL_ENGINE_LANES": "9", "MOONPOOL_ENGINE_LISTEN": "a:1"})
    assert settings.lanes == 9
    assert settings.listen is None


def test_arguments_may_be_any_integer_or_buffer() -> None:
    class Index:
        def __index__(self) -> int:
            return 12

    settings = read({"lanes": Index(), "timeout": 2, "secret": bytearray(b"s")})
    assert (settings.lanes, settings.timeout, settings.secret) == (12, 2.0, b"s")
    assert type(settings.timeout) is float


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "place", "hint"),
    [
        ({"lane": 1}, {}, "", "'lane'", "lanes"),
        ({"zzz": 1}, {}, "", "'zzz'", "lanes, slice_bytes"),
        ({}, {"MOONPOOL_ENGINE_LANE": "1"}, "", "MOONPOOL_ENGINE_LANE", "MOONPOOL_ENGINE_LANES"),
        ({}, {"MOONPOOL_ENGIN_LANES": "1"}, "", "MOONPOOL_ENGIN_LANES", "MOONPOOL_ENGINE_LANES"),
        ({}, {}, "[engine]\nlane = 1", "'lane'", "lanes"),
        ({}, {}, "[engin]\nlanes = 1", "'engin'", "engine"),
        ({}, {}, "lanes = 1", "'lanes'", "engine"),
        ({}, {}, "engine = 1", "not a table", "[engine]"),
        ({"slice_bytes": "1MB"}, {}, "", "argument slice_bytes", "1MiB"),
        ({}, {"MOONPOOL_ENGINE_TIMEOUT": "5 sec"}, "", "MOONPOOL_ENGINE_TIMEOUT", "ms, s"),
        ({}, {}, "[engine]\ntimeout = 'soon'", "engine.timeout", "250ms"),
        ({"lanes": 1.5}, {}, "", "argument lanes is 1.5", "whole number"),
        ({"lanes": True}, {}, "", "argument lanes is True", "whole number"),
        ({"lanes": "many"}, {}, "", "argument lanes is 'many'", "whole number"),
        ({"insecure": 1}, {}, "", "argument insecure is 1", "true or false"),
        ({}, {"MOONPOOL_ENGINE_INSECURE": "maybe"}, "", "MOONPOOL_ENGINE_INSECURE", "true or false"),
        ({"listen": 7700}, {}, "", "argument listen is 7700", "text, or none"),
        ({"lanes": 65}, {}, "", "lanes is 65", "0 to 64"),
        ({"slice_bytes": 1}, {}, "", "slice_bytes is 1B", "at least 4KiB"),
        ({"timeout": 0}, {}, "", "timeout is 0s", "at least 1ms"),
        ({"timeout": float("nan")}, {}, "", "timeout is nan", "at least 1ms"),
        ({"mode": "tpc"}, {}, "", "mode is 'tpc'", "tcp"),
        ({"mode": "carrier pigeon"}, {}, "", "mode is", "auto, local, tcp"),
    ],
)
def test_mistakes_name_the_place_and_the_nearest_choice(arguments, environ, text, place, hint, toml) -> None:
    with pytest.raises(ConfigError) as caught:
        read(arguments, environ, toml(text) if text else None)
    assert place in caught.value.message
    assert hint in caught.value.hint


def test_a_file_that_cannot_be_read_or_parsed(toml, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(file=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is not TOML"):
        read(file=toml("[engine"))


def test_variables_of_others_are_left_alone() -> None:
    # What Kubernetes injects for services named "moonpool" and "moonpool-engine", and another program's variable.
    environ = {
        "MOONPOOL_SERVICE_HOST": "10.0.0.1",
        "MOONPOOL_PORT": "tcp://10.0.0.1:7700",
        "MOONPOOL_ENGINE_SERVICE_HOST": "10.0.0.1",
        "MOONPOOL_ENGINE_SERVICE_PORT_DATA": "7700",
        "MOONPOOL_ENGINE_PORT": "tcp://10.0.0.1:7700",
        "MOONPOOL_ENGINE_PORT_7700_TCP_ADDR": "10.0.0.1",
        "MOONPOOL_DASHBOARD_COLOUR": "blue",
    }
    assert read(environ=environ) == Sample()


def test_a_secret_is_never_shown() -> None:
    settings = read({"secret": b"hunter2"})
    assert "hunter2" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        read({"secret": 8472})
    assert "8472" not in str(caught.value)


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" hunter2\n")
    assert read(environ={"MOONPOOL_ENGINE_SECRET": f"@{file}"}).secret == b"hunter2"
    assert read({"secret": b"@literal"}).secret == b"@literal"
    file.write_bytes(b"\n")
    for path in (file, tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="ENGINE_SECRET"):
            read(environ={"MOONPOOL_ENGINE_SECRET": f"@{path}"})


def test_the_reference_describes_every_field() -> None:
    rows = {row.name: row for row in describe(Sample, "engine")}
    assert rows["slice_bytes"].variable == "MOONPOOL_ENGINE_SLICE_BYTES"
    assert (rows["slice_bytes"].default, rows["slice_bytes"].bounds) == ("1MiB", "at least 4KiB")
    assert (rows["timeout"].default, rows["insecure"].default, rows["secret"].default) == ("5s", "false", "none")
    assert rows["mode"].bounds == "auto, local, tcp"
    assert rows["listen"].type == "text, or none"


def test_a_field_of_another_type_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Wrong:
        items: list[int] = setting(None, "No.")

    with pytest.raises(TypeError, match="cannot be of type"):
        load(Wrong, "engine", {"items": [1]}, environ={})

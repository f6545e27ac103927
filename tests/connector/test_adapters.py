# SPDX-License-Identifier: Apache-2.0
"""Which weights an adapter has, told by its files. Without vLLM."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moonpool.connector import adapters
from moonpool.connector.adapters import Adapters
from moonpool.connector.keys import Keys


@dataclass
class Lora:
    lora_int_id: int
    lora_name: str
    lora_path: str


@dataclass
class Request:
    lora_request: Lora | None = None
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([index]) * 32 for index in range(4)])


def write(folder: Path, weights: bytes, config: bytes = b"{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def keys_of(request: Request) -> list[bytes]:
    """Return the keys that a new engine gives a request."""
    its = Adapters()
    assert its.knows(request)
    return Keys(2, its).some(request, 0, 2)


def with_adapter(path: Path | str, number: int = 1, name: str = "adapter") -> Request:
    return Request(Lora(number, name, str(path)))


def test_without_an_adapter_the_key_is_the_hash() -> None:
    assert keys_of(Request()) == Request().block_hashes[1::2]


def test_the_same_files_are_the_same_adapter_wherever_they_are(tmp_path: Path) -> None:
    first = keys_of(with_adapter(write(tmp_path / "first", b"weights")))
    assert not set(first) & set(Request().block_hashes)
    assert {len(key) for key in first} == {32}
    other = write(tmp_path / "other", b"weights")
    (other / "optimizer.pt").write_bytes(b"what training goes on with")
    assert keys_of(with_adapter(other, 7, "other")) == first


@pytest.mark.parametrize("change", ["weights", "config", "more", "name"])
def test_other_files_are_another_adapter_under_the_same_name_and_path(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path / "adapter", b"weights")
    first = keys_of(with_adapter(folder))
    if change == "weights":
        write(folder, b"Weights")
    elif change == "config":
        write(folder, b"weights", b'{"lora_alpha": 2}')
    elif change == "more":
        (folder / "new_embeddings.safetensors").write_bytes(b"")
    else:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert not set(keys_of(with_adapter(folder))) & set(first)


def test_repositories_are_told_apart_by_name() -> None:
    assert keys_of(with_adapter("some/adapter")) == keys_of(with_adapter("some/adapter", 2, "other"))
    assert not set(keys_of(with_adapter("some/adapter"))) & set(keys_of(with_adapter("some/other")))


def test_what_changes_while_it_is_used_is_not_known_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, its = write(tmp_path / "adapter", b"weights"), Adapters()
    assert its.knows(with_adapter(folder))
    write(folder, b"Weights")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert not its.knows(with_adapter(folder))
    assert "adapter adapter" in caplog.text
    assert "have changed" in caplog.text
    caplog.clear()
    # Whether vLLM has read these or those, nobody knows.
    write(folder, b"weights")
    assert not its.knows(with_adapter(folder))
    assert not caplog.text
    # It reads what is loaded under another number.
    assert its.knows(with_adapter(folder, 2))
    assert its.knows(Request())


def test_what_is_written_again_with_the_same_content_is_the_same(tmp_path: Path) -> None:
    folder, its = write(tmp_path / "adapter", b"weights"), Adapters()
    request = with_adapter(folder)
    assert its.knows(request)
    before = its.identity(request)
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert its.knows(request)
    assert its.identity(request) == before


def test_what_cannot_be_read_is_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    its, empty = Adapters(), tmp_path / "empty"
    empty.mkdir()
    for _ in range(2):
        assert not its.knows(with_adapter(empty))
    assert len(caplog.records) == 1
    assert str(empty) in caplog.text
    folder = write(tmp_path / "adapter", b"weights")
    assert its.knows(with_adapter(folder))
    shutil.rmtree(folder)
    # vLLM would not find it either; what it has read is known no more.
    assert not its.knows(with_adapter(folder))


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_KNOWN_MAX", 2)
    its = Adapters()
    assert [its.knows(with_adapter("some/adapter", number)) for number in (1, 2, 3, 1)] == [True, True, False, True]


def test_requests_with_one_adapter_are_alike() -> None:
    its, one = Adapters(), with_adapter("some/adapter")
    assert its.same(one, with_adapter("some/adapter"))
    assert not its.same(one, with_adapter("some/adapter", 2))
    assert not its.same(one, Request())
    assert not its.same(Request(), Request())


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

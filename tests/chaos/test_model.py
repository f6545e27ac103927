# SPDX-License-Identifier: Apache-2.0
"""The checker is checked: it finds each kind of wrong byte, and nothing in right ones."""

from __future__ import annotations

import numpy as np
import pytest

from chaos.model import Model
from chaos.words import content, older_than

NBYTES = 4096


@pytest.fixture
def model() -> Model:
    model = Model(NBYTES)
    model.written(0, content(1, 0, NBYTES))
    return model


@pytest.mark.parametrize("start", [0, 3, 8, 1001])
@pytest.mark.parametrize("length", [1, 7, 8, 64, 1000])
def test_content_depends_only_on_the_write_and_the_place(start: int, length: int) -> None:
    assert bytes(content(5, start, length)) == bytes(content(5, 0, NBYTES)[start : start + length])
    assert bytes(content(5, start, 64)) != bytes(content(6, start, 64))
    assert bytes(content(5, start, 64)) != bytes(content(5, start + 8, 64))


def test_right_bytes_are_right(model: Model) -> None:
    assert model.wrong(100, content(1, 100, 500)) is None
    model.written(150, content(2, 150, 10))
    mixed = content(1, 100, 500).copy()
    mixed[50:60] = content(2, 150, 10)
    assert model.wrong(100, mixed) is None


def test_a_write_that_was_lost_is_found(model: Model) -> None:
    model.written(200, content(2, 200, 64))
    assert model.wrong(100, content(1, 100, 500)) == 100


def test_a_write_that_came_late_is_found(model: Model) -> None:
    model.may_be_written(200, content(2, 200, 64))
    model.written(200, content(3, 200, 64))
    assert model.wrong(200, content(2, 200, 64)) is not None
    assert model.wrong(200, content(3, 200, 64)) is None


def test_bytes_of_another_place_are_found(model: Model) -> None:
    assert model.wrong(0, content(1, 8, 64)) is not None


def test_one_wrong_bit_is_found(model: Model) -> None:
    octets = content(1, 64, 1000).copy()
    octets[777] ^= 4
    assert model.wrong(64, octets) == 777


def test_a_doubtful_write_may_be_there_or_not_byte_by_byte(model: Model) -> None:
    model.may_be_written(96, content(2, 96, 64))
    octets = content(1, 64, 256).copy()
    assert model.wrong(64, octets) is None
    octets[32:50] = content(2, 96, 18)
    assert model.wrong(64, octets) is None
    octets[96:104] = content(2, 160, 8)
    assert model.wrong(64, octets) is not None


def test_later_writes_end_doubts_where_they_were_made(model: Model) -> None:
    model.may_be_written(100, content(2, 100, 100))
    model.written(120, content(3, 120, 40))
    assert model.doubtful() == [(100, 120), (160, 200)]
    assert model.wrong(100, content(2, 100, 20)) is None
    assert model.wrong(120, content(2, 120, 40)) is not None
    assert model.wrong(160, content(2, 160, 40)) is None
    model.written(0, content(4, 0, NBYTES))
    assert model.doubtful() == []
    assert model.certain() == bytes(content(4, 0, NBYTES))


@pytest.mark.parametrize("start", [16, 21])
def test_announced_bytes_are_those_of_the_write_or_of_later_ones(start: int) -> None:
    found = content(7, start, 300).copy()
    assert older_than(7, start, found) is None
    found[100:205] = content(9, start + 100, 105)
    assert older_than(7, start, found) is None
    found[150:160] = content(10, start + 150, 10)
    assert older_than(7, start, found) is None
    found[150:220] = content(6, start + 150, 70)
    assert older_than(7, start, found) in range(150, 160)
    assert older_than(7, start, np.zeros(300, np.uint8)) is not None

# SPDX-License-Identifier: Apache-2.0
"""Notifications: what a transfer tells the other side, after its bytes are there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_testing.fixtures import Pair

from moonpool.transfer_engine import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    LimitError,
    MoonpoolError,
    Notification,
    NotificationQueueFullError,
)


def test_a_notification_names_its_sender(pair: Pair) -> None:
    pair.client.write(pair.peer, pair.local, pair.remote, notify=b"layer 3 is there").wait()
    assert pair.server.notifications(90.0) == [
        Notification("client", pair.client.incarnation, b"layer 3 is there"),
    ]
    assert pair.server.notifications() == []
    assert pair.client.notifications() == []


def test_they_come_in_order(pair: Pair) -> None:
    for index in range(20):
        pair.client.write(pair.peer, pair.local, pair.remote, notify=b"%d" % index).wait()
    got: list[bytes] = []
    while len(got) < 20:
        got += [note.payload for note in pair.server.notifications(90.0)]
    assert got == [b"%d" % index for index in range(20)]


def test_a_read_can_notify_too(pair: Pair) -> None:
    pair.client.read(pair.peer, pair.local, pair.remote, notify=b"taken").wait()
    assert [note.payload for note in pair.server.notifications(90.0)] == [b"taken"]


@pytest.mark.parametrize("payload", [b"", b"\0", bytearray(b"abc"), memoryview(b"abc"), b"x" * 65_536])
def test_any_bytes_up_to_64_kib(pair: Pair, payload: Any) -> None:
    pair.client.write(pair.peer, pair.local, pair.remote, notify=payload).wait()
    assert [note.payload for note in pair.server.notifications(90.0)] == [bytes(payload)]


def test_more_than_64_kib_is_refused(pair: Pair) -> None:
    with pytest.raises(LimitError, match="65536"):
        pair.client.write(pair.peer, pair.local, pair.remote, notify=b"x" * 65_537)
    assert pair.server.notifications() == []


@pytest.mark.parametrize("payload", ["text", 7, [b"a"]])
def test_what_is_no_bytes(pair: Pair, payload: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="notify"):
        pair.client.write(pair.peer, pair.local, pair.remote, notify=payload)


def test_waiting_for_one_that_comes(pair: Pair) -> None:
    got: list[Notification] = []
    waiting = threading.Event()

    def take() -> None:
        waiting.set()
        got.extend(pair.server.notifications(timeout=90.0))

    thread = threading.Thread(target=take)
    thread.start()
    waiting.wait()
    pair.client.write(pair.peer, pair.local, pair.remote, notify=b"now").wait()
    thread.join()
    assert [note.payload for note in got] == [b"now"]


def test_waiting_for_one_that_does_not_come(pair: Pair) -> None:
    assert pair.server.notifications(timeout=0.02) == []
    assert pair.server.notifications(timeout=-1) == []


def test_a_wait_ends_with_the_engine(pair: Pair) -> None:
    ended: list[BaseException] = []
    waiting = threading.Event()

    def take() -> None:
        waiting.set()
        try:
            pair.server.notifications(timeout=90.0)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    waiting.wait()
    pair.server.close()
    thread.join()
    assert len(ended) == 1


@pytest.mark.parametrize("timeout", [None, "1"])
def test_a_wait_needs_a_bound(pair: Pair, timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        pair.server.notifications(timeout=timeout)


def test_the_queue_is_bounded_and_says_so(open_pair: Any, transport: str) -> None:
    pair: Pair = open_pair(transport, notifications_max=2)
    for _ in range(2):
        pair.client.write(pair.peer, pair.local, pair.remote, notify=b"fits").wait()
    transfer = pair.client.write(pair.peer, pair.local, pair.remote, notify=b"one too many")
    with pytest.raises(NotificationQueueFullError) as caught:
        transfer.wait()
    assert caught.value.retryable
    assert caught.value.hint
    assert [note.payload for note in pair.server.notifications()] == [b"fits"] * 2
    pair.client.write(pair.peer, pair.local, pair.remote, notify=b"again").wait()
    assert [note.payload for note in pair.server.notifications(90.0)] == [b"again"]


def test_a_failed_transfer_does_not_notify(pair: Pair) -> None:
    transfer = pair.client.write(pair.peer, pair.local, pair.remote, [0, 1 << 20], 0, 64, notify=b"half")
    with pytest.raises(MoonpoolError):
        transfer.wait()
    pair.client.write(pair.peer, pair.local, pair.remote, notify=b"whole").wait()
    assert [note.payload for note in pair.server.notifications(90.0)] == [b"whole"]

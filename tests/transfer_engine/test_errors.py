# SPDX-License-Identifier: Apache-2.0
"""The table of outcomes: the same in C and Python, and each an exception that callers can catch as a builtin."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

import pytest

import moonpool
from moonpool import transfer_engine
from moonpool.transfer_engine import errors
from moonpool.transfer_engine.errors import BatchError, MoonpoolError, Status, exception_type, make_error
from moonpool.transfer_engine.peers import PeerState
from moonpool.transfer_engine.transfers import TransferState

FAILURES = [status for status in Status if status not in (Status.OK, Status.PENDING)]


def enum_in_header(name: str) -> dict[str, int]:
    header = (Path(moonpool.get_include()) / "moonpool" / "engine.h").read_text(encoding="utf-8")
    body = re.search(rf"typedef enum {name} \{{(.*?)\}} {name};", header, re.DOTALL)
    assert body is not None
    return {entry: int(value) for entry, value in re.findall(r"MP_(\w+) = (\d+)", body[1])}


@pytest.mark.parametrize(
    ("python", "c", "renamed"),
    [
        (Status, "mp_status", {}),
        (TransferState, "mp_transfer_state", {}),
        (PeerState, "mp_peer_state", {"PEER_LOST_STATE": "LOST"}),
    ],
)
def test_numbers_are_those_of_the_header(
    python: type[Status | TransferState | PeerState], c: str, renamed: dict[str, str]
) -> None:
    expected = {renamed.get(name, name.removeprefix("PEER_") if c == "mp_peer_state" else name): value
                for name, value in enum_in_header(c).items()}  # fmt: skip
    assert {member.name: int(member) for member in python} == expected


@pytest.mark.parametrize("status", FAILURES)
def test_every_failure_has_an_exception_of_its_own(status: Status) -> None:
    kind = exception_type(status)
    assert issubclass(kind, MoonpoolError)
    assert kind.default_code == status.name
    assert [other for other in FAILURES if exception_type(other) is kind] == [status]
    assert kind.__name__ in errors.__all__
    assert kind.__name__ in transfer_engine.__all__
    assert kind.__doc__


@pytest.mark.parametrize(
    ("status", "builtin"),
    [
        (Status.INVALID_ARGUMENT, ValueError),
        (Status.OUT_OF_RANGE, ValueError),
        (Status.CONFIG, ValueError),
        (Status.REGION_UNKNOWN, KeyError),
        (Status.REGION_RELEASED, ValueError),
        (Status.REGION_READ_ONLY, PermissionError),
        (Status.REGION_BUSY, BufferError),
        (Status.REGION_STALE, LookupError),
        (Status.ADDRESS, ValueError),
        (Status.LISTEN, OSError),
        (Status.CONNECT, ConnectionError),
        (Status.PEER_LOST, ConnectionError),
        (Status.PROTOCOL, ConnectionError),
        (Status.VERSION, ConnectionError),
        (Status.AUTH, PermissionError),
        (Status.DEADLINE, TimeoutError),
        (Status.WAIT_TIMEOUT, TimeoutError),
        (Status.NO_MEMORY, MemoryError),
        (Status.CLOSED, RuntimeError),
        (Status.SYSTEM, OSError),
    ],
)
def test_a_failure_is_also_the_builtin_a_caller_would_catch(status: Status, builtin: type[Exception]) -> None:
    assert issubclass(exception_type(status), builtin)


def test_an_exception_carries_every_field_and_shows_it() -> None:
    error = make_error(
        Status.PEER_LOST,
        "reading 4 items",
        peer="prefill-0 (10.0.0.7:7700)",
        path="tcp",
        cause="Connection reset by peer (errno 104)",
        retryable=True,
        hint="the transfer again",
        item=2,
        sys_errno=errno.ECONNRESET,
    )
    assert (error.code, error.peer, error.path, error.retryable, error.item) == (
        "PEER_LOST", "prefill-0 (10.0.0.7:7700)", "tcp", True, 2,
    )  # fmt: skip
    assert isinstance(error, ConnectionError)
    assert error.errno == errno.ECONNRESET
    for part in ("reading 4 items", "prefill-0 (10.0.0.7:7700)", "tcp", "item 2", "reset", "Try: the transfer again"):
        assert part in str(error)


@pytest.mark.parametrize("status", FAILURES)
def test_exceptions_survive_pickling(status: Status) -> None:
    error = make_error(status, "message", peer="p", hint="h", item=1)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_batch_error_lists_what_failed() -> None:
    error = BatchError("2 of 4 items failed")
    error.statuses = bytes([Status.OK, Status.OUT_OF_RANGE, Status.OK, Status.DIGEST])
    assert error.failed == [1, 3]
    assert pickle.loads(pickle.dumps(error)).failed == [1, 3]


def test_an_unknown_status_is_an_internal_error() -> None:
    assert exception_type(250) is errors.InternalError

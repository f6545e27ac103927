# SPDX-License-Identifier: Apache-2.0
"""Errors over the wire and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from moonpool.errors import MoonpoolError
from moonpool.proto import errors
from moonpool.proto.errors import from_rpc_error, status_of, trailer_of

SENT = [
    errors.InvalidRequestError,
    errors.AuthenticationError,
    errors.SessionUnknownError,
    errors.SegmentUnknownError,
    errors.SegmentLostError,
    errors.LimitError,
    errors.StoreLostError,
    errors.StoreUnavailableError,
    errors.UnsupportedError,
    errors.MasterClosedError,
    errors.RemoteError,
]


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailer: Any = (), details: str = "") -> None:
        self._answers = code, trailer, details

    def code(self) -> grpc.StatusCode:
        return self._answers[0]

    def trailing_metadata(self) -> Any:
        return self._answers[1]

    def details(self) -> str:
        return self._answers[2]


@pytest.mark.parametrize("cls", SENT)
def test_an_error_comes_back_as_what_it_was(cls: type[errors.RemoteError]) -> None:
    error = cls("no room", cause="the disk", hint="a larger one", retryable=True)
    error.retry_after_ms = 250
    code = status_of(error)
    assert code is not grpc.StatusCode.OK
    back = from_rpc_error(Failed(code, trailer_of(error)), "could not put 3 chunks", "10.0.0.1:7600")
    assert type(back) is cls
    assert (back.code, back.cause, back.hint, back.retryable) == (error.code, "the disk", "a larger one", True)
    assert back.retry_after_ms == 250
    assert str(back).startswith("could not put 3 chunks: no room [peer master (10.0.0.1:7600)]: the disk")


def test_each_has_a_code_of_its_own() -> None:
    assert len({cls.default_code for cls in SENT}) == len(SENT)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.MasterUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.CallDeadlineError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.INTERNAL, errors.RemoteError),
    ],
)
@pytest.mark.parametrize("trailer", [None, (), (("other", "x"),), ((errors.TRAILER, b"\xff\xff\xff"),)])
def test_an_error_without_details_is_typed_too(code: grpc.StatusCode, cls: type[MoonpoolError], trailer: Any) -> None:
    error = from_rpc_error(Failed(code, trailer, "it did not work"), "could not ask", "here")
    assert type(error) is cls
    assert error.retryable is (cls in (errors.MasterUnavailableError, errors.CallDeadlineError))


def test_a_code_of_a_later_version_is_kept() -> None:
    error = MoonpoolError("a later kind", code="LATER")
    back = from_rpc_error(Failed(status_of(error), trailer_of(error)), "could not ask", "here")
    assert type(back) is errors.RemoteError
    assert back.code == "LATER"

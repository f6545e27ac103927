# SPDX-License-Identifier: Apache-2.0
"""The root exception: its text, its fields, and that it lives with the builtins it is combined with."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from moonpool import AddressError, ConfigError, MoonpoolError


class LostError(MoonpoolError, ConnectionError):
    default_code = "LOST"


class LateError(MoonpoolError, TimeoutError):
    default_code = "LATE"


class FullError(MoonpoolError, MemoryError):
    default_code = "FULL"


class MissingError(MoonpoolError, KeyError):
    default_code = "MISSING"


def full(cls: type[MoonpoolError]) -> MoonpoolError:
    return cls(
        "could not read 4096 bytes",
        code="PEER_LOST",
        peer="decode-0 (10.0.0.7:7700)",
        path="tcp",
        cause="connection reset by peer",
        retryable=True,
        hint="engine.connect() again",
        item=3,
    )


@pytest.mark.parametrize("cls", [MoonpoolError, LostError, LateError, MissingError, ConfigError, AddressError])
def test_text_says_what_with_whom_why_and_what_to_try(cls: type[MoonpoolError]) -> None:
    assert str(full(cls)) == (
        "could not read 4096 bytes [peer decode-0 (10.0.0.7:7700), path tcp, item 3]: connection reset by peer."
        " Try: engine.connect() again"
    )


def test_text_leaves_out_what_is_not_known() -> None:
    assert str(MissingError("no region 'kv'")) == "no region 'kv'"


@pytest.mark.parametrize(
    ("cls", "builtin"), [(LostError, ConnectionError), (LateError, TimeoutError), (MissingError, KeyError)]
)
def test_the_builtin_catches_it(cls: type[MoonpoolError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin) as caught:
        raise full(cls)
    assert isinstance(caught.value, MoonpoolError)


def test_code_defaults_to_the_class() -> None:
    assert LateError("late").code == "LATE"
    assert MoonpoolError("bare").code == "INTERNAL"
    assert not MoonpoolError("bare").retryable


@pytest.mark.parametrize("cls", [MoonpoolError, LostError, LateError, FullError, MissingError, ConfigError])
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_every_field(cls: type[MoonpoolError], duplicate) -> None:
    error = full(cls)
    again = duplicate(error)
    assert type(again) is cls
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert again.args == error.args


@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_the_number_of_an_operating_system_error(duplicate) -> None:
    error = LostError("lost")
    error.errno = errno.ECONNRESET
    assert duplicate(error).errno == errno.ECONNRESET

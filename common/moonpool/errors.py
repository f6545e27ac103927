# SPDX-License-Identifier: Apache-2.0
"""The root of every exception that Moonpool raises on purpose.

Each component has its own table of subclasses; each of those also inherits the builtin exception that a Python
programmer would catch (``TimeoutError``, ``ConnectionError``, ``KeyError``, ``ValueError``, ...).
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["AddressError", "ConfigError", "MoonpoolError"]


class MoonpoolError(Exception):
    """Something Moonpool attempted did not happen.

    ``str(error)`` is one line: what was attempted, with whom, the first cause, and what to try.

    Attributes:
        message: what was attempted and what happened.
        code: stable upper-case name of the kind of failure, the same in C, Python, metrics and logs.
        peer: ``"name (host:port)"`` of the other side, or ``""``.
        path: the transport concerned (``"tcp"``, ``"local"``), or ``""``.
        cause: the first cause that was seen, or ``""``.
        retryable: whether the same call may succeed later without any change.
        hint: what to try, or ``""``.
        item: index of the first item concerned in a batch, or ``None``.
    """

    default_code: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        peer: str = "",
        path: str = "",
        cause: str = "",
        retryable: bool = False,
        hint: str = "",
        item: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.peer = peer
        self.path = path
        self.cause = cause
        self.retryable = retryable
        self.hint = hint
        self.item = item

    def __str__(self) -> str:
        # Defined here, not left to the builtin: KeyError would show the repr and OSError an errno that is not there.
        where = []
        if self.peer:
            where.append(f"peer {self.peer}")
        if self.path:
            where.append(f"path {self.path}")
        if self.item is not None:
            where.append(f"item {self.item}")
        text = self.message
        if where:
            text += f" [{', '.join(where)}]"
        if self.cause:
            text += f": {self.cause}"
        if self.hint:
            text += f". Try: {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with positional arguments only and would lose the fields. Errors cross
        # process boundaries (multiprocessing, test runners), so they must survive pickling.
        fields = dict(self.__dict__)
        if isinstance(self, OSError):
            fields["errno"] = self.errno  # lives in the C part of the object
        return _rebuild, (type(self), self.args, fields)


def _rebuild(cls: type[MoonpoolError], args: tuple[Any, ...], fields: dict[str, Any]) -> MoonpoolError:
    error = cls(*args)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class ConfigError(MoonpoolError, ValueError):
    """A setting is unknown, has the wrong type or unit, or an impossible value."""

    default_code = "CONFIG"


class AddressError(MoonpoolError, ValueError):
    """An address cannot be parsed or resolved."""

    default_code = "ADDRESS"

# SPDX-License-Identifier: Apache-2.0
"""What the commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from moonpool.store_client import StoreArgumentError, StoreClient
from moonpool.store_client.arguments import checked_namespace
from moonpool.store_client.settings import StoreClientSettings

__all__ = ["HashText", "NamespaceText", "connected", "open_client"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
# A command moves no bytes of chunks.
_STAGING: Final = 1 << 20
# Where options about TLS are kept in the context of a command.
_META: Final = "moonpool.option."


class HashText(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in later versions of click
    """A hash of 32 bytes as 64 hexadecimal digits."""

    name = "hash"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return the bytes."""
        try:
            raw = value if isinstance(value, bytes) else bytes.fromhex(value)
        except ValueError:
            raw = b""
        if len(raw) != 32:
            self.fail(f"{value!r} is not 64 hexadecimal digits", param, ctx)
        return raw


class NamespaceText(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in later versions of click
    """A namespace."""

    name = "namespace"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it. Bytes of the command line that are no UTF-8 are no namespace."""
        try:
            return checked_namespace(value)
        except StoreArgumentError as error:
            self.fail(f"{error.message}: it is {error.hint}", param, ctx)


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_META + str(param.name)] = value


_TLS_OPTIONS: Final = (
    ("--tls-name", "NAME", "Name in the master's certificate, if it is not the host."),
    ("--tls-ca", "FILE", "Authority that the master's certificate comes from, PEM."),
    ("--tls-key", "FILE", "Its key, PEM."),
    ("--tls-cert", "FILE", "Certificate, PEM. With --tls-key and --tls-ca: mutual TLS."),
)


def connected(command: _Command) -> _Command:
    """Give a command the options that say which master, and how. `open_client` knows of those about TLS by itself."""
    for option, metavar, text in _TLS_OPTIONS:
        command = click.option(option, metavar=metavar, help=text, expose_value=False, callback=_remember)(command)
    command = click.option("--config", type=click.Path(dir_okay=False), help="TOML file with a table [store_client].")(
        command
    )
    command = click.option("--timeout", metavar="DURATION", help="Longest time, such as 5s.")(command)
    return click.option("--master", metavar="HOST:PORT", help="Address of the master.")(command)


def open_client(master: str | None, timeout: str | None, config: str | None) -> StoreClient:
    """Return a client. Its secret comes from MOONPOOL_STORE_CLIENT_SECRET or the file."""
    options = {"master": master, "timeout": timeout, "startup_timeout": timeout, "name": "moonpool"}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    meta = click.get_current_context().meta
    given.update({name.removeprefix(_META): value for name, value in meta.items() if name.startswith(_META)})
    return StoreClient(settings=StoreClientSettings.load({"staging_bytes": _STAGING, **given}, file=config))

# SPDX-License-Identifier: Apache-2.0
"""Addresses of listeners and peers: ``host:port``, ``10.0.0.7:7700``, ``[::1]:7700``."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from moonpool.errors import AddressError

__all__ = ["Address", "parse_address", "parse_addresses"]

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
# What examples show: the port of a master in README.md and docs/.
_MASTER_PORT = 7600
# Python does not read ints of thousands of digits.
_PORT_DIGITS_MAX = 20


@dataclass(frozen=True)
class Address:
    """A host and a port. ``str()`` gives the text that `parse_address` reads.

    Attributes:
        host: an IPv4 address, an IPv6 address without brackets (perhaps with ``%zone``), or a host name.
        port: 0 to 65535; 0 lets a listener choose.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, example: int = 7700) -> Address:
    """Parse ``host:port``. Nothing is looked up: a host name may turn out not to exist later.

    Args:
        text: the address.
        example: the port that hints show.

    Raises:
        AddressError: `text` is not an address; the hint shows one that is.
    """
    if "://" in text:
        raise AddressError(
            f"{text!r} is not an address: it has a scheme", hint=repr(text.split("://", 1)[1].rstrip("/"))
        )
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise AddressError(f"{text!r} has an opening bracket without a closing one", hint=f"'[::1]:{example}'")
        if not _is_ipv6(host):
            raise AddressError(f"{text!r} has brackets around what is not an IPv6 address", hint=f"'[::1]:{example}'")
        if not rest.startswith(":"):
            raise AddressError(f"{text!r} names no port", hint=f"'[{host}]:{example}'")
        return Address(host, _port(text, rest[1:], example))
    if text.count(":") > 1:
        host, _, port = text.rpartition(":")
        hint = f"'[{host}]:{port}'" if _is_ipv6(host) and port.isdecimal() else f"'[::1]:{example}'"
        raise AddressError(f"{text!r}: an IPv6 address needs brackets before its port", hint=hint)
    host, colon, port = text.partition(":")
    if not colon:
        hint = f"'127.0.0.1:{text}'" if text.isdecimal() else f"'{text.strip() or 'host'}:{example}'"
        missing = "host" if text.isdecimal() else "port"
        raise AddressError(f"{text!r} names no {missing}", hint=hint)
    if not host:
        raise AddressError(
            f"{text!r} names no host",
            hint=f"'127.0.0.1{text}' for this host only, or '0.0.0.0{text}' to listen on every interface",
        )
    if not _is_host(host):
        raise AddressError(f"{text!r}: {host!r} is no IPv4 address and no host name", hint=f"'decode-0:{example}'")
    return Address(host, _port(text, port, example))


def parse_addresses(text: str) -> list[Address]:
    """Parse where masters are: ``host:port``, or several with commas between them. None is named twice.

    Raises:
        AddressError: one of them is not an address, or there is none.
    """
    return list(dict.fromkeys(parse_address(one.strip(), _MASTER_PORT) for one in text.split(",")))


def _port(text: str, port: str, example: int) -> int:
    # isdecimal() also accepts other scripts' digits; a port is ASCII.
    if not (port.isascii() and port.isdecimal()) or len(port) > _PORT_DIGITS_MAX or int(port) > 65535:
        raise AddressError(
            f"{text!r}: the port {port!r} is no number from 0 to 65535", hint=f"a port such as {example}"
        )
    return int(port)


def _is_ipv6(host: str) -> bool:
    address, percent, zone = host.partition("%")
    if percent and not zone:
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return True


def _is_host(host: str) -> bool:
    if len(host) > 253 or _HOST_NAME.fullmatch(host) is None:
        return False
    if re.fullmatch(r"[0-9.]+", host) is None:
        return True
    # All digits and dots: it must be a real IPv4 address. Resolvers would take "10.1" for 10.0.0.1.
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True

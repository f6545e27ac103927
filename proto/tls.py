# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS of master, nodes and clients: files that are looked at before they are used, and why it did not work.

gRPC says of a handshake that failed little more than that; so both ends look at their own files first, and a caller
that cannot reach its master shakes hands once more by itself to learn the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import grpc

from moonpool.address import parse_address
from moonpool.errors import ConfigError
from moonpool.proto.errors import TlsError

__all__ = ["Tls", "why_not"]

_FILES: Final = ("tls_cert", "tls_key", "tls_ca")
# Both ends of a handshake in memory take turns; it takes three or four.
_TURNS: Final = 16


@dataclasses.dataclass(frozen=True)
class Tls:
    """Where this side's certificate, its key and the authority that it trusts are: PEM files.

    Attributes:
        cert: the certificate, with those between it and the authority.
        key: its key, without a passphrase.
        ca: whom the other side's certificate has to come from.
        name: what the master's certificate is to be for; None: the host of its address.
    """

    cert: str
    key: str
    ca: str
    name: str | None = None

    @classmethod
    def of(cls, settings: Any) -> Tls | None:
        """Return what the settings say; None: no TLS.

        Raises:
            ConfigError: only some of the files are named.
        """
        given = {name: getattr(settings, name) for name in _FILES}
        name = getattr(settings, "tls_name", None)
        if name == "":
            raise ConfigError("tls_name is empty", hint="a name, or leave it out: the host of the address")
        if not any(given.values()):
            if name is not None:
                raise ConfigError("tls_name without tls_cert, tls_key and tls_ca", hint="all of them, or none")
            return None
        missing = [name for name, value in given.items() if not value]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} missing: TLS is mutual", hint="tls_cert, tls_key and tls_ca together, or none"
            )
        return cls(given["tls_cert"], given["tls_key"], given["tls_ca"], name)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a master needs.

        Raises:
            ConfigError: a file is missing or unusable, they do not go together, or the certificate is out of date.
        """
        self._check("server")
        cert, key, authority = self._read()
        return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a caller needs. Raises as `server_credentials`."""
        self._check("client")
        cert, key, authority = self._read()
        return grpc.ssl_channel_credentials(authority, key, cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Return options of the channel."""
        return () if self.name is None else (("grpc.ssl_target_name_override", self.name),)

    def context(self) -> ssl.SSLContext:
        """Return the same for the ssl module, as a caller."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key, _no_passphrase)
        context.set_alpn_protocols(["h2"])
        return context

    def _read(self) -> tuple[bytes, bytes, bytes]:
        return _read("tls_cert", self.cert), _read("tls_key", self.key), _read("tls_ca", self.ca)

    def _check(self, role: Literal["server", "client"]) -> None:
        self._read()
        authority = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            authority.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise _bad("tls_ca", self.ca, error) from error
        if not (known := authority.get_ca_certs()):
            raise ConfigError(f"tls_ca: {self.ca} has no certificate of an authority", hint="the one that issues yours")
        if all(ssl.cert_time_to_seconds(str(one["notAfter"])) < time.time() for one in known):
            raise ConfigError(f"tls_ca: {self.ca} is out of date", cause=f"until {known[0]['notAfter']}")
        _check_own(self.cert, self.key, role)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}: {path} cannot be read", cause=error.strerror or str(error), hint="a file in PEM format"
        ) from error


def _no_passphrase() -> str:
    # Without this, a key with one would have OpenSSL ask at the terminal.
    raise ConfigError("tls_key has a passphrase", hint="a key without one, in a file that only its user can read")


def _bad(name: str, path: str, error: ssl.SSLError) -> ConfigError:
    return ConfigError(f"{name}: {path} cannot be used", cause=error.reason or str(error), hint="a file in PEM format")


def _check_own(cert: str, key: str, role: Literal["server", "client"]) -> None:
    """Shake hands with oneself, trusting this very certificate: what is left to fail is its dates and its purpose."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    try:
        for context in (server, client):
            context.load_cert_chain(cert, key, _no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key} is not the key of {cert}", hint="tls_cert and tls_key that belong together"
            ) from error
        raise _bad("tls_cert or tls_key", f"{cert} with {key}", error) from error
    verifier = client if role == "server" else server
    verifier.verify_mode = ssl.CERT_REQUIRED
    verifier.load_verify_locations(cert)
    verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        for _ in range(_TURNS):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"tls_cert: {cert} cannot be used", cause=error.verify_message, hint=_hint(error)) from error
    except ssl.SSLError as error:
        raise _bad("tls_cert", cert, error) from error


def _hint(error: ssl.SSLCertVerificationError) -> str:
    text = error.verify_message
    if "expired" in text or "not yet valid" in text:
        return "a certificate that is valid today, and the clocks"
    if "mismatch" in text or "not valid for" in text:
        return "a certificate for this name, or tls_name with the name that it has"
    if "purpose" in text:
        return "a certificate that may be used for servers at the master, for clients elsewhere"
    return "tls_ca of the authority that issued it"


# ---------------------------------------------------------------- why a master cannot be reached


def why_not(master: str, tls: Tls | None, timeout: float) -> TlsError | None:
    """Return what is wrong between this caller and its master when it comes to TLS.

    Args:
        master: its address.
        tls: of this caller.
        timeout: seconds; it asks the network.

    Returns:
        None when nothing is, or when nobody listens there.
    """
    peer = f"master ({master})"
    try:
        with _connected(master, timeout) as connection:
            if tls is None:
                return _plain(connection, peer)
            return _handshake(connection, tls, tls.name or parse_address(master).host, peer)
    except OSError:
        # Not reachable, or not in time: whoever asked says so already.
        return None


@contextlib.contextmanager
def _connected(master: str, timeout: float) -> Iterator[socket.socket]:
    address = parse_address(master)
    with socket.create_connection((address.host, address.port), timeout) as connection:
        connection.settimeout(timeout)
        yield connection


def _plain(connection: socket.socket, peer: str) -> TlsError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError:
        return None  # it speaks no TLS either
    return TlsError(
        "the master speaks TLS, and here are no certificates", peer=peer, hint="tls_cert, tls_key and tls_ca"
    )


def _handshake(connection: socket.socket, tls: Tls, name: str, peer: str) -> TlsError | None:
    try:
        shaken = tls.context().wrap_socket(connection, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        what = f"the certificate of the master is not accepted for {name!r}"
        return TlsError(what, peer=peer, cause=error.verify_message, hint=_hint(error))
    except ssl.SSLError as error:
        hint = "tls_cert, tls_key and tls_ca at the master too, or none here"
        return TlsError("the master speaks no TLS", peer=peer, cause=_words(error), hint=hint)
    # What the master thinks of our certificate comes after the handshake: its first frame, an alert, or the end.
    with shaken:
        try:
            cause = "" if shaken.recv(1) else "it ended the connection after the handshake"
        except (ssl.SSLError, ConnectionError) as error:
            cause = _words(error)
    if not cause:
        return None
    return TlsError(
        "the master does not accept the certificate of this side",
        peer=peer,
        cause=cause,
        hint="one of the authority that tls_ca of the master names, valid today",
    )


def _words(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or str(error)).lower().replace("_", " ")

# SPDX-License-Identifier: Apache-2.0
"""The target of a run between two hosts: ``mooncake-bench transfer --listen``."""

from __future__ import annotations

import ipaddress
import socket
import sys

from moonpool.address import Address
from moonpool.bench import control
from moonpool.bench.backends import Place
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.session import TargetSession
from moonpool.bench.target import accept, serve
from moonpool.errors import MoonpoolError

__all__ = ["serve_one_run"]


def serve_one_run(address: Address, secret: bytes | None, *, insecure: bool) -> ExitStatus:
    """Listen, be the target of one run, and return the exit status of this side.

    Raises:
        UsageError: the address is reachable from elsewhere and there is no secret.
    """
    if secret is None and not insecure and not _loopback(address.host):
        raise UsageError(
            f"--listen {address} can be reached from elsewhere: anyone there could fill this memory",
            hint="--secret with the same text on both hosts, or --insecure",
        )
    try:
        with control.listen(address) as listening:
            port = listening.getsockname()[1]
            _say(f"listening on {Address(address.host, port)} for one run")
            channel = accept(listening, secret)
    except MoonpoolError as error:
        _say(str(error))
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    _say(f"serving {channel.peer}")
    # Fixed ports next to the one that was named can be let through a firewall.
    engine_port, limit_port = (port + 1, port + 2) if address.port else (0, 0)
    session = TargetSession(Place(address.host, secret, insecure, engine_port, limit_port))
    try:
        status = serve(channel, session)
    except MoonpoolError as error:
        _say(f"the run did not end in good order: {error}")
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    finally:
        session.close()
        channel.close()
    _say(f"{session.checks} checks of this side's memory: {'all bytes right' if not status else 'BYTES WERE WRONG'}")
    return status


def _loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # it cannot be listened on either, and that error says more
    return all(ipaddress.ip_address(str(where[4][0]).partition("%")[0]).is_loopback for where in found)


def _say(text: str) -> None:
    print(f"mooncake-bench: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the log of this side

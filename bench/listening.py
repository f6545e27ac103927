# SPDX-License-Identifier: Apache-2.0
"""The target of runs between two hosts: ``mooncake-bench transfer --listen``, and that of the hardware check."""

from __future__ import annotations

import ipaddress
import socket
import sys

from moonpool.address import Address
from moonpool.bench import control
from moonpool.bench.backends import Place
from moonpool.bench.control import Channel
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.session import TargetSession
from moonpool.bench.target import accept, serve
from moonpool.errors import MoonpoolError

__all__ = ["serve_one_run", "serve_until_dismissed"]


def serve_one_run(address: Address, secret: bytes | None, *, insecure: bool) -> ExitStatus:
    """Listen, be the target of one run, and return the exit status of this side.

    Raises:
        UsageError: the address is reachable from elsewhere and there is no secret.
    """
    return _serve(address, secret, insecure=insecure, many=False)


def serve_until_dismissed(address: Address, secret: bytes | None, *, insecure: bool) -> ExitStatus:
    """Listen, be the target of run after run until the other side says that it was the last one.

    Returns:
        The exit status of this side. That a run broke off the other side tells.

    Raises:
        UsageError: the address is reachable from elsewhere and there is no secret.
    """
    return _serve(address, secret, insecure=insecure, many=True)


def _serve(address: Address, secret: bytes | None, *, insecure: bool, many: bool) -> ExitStatus:
    if secret is None and not insecure and not _loopback(address.host):
        raise UsageError(
            f"--listen {address} can be reached from elsewhere: anyone there could fill this memory",
            hint="--secret with the same text on both hosts, or --insecure",
        )
    try:
        with control.listen(address) as listening:
            port = listening.getsockname()[1]
            _say(f"listening on {Address(address.host, port)} for {'run after run' if many else 'one run'}")
            # Fixed ports next to the one that was named can be let through a firewall.
            engine_port, limit_port = (port + 1, port + 2) if address.port else (0, 0)
            place = Place(address.host, secret, insecure, engine_port, limit_port)
            right = True
            while True:
                session = TargetSession(place)
                # Whoever calls meanwhile waits in the backlog; but of one run, nobody comes after it.
                channel = accept(listening, secret)
                if not many:
                    listening.close()
                status = _run(channel, session)
                right = right and status != ExitStatus.NOT_VERIFIED
                if not many:
                    return status
                if session.dismissed:
                    return ExitStatus.OK if right else ExitStatus.NOT_VERIFIED
    except MoonpoolError as error:
        _say(str(error))
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED


def _run(channel: Channel, session: TargetSession) -> ExitStatus:
    _say(f"serving {channel.peer}")
    try:
        status = serve(channel, session)
    except MoonpoolError as error:
        _say(f"the run did not end in good order: {error}")
        return ExitStatus.FAILED
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

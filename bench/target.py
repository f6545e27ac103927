# SPDX-License-Identifier: Apache-2.0
"""One side in a process of its own: ``python -m moonpool.bench.target``, started by ``mooncake-bench`` on one host.

It reads one line of JSON from standard input (the secret of the run, and which side it is), writes one line (the port
it listens on), and serves one run: as the target, as the initiating side of a comparison, or as the client of a pool.
When standard input ends, its parent is gone, and it ends too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

from moonpool.address import Address
from moonpool.bench import control
from moonpool.bench.backends import Place
from moonpool.bench.control import Channel
from moonpool.bench.errors import ControlError, ExitStatus
from moonpool.bench.initiating import InitiatorSession
from moonpool.bench.parent import die_with_parent
from moonpool.bench.session import Commands, TargetSession
from moonpool.errors import MoonpoolError

__all__ = ["accept", "main", "serve"]

# An answer is a short line: who cannot take it in this time is gone.
_ANSWER_S = 10.0


def accept(listening: socket.socket, secret: bytes | None) -> Channel:
    """Wait for a caller that knows the secret. Others are turned away and told why."""
    while True:
        connected, where = listening.accept()
        channel = Channel(connected, str(Address(where[0], where[1])))
        try:
            control.prove_target(channel, secret)
        except ControlError as error:
            print(f"mooncake-bench: {error}", file=sys.stderr)  # noqa: T201 - the log of a listening benchmark
            channel.close()
            continue
        return channel


def serve(channel: Channel, session: Commands) -> ExitStatus:
    """Carry out commands until the caller says goodbye, and return the exit status of this side.

    Raises:
        ControlError: the caller is gone without a word.
    """
    while True:
        message = channel.receive(None)
        if "goodbye" in message:
            channel.send({"result": {"verified": session.verified, "checks": session.checks}}, _ANSWER_S)
            return ExitStatus.OK if session.verified else ExitStatus.NOT_VERIFIED
        channel.send(_answer(session, message), _ANSWER_S)


def _answer(session: Commands, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": session.call(str(message.get("call")), message.get("arguments") or {})}
    except MoonpoolError as error:
        return {"error": {"code": error.code, "message": str(error)}}
    except Exception as error:  # noqa: BLE001 - also what other engines raise is for the caller to read
        return {"error": {"code": "BENCH_TARGET", "message": f"{type(error).__name__}: {error}"}}


def main() -> ExitStatus:
    """Serve one run for the parent process."""
    order = json.loads(sys.stdin.buffer.readline())
    secret = bytes.fromhex(order["secret"])
    if order["stoppable"] and not die_with_parent():
        return ExitStatus.FAILED
    with control.listen(Address("127.0.0.1", 0)) as listening:
        sys.stdout.write(json.dumps({"port": listening.getsockname()[1]}) + "\n")
        sys.stdout.flush()
        # Nobody reads on, and some engines log to standard output.
        os.dup2(2, 1)
        channels: list[Channel] = []
        threading.Thread(target=_end_with_parent, args=(listening, channels), daemon=True).start()
        try:
            channels.append(accept(listening, secret))
        except OSError:
            return ExitStatus.FAILED  # the parent ended before it called
    session = _session(order["role"], Place(secret=secret))
    try:
        return serve(channels[0], session)
    except ControlError:
        # The parent is gone or was interrupted; it knows best what happened.
        return ExitStatus.FAILED
    finally:
        session.close()
        channels[0].close()


def _session(role: str, place: Place) -> Commands:
    if role == "pool":
        # Imported late: processes of engines need nothing of the pool.
        from moonpool.bench.pool.peers.session import PoolSession

        return PoolSession()
    return TargetSession(place) if role == "target" else InitiatorSession(place)


def _end_with_parent(listening: socket.socket, channels: list[Channel]) -> None:
    # Not through sys.stdin: the interpreter could not end while a thread holds its lock.
    while os.read(0, 4096):
        pass
    for channel in channels:
        channel.close()
    if not channels:
        listening.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())

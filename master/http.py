# SPDX-License-Identifier: Apache-2.0
"""/livez, /healthz, /leader, /metrics and /status over HTTP: read-only pages, one request for each connection."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Final

from moonpool.address import Address, parse_address
from moonpool.master.errors import ListenError
from moonpool.master.role import Role

__all__ = ["StatusPages"]

_log = logging.getLogger("moonpool.master")
# A request has this long, and this many connections are open at once. Beyond that the oldest that has asked nothing yet
# is closed, so that whoever connects and says nothing is no burden to others.
_SECONDS: Final = 5.0
_CONNECTIONS_MAX: Final = 64
_LINE_MAX: Final = 4096
_HEADERS_MAX: Final = 100


class StatusPages:
    """Serves the pages of a master."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._server: asyncio.Server | None = None
        #: In the order in which they came.
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        #: Those that have not asked anything yet.
        self._silent: dict[asyncio.Task[None], None] = {}

    async def start(self, listen: str) -> str:
        """Serve. Returns the address with the port that it has.

        Raises:
            ListenError: the address cannot be listened on.
        """
        address = parse_address(listen)
        try:
            self._server = await asyncio.start_server(self._connected, address.host, address.port, limit=_LINE_MAX)
        except OSError as error:
            raise ListenError(
                f"could not serve status pages on {listen}", cause=error.strerror or str(error), hint="http=..."
            ) from error
        return str(Address(address.host, self._server.sockets[0].getsockname()[1]))

    async def close(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.close()
        # Not cancelled: asyncio logs a traceback for tasks of connections that are.
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self._silent[task] = None
        try:
            if len(self._connections) <= _CONNECTIONS_MAX or self._close_oldest():
                await asyncio.wait_for(self._serve(task, reader, writer), _SECONDS)
        except (OSError, ValueError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            _log.debug("a request for a status page came to nothing: %s", error)
        finally:
            del self._connections[task]
            self._silent.pop(task, None)
            writer.close()

    def _close_oldest(self) -> bool:
        """End the connection that has said nothing for longest. Returns whether there is one."""
        oldest = next(iter(self._silent))
        if oldest is asyncio.current_task():
            return False
        del self._silent[oldest]
        self._connections[oldest].transport.abort()
        return True

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        words = (await reader.readline()).decode("latin-1").split()
        for _ in range(_HEADERS_MAX):
            if (await reader.readline()).strip() == b"":
                break
        self._silent.pop(task, None)
        if writer.is_closing():  # it had to make room for another
            return
        code, kind, text = self._page(words[0], words[1].partition("?")[0]) if len(words) == 3 else _NO_REQUEST
        body = text.encode()
        head = f"HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + (b"" if words[:1] == ["HEAD"] else body))
        await writer.drain()

    def _page(self, method: str, path: str) -> tuple[str, str, str]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _PLAIN, "only GET\n"
        if path == "/livez":
            # That it is answered is what it says: a new start would help nobody whose store is away.
            return "200 OK", _PLAIN, "ok\n"
        if path == "/healthz":
            wrong = self._role.wrong()
            return (_UNAVAILABLE if wrong else "200 OK"), _PLAIN, "\n".join(wrong or ["ok"]) + "\n"
        if path == "/leader":
            return ("200 OK" if self._role.leads else _UNAVAILABLE), _PLAIN, self._role.said() + "\n"
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", self._role.metrics()
        if path == "/status":
            return "200 OK", "application/json", json.dumps(self._role.status()) + "\n"
        return "404 Not Found", _PLAIN, "there are /livez, /healthz, /leader, /metrics and /status\n"


_PLAIN: Final = "text/plain; charset=utf-8"
_UNAVAILABLE: Final = "503 Service Unavailable"
_NO_REQUEST: Final = ("400 Bad Request", _PLAIN, "this is no request\n")

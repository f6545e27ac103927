# SPDX-License-Identifier: Apache-2.0
"""A small proxy in front of vLLM servers of which some compute prompts (prefill) and others go on with them (decode).

::

    python examples/pd_proxy.py --listen 127.0.0.1:8000 \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each ``--prefill`` and ``--decode`` may be given several times; they are used in turn. A server that does not answer is
left out for a while. Without a prefill server a decode server does all of the work. ``/health`` says what is there.

Needs aiohttp, which comes with vLLM. It is an example: it has no authentication, and knows nothing of load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

AWAY_SECONDS = 5.0
CONNECT_SECONDS = 3.0
HEALTH_SECONDS = 2.0
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
#: What an answer of one token has no use for, or would forbid.
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of")

log = logging.getLogger("pd_proxy")


class Servers:
    """Servers of one kind. Those that did not answer are left out for a while, as long as there are others.

    Args:
        urls: of the servers.
    """

    def __init__(self, urls: list[str]) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._away_until = dict.fromkeys(self.urls, 0.0)
        self._turn = itertools.count()

    def in_turn(self, *, also_away: bool = False) -> Iterator[str]:
        """Yield those to be tried for a request, the first another one each time."""
        if not self.urls:
            return
        begin = next(self._turn) % len(self.urls)
        ordered = self.urls[begin:] + self.urls[:begin]
        now = time.monotonic()
        yield from (url for url in ordered if self._away_until[url] <= now)
        if also_away:
            yield from (url for url in ordered if self._away_until[url] > now)

    def failed(self, url: str, error: BaseException | str) -> None:
        """A server did not answer, or with an error of its own."""
        log.warning("%s is left out for %.0f s: %s", url, AWAY_SECONDS, error)
        self._away_until[url] = time.monotonic() + AWAY_SECONDS


class Proxy:
    """Sends each request to a prefill and then to a decode server.

    Args:
        prefill: servers whose connector has the role kv_producer or kv_both.
        decode: servers whose connector has the role kv_consumer or kv_both.
        prefill_seconds: after which a prompt is not waited for any more.
    """

    def __init__(self, prefill: list[str], decode: list[str], prefill_seconds: float) -> None:
        self.prefill = Servers(prefill)
        self.decode = Servers(decode)
        self._prefill_timeout = ClientTimeout(total=prefill_seconds, connect=CONNECT_SECONDS)
        self._session: ClientSession | None = None

    def application(self) -> web.Application:
        """Return what serves."""
        application = web.Application(client_max_size=64 << 20)
        application.router.add_get("/health", self.health)
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_post("/v1/chat/completions", self.complete)
        application.router.add_get("/v1/models", self.models)
        application.cleanup_ctx.append(self._with_session)
        return application

    async def health(self, _: web.Request) -> web.Response:
        """Say which servers answer. Without a decode server nothing can be served."""
        urls = [*self.prefill.urls, *self.decode.urls]
        answers = dict(zip(urls, await asyncio.gather(*map(self._is_healthy, urls)), strict=True))
        good = any(answers[url] for url in self.decode.urls)
        return web.json_response(
            {
                "prefill": {url: answers[url] for url in self.prefill.urls},
                "decode": {url: answers[url] for url in self.decode.urls},
            },
            status=200 if good else 503,
        )

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Say what a decode server has."""
        return await self._decode(request, "GET", None)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt or a chat."""
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise web.HTTPBadRequest(text=f"no JSON: {error}") from error
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="not an object")
        body.pop("kv_transfer_params", None)
        params = await self._compute(request.path, body)
        if params:
            body["kv_transfer_params"] = params
        return await self._decode(request, "POST", body)

    # ---------------------------------------------------------------- inside

    async def _compute(self, path: str, body: dict[str, Any]) -> Any:
        """Have a prompt computed; return what the decode server is given. None: it computes the prompt itself."""
        asked = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
        for url in self.prefill.in_turn():
            try:
                status, said = await self._ask(url + path, asked)
            except (ClientError, asyncio.TimeoutError, json.JSONDecodeError) as error:
                self.prefill.failed(url, error)
                continue
            if status < 500:
                # With a fault of the request too: the decode server explains it as well.
                return said.get("kv_transfer_params")
            self.prefill.failed(url, f"status {status}")
        return None

    async def _ask(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self._http.post(url, json=body, timeout=self._prefill_timeout) as answer:
            return answer.status, await answer.json() if answer.status < 400 else {}

    async def _decode(self, request: web.Request, method: str, body: dict[str, Any] | None) -> web.StreamResponse:
        """Pass on what a decode server says, as it comes."""
        timeout = ClientTimeout(total=None, connect=CONNECT_SECONDS)
        for url in self.decode.in_turn(also_away=True):
            try:
                answer = await self._http.request(method, url + request.path, json=body, timeout=timeout)
            except (ClientError, asyncio.TimeoutError) as error:
                self.decode.failed(url, error)
                continue
            async with answer:
                if answer.status < 500:
                    return await self._pass_on(request, answer)
                self.decode.failed(url, f"status {answer.status}")
        raise web.HTTPServiceUnavailable(text="no decode server answers")

    @staticmethod
    async def _pass_on(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        await response.prepare(request)
        async for part in answer.content.iter_any():
            await response.write(part)
        await response.write_eof()
        return response

    async def _is_healthy(self, url: str) -> bool:
        try:
            async with self._http.get(f"{url}/health", timeout=ClientTimeout(total=HEALTH_SECONDS)) as answer:
                return bool(answer.status == 200)
        except (ClientError, asyncio.TimeoutError):
            return False

    @property
    def _http(self) -> ClientSession:
        assert self._session is not None, "not serving yet"
        return self._session

    async def _with_session(self, _: web.Application) -> Any:
        async with ClientSession() as self._session:
            yield


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8000", help="host:port")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="of a prefill server")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="of a decode server")
    parser.add_argument("--prefill-seconds", type=float, default=60.0, help="longest time of one prompt")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    host, _, port = arguments.listen.rpartition(":")
    proxy = Proxy(arguments.prefill, arguments.decode, arguments.prefill_seconds)
    web.run_app(proxy.application(), host=host, port=int(port), print=None)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""examples/pd_proxy.py in front of servers that only say what they were asked."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM, and is not installed")
from aiohttp import web  # noqa: E402 - after it is known to be there
from aiohttp.test_utils import TestClient, TestServer, unused_port  # noqa: E402

_PATH = Path(__file__).parents[2] / "examples" / "pd_proxy.py"
PARAMS = {"do_remote_prefill": True, "remote_num_tokens": 64}


def proxy_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pd_proxy", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fake:
    """A server that keeps what it is asked, and answers what it is told to."""

    def __init__(self, answer: dict[str, Any], *, status: int = 200, seconds: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer = answer
        self.status = status
        self.seconds = seconds
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_get("/health", self._health)
        self.server = TestServer(application)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        await asyncio.sleep(self.seconds)
        if not body.get("stream"):
            return web.json_response(self.answer, status=self.status)
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for part in (b"data: one\n\n", b"data: two\n\n"):
            await response.write(part)
        return response

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


def serve(
    prefill: list[Fake],
    decode: list[Fake],
    body: Callable[[Any, list[str], list[str]], Awaitable[None]],
    **options: Any,
) -> None:
    """Run `body` with a client of a proxy in front of these."""

    async def run() -> None:
        for fake in (*prefill, *decode):
            await fake.server.start_server()
        try:
            urls = [[fake.url for fake in some] for some in (prefill, decode)]
            proxy = proxy_module().Proxy(
                [*urls[0], *options.get("more_prefill", ())], urls[1], options.get("prefill_seconds", 10.0)
            )
            async with TestClient(TestServer(proxy.application())) as client:
                await body(client, *urls)
        finally:
            for fake in (*prefill, *decode):
                await fake.server.close()

    asyncio.run(run())


def gone() -> str:
    return f"http://127.0.0.1:{unused_port()}"


def test_what_prefill_says_is_given_to_decode() -> None:
    first, second = Fake({"kv_transfer_params": PARAMS}), Fake({"text": "yes"})

    async def body(client: Any, *_: list[str]) -> None:
        asked = {"prompt": [1, 2], "max_tokens": 9, "min_tokens": 4, "stream_options": {}, "n": 2}
        async with client.post("/v1/completions", json=asked) as answer:
            assert (answer.status, await answer.json()) == (200, {"text": "yes"})
        assert second.asked == [{**asked, "kv_transfer_params": PARAMS}]

    serve([first], [second], body)
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    assert first.asked == [{"prompt": [1, 2], "max_tokens": 1, "stream": False, "kv_transfer_params": wanted}]


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def body(client: Any, *_: list[str]) -> None:
        async with client.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.read() == b"data: one\n\ndata: two\n\n"

    serve([Fake({"kv_transfer_params": PARAMS})], [Fake({})], body)


@pytest.mark.parametrize("trouble", ["gone", "ill", "slow", "says nothing", "refuses"])
def test_without_prefill_decode_does_all_of_it(trouble: str) -> None:
    fakes = {
        "gone": [],
        "ill": [Fake({}, status=500)],
        "slow": [Fake({}, seconds=30.0)],
        "says nothing": [Fake({"kv_transfer_params": None})],
        "refuses": [Fake({}, status=400)],
    }[trouble]
    second = Fake({"text": "yes"})

    async def body(client: Any, *_: list[str]) -> None:
        for _turn in range(2):
            async with client.post("/v1/completions", json={"prompt": "x"}) as answer:
                assert (answer.status, await answer.json()) == (200, {"text": "yes"})

    more = [gone()] if trouble == "gone" else []
    serve(fakes, [second], body, more_prefill=more, prefill_seconds=0.2)
    assert second.asked == [{"prompt": "x"}] * 2
    # One that has failed is left out; one that has answered is not.
    assert [len(fake.asked) for fake in fakes] == [1 if trouble in ("ill", "slow") else 2] * len(fakes)


def test_servers_are_used_in_turn_and_those_that_fail_are_left_out() -> None:
    first = [Fake({"kv_transfer_params": PARAMS}) for _ in range(2)]
    second = [Fake({"text": "yes"}), Fake({}, status=503)]

    async def body(client: Any, *_: list[str]) -> None:
        for _turn in range(4):
            async with client.post("/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 200

    serve(first, second, body)
    assert [len(fake.asked) for fake in first] == [2, 2]
    assert [len(fake.asked) for fake in second] == [4, 1]


def test_health_is_that_of_the_decode_servers() -> None:
    async def body(client: Any, prefill: list[str], decode: list[str]) -> None:
        async with client.get("/health") as answer:
            said = await answer.json()
            assert said == {"prefill": {prefill[0]: False}, "decode": {decode[0]: True, decode[1]: False}}
            assert answer.status == 200

    serve([Fake({}, status=500)], [Fake({}), Fake({}, status=500)], body)


def test_without_a_decode_server_the_proxy_says_so() -> None:
    async def body(client: Any, *_: list[str]) -> None:
        async with client.post("/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 503
        async with client.get("/health") as answer:
            assert answer.status == 503
        async with client.post("/v1/completions", data=b"{") as answer:
            assert answer.status == 400

    serve([], [Fake({}, status=500)], body)

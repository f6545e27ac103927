# SPDX-License-Identifier: Apache-2.0
"""Stands in for an LLM server: streams tokens that follow from the prompt, and is bad in ways that tests choose."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Behaviour", "LlmServer", "answer_to", "in_common"]


@dataclass(frozen=True)
class Behaviour:
    """What becomes of one request.

    Attributes:
        kind: ok, status, cut, reset, no_done, garbage, garbage_http, error, hang, empty, aborted, or die, after which
            the server is away.
        status: of ``status``.
        after: tokens ahead of what goes wrong.
        first_s: until the first token.
        each_s: between two tokens.
        usage: whether it is told how many tokens there were.
    """

    kind: str = "ok"
    status: int = 500
    after: int = 2
    first_s: float = 0.0
    each_s: float = 0.0
    usage: bool = True


def answer_to(prompt: list[int] | str, tokens: int) -> list[int]:
    """Return what it answers."""
    seed = sum(prompt) if isinstance(prompt, list) else len(prompt)
    return [100 + (seed + 7 * number) % 400 for number in range(tokens)]


def in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two begin with that are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass
class LlmServer:
    """A server on a port of this host, in a thread of its own. A context manager.

    Attributes:
        behave: says what becomes of a request, from its number and its body.
        vocabulary: that it tells, or None.
        metrics: whether it has ``/metrics``.
        tokens: whether it tells token ids when it is asked to.
        asked: bodies of all requests for completions, in the order in which they came.
    """

    behave: Callable[[int, dict[str, Any]], Behaviour] = lambda number, body: Behaviour()
    vocabulary: int | None = None
    metrics: bool = True
    tokens: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way_most: int = 0
    queried: int = 0
    hits: int = 0

    def __enter__(self) -> Self:
        self._under_way = 0
        self._seen: list[Any] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        # One that has died has no loop any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._talks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: the connection ends."""
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split()
        headers = {}
        while text := (await reader.readline()).decode().strip():
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if (method, path) == ("POST", "/v1/completions"):
            self.headers.append(headers)
            self._under_way += 1
            self.under_way_most = max(self.under_way_most, self._under_way)
            try:
                return await self._complete(json.loads(body), writer)
            finally:
                self._under_way -= 1
        if path == "/v1/models":
            model = {"id": "stand-in"} | ({} if self.vocabulary is None else {"vocab_size": self.vocabulary})
            whole(writer, 200, json.dumps({"object": "list", "data": [model]}))
        elif path == "/metrics" and self.metrics:
            whole(writer, 200, self._page())
        else:
            whole(writer, 404, "nothing here")
        await writer.drain()
        return True

    def _page(self) -> str:
        labels = 'engine="0",model_name="stand-in"'
        return "\n".join(
            [
                "# HELP vllm:prefix_cache_queries_total tokens",
                f"vllm:prefix_cache_queries_total{{{labels}}} {self.queried}",
                f"vllm:prefix_cache_hits_total{{{labels}}} {self.hits}",
                f"vllm:external_prefix_cache_queries_total{{{labels}}} 0.0",
                f"vllm:external_prefix_cache_hits_total{{{labels}}} 0.0",
                f"moonpool_connector_loads_total {len(self.asked)}",
                "vllm:num_requests_running 3",
                "",
            ]
        )

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        behaviour = self.behave(len(self.asked), body)
        self.asked.append(body)
        prompt = body["prompt"]
        cached = max((in_common(prompt, seen) for seen in self._seen), default=0)
        self._seen.append(prompt)
        if behaviour.kind == "status":
            whole(writer, behaviour.status, "no room" if behaviour.status in (429, 503) else "no")
            await writer.drain()
            return True
        if behaviour.kind == "garbage_http":
            writer.write(b"what is this\r\n\r\n")
            await writer.drain()
            return False
        self.queried += len(prompt)
        self.hits += cached
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(behaviour.first_s)
        answer = answer_to(prompt, body["max_tokens"])
        sent = answer if behaviour.kind in ("ok", "no_done", "aborted") else answer[: behaviour.after]
        for number, token in enumerate([] if behaviour.kind == "empty" else sent):
            last = number + 1 == len(sent) and behaviour.kind != "hang"
            choice: dict[str, Any] = {"index": 0, "text": f" t{token}", "finish_reason": "length" if last else None}
            if last and behaviour.kind == "aborted":
                choice["finish_reason"] = "abort"
            if self.tokens and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            event(writer, {"choices": [choice]})
            await writer.drain()
            if behaviour.each_s:
                await asyncio.sleep(behaviour.each_s)
        return await self._end(behaviour, prompt, len(sent), cached, writer)

    async def _end(
        self, behaviour: Behaviour, prompt: Any, tokens: int, cached: int, writer: asyncio.StreamWriter
    ) -> bool:
        if behaviour.kind == "die":
            self._stop.set()
        if behaviour.kind in ("hang", "die"):
            await asyncio.Event().wait()
        if behaviour.kind == "cut":
            return False
        if behaviour.kind == "reset":
            writer.transport.abort()
            return False
        if behaviour.kind == "garbage":
            chunk(writer, b"data: {nonsense\n\n")
        if behaviour.kind == "error":
            event(writer, {"error": {"message": "the engine died", "code": 500}})
        if behaviour.usage and behaviour.kind in ("ok", "no_done"):
            details = {"cached_tokens": cached}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": details}
            event(writer, {"choices": [], "usage": usage})
        if behaviour.kind != "no_done":
            chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return True


def whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status} As It Is\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

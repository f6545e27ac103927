# SPDX-License-Identifier: Apache-2.0
"""One request to an OpenAI-compatible server, and when each part of its answer came."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from moonpool.bench.errors import BenchError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Answer", "Failure", "Place", "Server"]

#: A connection that has been idle for so long is not used again: servers end theirs after 5 s (uvicorn's default), and
#: a request that meets that would look like a failure of the server.
_IDLE_S: Final = 3.0
#: For everything but completions.
_ASIDE_S: Final = 10.0
#: Of one line of an answer. The first one may have the prompt in it.
_LINE_BYTES_MAX: Final = 64 << 20
_SHOWN_MAX: Final = 300
#: What a server says that has no room, and may have some later.
_REFUSALS: Final = frozenset({429, 503})


class Failure:
    """Why there was no answer, or not the whole of it. HTTP errors are ``http_`` and the status."""

    #: Nothing takes connections there.
    AWAY: Final = "away"
    #: The server says that it has no room.
    REFUSED: Final = "refused"
    #: The connection ended before the answer did.
    CUT: Final = "cut"
    #: It took longer than was allowed.
    DEADLINE: Final = "deadline"
    #: What came is no answer of such a server.
    GARBAGE: Final = "garbage"
    #: The server says in its answer that it failed.
    SERVER: Final = "server"
    #: An answer without tokens.
    EMPTY: Final = "empty"


@dataclass(frozen=True)
class Place:
    """Where a server is.

    Attributes:
        url: without ``/v1``.
        socket: of a server on this host, which is reached through this; None: over the network.
        key: what it wants to see, or None.
    """

    url: str
    socket: str | None = None
    key: str | None = None


@dataclass
class Answer:
    """What came of one request. Times in seconds.

    Attributes:
        ttft: from sending the request to the first token; None: none came.
        gaps: between parts of the answer with tokens; servers may send several tokens at once.
        seconds: from sending the request to the end.
        tokens: of the answer, as far as it came.
        prompt_tokens: as the server counts; None: it does not say.
        cached_tokens: of the prompt, which the server did not compute; None: it does not say.
        token_ids: of the answer, where the server tells them.
        text: of the answer.
        failure: why it is no whole answer; empty: it is.
        detail: what is known of the failure.
    """

    ttft: float | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"))
    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    failure: str = ""
    detail: str = ""

    def fail(self, failure: str, detail: object) -> None:
        """Note what went wrong."""
        self.failure, self.detail = failure, _shown(str(detail))


class _Reply:
    """Reads the lines of one answer: server-sent events, of which each is one JSON object."""

    def __init__(self, answer: Answer, began: float) -> None:
        self._answer = answer
        self._last = began
        self._finished = ""
        self._parts = 0
        self._pending = bytearray()
        self.ended = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what has come.

        Raises:
            _GarbageError: it is no such answer.
        """
        for line in self._lines(data):
            if not line or line.startswith(b":"):
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._event(value.strip(), now)
            elif name not in (b"event", b"id", b"retry"):
                raise _GarbageError(line)

    def close(self) -> None:
        """Judge the answer when nothing more comes."""
        answer = self._answer
        if answer.failure:
            return
        if not self.ended:
            answer.fail(Failure.CUT, f"the answer ended after {answer.tokens} tokens, without [DONE]")
        elif self._finished in ("abort", "error"):
            answer.fail(Failure.SERVER, f"finish_reason {self._finished}")
        elif not self._parts:
            answer.fail(Failure.EMPTY, "the answer has no tokens")

    def _lines(self, data: bytes) -> Iterator[bytes]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._pending) + lines[0]
            self._pending.clear()
        self._pending += rest
        if len(self._pending) > _LINE_BYTES_MAX:
            raise _GarbageError(bytes(self._pending[:_SHOWN_MAX]))
        return (line.rstrip(b"\r") for line in lines)

    def _event(self, value: bytes, now: float) -> None:
        if self.ended:
            raise _GarbageError(value)
        if value == b"[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(value)
            if event.get("error"):
                self._answer.fail(Failure.SERVER, event["error"])
                return
            self._usage(event.get("usage") or {})
            for choice in event["choices"]:
                self._part(choice.get("text") or "", choice.get("token_ids") or [], now)
                self._finished = choice.get("finish_reason") or self._finished
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _GarbageError(value) from error

    def _part(self, text: Any, token_ids: Any, now: float) -> None:
        answer = self._answer
        if not isinstance(text, str) or not all(type(token) is int for token in token_ids):
            raise TypeError("neither text nor token ids")
        answer.text += text
        if not text and not token_ids:
            return
        answer.token_ids.extend(token_ids)
        # Where the server does not tell tokens, each part is one until it says how many there were.
        answer.tokens += len(token_ids) or 1
        self._parts += 1
        if answer.ttft is None:
            answer.ttft = now - self._last
        else:
            answer.gaps.append(now - self._last)
        self._last = now

    def _usage(self, usage: dict[str, Any]) -> None:
        answer = self._answer
        if isinstance(tokens := usage.get("completion_tokens"), int):
            answer.tokens = max(answer.tokens, tokens) if answer.token_ids else tokens
        if isinstance(tokens := usage.get("prompt_tokens"), int):
            answer.prompt_tokens = tokens
        if isinstance(tokens := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"), int):
            answer.cached_tokens = tokens


class Server:
    """A server that is asked. An async context manager, which holds its connections.

    Args:
        place: where it is.
        timeout: seconds that a request may take, until the end of its answer.
        plain: only what OpenAI's own interface has; otherwise vLLM is asked to go on behind the end of the text, and
            to tell token ids.
    """

    def __init__(self, place: Place, timeout: float, *, plain: bool) -> None:
        self._place = place
        self._timeout = timeout
        self._extensions: dict[str, Any] = {} if plain else {"ignore_eos": True, "return_token_ids": True}
        self.model = ""

    async def __aenter__(self) -> Self:
        socket = self._place.socket
        # Bounded by whoever asks: a queue of the client would look like one of the server.
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            if socket is None
            else aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=_IDLE_S)
        )
        headers = {} if self._place.key is None else {"Authorization": f"Bearer {self._place.key}"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> dict[str, Any]:
        """Return the first model that the server has, as it describes it.

        Raises:
            BenchError: it does not answer, or is no such server.
        """
        status, text = await self._get("/v1/models")
        if status == 200:
            try:
                model = json.loads(text)["data"][0]
                if isinstance(model["id"], str):
                    return dict(model)
            except (ValueError, KeyError, TypeError, IndexError):
                pass  # Said below, with what it answered instead.
        raise BenchError(
            f"{self._place.url}/v1/models: not the answer of an OpenAI-compatible server",
            cause=f"status {status}: {_shown(text)}",
            hint="the address without /v1, and --api-key where the server wants one",
        )

    async def metrics(self) -> str | None:
        """Return the page ``/metrics``, or None where there is none."""
        try:
            status, text = await self._get("/metrics")
        except BenchError:
            return None
        return text if status == 200 else None

    async def ask(self, prompt: list[int] | str, output_tokens: int) -> Answer:
        """Ask for a completion, and read it to its end, or until the deadline."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extensions,
            }
        ).encode()
        answer, began = Answer(), time.monotonic()
        try:
            async with self._session.post(
                f"{self._place.url}/v1/completions",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                allow_redirects=False,
            ) as response:
                await _read(response, answer, began)
        except asyncio.TimeoutError:
            answer.fail(Failure.DEADLINE, f"no whole answer after {self._timeout:g} s")
        except _GarbageError as error:
            answer.fail(Failure.GARBAGE, error)
        except aiohttp.ClientConnectorError as error:
            answer.fail(Failure.AWAY, error)
        except aiohttp.ClientResponseError as error:
            answer.fail(Failure.GARBAGE, error.message)
        except (aiohttp.ClientError, OSError) as error:
            answer.fail(Failure.CUT, repr(error))
        answer.seconds = time.monotonic() - began
        return answer

    async def _get(self, path: str) -> tuple[int, str]:
        url = f"{self._place.url}{path}"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_ASIDE_S)) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise BenchError(
                f"{url}: the server does not answer", cause=str(error) or repr(error), hint="whether it runs there"
            ) from error


async def _read(response: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
    if response.status != 200:
        said = (await response.content.read(4 * _SHOWN_MAX)).decode(errors="replace")
        refused = response.status in _REFUSALS
        answer.fail(Failure.REFUSED if refused else f"http_{response.status}", f"status {response.status}: {said}")
        return
    reply = _Reply(answer, began)
    # Not its lines: there is a bound on those, which prompts that are told back exceed.
    async for data in response.content.iter_any():
        reply.feed(data, time.monotonic())
    reply.close()


class _GarbageError(ValueError):
    """What came is no answer of such a server."""

    def __init__(self, what: bytes) -> None:
        super().__init__(f"not an event of a completion: {_shown(what[: 4 * _SHOWN_MAX].decode(errors='replace'))}")


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."

# SPDX-License-Identifier: Apache-2.0
"""The process of an engine that was started for a run: as much of an OpenAI-compatible server as the run asks for.

It is a server, on a socket of this host, so that servers and engines are asked and timed by the same code.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from typing import Any, Final

from aiohttp import web

from moonpool.bench.parent import die_with_parent

__all__ = ["Front", "main"]

#: Of a request: a prompt of a million tokens.
_BODY_BYTES_MAX: Final = 16 << 20
#: At the end nobody waits for answers any more.
_CUT_OFF_S: Final = 1.0


class Front:
    """Answers for an engine.

    Args:
        engine: vLLM's `AsyncLLM`.
        model: what it is called.
        vocabulary: how many tokens its model knows.
    """

    def __init__(self, engine: Any, model: str, vocabulary: int) -> None:
        self._engine = engine
        self._model = model
        self._vocabulary = vocabulary
        self._numbers = itertools.count()

    def application(self) -> web.Application:
        """Return the server."""
        application = web.Application(client_max_size=_BODY_BYTES_MAX)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_post("/v1/completions", self._complete)
        return application

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self._model, "vocab_size": self._vocabulary}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        from prometheus_client import generate_latest

        return web.Response(body=generate_latest())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = await request.json()
        parameters = SamplingParams(
            temperature=0,
            max_tokens=asked["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            outputs = self._engine.generate(
                {"prompt_token_ids": asked["prompt"]}, parameters, f"bench-{next(self._numbers)}"
            )
            tokens, last = 0, None
            async for last in outputs:
                (output,) = last.outputs
                tokens += len(output.token_ids)
                choice = {"text": "", "token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
                await _send(response, {"choices": [choice]})
            if last is not None:
                await _send(response, {"choices": [], "usage": _usage(last, tokens)})
        except ConnectionError:
            # Who asked is gone, and the engine has been told.
            return response
        except Exception as error:  # noqa: BLE001  # whatever the engine raises is what came of the request
            await _send(response, {"error": {"message": f"{type(error).__name__}: {error}"}})
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(last: Any, tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": len(last.prompt_token_ids),
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": last.num_cached_tokens},
    }


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def _serve(socket: str, told: int, task: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    config = task["kv_transfer_config"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=task["model"],
            kv_transfer_config=None if config is None else KVTransferConfig(**config),
            **task["arguments"],
        )
    )
    try:
        vocabulary = engine.model_config.get_vocab_size()
        runner = web.AppRunner(
            Front(engine, task["model"], vocabulary).application(), access_log=None, shutdown_timeout=_CUT_OFF_S
        )
        await runner.setup()
        try:
            await web.UnixSite(runner, socket).start()
            os.write(told, b"1")
            os.close(told)
            await ended.wait()
        finally:
            await runner.cleanup()
    finally:
        engine.shutdown()


def main() -> None:
    """Run an engine until SIGTERM, or until the benchmark ends. Arguments: socket, pipe, and the task as JSON."""
    if die_with_parent():
        asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""KV events of the pool in vLLM's event stream, for routers that send a request where its prefix is."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MEDIUM", "Events"]

#: What the events of this connector name as the place of a block.
MEDIUM: Final = "POOL"


class Events:
    """Makes events of what this engine saves, and of what it notices to be gone.

    Args:
        enabled: whether anybody wants them. Else nothing is kept.
        block_tokens: tokens of one block.
        blocks: of one chunk.
    """

    def __init__(self, enabled: bool, block_tokens: int, blocks: int) -> None:
        self._enabled = enabled
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._coming: dict[int, Any] = {}
        self._events: list[Any] = []

    def saving(self, job_id: int, request: Any, first: int, chunks: int) -> None:
        """Chunks of a request are on their way, from number `first` on."""
        if not self._enabled:
            return
        from vllm.distributed.kv_events import BlockStored

        begin, end = first * self._blocks, (first + chunks) * self._blocks
        lora = request.lora_request
        self._coming[job_id] = BlockStored(
            block_hashes=_external(request.block_hashes[begin:end]),
            parent_block_hash=_external(request.block_hashes[begin - 1 : begin])[0] if begin else None,
            token_ids=list(request.all_token_ids[begin * self._block_tokens : end * self._block_tokens]),
            block_size=self._block_tokens,
            lora_id=lora.lora_int_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
        )

    def ended(self, job_id: int, *, whole: bool) -> None:
        """They have arrived, or not all of them."""
        event = self._coming.pop(job_id, None)
        if event is not None and whole:
            self._events.append(event)

    def removed(self, request: Any, chunk: int) -> None:
        """A chunk of a request is there no more."""
        if not self._enabled:
            return
        from vllm.distributed.kv_events import BlockRemoved

        hashes = request.block_hashes[chunk * self._blocks : (chunk + 1) * self._blocks]
        self._events.append(BlockRemoved(block_hashes=_external(hashes), medium=MEDIUM))

    def take(self) -> list[Any]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events


def _external(hashes: Any) -> list[Any]:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [maybe_convert_block_hash(one) for one in hashes]

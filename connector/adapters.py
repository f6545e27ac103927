# SPDX-License-Identifier: Apache-2.0
"""Which weights a LoRA adapter has. They are part of the keys of what is computed with it.

vLLM tells adapters apart by name, and newer versions by path too. Another host may have other weights there, or this
one tomorrow, and a pool outlives both.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Adapters"]

_log = logging.getLogger("moonpool.connector")
#: What vLLM reads of the folder of an adapter. Others, such as the state of an optimizer, may be there and be large.
_FILES: Final = ("adapter_*", "new_embeddings*")
_READ_BYTES: Final = 1 << 20
#: Adapters that one engine has seen. Requests of further ones do not use the pool.
_KNOWN_MAX: Final = 1 << 16


@dataclass(slots=True)
class _Adapter:
    # What was seen of its files, by name, size and times, and what is in them; b"": it is not known which weights run.
    seen: list[tuple[str, int, int]]
    identity: bytes


class Adapters:
    """Tells adapters apart by what is in their files. Every method is called on the engine's thread.

    The files are read once, as vLLM does for the first request of an adapter, and looked at (not read) for each
    request. An adapter that vLLM gets by the name of a repository is told apart by that name.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], _Adapter] = {}

    def knows(self, request: Any) -> bool:
        """See for a request that is new whether it is known which weights its adapter has, if it has one.

        Once files have changed under the same name, number and path it is not: vLLM may have read them before or since.
        """
        lora = request.lora_request
        if lora is None:
            return True
        key = _key(lora)
        known = self._known.get(key)
        try:
            seen = _look(lora.lora_path)
            if known is None:
                if len(self._known) >= _KNOWN_MAX:
                    return False
                known = self._known[key] = _Adapter(seen, _identity(lora.lora_path, seen))
            elif known.identity and known.seen != seen:
                same = _identity(lora.lora_path, seen) == known.identity
                known.seen, known.identity = seen, known.identity if same else b""
                if not same:
                    _log.warning(
                        "moonpool: the files of adapter %s in %s have changed since it was first used; its requests "
                        "use the pool again once it is loaded under another name",
                        lora.lora_name,
                        lora.lora_path,
                    )
        except OSError as error:
            if known is None or known.identity:
                _log.warning("moonpool: requests of adapter %s do not use the pool: %s", lora.lora_name, error)
            known = self._known[key] = _Adapter([], b"")
        return bool(known.identity)

    def identity(self, request: Any) -> bytes:
        """Return what belongs to the keys of a request whose adapter is known; b"": it has none."""
        lora = request.lora_request
        return b"" if lora is None else self._known[_key(lora)].identity

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two requests have the same adapter."""
        mine, theirs = one.lora_request, other.lora_request
        return mine is not None and theirs is not None and _key(mine) == _key(theirs)


def _key(lora: Any) -> tuple[int, str, str]:
    return lora.lora_int_id, lora.lora_name, lora.lora_path


def _look(path: str) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files of an adapter; nothing where it is no folder of this host."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return []
    files = sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})
    if not files:
        raise FileNotFoundError(f"no file of an adapter is in {path}")
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _identity(path: str, files: list[tuple[str, int, int]]) -> bytes:
    if not files:
        return hashlib.sha256(b"repository\0" + path.encode()).digest()
    whole = hashlib.sha256(b"files\0")
    folder = Path(path).expanduser()
    for name, _, _ in files:
        content = hashlib.sha256()
        with (folder / name).open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                content.update(piece)
        whole.update(os.fsencode(name) + b"\0" + content.digest())
    return whole.digest()

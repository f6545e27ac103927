# SPDX-License-Identifier: Apache-2.0
"""Where the master keeps what it must know after a restart."""

from __future__ import annotations

from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.master.store.base import EPOCH_MAX, Identity, MetadataStore, SegmentRow, Writer
from moonpool.master.store.embedded import EmbeddedStore
from moonpool.master.store.memory import MemoryStore

__all__ = [
    "EPOCH_MAX",
    "EmbeddedStore",
    "Identity",
    "MemoryStore",
    "MetadataStore",
    "SegmentRow",
    "Writer",
    "open_store",
]


def open_store(name: str) -> MetadataStore:
    """Return the store that a setting names, not opened yet: ``"memory"`` or ``"sqlite:PATH"``.

    Raises:
        ConfigError: there is no such kind of store.
    """
    kind, colon, path = name.partition(":")
    if kind == "memory" and not colon:
        return MemoryStore(keep_records=False)
    if kind == "sqlite" and path and "\0" not in path:
        return EmbeddedStore(Path(path))
    raise ConfigError(f"store is {name!r}", hint="sqlite:/var/lib/moonpool/master.db, or memory")

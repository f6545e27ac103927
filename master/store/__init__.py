# SPDX-License-Identifier: Apache-2.0
"""Where the master keeps what it must know after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.errors import ConfigError
from moonpool.master.store.base import EPOCH_MAX, Identity, MetadataStore, SegmentRow, Writer
from moonpool.master.store.embedded import EmbeddedStore
from moonpool.master.store.etcd import EtcdOptions, EtcdStore
from moonpool.master.store.memory import MemoryStore

if TYPE_CHECKING:
    from moonpool.master.settings import MasterSettings

__all__ = [
    "EPOCH_MAX",
    "EmbeddedStore",
    "EtcdOptions",
    "EtcdStore",
    "Identity",
    "MemoryStore",
    "MetadataStore",
    "SegmentRow",
    "Writer",
    "open_store",
]


def open_store(name: str, settings: MasterSettings | None = None) -> MetadataStore:
    """Return the store that a setting names, not opened yet: ``"memory"``, ``"sqlite:PATH"`` or ``"etcd:HOST:PORT"``.

    Args:
        name: the setting.
        settings: the others, of which etcd has some.

    Raises:
        ConfigError: there is no such kind of store, or it lacks something.
    """
    kind, colon, path = name.partition(":")
    if kind == "memory" and not colon:
        return MemoryStore(keep_records=False)
    if kind == "sqlite" and path and "\0" not in path:
        return EmbeddedStore(Path(path))
    if kind == "etcd" and colon:
        return EtcdStore(EtcdOptions.parse(path, settings))
    raise ConfigError(f"store is {name!r}", hint="sqlite:/var/lib/moonpool/master.db, etcd:10.0.0.1:2379, or memory")

# SPDX-License-Identifier: Apache-2.0
"""Moonpool moves LLM KV cache between machines and pools it across a cluster.

This base package holds what every component shares and imports nothing heavy: errors, settings, addresses and
units. The transfer engine is :mod:`moonpool.transfer_engine`, the client of a pool :mod:`moonpool.store_client`, and
``moonpool.local_cluster`` starts a pool on this host.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.errors import AddressError, ConfigError, MoonpoolError

if TYPE_CHECKING:
    from moonpool.cluster import LocalCluster as LocalCluster
    from moonpool.cluster import local_cluster as local_cluster

__all__ = [
    "AddressError",
    "ConfigError",
    "MoonpoolError",
    "__version__",
    "get_include",
    "get_library_dir",
    "local_cluster",
]

__version__ = "0.1.0"


def _installed(relative: str) -> str:
    # An editable install keeps the Python files in the checkout and the built ones beside site-packages, so the
    # package has more than one folder.
    for folder in __path__:
        candidate = Path(folder) / relative
        if candidate.exists():
            return str(candidate.parent)
    raise FileNotFoundError(
        f"{relative} is not part of this installation of moonpool (looked in {', '.join(__path__)}). "
        "Try: pip install --force-reinstall moonpool"
    )


def get_include() -> str:
    """Return the folder to give a C or Cython compiler as ``-I``, for ``#include <moonpool/engine.h>``.

    Raises:
        FileNotFoundError: this installation carries no header.
    """
    return str(Path(_installed("include/moonpool/engine.h")).parent)


def get_library_dir() -> str:
    """Return the folder to give a linker as ``-L`` and ``-rpath``, for ``-lmoonpool``.

    Python and a compiled consumer in one process share this one copy of the engine.

    Raises:
        FileNotFoundError: this installation carries no library.
    """
    return _installed("lib/libmoonpool.so")


def __getattr__(name: str) -> Any:
    # Starting processes needs modules that nobody else does.
    if name in ("LocalCluster", "local_cluster"):
        from moonpool import cluster

        return getattr(cluster, name)
    raise AttributeError(f"module 'moonpool' has no attribute {name!r}")

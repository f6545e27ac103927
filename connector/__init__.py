# SPDX-License-Identifier: Apache-2.0
"""The connector that makes a vLLM instance use a pool.

``--kv-transfer-config '{"kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool.connector", ...}'``

Importing this package imports neither vLLM nor torch, and starts nothing: vLLM imports it in every process it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.connector.facade import MoonpoolConnector as MoonpoolConnector

__all__ = ["MoonpoolConnector"]


def __getattr__(name: str) -> Any:
    # The class has a base class of vLLM's.
    if name == "MoonpoolConnector":
        from moonpool.connector.facade import MoonpoolConnector

        return MoonpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["register"]

_NAME: Final = "MoonpoolConnector"


def register() -> None:
    """Make the connector known by its name. Again: nothing.

    Then ``kv_connector_module_path`` can be left out, and `MultiConnector` finds the statistics of the connector, which
    it looks up by the name of the class.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logging.getLogger(__name__).warning("moonpool: this vLLM has no KV connectors: %s", error)
        return
    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "moonpool.connector", _NAME)

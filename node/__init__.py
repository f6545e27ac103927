# SPDX-License-Identifier: Apache-2.0
"""A store node: a process that lends memory to a pool."""

from moonpool.node.node import StoreNode
from moonpool.node.settings import NodeSettings

__all__ = ["NodeSettings", "StoreNode"]

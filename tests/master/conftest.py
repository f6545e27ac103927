# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite."""

from etcd_testing.fixtures import etcd, etcd_options
from master_testing.fixtures import join, start_master

__all__ = ["etcd", "etcd_options", "join", "start_master"]

# SPDX-License-Identifier: Apache-2.0
"""The steps of ``deploy/hardware_check.sh``: ``mooncake-bench hardware``."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the pool: ``mooncake-bench store`` and ``mooncake-bench master``."""

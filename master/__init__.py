# SPDX-License-Identifier: Apache-2.0
"""The master of a pool."""

# SPDX-License-Identifier: Apache-2.0
"""Commands of ``moonpool`` for people who look after a pool."""

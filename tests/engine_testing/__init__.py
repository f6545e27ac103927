# SPDX-License-Identifier: Apache-2.0
"""What the tests of the engine are made of: a client of the wire protocol, other processes, bad networks, leak checks."""

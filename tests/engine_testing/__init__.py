# SPDX-License-Identifier: Apache-2.0
"""What the engine's tests are made of: a client of the wire protocol, other processes, bad networks, leak checks."""

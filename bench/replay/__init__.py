# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench replay``: how much of a trace's prefixes a pool of some size would have had, by eviction policy.

Nothing is transferred and no time is taken: the result is arithmetic, and the same on every machine. With ``--speed``
the trace goes through a live pool instead, in time. What the figures mean is in ``docs/bench.md``, why the default
policy is what it is in ``docs/decisions/0007-eviction.md``.
"""

__all__: list[str] = []

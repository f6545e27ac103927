# SPDX-License-Identifier: Apache-2.0
"""`mooncake-bench`: transfers between two real processes, each beside the limit of the same machine in the same run.

The command line is :mod:`moonpool.bench.cli`; ``docs/bench.md`` explains the method, the table and the JSON form.
"""

__all__: list[str] = []

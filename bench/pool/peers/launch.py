# SPDX-License-Identifier: Apache-2.0
"""Become another program that ends with its parent: ``python -m moonpool.bench.pool.peers.launch PARENT PROGRAM...``.

Servers of other projects know nothing of the pipe by which this project's processes notice that their parent is gone,
so the kernel ends them.
"""

from __future__ import annotations

import os
import sys

from moonpool.bench.parent import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Replace this process, unless the parent has ended already."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    if os.getppid() == parent:
        os.execv(program[0], program)


if __name__ == "__main__":
    main()

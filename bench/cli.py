# SPDX-License-Identifier: Apache-2.0
"""The entry point of ``mooncake-bench``."""

from __future__ import annotations

import sys

from moonpool.bench.errors import ExitStatus

__all__ = ["main"]


def main() -> None:
    """Run the command and end the process with its exit status."""
    try:
        from moonpool.bench.commands import cli
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        # The engine itself does without it, so a plain installation does not bring it.
        sys.stderr.write("mooncake-bench: numpy is not installed. Try: pip install 'moonpool[bench]'\n")
        sys.exit(ExitStatus.FAILED)
    cli()


if __name__ == "__main__":
    main()

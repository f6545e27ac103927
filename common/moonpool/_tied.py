# SPDX-License-Identifier: Apache-2.0
"""Run a `moonpool` command that ends with the process that started it: ``python -m moonpool._tied FD COMMAND...``.

FD is the reading end of a pipe whose other end the starter holds. It is closed when the starter ends, however that
came about, and then this process is ended too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

__all__ = ["main"]

_GRACE_SECONDS: Final = 3.0


def _follow(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the command."""
    fd = int(sys.argv[1])
    sys.argv[:2] = ["moonpool"]
    threading.Thread(target=_follow, args=(fd,), name="moonpool-tied", daemon=True).start()
    from moonpool.cli import main as command

    command()


if __name__ == "__main__":
    main()

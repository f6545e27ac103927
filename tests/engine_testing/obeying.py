# SPDX-License-Identifier: Apache-2.0
"""The other end of `engine_testing.processes`: a program that obeys one JSON line at a time until its input ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def obey(commands: object, ready: Any) -> None:
    """Say that the program is ready, then call the method of `commands` that each line names, and answer."""
    _answer(ready)
    for line in sys.stdin:
        message = json.loads(line)
        command: Callable[..., Any] = getattr(commands, message.pop("command"))
        try:
            _answer(command(**message))
        except Exception as error:  # noqa: BLE001 - it is reported to the test
            _answer({"failure": f"{type(error).__name__}: {error}"})


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()

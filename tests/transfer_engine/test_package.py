# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: light to import, complete in what it exports and documents."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from moonpool import transfer_engine

HEAVY = {"numpy", "click", "rich", "asyncio", "torch", "hypothesis", "difflib", "concurrent.futures", "ssl"}


def test_importing_it_loads_nothing_heavy() -> None:
    program = "import moonpool.transfer_engine, sys; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "moonpool.transfer_engine" in loaded
    assert not HEAVY & set(loaded)


def test_every_export_is_there_and_documented() -> None:
    for name in transfer_engine.__all__:
        exported = getattr(transfer_engine, name)
        assert exported.__doc__, name
        if not inspect.isclass(exported):
            continue
        for attribute, value in vars(exported).items():
            function = value.fget if isinstance(value, property) else value
            if not attribute.startswith("_") and inspect.isfunction(function):
                assert function.__doc__, f"{name}.{attribute}"


def test_it_says_that_it_is_typed() -> None:
    (folder,) = transfer_engine.__path__
    assert (Path(folder) / "py.typed").exists()

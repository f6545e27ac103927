# SPDX-License-Identifier: Apache-2.0
"""What is in deploy/, read, and what its commands need to run here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool.cli import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
#: What a command line asked for, and the settings in it.
Parsed = tuple[str, dict[str, Any]]


@pytest.fixture(scope="session")
def read() -> Callable[[str], Any]:
    """Return the one document of a YAML file of deploy/."""

    def read_(name: str) -> Any:
        return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))

    return read_


@pytest.fixture(scope="session")
def parse() -> Callable[[list[str]], Parsed]:
    """Have the command line of `moonpool` taken apart by the command itself, without running it."""

    def parse_(arguments: list[str]) -> Parsed:
        name, *rest = arguments
        with cli.make_context("moonpool", list(arguments)) as above:
            command = cli.get_command(above, name)
            assert command is not None
            with command.make_context(name, rest, parent=above) as context:
                return name, {key: value for key, value in context.params.items() if value not in (None, False)}

    return parse_


@pytest.fixture(scope="session")
def words_of() -> Callable[[str], list[str]]:
    """Return the arguments of `moonpool` in a shell line, without what the shell takes for itself."""

    def words_of_(line: str) -> list[str]:
        words = shlex.split(line)
        words = words[words.index("moonpool") + 1 :]
        return [word for word in words if ">" not in word]

    return words_of_


@pytest.fixture
def bin_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for PATH with `moonpool` in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "moonpool"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m moonpool.cli "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return folder

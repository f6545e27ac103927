# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md promises what a test does, and names commands and counters that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from moonpool.cli import cli
from moonpool.master import Master

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_row_of_the_table_of_faults_has_a_test_that_there_is() -> None:
    table = PAGE[PAGE.index("| fault | result | test |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 20
    for row in table:
        named = re.search(r"`(tests/\S+\.py)::(\w+)` \|$", row)
        assert named is not None, row
        path, name = named.groups()
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), row


# What is spelled in capitals stands for something.
COMMANDS = sorted({found for found in re.findall(r"`(moonpool [a-z]+(?: [^`]*)?)`", PAGE) if "…" not in found})


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_commands(line: str) -> None:
    words = shlex.split(line)[1:]
    command = cli.get_command(cli.make_context("moonpool", list(words)), words[0])
    assert command is not None
    command.make_context(words[0], words[1:], resilient_parsing=len(words) == 1)


def test_counters_are_counters() -> None:
    named = set(re.findall(r"`(\w+_total)`", PAGE))
    assert len(named) > 5
    with Master(listen="127.0.0.1:0", http=None, store="memory") as master:
        shown = master.server.role.metrics()
    assert not {name for name in named if f"moonpool_master_{name} " not in shown}

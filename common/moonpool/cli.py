# SPDX-License-Identifier: Apache-2.0
"""The command ``moonpool``: a group whose commands belong to the components and are imported when they are used."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Final

import click

import moonpool
from moonpool.errors import MoonpoolError

__all__ = ["check_descriptor", "cli", "main"]

#: Command -> where it is. A component that is not installed has no commands.
COMMANDS: Final = {
    "master": "moonpool.master.command:master",
    "node": "moonpool.node.command:node",
    "status": "moonpool.store_client.commands.status:status",
    "ls": "moonpool.store_client.commands.ls:ls",
    "rm": "moonpool.store_client.commands.rm:rm",
    "pin": "moonpool.store_client.commands.pin:pin",
    "drain": "moonpool.store_client.commands.drain:drain",
    "move": "moonpool.store_client.commands.move:move",
}

# As mooncake-bench has them.
_FAILED: Final = 3
_INTERRUPTED: Final = 130

_EXAMPLES = """\b
Examples:
  moonpool master --store sqlite:/var/lib/moonpool/master.db
  moonpool node --master 127.0.0.1:7600 --dram 8GiB
  moonpool status
"""


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class LazyGroup(click.Group):
    """Its commands are modules that are imported when they are asked for, so that `moonpool ls` loads no server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands that are installed, in the order of the table."""
        return [name for name, place in COMMANDS.items() if _there(place.partition(":")[0])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        module, _, attribute = COMMANDS.get(cmd_name, "").partition(":")
        if not module or not _there(module):
            return None
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=_EXAMPLES,
)
@click.version_option(moonpool.__version__, prog_name="moonpool")
def cli() -> None:
    """Run a pool of KV cache, and look after one.

    A master knows where chunks are, nodes lend memory, clients read and write it. Each setting can also come from the
    environment or from the file that MOONPOOL_CONFIG names.

    The exit status is 0 when it worked, 2 for a command line that makes no sense, 3 when something failed, and 130
    after Ctrl-C.
    """


def check_descriptor(number: int) -> None:
    """Refuse a `--ready-fd` before anything is started for whoever waits there.

    Raises:
        click.BadParameter: nothing is open under this number.
    """
    try:
        os.fstat(number)
    except (OSError, OverflowError) as error:
        raise click.BadParameter(f"{number} is no open descriptor", param_hint="--ready-fd") from error


def main() -> None:
    """Run the command and end the process with its exit status."""
    try:
        status = cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code if isinstance(error, click.UsageError) else _FAILED
    except (click.Abort, KeyboardInterrupt):
        status = _INTERRUPTED
    except MoonpoolError as error:
        sys.stderr.write(f"moonpool: {error}\n")
        status = _FAILED
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Write docs/settings.md from the settings dataclasses: ``python tools/settings_reference.py FILE|-``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moonpool.connector.settings import ConnectorSettings
from moonpool.master import MasterSettings
from moonpool.node import NodeSettings
from moonpool.settings import COMPONENTS, describe
from moonpool.store_client import StoreClientSettings
from moonpool.transfer_engine import EngineSettings

# What each component is configured by, and who reads it.
SETTINGS = {
    "connector": (
        ConnectorSettings,
        "`MoonpoolConnector` in vLLM: the same names are keys of `kv_connector_extra_config` ([vllm.md](vllm.md)).",
    ),
    "engine": (EngineSettings, "`TransferEngine(...)`: the same names are its keyword arguments."),
    "master": (
        MasterSettings,
        "`moonpool master`, and `moonpool.master.Master(...)`: the same names are its arguments.",
    ),
    "node": (NodeSettings, "`moonpool node`, and `StoreNode(...)`: the same names are its keyword arguments."),
    "store_client": (StoreClientSettings, "`StoreClient(...)`: the same names are its keyword arguments."),
}

HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/settings_reference.py out of the settings dataclasses; `make docs` writes it again. -->
# Settings

Each value is taken from the first of these that has it:

1. the argument in the code;
2. the environment variable `MOONPOOL_<COMPONENT>_<SETTING>` (an empty one counts as not set);
3. the table `[<component>]` of the TOML file that the environment variable `MOONPOOL_CONFIG` names;
4. the default.

Sizes are bytes, or carry a unit: `4KiB`, `1MiB`, `2GiB` (powers of two). Durations are seconds, or carry a unit:
`20us`, `250ms`, `5s`, `2min`. `none` stands for no value where a setting may have none.
A secret may be `@` and the path of the file that it is in. An unknown name, a bad unit, a
wrong type or a value out of bounds is an error that names the nearest valid choice.
"""


def reference() -> str:
    """Return the whole page."""
    assert set(SETTINGS) == set(COMPONENTS)
    pages = [HEAD]
    for component, (cls, reader) in SETTINGS.items():
        rows = describe(cls, component)
        example = "\n".join(
            f"{row.name} = {row.default if re.fullmatch('[0-9.]+|true|false', row.default) else repr(row.default)}"
            for row in rows
            if row.default != "none"
        ).replace("'", '"')
        pages.append(
            f"\n## {component}\n\n{reader}\n\nAs a file, with the defaults:\n\n```toml\n[{component}]\n{example}\n```\n"
        )
        for row in rows:
            bounds = f", {row.bounds}" if row.bounds else ""
            pages.append(
                f"\n### {row.name}\n\n{row.doc}\n\n"
                f"* {row.type[0].upper()}{row.type[1:]}{bounds}. Default: `{row.default}`\n* `{row.variable}`\n"
            )
    return "".join(pages)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "-":
        sys.stdout.write(reference())
    else:
        Path(sys.argv[1]).write_text(reference(), encoding="utf-8")

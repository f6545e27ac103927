# SPDX-License-Identifier: Apache-2.0
"""Print requirements out of pyproject.toml, the one place that names them.

``python tools/requirements.py GROUP...`` where GROUP is ``build-system``, ``project`` or the name of an extra.
"""

import re
import sys
from pathlib import Path


def requirements(pyproject: str, group: str) -> list[str]:
    """Return the requirements of one group.

    Reads the few lines it needs itself: this runs on Python 3.10, which has no TOML reader, before anything is
    installed. Each requirement is a string of its own in an array.
    """
    section, key = {
        "build-system": ("build-system", "requires"),
        "project": ("project", "dependencies"),
    }.get(group, ("project.optional-dependencies", group))
    table = re.search(rf"^\[{re.escape(section)}\]\n(.*?)(?=^\[|\Z)", pyproject, re.DOTALL | re.MULTILINE)
    array = table and re.search(rf"^{re.escape(key)} = \[(.*?)\]$", table[1], re.DOTALL | re.MULTILINE)
    if not array:
        sys.exit(f"pyproject.toml has no requirements called {group!r}")
    return re.findall(r'"([^"]+)"', array[1])


if __name__ == "__main__":
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name in sys.argv[1:]:
        print("\n".join(requirements(text, name)))

# SPDX-License-Identifier: Apache-2.0
"""Other engines, where the user has installed them."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from moonpool.bench.errors import BenchError

__all__ = ["imported", "version_of"]


def imported(module: str, package: str) -> Any:
    """Return a module of another engine.

    Raises:
        BenchError: it is not installed, or does not import; the message says why.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise BenchError(f"{module} does not import: {error}") from error
        raise BenchError("not installed", hint="pip install 'moonpool[compare]'") from error
    except Exception as error:
        # Whatever another project does while it is imported: it is named, and the others are measured.
        library = re.match(r"(lib[^.]+)\.so\S*: cannot open", str(error))
        hint = f"the system package of {library[1]}, such as {library[1]}1" if library else ""
        raise BenchError(f"{module} does not import: {error}", hint=hint) from error


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these that is installed."""
    installed = [found for name in distributions for found in importlib.metadata.distributions(name=name)]
    return installed[0].version if installed else None

# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by the command `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Authority", "Pair"]

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate, its key, and the authority that its owner trusts: arguments of a master, node or client."""

    tls_cert: str
    tls_key: str
    tls_ca: str


class Authority:
    """Issues certificates into a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no command openssl")
        self._folder = folder / name
        self._folder.mkdir()
        self.path = self._folder / "ca.pem"
        subject = ("-subj", f"/CN={name}", "-days", "30")
        self._openssl("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", *subject)

    def issue(self, name: str, alternative: str = "IP:127.0.0.1", days: int = 30) -> Pair:
        """Return a new certificate for a name; `days` below 0: one that is out of date."""
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}")
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", *names)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-days", str(days), "-out", f"{name}.pem")
        return Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"), str(self.path))

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self._folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

# SPDX-License-Identifier: Apache-2.0
"""The four devices of the machine."""

from __future__ import annotations

import subprocess

import pytest


@pytest.mark.parametrize("device", ["rxea0", "rxea1", "rxeb0", "rxeb1"])
def test_devices_are_active(device: str) -> None:
    out = subprocess.run(["ibv_devinfo", "-d", device], capture_output=True, text=True, check=True, timeout=20).stdout
    assert "PORT_ACTIVE" in out
    assert "active_mtu:\t\t4096" in out

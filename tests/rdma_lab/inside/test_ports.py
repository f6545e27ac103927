# SPDX-License-Identifier: Apache-2.0
"""The four devices of the machine, and what happens to their network."""

from __future__ import annotations

import pytest
from pyverbs.device import Context

from rdma_lab.inside.links import DEVICES, Links, physical_state, run, state, wait_until
from rdma_lab.inside.peer import PORT

MTU_1024, MTU_4096 = 3, 5  # of enum ibv_mtu


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_is_active_with_the_largest_mtu(device: str) -> None:
    shown = run("ibv_devinfo", "-d", device)
    assert "PORT_ACTIVE" in shown
    assert "active_mtu:\t\t4096" in shown


def test_a_link_that_goes_down_takes_both_ends_of_its_pair_and_no_other(links: Links) -> None:
    links.down("a0")
    wait_until(lambda: state("rxea0") == state("rxea1") == "DOWN", "both devices DOWN")
    assert (physical_state("rxea0"), physical_state("rxea1")) == ("Disabled", "Polling")
    assert state("rxeb0") == state("rxeb1") == "ACTIVE"
    links.up("a0")
    wait_until(lambda: state("rxea0") == state("rxea1") == "ACTIVE", "both devices ACTIVE")


def test_the_mtu_of_a_device_follows_its_link(links: Links) -> None:
    def mtu() -> int:
        with Context(name="rxeb0") as context:
            found: int = context.query_port(PORT).active_mtu
            return found

    assert mtu() == MTU_4096
    links.mtu("b0", 1500)
    wait_until(lambda: mtu() == MTU_1024, "an MTU of 1024")

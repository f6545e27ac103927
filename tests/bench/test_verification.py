# SPDX-License-Identifier: Apache-2.0
"""A backend that does not do what it says is found out on either side, and the exit status says so."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result
from engine_testing.fixtures import no_leaks

from moonpool.bench import backends, commands
from moonpool.bench.backends import InitiatorSide, RowSide
from moonpool.bench.backends.moonpool_engine import MoonpoolTcp
from moonpool.bench.errors import ExitStatus
from moonpool.bench.measure import Window

__all__ = ["no_leaks"]

TINY = """
    --block-size 4KiB --batch 2 --footprint 64KiB --duration 1ms --warmup 0 --rounds 1 --only engine
"""


class Meddler(InitiatorSide):
    """Does what another side does, and something else after the window."""

    def __init__(self, honest: InitiatorSide, meddle: Any) -> None:
        super().__init__(len(honest.next_batch))
        self._honest = honest
        self._meddle = meddle
        self.next_batch = honest.next_batch

    def run(self, seconds: float) -> Window:
        window = self._honest.run(seconds)
        if seconds:  # not after the warm-up, which is 0 here: the window would write over the damage
            self._meddle()
        return window

    def close(self) -> None:
        self._honest.close()


class DamagesItself(MoonpoolTcp):
    """Flips a bit in the memory of the initiating side."""

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        def flip() -> None:
            row.memory[5000] ^= 1

        return Meddler(super().initiator(row, offer), flip)


class WritesAstray(MoonpoolTcp):
    """Writes 8 bytes more than it was asked to, into the memory of the target."""

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        honest = super().initiator(row, offer)
        engine, region, peer = self._engine, self._region, self._peer
        assert engine is not None
        assert region is not None
        assert peer is not None
        (name,) = peer.regions

        def stray() -> None:
            engine.write(peer, region, peer.regions[name], 0, 4096 + 16, 8).wait()

        return Meddler(honest, stray)


def invoke(monkeypatch: pytest.MonkeyPatch, backend: type[MoonpoolTcp], op: str) -> Result:
    monkeypatch.setitem(backends.ENGINES, backend.transport, backend)
    return CliRunner().invoke(commands.cli, ["transfer", "--transport", backend.transport, "--op", op, *TINY.split()])


@pytest.mark.parametrize(
    ("backend", "op", "where"),
    [
        (DamagesItself, "read", "initiator"),
        (DamagesItself, "write", "initiator"),
        (WritesAstray, "write", "target"),
        (WritesAstray, "read", "target"),
    ],
)
def test_wrong_bytes_on_either_side_are_status_1(
    monkeypatch: pytest.MonkeyPatch, backend: type[MoonpoolTcp], op: str, where: str
) -> None:
    result = invoke(monkeypatch, backend, op)
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert f"engine, round 1, {where}: " in result.output
    assert "BAD" in result.output

# SPDX-License-Identifier: Apache-2.0
"""Several processes with an engine each, and a bad network between every two of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from engine_testing.processes import Program

from chaos.places import THREADS
from moonpool.transfer_engine.testing import FaultProxy

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
#: Short, so that what a fault holds up is given up within a run; small slices, so that a transfer is many of them.
OPTIONS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "secret": "chaos",
    "lanes": 2,
    "io_threads": 2,
    "slice_bytes": 1 << 16,
    "connect_timeout": 2.0,
    "progress_timeout": 1.0,
    "deadline": 4.0,
}


class Cluster:
    """Starts the processes, and restarts those that were killed; every process has traffic to every other one.

    Args:
        size: number of processes.
        seed: of the traffic and of the networks.
        transports: setting of the engines.

    Attributes:
        networks: by the number of the connecting and of the accepting process.
    """

    def __init__(self, size: int, seed: int, transports: str = "tcp") -> None:
        self.size = size
        self._seed = seed
        self._options = {**OPTIONS, "transports": transports}
        self._pool = ThreadPoolExecutor(size)
        self._generations = [0] * size
        self._programs: list[Program | None] = [None] * size
        self.networks: dict[tuple[int, int], FaultProxy] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._programs = list(self._pool.map(self._start_program, range(size)))
            for source, target in self._pairs():
                address = self._program(target).address
                self.networks[source, target] = FaultProxy(address, seed=seed * 1000 + source * size + target)
            for source, target in self._pairs():
                self._program(target).ask("serve", owner=source, generation=0)
            undo.pop_all()

    # ---------------------------------------------------------------- all of them

    def all(self, work: Callable[[Program], _T]) -> list[_T]:
        """Do something with every process at once."""
        return list(self._pool.map(lambda number: work(self._program(number)), range(self.size)))

    def start_traffic(self) -> None:
        """Let every process begin transfers to every other one."""
        for number in range(self.size):
            self._start_traffic_of(number)

    def calm(self) -> None:
        """End the traffic, with the faults that still are; then settle everything without any."""
        self.all(lambda program: program.ask("stop"))

    def settle(self) -> None:
        """Leave nothing in doubt. There must be no fault any more."""
        self.all(lambda program: program.ask("settle"))

    def sockets_max(self) -> int:
        """Return how many sockets a process has at most when it is calm: each thread has a peer per target."""
        connections_of_a_peer = 1 + int(OPTIONS["lanes"])
        listeners = 1
        if self._options["transports"] != "tcp":
            # The Unix socket that shm shares memory over, and the one it listens on.
            connections_of_a_peer += 1
            listeners += 1
        # As many come from the others as go to them.
        return listeners + 2 * THREADS * (self.size - 1) * connections_of_a_peer

    # ---------------------------------------------------------------- one of them

    def pause(self, number: int) -> None:
        """Stop a process with SIGSTOP."""
        self._program(number).pause()

    def resume(self, number: int) -> None:
        """Let it go on with SIGCONT."""
        self._program(number).resume()

    def kill(self, number: int) -> None:
        """Kill a process with SIGKILL."""
        program = self._program(number)
        program.kill()
        program.close()
        self._programs[number] = None

    def leave(self, number: int) -> None:
        """End a process in good order. It must leave nothing of its own behind."""
        program = self._program(number)
        self._programs[number] = None
        status = program.close()
        assert status == 0, f"process {number} ended with status {status}"

    def renew(self, number: int, owner: int) -> None:
        """Let a process release the regions that another one is using, and make new ones of the same names."""
        self._program(number).ask("renew", owner=owner)

    def restart(self, number: int) -> None:
        """Start a process that was killed or has left. Nobody else is restarted; the networks lead to the new one."""
        self._generations[number] += 1
        program = self._programs[number] = self._start_program(number)
        for other in self._others(number):
            self.networks[other, number].retarget(program.address)
            self._program(other).ask("serve", owner=number, generation=self._generations[number])
            program.ask("serve", owner=other, generation=self._generations[other])
        self._start_traffic_of(number)

    def close(self) -> None:
        """End everything in good order."""
        try:
            for number, program in enumerate(self._programs):
                if program is not None:
                    self.leave(number)
        finally:
            for program in self._programs:
                if program is not None:
                    program.kill()
                    program.close()
            for network in self.networks.values():
                network.close()
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- parts

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return ((source, target) for source in range(self.size) for target in self._others(source))

    def _others(self, number: int) -> list[int]:
        return [other for other in range(self.size) if other != number]

    def _program(self, number: int) -> Program:
        program = self._programs[number]
        assert program is not None, f"process {number} is not running"
        return program

    def _start_program(self, number: int) -> Program:
        setup = {
            "number": number, "generation": self._generations[number], "seed": self._seed, "options": self._options
        }  # fmt: skip
        return Program("chaos.node", setup, timeout=300.0)

    def _start_traffic_of(self, number: int) -> None:
        targets = {str(target): self.networks[number, target].address for target in self._others(number)}
        self._program(number).ask("start", targets=targets)

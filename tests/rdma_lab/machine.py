# SPDX-License-Identifier: Apache-2.0
"""The emulated machine: started, talked to in lines of JSON, and ended, each within a limit."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import fake_cuda

from rdma_lab import image
from rdma_lab.cpio import Archive
from rdma_lab.inside import CUDA

if TYPE_CHECKING:
    from typing_extensions import Self

# The port that tests are driven through; `inside/runner.py` looks for its name.
PORT = "moonpool.lab"
_CONSOLE_LINES = 40
_SHARED = ("rdma_lab/inside", "engine_testing", "fake_cuda")  # folders of tests/ that are there inside


class MachineError(Exception):
    """The machine is not there or no longer; says why, with what its console showed last."""


def qemu(kernel: Path, initrd: str, parameters: str = "", *, memory: int = 1500) -> list[str]:
    """Return the command that boots the machine.

    It ends when the process that starts it does, however that ends. No KVM: hosts that have /dev/kvm may still not run
    a stock kernel under it, and a test must not depend on which host it meets.
    """
    machine = f"-accel tcg,thread=multi -cpu max -m {memory} -smp 2 -no-reboot -nodefaults -display none -net none"
    # A host with much to do lets no timer come in time, and the kernel would take its interrupts for broken.
    options = f"console=ttyS0 panic=-1 no_timer_check mitigations=off random.trust_cpu=on rdinit=/lab/init {parameters}"
    # The shell looks whether this process was there still when it was bound to it.
    bound = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
    return [
        *bound,
        "qemu-system-x86_64",
        *machine.split(),
        "-kernel",
        str(kernel),
        "-initrd",
        initrd,
        "-append",
        options,
    ]


def initrd(base: Path, job: str) -> BinaryIO:
    """Return a file without a name: the base, then Moonpool, the tests and the shell commands to run."""
    stream = tempfile.TemporaryFile(dir=image.CACHE)  # noqa: SIM115 - the caller closes it
    with base.open("rb") as source:
        while block := source.read(1 << 20):
            stream.write(block)
    overlay = Archive(stream)
    overlay.file("/lab/init", image.HERE / "init.sh")
    overlay.text("/lab/job", job)
    overlay.file("/lab/pyproject.toml", image.ROOT / "pyproject.toml")
    for folder in _SHARED:
        for path in sorted((image.ROOT / "tests" / folder).rglob("*")):
            if path.suffix != ".pyc" and path.is_file():
                overlay.file(f"/lab/tests/{path.relative_to(image.ROOT / 'tests')}", path)
    for path in sorted((image.ROOT / "deploy").glob("*.sh")):
        overlay.file(f"/lab/deploy/{path.name}", path)
    overlay.file(str(CUDA), fake_cuda.library())
    image.add_distribution(overlay, metadata.distribution("moonpool"))
    overlay.close()
    stream.flush()
    return stream


class Machine:
    """A process that is talked to in lines of JSON.

    Args:
        command: given the number of its descriptor for the talk, the command that starts it.
        limit: seconds after which it is over in any case.
        hold: descriptors that it needs besides.
        show: gets what comes on its console.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        limit: float,
        hold: Sequence[int] = (),
        show: Callable[[bytes], object] | None = None,
    ) -> None:
        self._show = show
        self._end = time.monotonic() + limit
        self._limit = limit
        self._console = b""
        self._received = b""
        with ExitStack() as cleanup:
            self._channel, theirs = socket.socketpair()
            cleanup.callback(self._channel.close)
            with theirs:
                self._process = subprocess.Popen(
                    command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno(), *hold],
                )
            cleanup.callback(self._kill)
            self.pid = self._process.pid
            self._selector = cleanup.enter_context(selectors.DefaultSelector())
            assert self._process.stdout is not None
            self._selector.register(self._process.stdout, selectors.EVENT_READ)
            self._selector.register(self._channel, selectors.EVENT_READ)
            self._cleanup = cleanup.pop_all()

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._error(f"takes no message: {error}") from error

    def receive(self, limit: float) -> dict[str, Any]:
        """Return the next message, or raise after `limit` seconds."""
        end = min(time.monotonic() + limit, self._end)
        while b"\n" not in self._received:
            left = end - time.monotonic()
            if left <= 0:
                over = self._limit if end == self._end else limit
                raise self._error(f"has not answered within {over:g} s")
            for key, _ in self._selector.select(left):
                if key.fileobj is self._channel:
                    self._read_channel()
                else:
                    self._read_console()
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _read_channel(self) -> None:
        data = self._channel.recv(1 << 16)
        if not data:
            self.drain()
            raise self._error(f"ended with status {self._process.wait(10)}")
        self._received += data

    def _read_console(self) -> None:
        assert self._process.stdout is not None
        data = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
        if not data:
            self._selector.unregister(self._process.stdout)
        if self._show is not None:
            self._show(data)
        self._console = (self._console + data)[-(1 << 16) :]

    def drain(self) -> None:
        """Take what the console still shows before it ends; for a few seconds at most."""
        assert self._process.stdout is not None
        end = time.monotonic() + 5.0
        while self._process.stdout in self._selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._process.stdout:
                    self._read_console()

    def console(self) -> str:
        """Return the last lines of its console."""
        lines = self._console.decode(errors="replace").replace("\r", "").splitlines()
        return "\n".join(lines[-_CONSOLE_LINES:])

    def _error(self, what: str) -> MachineError:
        shown = self.console() or "(nothing)"
        return MachineError(f"the emulated machine {what}. Its console showed last:\n{shown}")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self) -> None:
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def boot(job: str, *, limit: float, show: Callable[[bytes], object] | None = None) -> Machine:
    """Start the machine with Moonpool, the tests and a job; the image is made first if need be."""
    kernel, base = image.prepare()
    with initrd(base, job) as archive:
        held = archive.fileno()
        return Machine(
            lambda fd: [*qemu(kernel.binary, f"/proc/self/fd/{held}", "quiet"), *devices(fd)],
            limit=limit,
            hold=[held],
            show=show,
        )


def devices(fd: int) -> list[str]:
    """Return the options of a console on standard output and a port that leads to `fd`."""
    channel = ["-chardev", f"socket,id=channel,fd={fd}", "-device", "virtio-serial"]
    port = ["-device", f"virtserialport,chardev=channel,name={PORT}"]
    return ["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console", *channel, *port]


def shell() -> int:
    """Boot the machine with a shell on this terminal, without any limit."""
    kernel, base = image.prepare()
    size = shutil.get_terminal_size()
    job = f"stty cols {size.columns} rows {size.lines}; setsid cttyhack bash || true"
    console = ["-chardev", "stdio,id=console,mux=on,signal=off", "-serial", "chardev:console", "-mon", "console"]
    with initrd(base, f"cd /root\n{job}") as archive:
        held = archive.fileno()
        command = [*qemu(kernel.binary, f"/proc/self/fd/{held}", "quiet"), *console]
        return subprocess.run(command, pass_fds=[held], check=False).returncode

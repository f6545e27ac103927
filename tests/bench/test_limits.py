# SPDX-License-Identifier: Apache-2.0
"""The Python face of the limits. What they move and how they fail is tested natively, in limits_test.cpp."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading

import numpy as np
import pytest
from engine_testing.fixtures import no_leaks

from moonpool import _limits

__all__ = ["no_leaks"]

TOKEN = b"0123456789abcdef"
BLOCK = 4096


def descriptors(memory: np.ndarray, batch: int = 2, streams: int = 1) -> _limits.Descriptors:
    count = len(memory) // BLOCK
    return _limits.Descriptors(memory, np.arange(count) * BLOCK, np.full(count, BLOCK, dtype=np.int64), batch, streams)


def progress(streams: int = 1) -> np.ndarray:
    return np.zeros(streams, dtype=np.uint64)


def link_pair(connections: int = 1, timeout_ms: int = 5000) -> tuple[_limits.Link, _limits.Link]:
    servers: list[_limits.Link] = []
    with _limits.Listener("127.0.0.1") as listener:
        accepting = threading.Thread(
            target=lambda: servers.append(listener.accept(TOKEN, connections, timeout_ms))
        )  # fmt: skip
        accepting.start()
        client = _limits.connect("127.0.0.1", listener.port, TOKEN, connections, timeout_ms)
        accepting.join()
    return client, servers[0]


@pytest.mark.parametrize("mode", [_limits.ACKED, _limits.STREAM])
@pytest.mark.parametrize("op", [_limits.READ, _limits.WRITE])
def test_moves_bytes_and_tells_how_many(op: int, mode: int) -> None:
    ours, theirs = np.zeros(8 * BLOCK, np.uint8), np.zeros(8 * BLOCK, np.uint8)
    source, destination = (ours, theirs) if op == _limits.WRITE else (theirs, ours)
    source[:] = np.arange(len(source)) % 251
    client, server = link_pair(2)
    with client, server:
        done, theirs_done, samples = progress(), progress(), np.zeros(4, dtype=np.int64)
        serving = threading.Thread(target=server.server_run, args=(descriptors(theirs), op, mode, 1, theirs_done))
        serving.start()
        window_ns, batches, nbytes, kept = client.client_run(descriptors(ours), op, mode, 0, None, done, samples)
        serving.join()
    assert done.tolist() == theirs_done.tolist() == [batches]
    assert (nbytes, window_ns > 0) == (batches * 2 * BLOCK, True)
    assert kept == (batches if mode == _limits.ACKED else 0)
    moved = min(batches, 4) * 2 * BLOCK
    assert np.array_equal(destination[:moved], source[:moved])
    assert not destination[moved:].any()


def test_copies_from_read_only_memory() -> None:
    source = np.frombuffer(bytes(range(256)) * 64, dtype=np.uint8)
    destination = np.zeros(len(source), np.uint8)
    result = _limits.copy_run(descriptors(destination), descriptors(source), 1, 0, None, progress(), None)
    assert result[1:] == (1, 2 * BLOCK, 0)
    assert np.array_equal(destination[: 2 * BLOCK], source[: 2 * BLOCK])


@pytest.mark.parametrize("op", [_limits.READ, _limits.WRITE])
def test_the_kernel_copies_between_processes(op: int) -> None:
    # This process stands for both.
    ours, theirs = np.zeros(8 * BLOCK, np.uint8), np.zeros(8 * BLOCK, np.uint8)
    source, destination = (ours, theirs) if op == _limits.WRITE else (theirs, ours)
    source[:] = np.arange(len(source)) % 251
    places = np.arange(8) * BLOCK
    lengths = np.full(8, BLOCK, dtype=np.int64)
    other = _limits.Descriptors.of_process(theirs.ctypes.data, len(theirs), places[::-1].copy(), lengths, 2, 1)
    own = _limits.Descriptors(ours, places, lengths, 2, 1)
    result = _limits.process_run(os.getpid(), own, other, op, 1, 0, None, progress(), None)
    assert result[1:] == (1, 2 * BLOCK, 0)
    moved = np.zeros(len(source), np.uint8)
    for mine, other_place in zip(places[:2], places[::-1][:2], strict=True):
        to, at = (other_place, mine) if op == _limits.WRITE else (mine, other_place)
        moved[to : to + BLOCK] = source[at : at + BLOCK]
    assert np.array_equal(destination, moved)


def test_memory_of_another_process_is_used_for_nothing_else() -> None:
    memory = np.zeros(8 * BLOCK, np.uint8)
    places, lengths = np.arange(8) * BLOCK, np.full(8, BLOCK, dtype=np.int64)
    foreign = _limits.Descriptors.of_process(memory.ctypes.data, len(memory), places, lengths, 2, 1)
    own = descriptors(memory)
    for arguments in ((foreign, own), (own, foreign)):
        with pytest.raises(ValueError, match="another process"):
            _limits.copy_run(*arguments, 1, 0, None, progress(), None)
    with pytest.raises(ValueError, match="another process"):
        _limits.process_run(os.getpid(), foreign, own, _limits.READ, 1, 0, None, progress(), None)
    with subprocess.Popen(["true"]) as ended:
        pass
    with pytest.raises(_limits.LimitError, match="No such process") as gone:
        _limits.process_run(ended.pid, own, foreign, _limits.READ, 1, 0, None, progress(), None)
    assert gone.value.code == "SYSTEM"


def test_closing_ends_a_run_in_another_thread() -> None:
    client, server = link_pair()
    failures: list[_limits.LimitError] = []
    entered = threading.Event()

    def serve() -> None:
        entered.set()
        with pytest.raises(_limits.LimitError) as error:
            server.server_run(descriptors(np.zeros(8 * BLOCK, np.uint8)), _limits.WRITE, _limits.ACKED, 1, progress())
        failures.append(error.value)

    serving = threading.Thread(target=serve)
    serving.start()
    entered.wait()
    server.close()
    server.close()
    serving.join()
    # Closed before or after the run began: an error of its own either way, and never a hang.
    assert failures[0].code in ("ABORTED", "CLOSED")
    with pytest.raises(_limits.LimitError):
        server.server_run(descriptors(np.zeros(8 * BLOCK, np.uint8)), _limits.WRITE, _limits.ACKED, 1, progress())
    client.close()


def test_closing_ends_an_accept_in_another_thread() -> None:
    listener = _limits.Listener("127.0.0.1")
    codes: list[str] = []
    entered = threading.Event()

    def accept() -> None:
        entered.set()
        with pytest.raises(_limits.LimitError) as error:
            listener.accept(TOKEN, 1, 60_000)
        codes.append(error.value.code)

    accepting = threading.Thread(target=accept)
    accepting.start()
    entered.wait()
    listener.close()
    accepting.join()
    assert codes[0] in ("ABORTED", "CLOSED")


def test_the_gil_is_free_during_a_run() -> None:
    # Server and client are threads of one interpreter: with the GIL held by one, the other could never answer.
    client, server = link_pair(timeout_ms=2000)
    with client, server:
        memory = np.zeros(8 * BLOCK, np.uint8)
        serving = threading.Thread(
            target=server.server_run, args=(descriptors(memory), _limits.READ, _limits.ACKED, 1, progress())
        )
        serving.start()
        client.client_run(descriptors(memory.copy()), _limits.READ, _limits.ACKED, 0, None, progress(), None)
        serving.join()


def test_errors_say_what_and_why() -> None:
    with pytest.raises(_limits.LimitError, match="not a numeric address") as error:
        _limits.Listener("localhost")
    assert error.value.code == "INVALID"
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.code, again.errno, str(again)) == ("INVALID", 0, str(error.value))
    with _limits.Listener("127.0.0.1") as listener:
        with pytest.raises(_limits.LimitError, match=r"listen on 127\.0\.0\.1") as taken:
            _limits.Listener("127.0.0.1", listener.port)
        assert (taken.value.code, taken.value.errno > 0) == ("SYSTEM", True)
        with pytest.raises(ValueError, match="token needs 16 bytes"):
            listener.accept(b"short", 1, 1)


def test_arguments_that_do_not_fit_are_refused() -> None:
    memory = np.zeros(8 * BLOCK, np.uint8)
    good = descriptors(memory)
    assert len(good) == 8
    with pytest.raises(ValueError, match="same number of entries"):
        _limits.Descriptors(memory, np.zeros(2, np.int64), np.ones(3, np.int64), 1, 1)
    with pytest.raises(ValueError, match="empty"):
        _limits.Descriptors(memory[:0], np.zeros(1, np.int64), np.ones(1, np.int64), 1, 1)
    with pytest.raises(ValueError, match="one entry per stream"):
        _limits.copy_run(good, good, 1, 0, None, progress(2), None)
    with pytest.raises(ValueError, match="exactly one entry"):
        _limits.copy_run(good, good, 1, 0, np.zeros(2, np.int32), progress(), None)
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        _limits.Descriptors(memory, np.zeros(1, np.int32), np.ones(1, np.int64), 1, 1)
    with pytest.raises(_limits.LimitError, match="batches of 3"):
        _limits.copy_run(descriptors(memory, 3), descriptors(memory, 3), 1, 0, None, progress(), None)

# SPDX-License-Identifier: Apache-2.0
"""Opening, naming and closing an engine."""

from __future__ import annotations

import gc
import random
import re
import socket
import threading
import warnings

import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.leaks import nothing_left_behind, sockets

from moonpool.transfer_engine import (
    LEAF_BYTES,
    AddressError,
    ArgumentTypeError,
    ClosedError,
    ConfigError,
    InvalidArgumentError,
    ListenError,
    OutOfRangeError,
    TransferEngine,
    TransportInfo,
    combine_batch,
    copy_batch,
    digest,
    digest_batch,
    probe,
)


def test_identity(open_engine: OpenEngine) -> None:
    engine, other = open_engine("decode-0"), open_engine()
    assert (engine.name, other.name) == ("decode-0", "engine")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", engine.address or "")
    assert re.fullmatch(r"[0-9a-f]{32}", engine.incarnation)
    assert engine.incarnation != other.incarnation
    assert repr(engine) == f"<TransferEngine 'decode-0' at {engine.address}, 0 regions>"


def test_an_engine_that_does_not_listen_has_no_address_and_no_socket(open_engine: OpenEngine) -> None:
    before = sockets()
    engine = open_engine(listen=None)
    assert engine.address is None
    assert "not listening" in repr(engine)
    assert sockets() == before


def test_listening_on_ipv6(open_engine: OpenEngine) -> None:
    address = open_engine(listen="[::1]:0").address
    assert re.fullmatch(r"\[::1\]:\d+", address or "")


def test_listening_on_a_host_name(open_engine: OpenEngine) -> None:
    engine = open_engine(listen="localhost:0")
    assert engine.address is not None
    open_engine(listen=None).connect(engine.address)


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1:7700", "127.0.0.1:99999", "127.0.0.1:http", "", ":", "[::1:7"])
def test_listening_on_no_address(listen: str) -> None:
    with pytest.raises(AddressError) as caught:
        TransferEngine(listen=listen)
    assert caught.value.hint


def test_listening_on_a_name_that_does_not_exist() -> None:
    with pytest.raises(AddressError) as caught:
        TransferEngine(listen="no-such-host.invalid:7700", secret=b"s")
    assert "no-such-host.invalid" in str(caught.value)


def test_listening_on_a_port_that_is_taken(open_engine: OpenEngine) -> None:
    taken = open_engine().address
    with pytest.raises(ListenError) as caught:
        TransferEngine(listen=taken)
    assert taken is not None
    assert taken in str(caught.value)
    assert caught.value.hint


def test_listening_on_a_foreign_address() -> None:
    with pytest.raises(ListenError) as caught:
        TransferEngine(listen="192.0.2.1:0", secret=b"s")
    assert "192.0.2.1" in str(caught.value)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_listening_beyond_loopback_needs_a_secret(listen: str, open_engine: OpenEngine) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(listen=listen)
    for word in ("secret", "127.0.0.1", "insecure"):
        assert word in str(caught.value)
    assert open_engine(listen=listen, insecure=True).address
    assert open_engine(listen=listen, secret=b"s").address


def test_a_context_manager_closes() -> None:
    with TransferEngine() as engine:
        assert not engine.closed
    assert engine.closed
    assert repr(engine).endswith("closed>")


def test_closing_twice_does_nothing() -> None:
    engine = TransferEngine()
    engine.close()
    engine.close()


def test_a_closed_engine_refuses_everything() -> None:
    with TransferEngine() as engine:
        region = engine.allocate(64, name="a")
    for call in (
        lambda: engine.allocate(64),
        lambda: engine.register(bytearray(64)),
        lambda: engine.connect("127.0.0.1:1"),
        engine.notifications,
        lambda: engine.notifications(timeout=90.0),
    ):
        with pytest.raises(ClosedError) as caught:
            call()
        assert caught.value.hint
    assert region.released
    region.release()


def test_a_closed_engine_listens_no_more() -> None:
    with TransferEngine() as engine:
        host, port = (engine.address or "").split(":")
    with socket.socket() as sock:
        assert sock.connect_ex((host, int(port))) != 0


def test_closing_from_several_threads_returns_when_it_is_closed(open_engine: OpenEngine) -> None:
    engine = open_engine()
    memory = bytearray(1 << 16)
    engine.register(memory)
    barrier = threading.Barrier(8)
    resizable = []

    def close() -> None:
        barrier.wait()
        engine.close()
        # Only possible once the engine has let go of the buffer.
        resizable.append(not engine._lifetime.regions)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.append(0)
    assert resizable == [True] * 8


def test_closing_while_others_use_it(open_engine: OpenEngine) -> None:
    """Whatever is called while the engine closes either works or says that it is closed."""
    for _ in range(5):
        _close_while_used(open_engine())


def _close_while_used(engine: TransferEngine) -> None:
    unexpected: list[BaseException] = []
    started = threading.Barrier(4)

    def use() -> None:
        started.wait()
        try:
            while True:
                engine.allocate(4096).release()
                engine.register(bytearray(64))
                engine.notifications()
                engine.stats()
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001 - collected for the assertion
            unexpected.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    for thread in threads:
        thread.join()
    assert not unexpected


def test_an_unclosed_engine_warns_with_the_place_it_was_made() -> None:
    with nothing_left_behind(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = TransferEngine("forgotten")
        engine.allocate(4096)
        line = engine._lifetime._place.line
        del engine
        gc.collect()
    (warning,) = [entry for entry in caught if entry.category is ResourceWarning]
    assert warning.filename == __file__
    assert warning.lineno == line
    assert f"{__file__}:{line}" in str(warning.message)
    assert "'forgotten'" in str(warning.message)


def test_a_closed_engine_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TransferEngine().close()
        gc.collect()
    assert not caught


def test_a_refused_option_leaves_nothing_behind() -> None:
    with nothing_left_behind():
        for _ in range(20):
            with pytest.raises(ConfigError):
                TransferEngine(listen="0.0.0.0:0")


def test_engines_come_and_go_without_leaks(open_engine: OpenEngine) -> None:
    server = open_engine()
    server.allocate(4096, name="kv")
    with nothing_left_behind():
        for _ in range(10):
            with TransferEngine(listen=None, transports="tcp") as client:
                assert server.address is not None
                peer = client.connect(server.address)
                client.read(peer, client.allocate(4096), peer.regions["kv"]).wait()


def test_stats_count_what_moved(pair: Pair, transport: str) -> None:
    before = pair.client.stats()
    pair.client.read(pair.peer, pair.local, pair.remote).wait()
    after = pair.client.stats()
    assert before != after
    assert str(pair.local.nbytes) in str(after)


def test_probe_tells_what_this_host_offers() -> None:
    transports = {info.name: info for info in probe()}
    assert set(transports) == {"local", "shm", "cuda_ipc", "rdma", "tcp"}
    assert all(isinstance(info, TransportInfo) and info.reason for info in transports.values())
    assert all(transports[name].available for name in ("local", "shm", "tcp"))


def test_digests_of_many_ranges_in_one_call() -> None:
    data = bytes(range(256)) * 2000
    offsets, lengths = [0, 5, 100, len(data)], [len(data), 1, 300_000, 0]
    digests = memoryview(digest_batch(data, offsets, lengths)).cast("Q")
    assert list(digests) == [digest(data[at : at + n]) for at, n in zip(offsets, lengths, strict=True)]
    assert digest_batch(bytearray(data), 0, 10) == digest(data[:10]).to_bytes(8, "little")
    assert digest_batch(data, [], []) == b""
    for wrong in ([0, len(data)], [0, -1], [0, 2**64]):
        with pytest.raises(OutOfRangeError, match="item 1"):
            digest_batch(data, wrong, 1)
    with pytest.raises(InvalidArgumentError):
        digest_batch(data, [0, 1], [1, 2, 3])
    with pytest.raises(ArgumentTypeError):
        digest_batch("text", 0, 1)


def test_digests_of_wholes_from_those_of_their_leaves() -> None:
    data = random.Random(3).randbytes(5 * LEAF_BYTES + 1)
    starts = list(range(0, len(data), LEAF_BYTES))
    leaves = digest_batch(data, starts, [min(LEAF_BYTES, len(data) - at) for at in starts])
    wholes = [(0, 6), (0, 1), (1, 2), (5, 1)]
    table = b"x" + leaves
    found = combine_batch(table, [1 + 8 * first for first, _ in wholes], [8 * count for _, count in wholes])
    assert list(memoryview(found).cast("Q")) == [
        digest(data[first * LEAF_BYTES : (first + count) * LEAF_BYTES]) for first, count in wholes
    ]
    assert combine_batch(leaves, [], []) == b""
    for wrong in (0, 4, 12):
        with pytest.raises(InvalidArgumentError, match="item 1"):
            combine_batch(leaves, [0, 8], [8, wrong])
    with pytest.raises(OutOfRangeError, match="item 0"):
        combine_batch(leaves, 8, len(leaves))


def test_copies_of_many_ranges_in_one_call(open_engine: OpenEngine) -> None:
    source = random.Random(4).randbytes(300_000)
    region = open_engine().allocate(200_000)
    copy_batch(region, [0, 150_001, 7], source, [9, 200_000, 3], [5, 49_999, 0])
    got = bytes(region)
    assert got[:5] == source[9:14]
    assert got[150_001:] == source[200_000:249_999]
    assert not any(got[5:150_001])
    target = bytearray(100)
    copy_batch(target, 1, source, 2, 99)
    assert bytes(target) == b"\0" + source[2:101]
    for offsets, name in (([0, 2], "target"), ([0, -1], "negative"), ([0, 2**63], "huge")):
        with pytest.raises(OutOfRangeError, match="item 1"):
            copy_batch(target, offsets, source, 0, 99)
        assert target[0] == 0, name
    with pytest.raises(OutOfRangeError, match="item 0"):
        copy_batch(target, 0, source, len(source), 1)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        copy_batch(source, 0, source, 0, 1)
    with pytest.raises(InvalidArgumentError):
        copy_batch(target, [0, 1], source, [1, 2, 3], 1)
    with pytest.raises(ArgumentTypeError):
        copy_batch("text", 0, source, 0, 1)


def test_digest_of_any_contiguous_buffer() -> None:
    data = bytes(range(256)) * 4096
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data))
    assert digest(data) != digest(data[:-1])
    assert 0 <= digest(b"") < 1 << 64
    with pytest.raises(TypeError, match="str"):
        digest("text")
    with pytest.raises(InvalidArgumentError):
        digest(memoryview(data)[::2])

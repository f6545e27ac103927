# SPDX-License-Identifier: Apache-2.0
"""Values of every wrong kind in every place that takes one: each is a typed error that says what to do."""

from __future__ import annotations

import array
import ctypes
import fractions
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.patterns import fill, pattern

from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import (
    AddressError,
    ArgumentTypeError,
    ConfigError,
    EngineSettings,
    InvalidArgumentError,
    OutOfMemoryError,
    OutOfRangeError,
    RegionNotFoundError,
    RegionReleasedError,
    TransferEngine,
    digest,
)

HUGE = 10**5000  # more digits than Python writes out
HALF = "\ud800"  # half of a surrogate pair: a str without a UTF-8 form


@pytest.fixture
def local(open_pair: Callable[..., Pair]) -> Pair:
    return open_pair("local")


class Tensor:
    """What a torch tensor of several elements does."""

    def __index__(self) -> int:
        raise TypeError("only integer tensors of a single element can be converted to an index")

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def numpy(self) -> np.ndarray:
        return np.arange(2)


# -------------------------------------------------------------------- times


@pytest.mark.parametrize(
    "seconds",
    [10**400, HUGE, True, False, "1", b"1", bytearray(b"1"), memoryview(b"1"), 1j, np.ones(2), Tensor(), {}],
    ids=lambda value: type(value).__name__,
)
def test_seconds(local: Pair, seconds: Any) -> None:
    transfer = local.client.read(local.peer, local.local, local.remote).wait()
    running = local.client.read(local.peer, local.local, local.remote)
    for call in (
        lambda: local.client.read(local.peer, local.local, local.remote, deadline=seconds),
        lambda: running.cancel(seconds),
        lambda: local.client.notifications(seconds),
        lambda: local.peer.regions.wait("kv2", seconds),
        lambda: local.peer.ensure(seconds),
        lambda: local.client.connect(local.server.address or "", seconds),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert "number of seconds" in caught.value.hint or "seconds as a number" in caught.value.hint
    running.wait()
    transfer.wait()


def test_seconds_of_a_wait_that_is_over_are_looked_at_too(local: Pair) -> None:
    transfer = local.client.read(local.peer, local.local, local.remote).wait()
    for seconds in (10**400, "soon", True):
        with pytest.raises(InvalidArgumentError):
            transfer.wait(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [5, 5.0, np.float32(5), np.int64(5), np.array(5.0), fractions.Fraction(5), 10**9])
def test_seconds_may_be_any_real_number(local: Pair, seconds: Any) -> None:
    local.client.read(local.peer, local.local, local.remote, deadline=seconds).wait(seconds)


def test_a_negative_time_beyond_every_float_has_passed(local: Pair) -> None:
    assert local.client.notifications(-HUGE) == []


# -------------------------------------------------------------------- texts


def test_texts_without_a_utf8_form(open_engine: OpenEngine, local: Pair) -> None:
    for call, error in (
        (lambda: local.client.allocate(64, HALF), InvalidArgumentError),
        (lambda: local.client.register(bytearray(64), HALF), InvalidArgumentError),
        (lambda: local.peer.regions[HALF], RegionNotFoundError),
        (lambda: local.client.connect(HALF + ":5"), AddressError),
        (lambda: local.client.connect("a\0b:5"), AddressError),
        (lambda: TransferEngine(HALF), ConfigError),
        (lambda: TransferEngine("a\0b"), ConfigError),
        (lambda: TransferEngine(listen=HALF + ":0"), AddressError),
        (lambda: TransferEngine(secret=HALF), ConfigError),
    ):
        with pytest.raises(error) as caught:
            call()
        str(caught.value).encode(errors="backslashreplace")
        assert caught.value.hint  # type: ignore[attr-defined]
    assert HALF not in local.peer.regions
    assert "a\0b" not in local.peer.regions


def test_a_str_of_a_subclass_is_a_str(local: Pair) -> None:
    region = local.server.allocate(64, np.str_("named"))
    assert type(region.name) is str
    assert local.peer.regions.wait(np.str_("named"), 90.0).nbytes == 64
    with TransferEngine(np.str_("me"), listen=np.str_("127.0.0.1:0")) as engine:
        assert engine.name == "me"


# -------------------------------------------------------------------- flags


@pytest.mark.parametrize("value", ["no", "", [], 2, 0, 1, None, np.bool_(True)], ids=repr)
def test_flags(local: Pair, value: Any) -> None:
    plan = local.client.prepare(local.peer, local.local, local.remote, 0, 0, 64)
    for call in (
        lambda: local.client.read(local.peer, local.local, local.remote, digest=value),
        lambda: local.client.post(plan, digest=value),
        lambda: local.client.register(bytearray(64), writable=value),
        lambda: local.client.register((4096, 64), writable=value),
    ):
        with pytest.raises(ArgumentTypeError, match=r"(digest|writable) is a") as caught:
            call()
        assert caught.value.hint == "True or False"


# -------------------------------------------------------------------- numbers


@pytest.mark.parametrize("nbytes", [HUGE, 1 << 64, -HUGE], ids=["huge", "65 bits", "negative"])
def test_lengths_beyond_64_bits(local: Pair, nbytes: int) -> None:
    with pytest.raises(OutOfRangeError):
        local.client.allocate(nbytes)
    with pytest.raises(OutOfRangeError):
        local.client.register((4096, nbytes))
    with pytest.raises(OutOfRangeError):
        local.client.register((nbytes, 64))


def test_offsets_beyond_64_bits(local: Pair) -> None:
    for arguments in ((HUGE, 0, 4), (0, -HUGE, 4), (0, 0, HUGE), (0, HUGE)):
        with pytest.raises(OutOfRangeError):
            local.client.read(local.peer, local.local, local.remote, *arguments)
    with pytest.raises(OutOfRangeError):
        local.client.read(local.peer, [(local.local, HUGE, local.remote, 0, 4)])
    with pytest.raises(OutOfMemoryError):
        local.client.read(local.peer, local.local, local.remote, range(10**30), 0, 4)


def test_tensors_are_told_the_way(local: Pair) -> None:
    with pytest.raises(ArgumentTypeError, match=r"x\.numpy\(\)"):
        local.client.read(local.peer, local.local, local.remote, Tensor(), 0, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        local.client.allocate(Tensor())  # type: ignore[arg-type]
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ArgumentTypeError, match=r"x\.numpy\(\)"):
        local.client.read(local.peer, local.local, local.remote, torch.arange(2), 0, 4)
    local.client.read(local.peer, local.local, local.remote, torch.arange(2).numpy(), 0, 4).wait()


# -------------------------------------------------------------------- buffers


def test_arrays_of_ctypes_are_arrays_of_integers(pair: Pair) -> None:
    """Ctypes exports them without strides."""
    fill(pair.region)
    offsets = (ctypes.c_int64 * 2)(64, 128)
    pair.client.read(pair.peer, pair.local, pair.remote, offsets, (ctypes.c_uint32 * 2)(0, 8), 8).wait()
    assert bytes(memoryview(pair.local)[128:136]) == pattern(1 << 16)[8:16]
    plan = pair.client.prepare(pair.peer, pair.local, pair.remote, offsets, offsets, (ctypes.c_int16 * 2)(5, 6))
    assert pair.client.post(plan, (ctypes.c_int64 * 1)(1)).result() == bytes(1)
    with pytest.raises(ArgumentTypeError):
        pair.client.read(pair.peer, pair.local, pair.remote, (ctypes.c_double * 2)(), 0, 8)
    with pytest.raises(InvalidArgumentError, match="2 dimensions"):
        pair.client.read(pair.peer, pair.local, pair.remote, (ctypes.c_int64 * 2 * 2)(), 0, 8)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "memory",
    [
        lambda pair: pair.local,
        lambda pair: memoryview(pair.local),
        lambda pair: b"\0\1",
        lambda pair: bytearray(8),
        lambda pair: mmap.mmap(-1, 4096),
        lambda pair: (ctypes.c_char * 8)(),
    ],
)
def test_raw_memory_is_no_array_of_numbers(local: Pair, memory: Any, place: int) -> None:
    arguments: list[Any] = [0, 0, 4]
    arguments[place] = memory(local)
    with pytest.raises(ArgumentTypeError) as caught:
        local.client.read(local.peer, local.local, local.remote, *arguments)
    assert "numpy.asarray" in caught.value.hint
    if isinstance(arguments[place], mmap.mmap):
        arguments[place].close()


def test_bytes_with_holes(local: Pair) -> None:
    for holes in (np.arange(10)[::2], memoryview(bytes(16))[::2]):
        with pytest.raises(InvalidArgumentError, match="notify") as caught:
            local.client.read(local.peer, local.local, local.remote, notify=holes)
        assert "contiguous" in caught.value.hint
        with pytest.raises(InvalidArgumentError, match="data"):
            digest(holes)
    released = local.client.allocate(64)
    released.release()
    for call in (
        lambda: digest(released),
        lambda: local.client.read(local.peer, local.local, local.remote, notify=released),
        lambda: local.client.register(released),
    ):
        with pytest.raises(RegionReleasedError):
            call()


# -------------------------------------------------------------------- memory to register


class Declared:
    def __init__(self, **fields: Any) -> None:
        self.memory = np.zeros(64, dtype=np.uint8)
        given = {"data": (self.memory.ctypes.data, False), "shape": (64,), "typestr": "|u1", "version": 3, **fields}
        self.__array_interface__ = {key: value for key, value in given.items() if value is not ...}


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": ...},
        {"shape": 64},
        {"shape": (6.4,)},
        {"shape": (True,)},
        {"shape": (-4,)},
        {"shape": (1 << 62, 1 << 62)},
        {"shape": ("64",)},
        {"typestr": ...},
        {"typestr": 4},
        {"typestr": "u"},
        {"typestr": "|O8"},
        {"typestr": "|t8"},
        {"typestr": "<f99999999999999999999"},
        {"data": ...},
        {"data": None},
        {"data": (None, False)},
        {"data": (5,)},
        {"data": (-5, False)},
        {"data": (0, False)},
        {"data": (1 << 70, False)},
        {"data": (True, False)},
        {"data": (4096, "no")},
        {"data": (4096, 0, 0)},
        {"data": bytearray(64)},
        {"offset": 8},
        {"offset": "8"},
        {"mask": np.zeros(64, dtype=bool)},
        {"strides": (2,)},
        {"strides": (-1,)},
        {"strides": (1, 1)},
        {"strides": "1"},
        {"strides": 1},
        {"strides": (None,)},
    ],
    ids=lambda fields: "-".join(f"{key}={value!r}"[:40] for key, value in fields.items()),
)
def test_a_malformed_array_interface(local: Pair, fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgumentError, OutOfRangeError)) as caught:
        local.client.register(Declared(**fields))
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"offset": 0},
        {"offset": None},
        {"shape": [64]},
        {"shape": (np.int64(8), 1, 8), "strides": (8, 12345, 1)},
        {"shape": (16,), "typestr": "<U1"},
        {"shape": (8,), "typestr": "<M8[ns]", "strides": (8,)},
        {"shape": ()},
    ],
    ids=str,
)
def test_an_array_interface_that_is_in_order(local: Pair, fields: dict[str, Any]) -> None:
    declared = Declared(**fields)
    region = local.client.register(declared)
    assert region.address == declared.memory.ctypes.data
    assert region.nbytes == (1 if fields.get("shape") == () else 64)


def test_arrays_of_objects_are_refused(local: Pair) -> None:
    for objects in (np.array([{}, []], dtype=object), np.zeros(2, dtype=[("a", object), ("b", int)])):
        with pytest.raises(ArgumentTypeError, match="Python objects"):
            local.client.register(objects)


def test_what_looks_like_a_tensor_and_is_none(local: Pair) -> None:
    class Odd:
        data_ptr = element_size = None

    with pytest.raises(ArgumentTypeError, match="Odd"):
        local.client.register(Odd())
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ArgumentTypeError, match="UntypedStorage"):
        local.client.register(torch.zeros(4).untyped_storage())


# -------------------------------------------------------------------- the rest


@pytest.mark.parametrize("op", [None, 1, b"read", ["read"], np.array(["read", "write"])])
def test_an_operation_of_a_wrong_type(local: Pair, op: Any) -> None:
    plan = local.client.prepare(local.peer, local.local, local.remote, 0, 0, 64)
    with pytest.raises(ArgumentTypeError, match="op is a"):
        local.client.post(plan, op=op)


@pytest.mark.parametrize(
    "options",
    [
        {"connect_timeout": 10**29},
        {"connect_timeout": 10**400},
        {"deadline": -HUGE},
        {"lanes": HUGE},
        {"slice_bytes": HUGE},
        {"slice_bytes": "9" * 5000},
        {"lanes": "9" * 5000},
        {"name": HUGE},
        {"lanes": np.arange(2)},
        {"listen": "127.0.0.1:" + "9" * 5000},
    ],
    ids="-".join,
)
def test_settings_beyond_all_bounds(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, AddressError)) as caught:
        TransferEngine(**options)
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"lanes": "x"},
        {"lanes": "2"},
        {"lanes": -1},
        {"lanes": True},
        {"deadline": "x"},
        {"deadline": "5s"},
        {"deadline": None},
        {"insecure": "no"},
        {"secret": b""},
        {"secret": "text"},
        {"name": 5},
        {"name": None},
        {"listen": "nowhere"},
        {"transports": "tpc"},
    ],
    ids=str,
)
def test_settings_made_by_hand_are_held_to_the_same_rules(fields: dict[str, Any]) -> None:
    with pytest.raises(MoonpoolError) as caught:
        TransferEngine(settings=EngineSettings(**fields))
    assert caught.value.hint
    assert "text" not in caught.value.message or "secret" not in fields


@pytest.mark.parametrize("settings", [5, {}, "x", EngineSettings], ids=str)
def test_settings_of_a_wrong_type(settings: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="settings is a"):
        TransferEngine(settings=settings)


def test_good_settings_made_by_hand(open_engine: OpenEngine) -> None:
    settings = EngineSettings(name="made", listen=None, secret=bytes(8), lanes=2, deadline=5)
    with TransferEngine(settings=settings) as engine:
        assert engine.settings is settings


def test_array_array_of_integers(local: Pair) -> None:
    local.client.read(local.peer, local.local, local.remote, array.array("h", [0, 64]), 0, 4).wait()

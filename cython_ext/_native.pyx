# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, embedsignature=True, binding=True
"""Objects around moonpool/engine.h. They pass arguments and own handles; moonpool.transfer_engine decides.

Every native call that can block or do work runs without the GIL. Calls that only read a field of a handle keep it:
giving it up would cost more than they do.
"""

import threading

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_STRIDES, PyBuffer_FillInfo, PyBuffer_IsContiguous, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_AsDouble, PyFloat_CheckExact
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.unicode cimport PyUnicode_AsUTF8String, PyUnicode_DecodeUTF8
from libc.stdint cimport (
    INT64_MAX, INT64_MIN, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
    uintptr_t)
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen
from posix.types cimport pid_t
from posix.unistd cimport getpid

from moonpool_engine cimport *
from moonpool_testing cimport *

READ = MP_READ
WRITE = MP_WRITE
LEAF_BYTES = MP_DIGEST_LEAF_BYTES

#: Not an mp_status: what the error factory is given when an argument has a wrong type.
WRONG_TYPE = -1

# Ctrl-C must end a wait, and Python runs signal handlers only between native calls.
cdef int64_t SIGNAL_CHECK_NS = 100_000_000

cdef tuple empty_tuple = ()
cdef char nothing = 0


# ------------------------------------------------------------------------------------------------ errors

def _plain_error(status, message, **fields):
    return RuntimeError(message)


cdef object error_factory = _plain_error


def set_error_factory(factory):
    """Install the callable that turns a status and the fields of mp_error into an exception."""
    global error_factory
    error_factory = factory


cdef str text(const char *source):
    return PyUnicode_DecodeUTF8(source, strlen(source), b"replace")


cdef object to_exception(mp_status status, const mp_error *error):
    return error_factory(
        <int>status, text(error.message), peer=text(error.peer), path=text(error.path), cause=text(error.cause),
        retryable=error.retryable != 0, hint=text(error.hint), item=error.item if error.item >= 0 else None,
        sys_errno=error.sys_errno)


cdef inline int check(mp_status status, const mp_error *error) except -1:
    if status != MP_OK:
        raise to_exception(status, error)
    return 0


cdef object mistake(int status, str message, str hint):
    return error_factory(status, message, hint=hint)


cdef object wrong_type(str what, object value, str expected):
    return error_factory(WRONG_TYPE, f"{what} is a {type(value).__name__}", hint=expected)


include "_values.pxi"
include "_arguments.pxi"
include "_regions.pxi"
include "_peers.pxi"
include "_transfers.pxi"


# ------------------------------------------------------------------------------------------------ engine

cdef class Engine:
    """An mp_engine. Closing is up to moonpool.transfer_engine; the handle goes with the last reference."""

    cdef mp_engine *handle
    cdef readonly str address       # "" when it does not listen
    cdef readonly str incarnation
    cdef pid_t process

    def __init__(self, *, name, listen, transports, require, bytes secret, bint insecure,
                 uint32_t lanes, uint32_t io_threads, uint64_t slice_bytes, uint32_t spin_us,
                 uint32_t connect_timeout_ms, uint32_t progress_timeout_ms, uint32_t deadline_ms,
                 uint32_t regions_max, uint32_t peers_max, uint32_t notifications_max,
                 rdma_devices, uint32_t rdma_queue_pairs, uint32_t rdma_queue_pairs_max, uint32_t rdma_queue_depth,
                 uint32_t rdma_inline_bytes, uint32_t rdma_service_level, uint32_t rdma_traffic_class,
                 uint32_t rdma_pkey_index, uint64_t rdma_registration_bytes_max, bint cuda_staging,
                 uint64_t cuda_staging_bytes):
        cdef mp_config config
        cdef uint8_t incarnation[16]
        cdef bytes name_text = encoded(name, "name", MP_CONFIG)
        cdef bytes transports_text = encoded(transports, "transports", MP_CONFIG)
        cdef bytes listen_text = encoded_or_none(listen, "listen", MP_ADDRESS)
        cdef bytes require_text = encoded_or_none(require, "require", MP_CONFIG)
        cdef bytes devices_text = encoded_or_none(rdma_devices, "rdma_devices", MP_CONFIG)
        if self.handle != NULL:
            raise RuntimeError("the engine is open already")
        mp_config_init(&config)
        config.abi_version = MP_ABI_VERSION  # of the header this was compiled with, for the library to compare
        config.name = pointer(name_text)
        config.transports = pointer(transports_text)
        config.listen = pointer(listen_text)
        config.require = pointer(require_text)
        if secret is not None:
            config.secret = <const uint8_t *>pointer(secret)
            config.secret_bytes = len(secret)
        config.insecure = insecure
        config.lanes = lanes
        config.io_threads = io_threads
        config.slice_bytes = slice_bytes
        config.spin_us = spin_us
        config.connect_timeout_ms = connect_timeout_ms
        config.progress_timeout_ms = progress_timeout_ms
        config.deadline_ms = deadline_ms
        config.regions_max = regions_max
        config.peers_max = peers_max
        config.notifications_max = notifications_max
        config.rdma_devices = pointer(devices_text)
        config.rdma_queue_pairs = rdma_queue_pairs
        config.rdma_queue_pairs_max = rdma_queue_pairs_max
        config.rdma_queue_depth = rdma_queue_depth
        config.rdma_inline_bytes = rdma_inline_bytes
        config.rdma_service_level = rdma_service_level
        config.rdma_traffic_class = rdma_traffic_class
        config.rdma_pkey_index = rdma_pkey_index
        config.rdma_registration_bytes_max = rdma_registration_bytes_max
        config.cuda_staging = cuda_staging
        config.cuda_staging_bytes = cuda_staging_bytes
        self.open(&config)
        self.process = getpid()
        self.address = text(mp_engine_address(self.handle))
        mp_engine_incarnation(self.handle, incarnation)
        self.incarnation = hexadecimal(incarnation)

    cdef int open(self, const mp_config *config) except -1:
        """FaultyEngine opens another kind of engine."""
        cdef mp_error error
        cdef mp_status status
        with nogil:
            status = mp_engine_open(config, &self.handle, &error)
        return check(status, &error)

    def __dealloc__(self):
        # Without the GIL: this may close sockets and join threads, and a thread that the core waits for may itself be
        # waiting for the GIL to leave a native call. The same holds for every __dealloc__ below, which may unmap
        # gigabytes or meet a lock that such a thread holds.
        cdef mp_engine *handle = self.handle
        if handle != NULL:
            with nogil:
                mp_engine_free(handle)

    def close(self):
        cdef mp_error error
        cdef mp_status status
        with nogil:
            status = mp_engine_close(self.handle, &error)
        check(status, &error)

    def fence(self, bytes incarnation):
        """`incarnation` has 16 bytes."""
        cdef mp_error error
        cdef mp_status status
        cdef uint32_t sessions = 0
        cdef const uint8_t *raw = incarnation
        with nogil:
            status = mp_engine_fence(self.handle, raw, &sessions, &error)
        check(status, &error)
        return sessions

    def stats_json(self):
        same_process(self)
        return json_text(self.handle)

    def allocate(self, type region_type, nbytes, name, writable, huge_pages, numa_node):
        cdef Region region = new_object(region_type)
        cdef bytes name_text = encoded_or_none(name, "name", MP_INVALID_ARGUMENT)
        cdef const char *name_pointer = pointer(name_text)
        cdef uint64_t size = length(nbytes)
        cdef mp_allocation allocation
        cdef mp_error error
        cdef mp_status status
        mp_allocation_init(&allocation)
        allocation.flags = MP_REGION_WRITABLE if flag(writable, "writable") else 0
        if huge_pages is not None:
            allocation.huge_pages = MP_HUGE_PAGES_REQUIRED if flag(huge_pages, "huge_pages") else MP_HUGE_PAGES_NEVER
        if numa_node is not None:
            allocation.numa_node = node(numa_node)
        with nogil:
            status = mp_region_allocate(self.handle, size, name_pointer, &allocation, &region.handle, &error)
        check(status, &error)
        region.opened(self, name_text)
        return region

    def register_buffer(self, type region_type, memory, name, writable):
        """Holds the buffer of `memory` until the region has let go of it."""
        cdef Region region = new_object(region_type)
        PyObject_GetBuffer(memory, &region.view, PyBUF_STRIDES)
        region.has_view = True
        if not PyBuffer_IsContiguous(&region.view, b"A"):
            raise mistake(MP_INVALID_ARGUMENT, "the memory is not contiguous", "a contiguous array")
        self.register_at(region, region.view.buf, region.view.len, name, writable)
        return region

    def register_address(self, type region_type, address, nbytes, name, writable, owner):
        """Keeps a reference to `owner` until the region has let go of the memory."""
        cdef Region region = new_object(region_type)
        region.owner = owner
        self.register_at(region, <void *><uintptr_t>address, length(nbytes), name, writable)
        return region

    def register_cuda(self, type region_type, address, nbytes, device, name, writable, owner):
        """Memory of a GPU: `device` is its ordinal, -1 for whichever it is. Keeps a reference to `owner` likewise."""
        cdef Region region = new_object(region_type)
        cdef void *pointer_of_device = <void *><uintptr_t>address
        cdef uint64_t size = length(nbytes)
        cdef int32_t ordinal = device
        cdef bytes name_text = encoded_or_none(name, "name", MP_INVALID_ARGUMENT)
        cdef const char *name_pointer = pointer(name_text)
        cdef uint32_t flags = MP_REGION_WRITABLE if flag(writable, "writable") else 0
        cdef mp_error error
        cdef mp_status status
        region.owner = owner
        with nogil:
            status = mp_region_register_cuda(
                self.handle, pointer_of_device, size, ordinal, name_pointer, flags, &region.handle, &error)
        check(status, &error)
        region.opened(self, name_text)
        return region

    cdef int register_at(self, Region region, void *address, uint64_t nbytes, object name, object writable) except -1:
        cdef bytes name_text = encoded_or_none(name, "name", MP_INVALID_ARGUMENT)
        cdef const char *name_pointer = pointer(name_text)
        cdef uint32_t flags = MP_REGION_WRITABLE if flag(writable, "writable") else 0
        cdef mp_error error
        cdef mp_status status
        with nogil:
            status = mp_region_register(self.handle, address, nbytes, name_pointer, flags, &region.handle, &error)
        check(status, &error)
        region.opened(self, name_text)
        return 0

    def connect(self, type peer_type, address, timeout):
        cdef Peer peer = new_object(peer_type)
        cdef bytes address_text = encoded(address, "address", MP_ADDRESS)
        cdef const char *address_pointer = address_text
        cdef uint32_t timeout_ms = milliseconds(timeout, "timeout")
        cdef list raised = []
        cdef mp_interrupt interrupt = interrupt_of_this_thread()
        cdef mp_error error
        cdef mp_status status
        peer.engine = self
        with nogil:
            status = mp_peer_connect(
                self.handle, address_pointer, timeout_ms, interrupt, <void *>raised, &peer.handle, &error)
        if raised:
            raise raised[0]
        check(status, &error)
        return peer

    def take_notification(self, timeout):
        """Return (peer, incarnation, payload), or None when none came in time."""
        cdef int64_t remaining = bounded_nanoseconds(timeout, "timeout")
        cdef int64_t step
        cdef mp_notification notification
        cdef mp_status status
        while True:
            step = next_step(remaining)
            with nogil:
                status = mp_notification_take(self.handle, step, &notification)
            if status != MP_WAIT_TIMEOUT:
                break
            PyErr_CheckSignals()
            remaining = after_step(remaining, step)
            if remaining == 0:
                return None
        if status != MP_OK:
            same_process(self)
            raise mistake(status, "waiting for notifications", "an engine that is open")
        try:
            return (
                text(notification.peer), hexadecimal(notification.incarnation),
                PyBytes_FromStringAndSize(<char *>notification.payload, notification.payload_bytes))
        finally:
            mp_notification_clear(&notification)


cdef inline int same_process(Engine engine) except -1:
    # For what the C face answers in other words than MP_FORKED: "{}", no regions, a closed peer.
    if engine.process != getpid():
        raise mistake(MP_FORKED, "this engine was made before the process forked",
                      "make a new engine in the child, or start workers with the spawn method")
    return 0


cdef str hexadecimal(const uint8_t *incarnation):
    return PyBytes_FromStringAndSize(<const char *>incarnation, 16).hex()


cdef int64_t next_step(int64_t remaining) noexcept:
    return SIGNAL_CHECK_NS if remaining < 0 else min(remaining, SIGNAL_CHECK_NS)


cdef int64_t after_step(int64_t remaining, int64_t step) noexcept:
    return -1 if remaining < 0 else remaining - step


# ------------------------------------------------------------------------------------------------ free functions

def digest(data):
    """Return mp_digest of a contiguous buffer."""
    cdef Py_buffer view
    cdef uint64_t result
    plain_buffer(data, &view, "data", "anything with a contiguous buffer")
    try:
        with nogil:
            result = mp_digest(view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return result


ctypedef mp_status (*range_digests)(const void *, uint64_t, const int64_t *, size_t, const int64_t *, size_t, size_t,
                                    uint64_t *, size_t *) noexcept nogil


def digest_batch(memory, offsets, lengths):
    """Return mp_digest of each range of a contiguous buffer, 8 little-endian bytes each."""
    return digests_of(mp_digest_batch, memory, offsets, lengths)


def combine_batch(memory, offsets, lengths):
    """Return the digests of wholes whose leaves have the digests in these ranges of a contiguous buffer."""
    return digests_of(mp_combine_batch, memory, offsets, lengths)


cdef bytes digests_of(range_digests compute, memory, offsets, lengths):
    cdef Py_buffer view
    cdef Column columns[2]
    cdef Py_ssize_t count
    cdef size_t bad = 0
    cdef mp_status status
    cdef bytes digests
    cdef uint64_t *out
    memset(columns, 0, sizeof(columns))
    plain_buffer(memory, &view, "memory", "anything with a contiguous buffer")
    try:
        column_fill(&columns[0], offsets, "offsets")
        column_fill(&columns[1], lengths, "lengths")
        count = common_count(columns, ("offsets", "lengths"))
        digests = PyBytes_FromStringAndSize(NULL, count * sizeof(uint64_t))
        out = <uint64_t *><void *>PyBytes_AS_STRING(digests)
        with nogil:
            status = compute(view.buf, view.len, columns[0].data, columns[0].stride, columns[1].data,
                             columns[1].stride, count, out, &bad)
        if status == MP_OUT_OF_RANGE:
            raise mistake(status, f"item {bad} is not inside the {view.len} bytes of memory",
                          "offset + length up to the end of it")
        if status != MP_OK:
            raise mistake(status, f"item {bad} is not one or more digests", "lengths of 8, 16, 24, ... bytes")
    finally:
        column_clear(&columns[0])
        column_clear(&columns[1])
        PyBuffer_Release(&view)
    return digests


def digest_joined(memories, which, offsets, lengths, counts):
    """Return the digests of wholes that lie in ranges of several contiguous buffers."""
    cdef list held = list(memories)
    cdef Py_ssize_t i, taken = 0
    cdef Py_buffer *views = <Py_buffer *>reserve(len(held), sizeof(Py_buffer))
    cdef mp_memory *table = NULL
    try:
        table = <mp_memory *>reserve(len(held), sizeof(mp_memory))
        for i in range(len(held)):
            plain_buffer(held[i], &views[i], f"memory {i}", "anything with a contiguous buffer")
            taken += 1
            table[i].data = views[i].buf
            table[i].nbytes = views[i].len
        return joined_digests(table, taken, which, offsets, lengths, counts)
    finally:
        for i in range(taken):
            PyBuffer_Release(&views[i])
        free(views)
        free(table)


cdef bytes joined_digests(const mp_memory *memories, size_t memories_count, which, offsets, lengths, counts):
    cdef Column columns[3]
    cdef Column each
    cdef Py_ssize_t i, count
    cdef size_t bad = 0
    cdef size_t wholes
    cdef mp_status status
    cdef bytes digests
    cdef uint64_t *out
    memset(columns, 0, sizeof(columns))
    memset(&each, 0, sizeof(each))
    try:
        column_fill(&columns[0], which, "which")
        column_fill(&columns[1], offsets, "offsets")
        column_fill(&columns[2], lengths, "lengths")
        column_fill(&each, counts, "counts")
        count = common_count(columns, ("which", "offsets", "lengths"))
        if each.count < 0:
            raise wrong_type("counts", counts, "an array of integers, one for each whole")
        wholes = each.count
        digests = PyBytes_FromStringAndSize(NULL, wholes * sizeof(uint64_t))
        out = <uint64_t *><void *>PyBytes_AS_STRING(digests)
        with nogil:
            status = mp_digest_joined(memories, memories_count, columns[0].data, columns[0].stride, columns[1].data,
                                      columns[1].stride, columns[2].data, columns[2].stride, count, each.data,
                                      each.stride, wholes, out, &bad)
        if status == MP_OUT_OF_RANGE:
            raise mistake(status, f"item {bad} is not inside its memory, of {memories_count}",
                          "which from 0 on, offset + length up to the end of that memory")
        if status != MP_OK:
            raise mistake(status, f"whole {bad} has not its share of {count} ranges", "counts that add up to them")
    finally:
        for i in range(3):
            column_clear(&columns[i])
        column_clear(&each)
    return digests


def copy_batch(target, target_offsets, source, source_offsets, lengths):
    """Copy ranges of one contiguous buffer into another one. Either may be a region of a GPU."""
    cdef Py_buffer views[2]
    cdef Column columns[3]
    cdef mp_region *regions[2]
    cdef Py_ssize_t i, count, held = 0
    cdef size_t bad = 0
    cdef mp_error error
    cdef mp_status status
    both = (source, target)
    memset(columns, 0, sizeof(columns))
    memset(views, 0, sizeof(views))
    try:
        for i in range(2):
            regions[i] = hold_side(both[i], &views[i], "target" if i else "source")
            held += 1
        if views[1].readonly:
            raise mistake(MP_INVALID_ARGUMENT, "target is read-only", "a bytearray, an array or a region")
        column_fill(&columns[0], target_offsets, "target_offsets")
        column_fill(&columns[1], source_offsets, "source_offsets")
        column_fill(&columns[2], lengths, "lengths")
        count = common_count(columns, ("target_offsets", "source_offsets", "lengths"))
        if regions[0] != NULL or regions[1] != NULL:
            with nogil:
                status = mp_region_copy_batch(
                    regions[1], views[1].buf, views[1].len, columns[0].data, columns[0].stride, regions[0],
                    views[0].buf, views[0].len, columns[1].data, columns[1].stride, columns[2].data,
                    columns[2].stride, count, &error)
            check(status, &error)
            return
        with nogil:
            status = mp_copy_batch(views[1].buf, views[1].len, columns[0].data, columns[0].stride, views[0].buf,
                                   views[0].len, columns[1].data, columns[1].stride, columns[2].data,
                                   columns[2].stride, count, &bad)
        if status != MP_OK:
            raise mistake(status, f"item {bad} is not inside the {views[0].len} bytes of source and the "
                          f"{views[1].len} of target", "offset + length up to the end of both")
    finally:
        for i in range(3):
            column_clear(&columns[i])
        for i in range(held):
            if regions[i] != NULL:
                unpin(<Region>both[i])
            else:
                PyBuffer_Release(&views[i])


cdef mp_region *hold_side(object side, Py_buffer *view, str what) except? NULL:
    """Take the bytes of one side of a copy; or its handle where it is a region of a GPU, pinned."""
    if isinstance(side, Region) and (<Region>side).info.flags & MP_REGION_CUDA:
        if (<Region>side).handle == NULL:
            raise mistake(MP_REGION_RELEASED, f"region {(<Region>side).name!r} is released", "a live region")
        return pin(<Region>side)
    plain_buffer(side, view, what, "anything with a contiguous buffer")
    return NULL


def probe_json():
    return json_text(NULL)


include "_device.pxi"


cdef str json_text(mp_engine *engine):
    """Return the counters of `engine`, or with NULL what this host offers, in a buffer that is made to fit."""
    cdef size_t size = 4096
    cdef size_t needed
    cdef char *buffer
    while True:
        buffer = <char *>reserve(size, 1)
        try:
            with nogil:
                if engine != NULL:
                    needed = mp_engine_stats_json(engine, buffer, size)
                else:
                    needed = mp_probe_json(buffer, size)
            if needed <= size:
                return text(buffer)
        finally:
            free(buffer)
        # Others may be adding to it meanwhile.
        size = needed + 1024


include "_testing.pxi"

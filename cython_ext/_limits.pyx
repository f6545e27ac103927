# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, embedsignature=False
"""Plain sockets, memcpy and process_vm_* for mooncake-bench: what this machine can do. Decides nothing itself."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "limits_api.h" nogil:
    enum:
        MPL_TOKEN_BYTES
        MPL_CONNECTIONS_MAX
        MPL_STREAMS_MAX
        MPL_SHARE_BYTES_MIN
        MPL_OK

    ctypedef int mpl_status
    ctypedef enum mpl_op:
        MPL_READ
        MPL_WRITE
    ctypedef enum mpl_mode:
        MPL_ACKED
        MPL_STREAM
    ctypedef struct mpl_error:
        int32_t code
        int32_t sys_errno
        char message[256]
    ctypedef struct mpl_list:
        void *memory
        uint64_t memory_bytes
        const int64_t *offsets
        const int64_t *lengths
        size_t count
        size_t batch
        size_t streams
    ctypedef struct mpl_result:
        int64_t window_ns
        uint64_t batches
        uint64_t bytes
        int64_t *samples_ns
        size_t samples_capacity
        size_t samples_count
    ctypedef struct mpl_listener:
        pass
    ctypedef struct mpl_link:
        pass

    mpl_status mpl_listen(const char *, uint16_t, mpl_listener **, uint16_t *, mpl_error *)
    mpl_status mpl_accept(mpl_listener *, const uint8_t *, size_t, uint32_t, mpl_link **, mpl_error *)
    void mpl_listener_abort(mpl_listener *)
    void mpl_listener_free(mpl_listener *)
    mpl_status mpl_connect(const char *, uint16_t, const uint8_t *, size_t, uint32_t, mpl_link **, mpl_error *)
    void mpl_link_abort(mpl_link *)
    void mpl_link_free(mpl_link *)
    mpl_status mpl_client_run(mpl_link *, const mpl_list *, mpl_op, mpl_mode, int64_t, const int32_t *, uint64_t *,
                              mpl_result *, mpl_error *)
    mpl_status mpl_server_run(mpl_link *, const mpl_list *, mpl_op, mpl_mode, uint32_t, uint64_t *, mpl_error *)
    mpl_status mpl_copy_run(const mpl_list *, const mpl_list *, size_t, int64_t, const int32_t *, uint64_t *,
                            mpl_result *, mpl_error *)
    mpl_status mpl_process_run(int32_t, const mpl_list *, const mpl_list *, mpl_op, size_t, int64_t, const int32_t *,
                               uint64_t *, mpl_result *, mpl_error *)


TOKEN_BYTES = MPL_TOKEN_BYTES
CONNECTIONS_MAX = MPL_CONNECTIONS_MAX
STREAMS_MAX = MPL_STREAMS_MAX
SHARE_BYTES_MIN = MPL_SHARE_BYTES_MIN
READ = MPL_READ
WRITE = MPL_WRITE
ACKED = MPL_ACKED
STREAM = MPL_STREAM

_CODES = ("OK", "INVALID", "SYSTEM", "TIMEOUT", "CLOSED", "ABORTED", "PROTOCOL", "NO_MEMORY")


class LimitError(Exception):
    """A limit could not be measured. `code` is the name of an mpl_status, `errno` the system's number or 0."""

    def __init__(self, code, errno, message):
        super().__init__(message)
        self.code = code
        self.errno = errno

    def __reduce__(self):
        return type(self), (self.code, self.errno, str(self))


cdef int _check(mpl_status status, mpl_error *error) except -1:
    if status == MPL_OK:
        return 0
    raise LimitError(_CODES[status], error.sys_errno, error.message.decode("utf-8", "replace"))


cdef class Descriptors:
    """One side's descriptor list; keeps its memory and its arrays alive."""

    cdef const uint8_t[::1] _memory
    cdef const int64_t[::1] _offsets
    cdef const int64_t[::1] _lengths
    cdef mpl_list _list
    cdef bint _foreign

    def __init__(self, memory, offsets, lengths, size_t batch, size_t streams):
        self._memory = memory
        if self._memory.shape[0] == 0:
            raise ValueError("memory is empty")
        self._describe(<uint64_t>&self._memory[0], <uint64_t>self._memory.shape[0], offsets, lengths, batch, streams)

    @staticmethod
    def of_process(uint64_t address, uint64_t nbytes, offsets, lengths, size_t batch, size_t streams):
        """Describe memory of another process, for `process_run` only."""
        cdef Descriptors made = Descriptors.__new__(Descriptors)
        made._describe(address, nbytes, offsets, lengths, batch, streams)
        made._foreign = True
        return made

    cdef int _describe(self, uint64_t address, uint64_t nbytes, offsets, lengths, size_t batch,
                       size_t streams) except -1:
        self._offsets = offsets
        self._lengths = lengths
        if self._offsets.shape[0] != self._lengths.shape[0] or self._offsets.shape[0] == 0:
            raise ValueError("offsets and lengths need the same number of entries, at least one")
        self._list.memory = <void *>address
        self._list.memory_bytes = nbytes
        self._list.offsets = &self._offsets[0]
        self._list.lengths = &self._lengths[0]
        self._list.count = <size_t>self._offsets.shape[0]
        self._list.batch = batch
        self._list.streams = streams
        return 0

    cdef const mpl_list *_own(self) except NULL:
        if self._foreign:
            raise ValueError("this memory belongs to another process")
        return &self._list

    def __len__(self):
        return self._list.count


cdef const int32_t *_stop_pointer(const int32_t[::1] stop) except? NULL:
    if stop is None:
        return NULL
    if stop.shape[0] != 1:
        raise ValueError("stop needs exactly one entry")
    return &stop[0]


cdef uint64_t *_progress_pointer(uint64_t[::1] next_batch, size_t streams) except NULL:
    if next_batch is None or next_batch.shape[0] == 0 or <size_t>next_batch.shape[0] != streams:
        raise ValueError("next_batch needs one entry per stream")
    return &next_batch[0]


cdef void _samples_room(mpl_result *result, int64_t[::1] samples) noexcept:
    result.samples_ns = NULL
    result.samples_capacity = 0
    if samples is not None and samples.shape[0] > 0:
        result.samples_ns = &samples[0]
        result.samples_capacity = <size_t>samples.shape[0]


cdef class Link:
    """Connections of one side, ready to run. Made by `connect` and `Listener.accept`."""

    cdef mpl_link *_link
    cdef int _running
    cdef bint _closed

    def __dealloc__(self):
        if self._link is not NULL:
            mpl_link_free(self._link)

    cdef int _enter(self) except -1:
        if self._closed:
            raise LimitError("CLOSED", 0, "the link is closed")
        self._running += 1
        return 0

    cdef void _leave(self) noexcept:
        self._running -= 1
        if self._closed and self._running == 0:
            mpl_link_free(self._link)
            self._link = NULL

    def client_run(self, Descriptors descriptors not None, int op, int mode, int64_t duration_ns,
                   const int32_t[::1] stop, uint64_t[::1] next_batch, int64_t[::1] samples):
        """Return (window_ns, batches, bytes, samples kept)."""
        cdef mpl_result result
        cdef mpl_error error
        cdef mpl_status status
        cdef const mpl_list *blocks = descriptors._own()
        cdef const int32_t *stop_at = _stop_pointer(stop)
        cdef uint64_t *progress = _progress_pointer(next_batch, descriptors._list.streams)
        _samples_room(&result, samples)
        self._enter()
        with nogil:
            status = mpl_client_run(self._link, blocks, <mpl_op>op, <mpl_mode>mode, duration_ns, stop_at,
                                    progress, &result, &error)
        self._leave()
        _check(status, &error)
        return result.window_ns, result.batches, result.bytes, result.samples_count

    def server_run(self, Descriptors descriptors not None, int op, int mode, uint32_t runs,
                   uint64_t[::1] next_batch):
        cdef mpl_error error
        cdef mpl_status status
        cdef const mpl_list *blocks = descriptors._own()
        cdef uint64_t *progress = _progress_pointer(next_batch, descriptors._list.streams)
        self._enter()
        with nogil:
            status = mpl_server_run(self._link, blocks, <mpl_op>op, <mpl_mode>mode, runs, progress, &error)
        self._leave()
        _check(status, &error)

    def abort(self):
        """End a run in another thread. Idempotent."""
        if self._link is not NULL:
            mpl_link_abort(self._link)

    def close(self):
        """Close the connections; a run in another thread is aborted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._running:
            mpl_link_abort(self._link)
        elif self._link is not NULL:
            mpl_link_free(self._link)
            self._link = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


cdef const uint8_t *_token_pointer(const uint8_t[::1] token) except NULL:
    if token.shape[0] != MPL_TOKEN_BYTES:
        raise ValueError(f"token needs {MPL_TOKEN_BYTES} bytes")
    return &token[0]


def connect(str host not None, uint16_t port, token, size_t connections, uint32_t timeout_ms):
    """Connect to a `Listener` that knows the token."""
    cdef mpl_error error
    cdef mpl_status status
    cdef bytes name = host.encode()
    cdef const char *name_at = name
    cdef const uint8_t[::1] secret = token
    cdef const uint8_t *secret_at = _token_pointer(secret)
    cdef Link link = Link.__new__(Link)
    with nogil:
        status = mpl_connect(name_at, port, secret_at, connections, timeout_ms, &link._link, &error)
    _check(status, &error)
    return link


cdef class Listener:
    """A listening socket on a numeric address; port 0 picks one."""

    cdef mpl_listener *_listener
    cdef int _running
    cdef bint _closed
    cdef readonly int port

    def __cinit__(self, str host not None, uint16_t port=0):
        cdef mpl_error error
        cdef mpl_status status
        cdef uint16_t bound = 0
        cdef bytes name = host.encode()
        cdef const char *name_at = name
        with nogil:
            status = mpl_listen(name_at, port, &self._listener, &bound, &error)
        _check(status, &error)
        self.port = bound

    def __dealloc__(self):
        if self._listener is not NULL:
            mpl_listener_free(self._listener)

    def accept(self, token, size_t connections, uint32_t timeout_ms):
        """Wait for all connections of one `connect`."""
        cdef mpl_error error
        cdef mpl_status status
        cdef const uint8_t[::1] secret = token
        cdef const uint8_t *secret_at = _token_pointer(secret)
        cdef Link link = Link.__new__(Link)
        if self._closed:
            raise LimitError("CLOSED", 0, "the listener is closed")
        self._running += 1
        with nogil:
            status = mpl_accept(self._listener, secret_at, connections, timeout_ms, &link._link, &error)
        self._running -= 1
        if self._closed and self._running == 0:
            mpl_listener_free(self._listener)
            self._listener = NULL
        _check(status, &error)
        return link

    def close(self):
        """Stop listening; an `accept` in another thread is aborted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._running:
            mpl_listener_abort(self._listener)
        else:
            mpl_listener_free(self._listener)
            self._listener = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def copy_run(Descriptors destination not None, Descriptors source not None, size_t threads,
             int64_t duration_ns, const int32_t[::1] stop, uint64_t[::1] next_batch, int64_t[::1] samples):
    """memcpy descriptor by descriptor; return (window_ns, batches, bytes, samples kept)."""
    cdef mpl_result result
    cdef mpl_error error
    cdef mpl_status status
    cdef const mpl_list *to = destination._own()
    cdef const mpl_list *from_ = source._own()
    cdef const int32_t *stop_at = _stop_pointer(stop)
    cdef uint64_t *progress = _progress_pointer(next_batch, source._list.streams)
    _samples_room(&result, samples)
    with nogil:
        status = mpl_copy_run(to, from_, threads, duration_ns, stop_at, progress, &result,
                              &error)
    _check(status, &error)
    return result.window_ns, result.batches, result.bytes, result.samples_count


def process_run(int pid, Descriptors own not None, Descriptors other not None, int op, size_t threads,
                int64_t duration_ns, const int32_t[::1] stop, uint64_t[::1] next_batch, int64_t[::1] samples):
    """Copy between `own` and the memory of process `pid`; return (window_ns, batches, bytes, samples kept)."""
    cdef mpl_result result
    cdef mpl_error error
    cdef mpl_status status
    cdef const mpl_list *ours = own._own()
    cdef const int32_t *stop_at = _stop_pointer(stop)
    cdef uint64_t *progress = _progress_pointer(next_batch, own._list.streams)
    _samples_room(&result, samples)
    with nogil:
        status = mpl_process_run(pid, ours, &other._list, <mpl_op>op, threads, duration_ns, stop_at, progress, &result,
                                 &error)
    _check(status, &error)
    return result.window_ns, result.batches, result.bytes, result.samples_count

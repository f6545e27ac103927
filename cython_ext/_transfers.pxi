# SPDX-License-Identifier: Apache-2.0
"""Submitting and waiting: Plan and Transfer. Included by _native.pyx."""


cdef struct Options:
    mp_options raw
    bint held
    Py_buffer view


cdef int options_fill(Options *options, object deadline, object deadline_at, object notify, object digest,
                      object stream) except -1:
    cdef int64_t ns
    options.held = False
    options.raw.deadline_ns = options.raw.deadline_at_ns = 0
    options.raw.notify = NULL
    options.raw.notify_bytes = 0
    options.raw.digest = flag(digest, "digest")
    options.raw.cuda_stream = 0
    options.raw.cuda_stream_given = stream is not None
    if stream is not None:
        options.raw.cuda_stream = stream_handle(stream)
    if deadline is not None:
        ns = nanoseconds(deadline, "deadline")
        options.raw.deadline_ns = ns if ns > 0 else -1
    if deadline_at is not None:
        ns = nanoseconds(deadline_at, "deadline_at")
        options.raw.deadline_at_ns = ns if ns > 0 else -1
    if notify is not None:
        plain_buffer(notify, &options.view, "notify", "bytes")
        options.held = True
        # Not NULL for an empty payload: NULL means that there is no notification.
        options.raw.notify = options.view.buf if options.view.len > 0 else &nothing
        options.raw.notify_bytes = options.view.len
    return 0


cdef uint64_t stream_handle(object stream) except? 0:
    # As torch.cuda.Stream has it.
    handle = getattr(stream, "cuda_stream", None)
    if handle is None:
        handle = stream
    if not PyLong_CheckExact(handle) or not 0 <= handle < 1 << 64:
        raise wrong_type("stream", stream, "the integer handle of a CUDA stream, or an object with cuda_stream")
    return handle


cdef inline void options_clear(Options *options) noexcept:
    if options.held:
        options.held = False
        PyBuffer_Release(&options.view)


@cython.no_gc_clear
cdef class Plan:
    """An mp_plan."""

    cdef mp_plan *handle
    cdef readonly Peer peer

    def __dealloc__(self):
        cdef mp_plan *handle = self.handle
        if handle != NULL:
            with nogil:
                mp_plan_free(handle)

    def __len__(self):
        return mp_plan_count(self.handle) if self.handle != NULL else 0


cdef Peer peer_of(Engine engine, object peer):
    if not isinstance(peer, Peer) or (<Peer>peer).handle == NULL:
        raise wrong_type("peer", peer, "a Peer, from engine.connect()")
    if (<Peer>peer).engine is not engine:
        raise mistake(MP_INVALID_ARGUMENT, "the peer was connected by another engine", "the engine that connected it")
    return <Peer>peer


def prepare(Engine engine, type plan_type, peer, local, remote, local_offsets, remote_offsets, lengths):
    """Check a batch once, for many posts. With `remote` None, `local` is a list of tuples."""
    cdef Plan plan = new_object(plan_type)
    cdef Batch batch = Batch()
    cdef mp_error error
    cdef mp_status status
    plan.peer = peer_of(engine, peer)
    try:
        batch.fill(local, remote, local_offsets, remote_offsets, lengths)
        with nogil:
            status = mp_plan_create(plan.peer.handle, &batch.raw, &plan.handle, &error)
    finally:
        batch.clear()
    check(status, &error)
    return plan


def post(Engine engine, type transfer_type, plan, int op, indices, deadline, deadline_at, notify, digest, stream):
    cdef Transfer transfer = new_object(transfer_type)
    cdef Column column
    cdef Options options
    cdef const int64_t *chosen = NULL
    cdef size_t count = 0
    cdef mp_plan *handle
    cdef mp_error error
    cdef mp_status status
    if not isinstance(plan, Plan) or (<Plan>plan).handle == NULL:
        raise wrong_type("plan", plan, "a Plan, from engine.prepare()")
    handle = (<Plan>plan).handle
    transfer.peer = peer_of(engine, (<Plan>plan).peer)
    transfer.op = op
    column.copy = NULL
    column.held = False
    options.held = False
    try:
        if indices is not None:
            column_fill(&column, indices, "indices")
            chosen = column.data
            count = 1 if column.count < 0 else column.count
        options_fill(&options, deadline, deadline_at, notify, digest, stream)
        with nogil:
            status = mp_plan_post(handle, <mp_op>op, chosen, count, &options.raw, &transfer.handle, &error)
    finally:
        options_clear(&options)
        column_clear(&column)
    check(status, &error)
    return transfer


def submit(Engine engine, type transfer_type, peer, int op, local, remote, local_offsets, remote_offsets, lengths,
           deadline, deadline_at, notify, digest, stream):
    """Submit one batch. With `remote` None, `local` is a list of tuples."""
    cdef Transfer transfer = new_object(transfer_type)
    cdef Batch batch = Batch()
    cdef Options options
    cdef mp_error error
    cdef mp_status status
    transfer.peer = peer_of(engine, peer)
    transfer.op = op
    options.held = False
    try:
        batch.fill(local, remote, local_offsets, remote_offsets, lengths)
        options_fill(&options, deadline, deadline_at, notify, digest, stream)
        with nogil:
            status = mp_submit(transfer.peer.handle, <mp_op>op, &batch.raw, &options.raw, &transfer.handle, &error)
    finally:
        options_clear(&options)
        batch.clear()
    check(status, &error)
    return transfer


@cython.no_gc_clear
cdef class Transfer:
    """An mp_transfer."""

    cdef mp_transfer *handle
    cdef readonly Peer peer
    cdef int op

    def __dealloc__(self):
        cdef mp_transfer *handle = self.handle
        if handle != NULL:
            with nogil:
                mp_transfer_free(handle)

    cdef int usable(self) except -1:
        if self.handle == NULL:
            raise wrong_type("transfer", self, "a Transfer, from engine.read() or engine.write()")
        return 0

    @property
    def _op(self):
        return self.op

    def __len__(self):
        return mp_transfer_count(self.handle) if self.handle != NULL else 0

    def _state_now(self):
        """Return the mp_transfer_state of now."""
        self.usable()
        return self.state_here()

    cdef int state_here(self) except -1:
        cdef int state = mp_transfer_get_state(self.handle)
        if state == MP_FAILED:  # also in a forked child, where it stays so
            same_process(self.peer.engine)
        return state

    def _wait(self, timeout):
        """Wait until it is no longer running, and return the mp_transfer_state then."""
        cdef int64_t remaining = nanoseconds(timeout, "timeout")
        cdef int64_t step
        cdef mp_status status
        self.usable()
        if mp_transfer_get_state(self.handle) == MP_RUNNING:
            while remaining != 0:
                step = next_step(remaining)
                with nogil:
                    status = mp_transfer_wait(self.handle, step)
                if status != MP_WAIT_TIMEOUT:
                    break
                PyErr_CheckSignals()
                remaining = after_step(remaining, step)
        return self.state_here()

    def _cancel(self, timeout):
        """Stop it, wait until it is settled, and return the mp_transfer_state then."""
        cdef int64_t remaining = nanoseconds(timeout, "timeout")
        cdef int64_t step
        cdef mp_status status
        self.usable()
        while True:
            step = next_step(remaining)
            with nogil:
                status = mp_transfer_cancel(self.handle, step)
            if status != MP_WAIT_TIMEOUT:
                break
            PyErr_CheckSignals()
            remaining = after_step(remaining, step)
            if remaining == 0:
                break
        return self.state_here()

    def _set_eventfd(self, int fd):
        cdef mp_status status
        self.usable()
        with nogil:
            status = mp_transfer_set_eventfd(self.handle, fd)
        if status != MP_OK:
            same_process(self.peer.engine)
            raise mistake(status, f"setting descriptor {fd}", "an eventfd, or -1")

    def _failure(self):
        """Return the exception of the first cause, or None."""
        cdef mp_error error
        self.usable()
        with nogil:
            mp_transfer_get_error(self.handle, &error)
        return to_exception(<mp_status>error.code, &error) if error.code != MP_OK else None

    def _status_bytes(self):
        """Return one mp_status per item, one byte each."""
        self.usable()
        same_process(self.peer.engine)
        cdef size_t count = mp_transfer_count(self.handle)
        cdef bytes result = PyBytes_FromStringAndSize(NULL, count)
        cdef uint8_t *target = <uint8_t *>PyBytes_AS_STRING(result)
        with nogil:
            mp_transfer_item_status(self.handle, target, count)
        return result

    def _digest_bytes(self):
        """Return one uint64 per item, or None when digests were not asked for."""
        self.usable()
        same_process(self.peer.engine)
        cdef size_t count = mp_transfer_count(self.handle)
        cdef bytes result = PyBytes_FromStringAndSize(NULL, count * sizeof(uint64_t))
        cdef uint64_t *target = <uint64_t *>PyBytes_AS_STRING(result)
        cdef mp_status status
        with nogil:
            status = mp_transfer_digests(self.handle, target, count)
        return result if status == MP_OK else None

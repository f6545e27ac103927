# SPDX-License-Identifier: Apache-2.0
"""Peers, and the calls that wait for one. Included by _native.pyx."""


cdef int32_t run_signal_handlers(void *raised) noexcept with gil:
    """An mp_interrupt: put what a signal handler raised into the list `raised`."""
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        (<list>raised).append(error)
        return 1
    return 0


cdef mp_interrupt interrupt_of_this_thread():
    # Python runs signal handlers in its main thread only. The others need not take the GIL in the middle of the core,
    # which for daemon threads would be the end while the interpreter ends.
    if PyThread_get_thread_ident() == threading.main_thread().ident:
        return run_signal_handlers
    return NULL


@cython.no_gc_clear
cdef class Peer:
    """An mp_peer."""

    cdef mp_peer *handle
    cdef Engine engine

    def __dealloc__(self):
        cdef mp_peer *handle = self.handle
        if handle != NULL:
            with nogil:
                mp_peer_free(handle)

    cdef int usable(self) except -1:
        if self.handle == NULL:
            raise wrong_type("peer", self, "a Peer, from engine.connect()")
        same_process(self.engine)
        return 0

    def _info(self):
        """Return (state, incarnation, name, address, path, fallback, regions)."""
        cdef mp_peer_info info
        self.usable()
        with nogil:
            mp_peer_get_info(self.handle, &info)
        return (info.state, hexadecimal(info.incarnation), text(info.name), text(info.address), text(info.path),
                text(info.fallback), info.regions)

    def _label(self):
        """Return "name (host:port)", as mp_error writes it."""
        cdef mp_peer_info info
        self.usable()
        with nogil:
            mp_peer_get_info(self.handle, &info)
        return f"{text(info.name)} ({text(info.address)})"

    def _ensure(self, timeout):
        self.connect_again(milliseconds(timeout, "timeout"))

    cdef int connect_again(self, uint32_t timeout_ms) except -1:
        cdef list raised = []
        cdef mp_interrupt interrupt = interrupt_of_this_thread()
        cdef mp_error error
        cdef mp_status status
        self.usable()
        with nogil:
            status = mp_peer_ensure(self.handle, timeout_ms, interrupt, <void *>raised, &error)
        if raised:
            raise raised[0]
        return check(status, &error)

    def _close(self):
        cdef mp_error error
        cdef mp_status status
        if self.engine is not None and self.engine.process != getpid():
            return  # the connection is the parent's
        self.usable()
        with nogil:
            status = mp_peer_close(self.handle, &error)
        check(status, &error)

    def _find_region(self, type remote_type, name, timeout):
        cdef RemoteRegion remote = new_object(remote_type)
        cdef bytes name_text = encoded(name, "name", MP_REGION_UNKNOWN)
        cdef const char *name_pointer = name_text
        cdef int64_t remaining = bounded_nanoseconds(timeout, "timeout")
        cdef int64_t step
        cdef mp_peer_info info
        cdef mp_error error
        cdef mp_status status
        while True:
            self.usable()
            step = next_step(remaining)
            with nogil:
                mp_peer_get_info(self.handle, &info)
            if info.state != MP_PEER_READY:
                # As the next call would by itself, but that one cannot be interrupted.
                self.connect_again(0)
            with nogil:
                status = mp_peer_find_region(self.handle, name_pointer, step, &remote.raw, &error)
            if status != MP_REGION_UNKNOWN and status != MP_WAIT_TIMEOUT:
                break
            PyErr_CheckSignals()
            remaining = after_step(remaining, step)
            if remaining == 0:
                break
        check(status, &error)
        return remote

    def _list_regions(self, type remote_type):
        """Return every named region the peer has announced, ordered by name."""
        cdef size_t capacity = 0
        cdef size_t count
        cdef mp_remote_region *found
        cdef RemoteRegion remote
        cdef list result = []
        self.usable()
        with nogil:
            count = mp_peer_list_regions(self.handle, NULL, 0)
        while True:
            # Others may be announced between the two calls.
            capacity = count + 16
            found = <mp_remote_region *>reserve(capacity, sizeof(mp_remote_region))
            try:
                with nogil:
                    count = mp_peer_list_regions(self.handle, found, capacity)
                if count <= capacity:
                    for i in range(count):
                        remote = new_object(remote_type)
                        remote.raw = found[i]
                        result.append(remote)
                    return result
            finally:
                free(found)

# SPDX-License-Identifier: Apache-2.0
"""Region and RemoteRegion. Included by _native.pyx."""


# Without tp_clear: the garbage collector must not take the engine from under the handle.
@cython.no_gc_clear
cdef class Region:
    """An mp_region and the Python memory behind it.

    `uses` counts what needs the memory or the handle: exported buffers and native calls in flight. Once the region is
    withdrawn, the last use drops the handle (which frees allocated memory) and the buffer or owner it was made from.
    """

    cdef mp_region *handle
    cdef mp_region_info info
    cdef Engine engine
    cdef readonly str name
    cdef Py_buffer view
    cdef bint has_view
    cdef object owner
    cdef Py_ssize_t uses
    cdef readonly bint released

    cdef int opened(self, Engine engine, bytes name) except -1:
        self.engine = engine
        self.name = None if name is None else name.decode()
        mp_region_get_info(self.handle, &self.info)
        return 0

    def __dealloc__(self):
        self.let_go()

    cdef void let_go(self) noexcept:
        cdef mp_region *handle = self.handle
        self.handle = NULL
        if handle != NULL:
            with nogil:
                mp_region_free(handle)
        if self.has_view:
            self.has_view = False
            PyBuffer_Release(&self.view)

    cdef void drop_if_unused(self) noexcept:
        if self.released and self.uses == 0:
            self.let_go()
            self.owner = None

    def _withdraw(self):
        """Release the region in the core. Returns once nothing reads or writes it."""
        cdef mp_error error
        cdef mp_status status
        if self.handle == NULL:
            return
        pin(self)
        try:
            with nogil:
                status = mp_region_release(self.handle, &error)
            check(status, &error)
            self.released = True
        finally:
            unpin(self)

    def _forget(self):
        """Let go of the memory: the engine is closed and touches it no more."""
        self.released = True
        self.drop_if_unused()

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.released or self.handle == NULL:
            raise mistake(MP_REGION_RELEASED, f"region {self.name!r} is released", "a view taken while it was live")
        if self.info.flags & MP_REGION_CUDA:
            raise BufferError(f"region {self.name!r} is memory of a GPU, which no processor can read")
        PyBuffer_FillInfo(buffer, self, self.info.address, <Py_ssize_t>self.info.length,
                          not self.info.engine_owned and not self.info.flags & MP_REGION_WRITABLE, flags)
        self.uses += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        unpin(self)

    @property
    def address(self):
        return <uintptr_t>self.info.address

    @property
    def nbytes(self):
        return self.info.length

    @property
    def key(self):
        return self.info.key

    @property
    def id(self):
        return self.info.id

    @property
    def generation(self):
        return self.info.generation

    @property
    def writable(self):
        return self.info.flags & MP_REGION_WRITABLE != 0

    @property
    def allocated(self):
        return self.info.engine_owned != 0

    @property
    def shared(self):
        return self.info.flags & MP_REGION_SHARED != 0

    @property
    def location(self):
        cdef char buffer[32]
        if self.handle == NULL:
            raise mistake(MP_REGION_RELEASED, f"region {self.name!r} is released", "its location while it is live")
        mp_region_location(self.handle, buffer, sizeof(buffer))
        return text(buffer)

    @property
    def page_bytes(self):
        return self.info.page_bytes or None


cdef inline mp_region *pin(Region region) noexcept:
    region.uses += 1
    return region.handle


cdef inline void unpin(Region region) noexcept:
    region.uses -= 1
    region.drop_if_unused()


cdef class RemoteRegion:
    """An mp_remote_region by value."""

    cdef mp_remote_region raw

    @property
    def name(self):
        return text(self.raw.name)

    @property
    def nbytes(self):
        return self.raw.length

    @property
    def key(self):
        return self.raw.key

    @property
    def generation(self):
        return self.raw.generation

    @property
    def writable(self):
        return self.raw.flags & MP_REGION_WRITABLE != 0

    @property
    def incarnation(self):
        return hexadecimal(self.raw.incarnation)

    def __reduce__(self):
        cdef bytes incarnation = PyBytes_FromStringAndSize(<const char *>self.raw.incarnation, 16)
        cdef bytes name = self.raw.name
        return restore_remote_region, (
            type(self), self.raw.key, self.raw.length, self.raw.generation, self.raw.flags, incarnation, name)


def restore_remote_region(type remote_type, uint64_t key, uint64_t nbytes, uint64_t generation, uint32_t flags,
                          bytes incarnation not None, bytes name not None):
    """Return the RemoteRegion that was pickled or copied."""
    cdef RemoteRegion remote
    cdef mp_remote_region raw
    if not issubclass(remote_type, RemoteRegion) or len(incarnation) != 16 or len(name) >= sizeof(raw.name):
        raise mistake(MP_INVALID_ARGUMENT, "this is no RemoteRegion", "peer.regions['name']")
    memset(&raw, 0, sizeof(raw))
    raw.key = key
    raw.length = nbytes
    raw.generation = generation
    raw.flags = flags
    memcpy(raw.incarnation, PyBytes_AS_STRING(incarnation), 16)
    memcpy(raw.name, PyBytes_AS_STRING(name), len(name))
    remote = new_object(remote_type)
    remote.raw = raw
    return remote

# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers, and whole batches of them. Included by _native.pyx."""

cdef struct Column:
    # One of the three number columns of a batch: a scalar that is repeated, or an array.
    const int64_t *data
    size_t stride        # in elements: 0 or 1
    Py_ssize_t count     # -1: a scalar
    int64_t scalar
    int64_t *copy
    bint held
    Py_buffer view


cdef int column_fill(Column *column, object value, str what) except -1:
    if PyLong_CheckExact(value):
        return column_scalar(column, exact_int64(value, what))
    if PyObject_CheckBuffer(value):
        return column_buffer(column, value, what)
    if isinstance(value, (list, tuple, range)):
        return column_sequence(column, value, what)
    return column_scalar(column, exact_int64(whole_number(value, what, expected_numbers(value)), what))


cdef str expected_numbers(object value):
    if hasattr(value, "numpy"):
        return "x.numpy(), which shares the memory of a CPU tensor"
    return "an int, or a one-dimensional array of integers"


cdef int column_scalar(Column *column, int64_t value) except -1:
    column.scalar = value
    column.data = &column.scalar
    column.stride = 0
    column.count = -1
    return 0


cdef int column_sequence(Column *column, object values, str what) except -1:
    cdef Py_ssize_t i
    cdef tuple numbers
    try:
        numbers = tuple(values)
    except (OverflowError, MemoryError) as cause:  # range(10**30) is easily written
        raise mistake(MP_NO_MEMORY, f"{what} has more entries than memory can hold", "smaller batches") from cause
    column_reserve(column, len(numbers))
    for i in range(len(numbers)):
        value = numbers[i]
        if not PyLong_CheckExact(value):
            value = whole_number(value, f"{what}[{i}]", "an int")
        column.copy[i] = clamped_int64(value)
    return 0


cdef int column_reserve(Column *column, Py_ssize_t count) except -1:
    column.copy = <int64_t *>reserve(count, sizeof(int64_t))
    column.data = column.copy
    column.stride = 1
    column.count = count
    return 0


cdef int column_buffer(Column *column, object value, str what) except -1:
    cdef str expected = "an array of integers, for example numpy.asarray(x, dtype='int64')"
    cdef char kind
    cdef const char *fmt
    cdef Py_buffer *view = &column.view
    try:
        PyObject_GetBuffer(value, view, PyBUF_FORMAT | PyBUF_STRIDES)
    except (BufferError, ValueError, TypeError) as cause:
        raise wrong_type(what, value, expected) from cause
    column.held = True
    fmt = "B"
    if view.format != NULL:
        fmt = view.format
    if fmt[0] in b"@=<":  # little-endian hosts only: the build refuses others
        fmt += 1
    kind = fmt[0]
    if kind not in b"bBhHiIlLqQnN" or fmt[1] != 0:
        raise wrong_type(f"{what} has elements of format {text(fmt)!r} and", value, expected)
    if view.itemsize not in (1, 2, 4, 8):
        raise wrong_type(f"{what} has elements of {view.itemsize} bytes and", value, expected)
    if view.itemsize == 1 and not hasattr(value, "__array_interface__"):
        # bytes, a Region, an mmap: memory that was given in the place of numbers would be taken for millions of items.
        raise wrong_type(f"{what} is raw memory, not numbers: it", value, expected)
    if view.ndim > 1:
        raise mistake(MP_INVALID_ARGUMENT, f"{what} has {view.ndim} dimensions", "a one-dimensional array: x.ravel()")
    cdef bint is_signed = kind in b"bhilqn"
    if view.ndim == 0:
        column_convert(&column.scalar, <const char *>view.buf, 1, 0, view.itemsize, is_signed)
        return column_scalar(column, column.scalar)
    cdef Py_ssize_t count = view.shape[0]
    # NULL: contiguous. ctypes exports its arrays so although strides were asked for.
    cdef Py_ssize_t stride = view.strides[0] if view.strides != NULL else view.itemsize
    if is_signed and view.itemsize == 8 and (stride == 8 or count <= 1) and not <uintptr_t>view.buf & 7:
        column.data = <const int64_t *>view.buf
        column.stride = 1
        column.count = count
        return 0
    column_reserve(column, count)
    column_convert(column.copy, <const char *>view.buf, count, stride, view.itemsize, is_signed)
    return 0


cdef void column_convert(int64_t *target, const char *source, Py_ssize_t count, Py_ssize_t stride, Py_ssize_t size,
                         bint is_signed) noexcept nogil:
    cdef Py_ssize_t i
    cdef int8_t i8
    cdef int16_t i16
    cdef int32_t i32
    cdef uint8_t u8
    cdef uint16_t u16
    cdef uint32_t u32
    cdef uint64_t u64
    for i in range(count):
        # memcpy: the elements of a strided view need not be aligned.
        if size == 8:
            memcpy(&u64, source, 8)
            target[i] = <int64_t>u64 if is_signed or u64 <= <uint64_t>INT64_MAX else INT64_MAX
        elif size == 4 and is_signed:
            memcpy(&i32, source, 4)
            target[i] = i32
        elif size == 4:
            memcpy(&u32, source, 4)
            target[i] = u32
        elif size == 2 and is_signed:
            memcpy(&i16, source, 2)
            target[i] = i16
        elif size == 2:
            memcpy(&u16, source, 2)
            target[i] = u16
        elif is_signed:
            memcpy(&i8, source, 1)
            target[i] = i8
        else:
            memcpy(&u8, source, 1)
            target[i] = u8
        source += stride


cdef void column_clear(Column *column) noexcept:
    free(column.copy)
    column.copy = NULL
    if column.held:
        column.held = False
        PyBuffer_Release(&column.view)


cdef Py_ssize_t common_count(const Column *columns, tuple names) except -1:
    """Return how many items these columns describe together. `names`: what the caller calls them."""
    cdef Py_ssize_t i, count = -1
    cdef str first = ""
    for i in range(len(names)):
        if columns[i].count < 0:
            continue
        if count >= 0 and columns[i].count != count:
            raise mistake(
                MP_INVALID_ARGUMENT,
                f"{first} has {count} entries, {names[i]} has {columns[i].count}",
                "arrays of one length; a single int holds for every item")
        count = columns[i].count
        first = names[i]
    return 1 if count < 0 else count


# ------------------------------------------------------------------------------------------------ batches

cdef class Region
cdef class RemoteRegion


@cython.final
@cython.freelist(8)
cdef class Batch:
    """The arguments of one submit or prepare as an mp_batch. `clear` must follow every `fill_*`, even a failed one."""

    cdef mp_batch raw
    cdef Column columns[3]            # local_offsets, remote_offsets, lengths
    cdef list regions                 # the Regions whose handles the batch names
    cdef list remotes                 # keeps the RemoteRegions that the batch points into
    cdef Py_ssize_t pinned            # how many of `regions` are pinned so far
    cdef mp_region *one_local
    cdef const mp_remote_region *one_remote
    cdef mp_region **local_table
    cdef const mp_remote_region **remote_table
    cdef uint32_t *indexes            # `count` local ones, then `count` remote ones
    cdef Py_ssize_t indexed           # how many of them, where only `local` has several

    cdef int fill(self, object local, object remote, object local_offsets, object remote_offsets,
                  object lengths) except -1:
        if remote is None and isinstance(local, (list, tuple)):
            return self.fill_items(list(local))
        return self.fill_columns(local, remote, local_offsets, remote_offsets, lengths)

    cdef int fill_columns(self, object local, object remote, object local_offsets, object remote_offsets,
                          object lengths) except -1:
        if isinstance(local, tuple):
            self.fill_locals(local, remote)
        else:
            check_regions(local, remote, "")
            self.regions = [local]
        self.remotes = [remote]
        column_fill(&self.columns[0], local_offsets, "local_offsets")
        column_fill(&self.columns[1], remote_offsets, "remote_offsets")
        column_fill(&self.columns[2], lengths, "lengths")
        self.raw.count = common_count(self.columns, column_names)
        self.point_at_columns()
        if self.indexes == NULL:
            self.one_remote = &(<RemoteRegion>remote).raw
            self.one_local = pin(<Region>local)
            self.pinned = 1
            self.raw.locals = &self.one_local
            self.raw.locals_count = 1
            self.raw.remotes = &self.one_remote
            self.raw.remotes_count = 1
            return 0
        if self.raw.count != self.indexed:
            raise mistake(MP_INVALID_ARGUMENT, f"{self.indexed} items have a region, of {self.raw.count}",
                          "(regions, which): one number for each item")
        self.raw.local_index = self.indexes
        return self.fill_tables()

    cdef int fill_locals(self, tuple local, object remote) except -1:
        cdef Column which
        cdef Py_ssize_t i
        if len(local) != 2 or not isinstance(local[0], (list, tuple)) or not local[0]:
            raise wrong_type("local", local, "a Region, or (regions, which)")
        self.regions = list(local[0])
        for region in self.regions:
            check_regions(region, remote, "")
        memset(&which, 0, sizeof(which))
        try:
            column_fill(&which, local[1], "which")
            self.indexed = max(which.count, 1)
            self.indexes = <uint32_t *>reserve(self.indexed, sizeof(uint32_t))
            for i in range(self.indexed):
                if not 0 <= which.data[i] < <Py_ssize_t>len(self.regions):
                    raise mistake(MP_INVALID_ARGUMENT, f"item {i} names region {which.data[i]} of {len(self.regions)}",
                                  "from 0 on")
                self.indexes[i] = <uint32_t>which.data[i]
        finally:
            column_clear(&which)
        return 0

    cdef int fill_items(self, list items) except -1:
        cdef Py_ssize_t i
        cdef Py_ssize_t count = len(items)
        cdef dict local_slots = {}
        cdef dict remote_slots = {}
        self.regions = []
        self.remotes = []
        for i in range(3):
            column_reserve(&self.columns[i], count)
        self.indexes = <uint32_t *>reserve(2 * count, sizeof(uint32_t))
        for i in range(count):
            row = items[i]
            if not isinstance(row, (tuple, list)) or len(row) != 5:
                raise wrong_type(f"item {i}", row, "(local, local_offset, remote, remote_offset, length)")
            local, local_offset, remote, remote_offset, length = row
            check_regions(local, remote, f"item {i}: ")
            self.indexes[i] = slot(local_slots, self.regions, local)
            self.indexes[count + i] = slot(remote_slots, self.remotes, remote)
            self.columns[0].copy[i] = item_number(local_offset, i, "local_offset")
            self.columns[1].copy[i] = item_number(remote_offset, i, "remote_offset")
            self.columns[2].copy[i] = item_number(length, i, "length")
        self.fill_tables()
        self.raw.local_index = self.indexes
        self.raw.remote_index = self.indexes + count
        self.raw.count = count
        self.point_at_columns()
        return 0

    cdef int fill_tables(self) except -1:
        cdef Py_ssize_t i
        self.raw.locals_count = len(self.regions)
        self.raw.remotes_count = len(self.remotes)
        self.local_table = <mp_region **>reserve(self.raw.locals_count, sizeof(mp_region *))
        self.remote_table = <const mp_remote_region **>reserve(self.raw.remotes_count, sizeof(mp_remote_region *))
        for i in range(len(self.remotes)):
            self.remote_table[i] = &(<RemoteRegion>self.remotes[i]).raw
        for i in range(len(self.regions)):
            self.local_table[i] = pin(<Region>self.regions[i])
            self.pinned += 1
        self.raw.locals = self.local_table
        self.raw.remotes = self.remote_table
        return 0

    cdef void point_at_columns(self) noexcept:
        self.raw.local_offsets = self.columns[0].data
        self.raw.local_offsets_stride = self.columns[0].stride
        self.raw.remote_offsets = self.columns[1].data
        self.raw.remote_offsets_stride = self.columns[1].stride
        self.raw.lengths = self.columns[2].data
        self.raw.lengths_stride = self.columns[2].stride

    cdef void clear(self) noexcept:
        cdef Py_ssize_t i
        for i in range(3):
            column_clear(&self.columns[i])
        for i in range(self.pinned):
            unpin(<Region>self.regions[i])
        self.pinned = 0
        free(self.indexes)
        free(self.local_table)
        free(self.remote_table)
        self.indexes = NULL
        self.local_table = NULL
        self.remote_table = NULL


cdef tuple column_names = ("local_offsets", "remote_offsets", "lengths")


cdef inline int check_regions(object local, object remote, str where) except -1:
    if not isinstance(local, Region):
        raise wrong_type(f"{where}local", local, "a Region, from engine.allocate() or engine.register()")
    if not isinstance(remote, RemoteRegion):
        raise wrong_type(f"{where}remote", remote, "a RemoteRegion, from peer.regions['name']")
    return 0


cdef uint32_t slot(dict slots, list table, object entry) except? 4294967295:
    # By identity: two handles of one region are two entries, which costs a pointer and no comparison.
    key = <uintptr_t><PyObject *>entry
    found = slots.get(key)
    if found is None:
        found = slots[key] = len(table)
        table.append(entry)
    return found


cdef int64_t item_number(object value, Py_ssize_t item, str what) except? -2:
    if PyLong_CheckExact(value):
        return clamped_int64(value)
    return clamped_int64(whole_number(value, f"item {item}: {what}", "an int"))

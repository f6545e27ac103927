# SPDX-License-Identifier: Apache-2.0
"""Single Python values as C values. Whatever a caller gives passes one of these. Included by _native.pyx."""


cdef str shown(object value):
    """Return what a message says of `value`. Python refuses to write out ints of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


# ------------------------------------------------------------------------------------------------ texts and flags

cdef bytes encoded_or_none(object value, str what, int status):
    return None if value is None else encoded(value, what, status)


cdef bytes encoded(object value, str what, int status):
    """Return the UTF-8 of a str. `status` is that of the error for one that has none."""
    cdef bytes result
    if not isinstance(value, str):
        raise wrong_type(what, value, "a str")
    try:
        result = PyUnicode_AsUTF8String(value)
    except UnicodeEncodeError as cause:
        raise mistake(
            status, f"{what} is {value!a}, with half of a surrogate pair", "text that UTF-8 can express") from cause
    if b"\0" in result:
        raise mistake(status, f"{what} has a NUL character in it", "the same text without it")
    return result


cdef const char *pointer(bytes value) noexcept:
    """NULL for None. The pointer lives as long as `value`."""
    if value is None:
        return NULL
    return PyBytes_AS_STRING(value)


cdef bint flag(object value, str what) except? -1:
    # A text such as "no" is true in Python, and nobody means it.
    if value is True:
        return True
    if value is False:
        return False
    raise wrong_type(what, value, "True or False")


# ------------------------------------------------------------------------------------------------ times

cdef int64_t nanoseconds(object seconds, str what) except? -2:
    """None: -1, "until the deadline". Never negative otherwise."""
    cdef double value
    if seconds is None:
        return -1
    if PyFloat_CheckExact(seconds):
        value = PyFloat_AS_DOUBLE(seconds)
    else:
        value = real_number(seconds, what)
    if not value < 9e9:  # also NaN
        raise mistake(
            MP_INVALID_ARGUMENT, f"{what} is {shown(seconds)}", "a number of seconds, or None for no other bound")
    return <int64_t>(value * 1e9) if value > 0 else 0


cdef double real_number(object value, str what) except? -2.0:
    # float() would take True, and the digits in a text or buffer.
    if isinstance(value, (bool, str)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise wrong_type(what, value, "seconds as a number, or None")
    try:
        return PyFloat_AsDouble(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError, RuntimeError) as cause:  # an array or tensor of several
        raise wrong_type(what, value, "seconds as a number, or None") from cause


cdef int64_t bounded_nanoseconds(object seconds, str what) except? -2:
    """For waits that nothing else would end."""
    if seconds is None:
        raise wrong_type(what, seconds, "a number of seconds")
    return nanoseconds(seconds, what)


cdef uint32_t milliseconds(object seconds, str what) except? 4294967295:
    """None: 0, "the configured one". A time that passed already becomes the shortest one."""
    cdef int64_t ns = nanoseconds(seconds, what)
    if ns < 0:
        return 0
    return <uint32_t>min(max((ns + 999_999) // 1_000_000, 1), 4_000_000_000)


# ------------------------------------------------------------------------------------------------ whole numbers

cdef object whole_number(object value, str what, str expected):
    """Return an int for anything that is one. True is none."""
    if isinstance(value, bool) or not PyIndex_Check(value):
        raise wrong_type(what, value, expected)
    try:
        return PyNumber_Index(value)
    except (TypeError, ValueError, RuntimeError) as cause:  # an array or tensor of several, or of another type
        raise wrong_type(what, value, expected) from cause


cdef int64_t exact_int64(object value, str what) except? -2:
    cdef int overflow = 0
    cdef int64_t result = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow:
        raise mistake(
            MP_OUT_OF_RANGE, f"{what} is {shown(value)}, beyond 64 bits", "an offset or length inside the region")
    return result


cdef int64_t clamped_int64(object value) except? -2:
    # In the list form a number beyond 64 bits spoils its own item only, so it becomes one that no region holds.
    cdef int overflow = 0
    cdef int64_t result = PyLong_AsLongLongAndOverflow(value, &overflow)
    return result if overflow == 0 else INT64_MAX if overflow > 0 else INT64_MIN


cdef uint64_t length(object nbytes) except? 0:
    cdef int64_t value = exact_int64(whole_number(nbytes, "nbytes", "a number of bytes as an int"), "nbytes")
    if value <= 0:
        raise mistake(MP_OUT_OF_RANGE, f"nbytes is {value}", "at least 1 byte")
    return value


cdef int32_t node(object value) except -1:
    number = whole_number(value, "numa_node", "the number of a NUMA node as an int")
    if not 0 <= number <= 2147483647:
        raise mistake(MP_INVALID_ARGUMENT, f"numa_node is {shown(value)}", "0 or more, or None for any node")
    return number


# ------------------------------------------------------------------------------------------------ memory

cdef int plain_buffer(object value, Py_buffer *view, str what, str expected) except -1:
    """Take the bytes of `value`, which must lie in a row. The caller releases `view`."""
    if not PyObject_CheckBuffer(value):
        raise wrong_type(what, value, expected)
    try:
        PyObject_GetBuffer(value, view, PyBUF_SIMPLE)
    except (BufferError, TypeError, ValueError) as cause:
        if isinstance(value, Region):  # it has told why
            raise
        raise mistake(
            MP_INVALID_ARGUMENT, f"the bytes of {what} cannot be used as they lie: {cause}",
            "a contiguous copy, bytes(x)") from cause
    return 0


cdef void *reserve(size_t count, size_t size) except NULL:
    cdef void *memory = calloc(max(count, 1), size)
    if memory == NULL:
        raise mistake(MP_NO_MEMORY, f"no memory for {count} entries of {size} bytes", "smaller batches")
    return memory


cdef extern from *:
    """
    static inline PyObject *moonpool_new_object(PyTypeObject *kind, PyObject *no_arguments) {
      return kind->tp_new(kind, no_arguments, nullptr);
    }
    """
    object moonpool_new_object(type kind, tuple no_arguments)


cdef inline object new_object(type kind):
    # What kind.__new__(kind) does, at a third of the cost: every transfer passes here.
    return moonpool_new_object(kind, empty_tuple)

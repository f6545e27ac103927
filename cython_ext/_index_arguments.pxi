# SPDX-License-Identifier: Apache-2.0
# ---- arguments: a wrong type is a TypeError, a wrong size a ValueError

cdef object _integer(object value, str name, object most):
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {value}")
    return value


cdef uint32_t _u32(object value, str name) except? 0:
    return _integer(value, name, 0xffffffff)


cdef uint64_t _u64(object value, str name) except? 0:
    return _integer(value, name, 0xffffffffffffffff)


cdef int64_t _time(object value, str name) except? 0:
    return _integer(value, name, _TIME_MAX)


cdef uint32_t _segment(object value) except? 0:
    if _u32(value, "segment") == kNone:
        raise ValueError(f"segment must not be {kNone}: that says that there is none")
    return value


cdef const uint8_t *_bytes(bytes value, str name) except NULL:
    if value is None:
        raise TypeError(f"{name} must be bytes, not NoneType")
    return <const uint8_t *><const char *>value


cdef Hashes _hashes(bytes hashes, object namespace) except *:
    cdef Hashes made
    made.data = _bytes(hashes, "hashes")
    if len(hashes) % kHashBytes != 0:
        raise ValueError(f"hashes must be a multiple of {kHashBytes} bytes, not {len(hashes)}")
    made.count = len(hashes) // kHashBytes
    made.name_space = _u32(namespace, "namespace")
    return made


cdef const uint8_t *_each(bytes value, str name, size_t count, size_t size) except NULL:
    cdef const uint8_t *at = _bytes(value, name)
    if <size_t>len(value) != count * size:
        raise ValueError(f"{name} must be {count} x {size} bytes, not {len(value)}")
    return at


cdef const uint8_t *_slots(bytes slots, size_t *count) except NULL:
    cdef const uint8_t *at = _bytes(slots, "slots")
    if len(slots) % 4 != 0:
        raise ValueError(f"slots must be a multiple of 4 bytes, not {len(slots)}")
    count[0] = len(slots) // 4
    return at


cdef const uint8_t *_moves(bytes moves, size_t *count) except NULL:
    cdef const uint8_t *at = _bytes(moves, "moves")
    if len(moves) % 8 != 0:
        raise ValueError(f"moves must be a multiple of 8 bytes, not {len(moves)}")
    count[0] = len(moves) // 8
    return at


cdef uint8_t *_room(bytes made) noexcept:
    # Of bytes that nobody else has seen yet.
    return <uint8_t *><char *>made


cdef bytes _new(Py_ssize_t size):
    return PyBytes_FromStringAndSize(NULL, size)


cdef int _check(Outcome outcome, object segment=None) except -1:
    if outcome == Outcome.kOk:
        return 0
    if outcome == Outcome.kNoMemory:
        raise MemoryError("the chunk index got no memory")
    if outcome == Outcome.kUnknownSegment:
        raise KeyError(f"there is no segment {segment}")
    if outcome == Outcome.kLostSegment:
        raise ValueError(f"segment {segment} was dropped; its number is not used again")
    if outcome == Outcome.kTooSmall:
        raise ValueError(f"segment {segment} has extents beyond this capacity")
    if outcome == Outcome.kTooManySegments:
        raise ValueError("there are as many segments as the index can hold")
    raise ValueError("records must be as many as slots, each with its length before it")


cdef DemoteCall _demote(uses_min, count_max, bytes_max, avoid) except *:
    cdef DemoteCall call
    call.uses_min = _u32(uses_min, "uses_min")
    call.count_max = _u32(count_max, "count_max")
    call.bytes_max = _u64(bytes_max, "bytes_max")
    for segment in avoid:
        call.avoid.push_back(_u32(segment, "avoid"))
    return call

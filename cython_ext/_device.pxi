# SPDX-License-Identifier: Apache-2.0
"""What the CUDA driver and DLPack say of memory. Included by _native.pyx."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid


def cuda_memory_kind(address, nbytes):
    """Return (kind, device): an mp_memory_kind, and the ordinal of the GPU or -1."""
    cdef const void *memory = <const void *><uintptr_t>address
    cdef uint64_t size = length(nbytes)
    cdef mp_memory_kind kind
    cdef int32_t device
    cdef mp_error error
    cdef mp_status status
    with nogil:
        status = mp_cuda_memory_kind(memory, size, &kind, &device, &error)
    check(status, &error)
    return kind, device


# https://dmlc.github.io/dlpack/latest/c_api.html: DLTensor, the first member of DLManagedTensor.
cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset


def dlpack_memory(capsule):
    """Return (device type, device id, address, nbytes, contiguous) of a DLPack capsule that was not consumed."""
    cdef DLTensor *tensor
    cdef Py_ssize_t axis
    cdef int64_t count = 1
    cdef bint contiguous = True
    if not PyCapsule_IsValid(capsule, b"dltensor"):
        raise wrong_type("what __dlpack__ returned", capsule, "a DLPack capsule that was not consumed")
    tensor = <DLTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
    for axis in range(tensor.ndim - 1, -1, -1):
        # An axis of one element is never stepped along.
        if tensor.strides != NULL and tensor.shape[axis] > 1 and tensor.strides[axis] != count:
            contiguous = False
        count *= tensor.shape[axis]
    bits = <object>count * tensor.bits * tensor.lanes
    return (tensor.device_type, tensor.device_id, <uintptr_t>tensor.data + tensor.byte_offset, (bits + 7) // 8,
            contiguous)

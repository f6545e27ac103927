# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""A compiled module that knows only the installed .pxd, header and library."""

from libc.stdint cimport int64_t
from libc.string cimport memset

from moonpool.moonpool_engine cimport (
    MP_OK,
    MP_READ,
    MP_COMPLETED,
    MP_REGION_WRITABLE,
    mp_batch,
    mp_config,
    mp_config_init,
    mp_digest,
    mp_engine,
    mp_engine_free,
    mp_engine_open,
    mp_error,
    mp_options,
    mp_peer,
    mp_peer_connect,
    mp_peer_find_region,
    mp_peer_free,
    mp_peer_get_info,
    mp_peer_info,
    mp_region,
    mp_region_free,
    mp_region_register,
    mp_remote_region,
    mp_status,
    mp_submit,
    mp_transfer,
    mp_transfer_free,
    mp_transfer_get_state,
    mp_transfer_wait,
)


cdef int check(mp_status status, const mp_error *error) except -1:
    if status != MP_OK:
        raise RuntimeError(error.message.decode())
    return 0


def digest(const unsigned char[::1] data):
    """Return the engine's digest of `data`."""
    return mp_digest(&data[0], data.shape[0])


def read(bytes address, bytes name, unsigned char[::1] into):
    """Read the start of region `name` of the engine at `address`; return the path the bytes took."""
    cdef mp_config config
    cdef mp_error error
    cdef mp_engine *engine = NULL
    cdef mp_region *region = NULL
    cdef mp_peer *peer = NULL
    cdef mp_transfer *transfer = NULL
    cdef mp_remote_region remote
    cdef const mp_remote_region *remotes
    cdef mp_peer_info info
    cdef mp_batch batch
    cdef mp_options options
    cdef mp_status status
    cdef int64_t zero = 0
    cdef int64_t length = into.shape[0]
    cdef const char *c_address = address
    cdef const char *c_name = name
    mp_config_init(&config)
    config.listen = NULL
    try:
        check(mp_engine_open(&config, &engine, &error), &error)
        check(mp_region_register(engine, &into[0], length, NULL, MP_REGION_WRITABLE, &region, &error), &error)
        with nogil:
            status = mp_peer_connect(engine, c_address, 5000, NULL, NULL, &peer, &error)
        check(status, &error)
        check(mp_peer_find_region(peer, c_name, 5000000000, &remote, &error), &error)
        remotes = &remote
        memset(&batch, 0, sizeof(batch))
        batch.count = 1
        batch.local_offsets = &zero
        batch.remote_offsets = &zero
        batch.lengths = &length
        batch.locals = &region
        batch.locals_count = 1
        batch.remotes = &remotes
        batch.remotes_count = 1
        memset(&options, 0, sizeof(options))
        check(mp_submit(peer, MP_READ, &batch, &options, &transfer, &error), &error)
        with nogil:
            status = mp_transfer_wait(transfer, -1)
        if status != MP_OK or mp_transfer_get_state(transfer) != MP_COMPLETED:
            raise RuntimeError("the transfer did not complete")
        mp_peer_get_info(peer, &info)
        return info.path.decode()
    finally:
        with nogil:
            if transfer != NULL:
                mp_transfer_free(transfer)
            if peer != NULL:
                mp_peer_free(peer)
            if engine != NULL:
                mp_engine_free(engine)
            if region != NULL:
                mp_region_free(region)

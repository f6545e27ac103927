# SPDX-License-Identifier: Apache-2.0
"""Declarations of moonpool/engine.h, and nothing else. The header carries the documentation."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "moonpool/engine.h" nogil:
    enum:
        MP_ABI_VERSION
        MP_REGION_WRITABLE
        MP_REGION_SHARED
        MP_REGION_CUDA
        MP_HUGE_PAGES_AUTO
        MP_HUGE_PAGES_NEVER
        MP_HUGE_PAGES_REQUIRED
        MP_NUMA_ANY
        MP_CUDA_ANY
        MP_DIGEST_LEAF_BYTES

    ctypedef struct mp_engine:
        pass
    ctypedef struct mp_region:
        pass
    ctypedef struct mp_peer:
        pass
    ctypedef struct mp_plan:
        pass
    ctypedef struct mp_transfer:
        pass

    ctypedef enum mp_status:
        MP_OK
        MP_PENDING
        MP_INVALID_ARGUMENT
        MP_OUT_OF_RANGE
        MP_CONFIG
        MP_TRANSPORT_UNAVAILABLE
        MP_REGION_UNKNOWN
        MP_REGION_RELEASED
        MP_REGION_READ_ONLY
        MP_REGION_BUSY
        MP_REGION_STALE
        MP_ADDRESS
        MP_LISTEN
        MP_CONNECT
        MP_PEER_LOST
        MP_PROTOCOL
        MP_VERSION
        MP_AUTH
        MP_DEADLINE
        MP_CANCELLED
        MP_WAIT_TIMEOUT
        MP_DIGEST
        MP_NOTIFY_FULL
        MP_NO_MEMORY
        MP_LIMIT
        MP_CLOSED
        MP_FORKED
        MP_SYSTEM
        MP_INTERNAL
        MP_CUDA

    ctypedef struct mp_error:
        int32_t code
        int32_t sys_errno
        int64_t item
        int32_t retryable
        char path[16]
        char peer[128]
        char message[512]
        char cause[256]
        char hint[256]

    # ------------------------------------------------------------ engine
    ctypedef struct mp_config:
        uint32_t abi_version
        const char *name
        const char *listen
        const char *transports
        const char *require
        const uint8_t *secret
        size_t secret_bytes
        int32_t insecure
        uint32_t lanes
        uint32_t io_threads
        uint64_t slice_bytes
        uint32_t spin_us
        uint32_t connect_timeout_ms
        uint32_t progress_timeout_ms
        uint32_t deadline_ms
        uint32_t regions_max
        uint32_t peers_max
        uint32_t notifications_max
        const char *rdma_devices
        uint32_t rdma_queue_pairs
        uint32_t rdma_queue_pairs_max
        uint32_t rdma_queue_depth
        uint32_t rdma_inline_bytes
        uint32_t rdma_service_level
        uint32_t rdma_traffic_class
        uint32_t rdma_pkey_index
        uint64_t rdma_registration_bytes_max
        int32_t cuda_staging
        uint64_t cuda_staging_bytes

    void mp_config_init(mp_config *config)
    mp_status mp_engine_open(const mp_config *config, mp_engine **engine, mp_error *error)
    mp_status mp_engine_close(mp_engine *engine, mp_error *error)
    mp_status mp_engine_fence(mp_engine *engine, const uint8_t *incarnation, uint32_t *sessions, mp_error *error)
    void mp_engine_free(mp_engine *engine)
    const char *mp_engine_address(const mp_engine *engine)
    void mp_engine_incarnation(const mp_engine *engine, uint8_t incarnation[16])
    size_t mp_engine_stats_json(mp_engine *engine, char *buffer, size_t size)
    size_t mp_probe_json(char *buffer, size_t size)

    # ------------------------------------------------------------ regions
    ctypedef struct mp_region_info:
        uint64_t id
        uint64_t key
        uint64_t generation
        uint64_t length
        void *address
        uint32_t flags
        int32_t engine_owned
        uint64_t page_bytes

    ctypedef struct mp_allocation:
        uint32_t flags
        int32_t huge_pages
        int32_t numa_node

    void mp_allocation_init(mp_allocation *allocation)
    mp_status mp_region_allocate(mp_engine *engine, uint64_t nbytes, const char *name,
                                 const mp_allocation *allocation, mp_region **region, mp_error *error)
    mp_status mp_region_register(mp_engine *engine, void *address, uint64_t nbytes, const char *name, uint32_t flags,
                                 mp_region **region, mp_error *error)
    ctypedef enum mp_memory_kind:
        MP_MEMORY_HOST
        MP_MEMORY_PINNED
        MP_MEMORY_DEVICE
        MP_MEMORY_MANAGED

    mp_status mp_region_register_cuda(mp_engine *engine, void *address, uint64_t nbytes, int32_t device,
                                      const char *name, uint32_t flags, mp_region **region, mp_error *error)
    mp_status mp_cuda_memory_kind(const void *address, uint64_t nbytes, mp_memory_kind *kind, int32_t *device,
                                  mp_error *error)
    size_t mp_region_location(const mp_region *region, char *buffer, size_t size)
    mp_status mp_region_release(mp_region *region, mp_error *error)
    void mp_region_free(mp_region *region)
    void mp_region_get_info(const mp_region *region, mp_region_info *info)

    # ------------------------------------------------------------ peers
    ctypedef struct mp_remote_region:
        uint64_t key
        uint64_t length
        uint64_t generation
        uint32_t flags
        uint8_t incarnation[16]
        char name[256]

    ctypedef enum mp_peer_state:
        MP_PEER_CONNECTING
        MP_PEER_READY
        MP_PEER_LOST_STATE
        MP_PEER_CLOSED

    ctypedef struct mp_peer_info:
        int32_t state
        uint8_t incarnation[16]
        char name[128]
        char address[128]
        char path[16]
        char fallback[256]
        uint64_t regions

    ctypedef int32_t (*mp_interrupt)(void *context) noexcept nogil

    mp_status mp_peer_connect(mp_engine *engine, const char *address, uint32_t timeout_ms, mp_interrupt interrupt,
                              void *context, mp_peer **peer, mp_error *error)
    mp_status mp_peer_ensure(mp_peer *peer, uint32_t timeout_ms, mp_interrupt interrupt, void *context,
                             mp_error *error)
    mp_status mp_peer_close(mp_peer *peer, mp_error *error)
    void mp_peer_free(mp_peer *peer)
    void mp_peer_get_info(const mp_peer *peer, mp_peer_info *info)
    mp_status mp_peer_find_region(mp_peer *peer, const char *name, int64_t timeout_ns, mp_remote_region *region,
                                  mp_error *error)
    size_t mp_peer_list_regions(mp_peer *peer, mp_remote_region *regions, size_t capacity)

    # ------------------------------------------------------------ transfers
    ctypedef enum mp_op:
        MP_READ
        MP_WRITE

    ctypedef struct mp_batch:
        size_t count
        const int64_t *local_offsets
        size_t local_offsets_stride
        const int64_t *remote_offsets
        size_t remote_offsets_stride
        const int64_t *lengths
        size_t lengths_stride
        mp_region **locals
        size_t locals_count
        const uint32_t *local_index
        const mp_remote_region **remotes
        size_t remotes_count
        const uint32_t *remote_index

    ctypedef struct mp_options:
        int64_t deadline_ns
        int64_t deadline_at_ns
        const void *notify
        size_t notify_bytes
        int32_t digest
        uint64_t cuda_stream
        int32_t cuda_stream_given

    ctypedef enum mp_transfer_state:
        MP_RUNNING
        MP_COMPLETED
        MP_FAILED
        MP_STOPPED
        MP_EXPIRED
        MP_UNSETTLED

    mp_status mp_submit(mp_peer *peer, mp_op op, const mp_batch *batch, const mp_options *options,
                        mp_transfer **transfer, mp_error *error)
    mp_status mp_plan_create(mp_peer *peer, const mp_batch *batch, mp_plan **plan, mp_error *error)
    mp_status mp_plan_post(mp_plan *plan, mp_op op, const int64_t *indices, size_t count, const mp_options *options,
                           mp_transfer **transfer, mp_error *error)
    size_t mp_plan_count(const mp_plan *plan)
    void mp_plan_free(mp_plan *plan)
    mp_transfer_state mp_transfer_get_state(const mp_transfer *transfer)
    mp_status mp_transfer_wait(mp_transfer *transfer, int64_t timeout_ns)
    mp_status mp_transfer_wait_settled(mp_transfer *transfer, int64_t timeout_ns)
    mp_status mp_transfer_cancel(mp_transfer *transfer, int64_t timeout_ns)
    void mp_transfer_get_error(const mp_transfer *transfer, mp_error *error)
    size_t mp_transfer_count(const mp_transfer *transfer)
    void mp_transfer_item_status(const mp_transfer *transfer, uint8_t *status, size_t count)
    mp_status mp_transfer_digests(const mp_transfer *transfer, uint64_t *digests, size_t count)
    mp_status mp_transfer_set_eventfd(mp_transfer *transfer, int fd)
    void mp_transfer_free(mp_transfer *transfer)
    const uint64_t MP_DIGEST_LEAF_BYTES
    uint64_t mp_digest(const void *data, uint64_t nbytes)
    mp_status mp_digest_batch(const void *memory, uint64_t nbytes, const int64_t *offsets, size_t offsets_stride,
                              const int64_t *lengths, size_t lengths_stride, size_t count, uint64_t *digests,
                              size_t *bad)
    mp_status mp_combine_batch(const void *memory, uint64_t nbytes, const int64_t *offsets, size_t offsets_stride,
                               const int64_t *lengths, size_t lengths_stride, size_t count, uint64_t *digests,
                               size_t *bad)
    ctypedef struct mp_memory:
        const void *data
        uint64_t nbytes
    mp_status mp_digest_joined(const mp_memory *memories, size_t memories_count, const int64_t *which,
                               size_t which_stride, const int64_t *offsets, size_t offsets_stride,
                               const int64_t *lengths, size_t lengths_stride, size_t count, const int64_t *counts,
                               size_t counts_stride, size_t wholes, uint64_t *digests, size_t *bad)
    mp_status mp_copy_batch(void *target, uint64_t target_bytes, const int64_t *target_offsets,
                            size_t target_offsets_stride, const void *source, uint64_t source_bytes,
                            const int64_t *source_offsets, size_t source_offsets_stride, const int64_t *lengths,
                            size_t lengths_stride, size_t count, size_t *bad)
    mp_status mp_region_copy_batch(mp_region *target_region, void *target, uint64_t target_bytes,
                                   const int64_t *target_offsets, size_t target_offsets_stride,
                                   mp_region *source_region, const void *source, uint64_t source_bytes,
                                   const int64_t *source_offsets, size_t source_offsets_stride,
                                   const int64_t *lengths, size_t lengths_stride, size_t count, mp_error *error)

    # ------------------------------------------------------------ notifications
    ctypedef struct mp_notification:
        char peer[128]
        uint8_t incarnation[16]
        uint8_t *payload
        size_t payload_bytes

    mp_status mp_notification_take(mp_engine *engine, int64_t timeout_ns, mp_notification *notification)
    void mp_notification_clear(mp_notification *notification)

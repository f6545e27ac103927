/* SPDX-License-Identifier: Apache-2.0
 *
 * moonpool/engine.h - the C face of the Moonpool transfer engine.
 *
 * One engine per process is usual; several are allowed. Every handle is opaque and reference counted by the
 * engine: `*_free` drops the caller's reference, it never pulls memory from under a running transfer.
 *
 * Threads: every function may be called from any thread at any time, unless its comment says otherwise.
 * Fork: in a forked child every call fails with MP_FORKED, except `*_free` and `mp_engine_close`, which only release
 * what the child inherited. Calls without a status say it in their own terms: a transfer is MP_FAILED with that error,
 * a peer MP_PEER_CLOSED, lists and counters are empty. Errors: functions that can fail return an mp_status and fill
 * `*error` when it is not NULL. Times: `_ms` milliseconds, `_ns` nanoseconds; a negative `timeout_ns` waits until the
 * operation's own deadline. No function blocks without a bound.
 */
#ifndef MOONPOOL_ENGINE_H
#define MOONPOOL_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MP_API __attribute__((visibility("default")))
#define MP_ABI_VERSION 4

typedef struct mp_engine mp_engine;
typedef struct mp_region mp_region;
typedef struct mp_peer mp_peer;
typedef struct mp_plan mp_plan;
typedef struct mp_transfer mp_transfer;

/* The one table of outcomes. Python's exceptions, the wire and the per-item statuses use the same numbers. */
typedef enum mp_status {
  MP_OK = 0,
  MP_PENDING = 1,               /* per item: not finished yet */
  MP_INVALID_ARGUMENT = 2,      /* the call itself is wrong: NULL, bad shape, mixed engines */
  MP_OUT_OF_RANGE = 3,          /* negative or zero length, offset outside the region, overflow */
  MP_CONFIG = 4,                /* a setting has an impossible value */
  MP_TRANSPORT_UNAVAILABLE = 5, /* a named transport is unknown here, or `require` cannot be met */
  MP_REGION_UNKNOWN = 6,        /* no such key or name */
  MP_REGION_RELEASED = 7,       /* it was there and is gone */
  MP_REGION_READ_ONLY = 8,
  MP_REGION_BUSY = 9,   /* release refused: a running transfer owns the bytes */
  MP_REGION_STALE = 10, /* the handle names an earlier incarnation of the peer */
  MP_ADDRESS = 11,      /* an address that cannot be parsed or resolved */
  MP_LISTEN = 12,       /* the listening socket cannot be made */
  MP_CONNECT = 13,      /* refused, unreachable, or no answer within the connect deadline */
  MP_PEER_LOST = 14,    /* the connection ended while work was outstanding */
  MP_PROTOCOL = 15,     /* the other side does not speak this protocol */
  MP_VERSION = 16,      /* it does, in another version */
  MP_AUTH = 17,         /* the cluster secrets differ */
  MP_DEADLINE = 18,     /* the operation's deadline or progress time-out passed */
  MP_CANCELLED = 19,
  MP_WAIT_TIMEOUT = 20, /* the wait ended, the transfer did not; its buffers stay owned */
  MP_DIGEST = 21,       /* bytes arrived that are not the bytes sent */
  MP_NOTIFY_FULL = 22,  /* the peer's notification queue is at its bound */
  MP_NO_MEMORY = 23,
  MP_LIMIT = 24,  /* a documented bound was reached (regions, peers, items) */
  MP_CLOSED = 25, /* the engine, peer or region handle was closed */
  MP_FORKED = 26, /* used in a forked child */
  MP_SYSTEM = 27, /* an operating-system call failed; see sys_errno */
  MP_INTERNAL = 28,
  MP_CUDA = 29 /* the CUDA driver is missing or refused a call; the cause begins with its name for the error */
} mp_status;

typedef struct mp_error {
  int32_t code;      /* mp_status */
  int32_t sys_errno; /* 0 or errno */
  int64_t item;      /* first item concerned, or -1 */
  int32_t retryable; /* 1 when the same call may succeed later */
  char path[16];     /* "local", "shm", "cuda_ipc", "rdma", "tcp", or "" */
  char peer[128];    /* "name (host:port)" or "" */
  char message[512]; /* what was attempted and what happened */
  char cause[256];   /* the first cause, or "" */
  char hint[256];    /* what to try, or "" */
} mp_error;

/* ---------------------------------------------------------------- engine */

typedef struct mp_config {
  uint32_t abi_version;   /* MP_ABI_VERSION */
  const char *name;       /* shown to peers; NULL: "engine" */
  const char *listen;     /* "host:port", "[::1]:0"; port 0 picks one; NULL: accepts nobody */
  const char *transports; /* "auto" or a comma list of "local", "shm", "cuda_ipc", "rdma", "tcp" */
  const char *require;    /* NULL, or the one transport every transfer must use */
  const uint8_t *secret;  /* cluster secret, or NULL */
  size_t secret_bytes;
  int32_t insecure;              /* allow listening beyond loopback without a secret */
  uint32_t lanes;                /* TCP connections per peer; 0: chosen from the cores. At most 64 */
  uint32_t io_threads;           /* 0: chosen from the cores. At most 64 */
  uint64_t slice_bytes;          /* of a large transfer that a lane takes at once; tcp may take more, rdma on several
                                  * rails less. 0: 1 MiB */
  uint32_t spin_us;              /* how long a waiter or an I/O thread looks before it sleeps; UINT32_MAX: default */
  uint32_t connect_timeout_ms;   /* 0: 5000 */
  uint32_t progress_timeout_ms;  /* no byte moved on a busy lane for so long: it is broken. 0: 10000 */
  uint32_t deadline_ms;          /* default deadline of a transfer. 0: 60000 */
  uint32_t regions_max;          /* 0: 1048576 */
  uint32_t peers_max;            /* inbound sessions; 0: 4096 */
  uint32_t notifications_max;    /* queued, not yet taken; 0: 65536. Each at most 64 KiB, 64 MiB together */
  const char *rdma_devices;      /* NULL: all; or NAME[:PORT][@GID_INDEX] with commas, such as "mlx5_0:1@3,mlx5_1" */
  uint32_t rdma_queue_pairs;     /* per peer and rail; 0: 2. At most 16 */
  uint32_t rdma_queue_pairs_max; /* of this engine for its own requests; the idlest make room. 0: 1024. To 65536 */
  uint32_t rdma_queue_depth;   /* work requests in a queue pair; 0: 256. 16 to 16384, less where the device has less */
  uint32_t rdma_inline_bytes;  /* writes up to this size travel in the request; UINT32_MAX: 128. At most 4096 */
  uint32_t rdma_service_level; /* 0 to 15 */
  uint32_t rdma_traffic_class; /* 0 to 255; DSCP in its upper six bits */
  uint32_t rdma_pkey_index;    /* in the port's table of partition keys */
  uint64_t rdma_registration_bytes_max; /* larger memory is registered in pieces; 0: what the devices allow */
  int32_t cuda_staging; /* 1 (default): memory of a GPU that neither a network adapter nor this process's copies between
                         * GPUs reach passes through the host. 0: that is an error, of its registration where there is
                         * RDMA, otherwise of the transfer */
  uint64_t cuda_staging_bytes; /* pinned memory for each GPU whose memory passes through the host; made at the first
                                * such transfer. 0: 64 MiB. 4 MiB to 16 GiB */
} mp_config;

/* Fills every field with its default. */
MP_API void mp_config_init(mp_config *config);

MP_API mp_status mp_engine_open(const mp_config *config, mp_engine **engine, mp_error *error);
/* Ends every transfer, closes every socket, joins every thread. Idempotent. After it returns registered memory is not
 * written, and no read of it completes. In a forked child it only closes the inherited descriptors. */
MP_API mp_status mp_engine_close(mp_engine *engine, mp_error *error);
/* Ends every connection that the engine of this incarnation (mp_engine_incarnation, mp_notification) has to this one,
 * with its queue pairs. When it returns MP_OK nothing that was begun through them writes memory of this engine, and no
 * read of it completes. `*sessions` (may be NULL): how many there were. The peer may connect again: what it asks for
 * then is new. */
MP_API mp_status mp_engine_fence(mp_engine *engine, const uint8_t incarnation[16], uint32_t *sessions, mp_error *error);
/* Drops the handle; closes first when that was not done. */
MP_API void mp_engine_free(mp_engine *engine);
/* "127.0.0.1:40123", or "" when the engine does not listen. Valid until mp_engine_free. */
MP_API const char *mp_engine_address(const mp_engine *engine);
MP_API void mp_engine_incarnation(const mp_engine *engine, uint8_t incarnation[16]);
/* Counters and gauges as a JSON object (docs/stats.md). Returns the length needed; writes at most `size` bytes
 * including the terminating 0. */
MP_API size_t mp_engine_stats_json(mp_engine *engine, char *buffer, size_t size);
/* JSON array of {"transport", "available", "reason"} for this build and host. Needs no engine. Same convention. */
MP_API size_t mp_probe_json(char *buffer, size_t size);

/* ---------------------------------------------------------------- regions */

#define MP_REGION_WRITABLE 1u
#define MP_REGION_SHARED 2u /* peers on the same host map it; set by the engine */
#define MP_REGION_CUDA 4u   /* memory of a GPU; set by the engine */

enum { MP_HUGE_PAGES_AUTO = 0, MP_HUGE_PAGES_NEVER = 1, MP_HUGE_PAGES_REQUIRED = 2 };
#define MP_NUMA_ANY -1
#define MP_CUDA_ANY -1

/* What the CUDA driver says of an address. Of managed memory the host can use the address too. */
typedef enum mp_memory_kind {
  MP_MEMORY_HOST = 0,
  MP_MEMORY_PINNED = 1, /* host memory that is registered with the driver, or came from it */
  MP_MEMORY_DEVICE = 2,
  MP_MEMORY_MANAGED = 3
} mp_memory_kind;

/* How memory is allocated. NULL where one is asked for: the defaults that mp_allocation_init sets. */
typedef struct mp_allocation {
  uint32_t flags;     /* MP_REGION_WRITABLE (default): peers may write it. The engine's own process always may */
  int32_t huge_pages; /* AUTO: where the kernel offers them, from 2 MiB on. REQUIRED: 2 MiB pages now, or an error */
  int32_t numa_node;  /* preferred node, or MP_NUMA_ANY: the node of the thread that touches a page first */
} mp_allocation;

MP_API void mp_allocation_init(mp_allocation *allocation);

typedef struct mp_region_info {
  uint64_t id;  /* unique in this engine */
  uint64_t key; /* random token that peers must name */
  uint64_t generation;
  uint64_t length; /* bytes */
  void *address;
  uint32_t flags;       /* MP_REGION_* */
  int32_t engine_owned; /* 1: allocated by the engine */
  uint64_t page_bytes;  /* of allocated memory; 2 MiB only when it is certain. 0: registered memory */
} mp_region_info;

/* Page-aligned zeroed memory owned by the engine; freed with the last reference. `name` may be NULL or up to 255
 * bytes; names are unique among live regions. With a name it is memory that peers on the same host can map, and that a
 * forked child shares with its parent. */
MP_API mp_status mp_region_allocate(mp_engine *engine, uint64_t nbytes, const char *name,
                                    const mp_allocation *allocation, mp_region **region, mp_error *error);
/* The memory must stay valid until mp_region_release succeeded or the engine is closed. */
MP_API mp_status mp_region_register(mp_engine *engine, void *address, uint64_t nbytes, const char *name, uint32_t flags,
                                    mp_region **region, mp_error *error);
/* The same for memory of GPU `device` (its CUDA ordinal; MP_CUDA_ANY: whichever it is), also managed memory. Host
 * memory, and memory of another device, is MP_INVALID_ARGUMENT. No context is made: the one that the memory belongs to
 * is used. Memory that is freed before the region is released is noticed, and its transfers fail with
 * MP_REGION_RELEASED. */
MP_API mp_status mp_region_register_cuda(mp_engine *engine, void *address, uint64_t nbytes, int32_t device,
                                         const char *name, uint32_t flags, mp_region **region, mp_error *error);
/* The kind of the memory that `nbytes` bytes at `address` lie in, and its device (-1: none). Needs no engine. Opens the
 * CUDA driver: MP_CUDA where there is none. MP_INVALID_ARGUMENT: its first and last byte are of different kinds. */
MP_API mp_status mp_cuda_memory_kind(const void *address, uint64_t nbytes, mp_memory_kind *kind, int32_t *device,
                                     mp_error *error);
/* Where the region is: "cuda:0", "cpu:1" (its NUMA node), or "cpu" when the kernel does not say. Writes at most `size`
 * bytes including the terminating 0, and returns the length needed. */
MP_API size_t mp_region_location(const mp_region *region, char *buffer, size_t size);
/* Withdraws the region: peers are refused from now on. When it returns MP_OK nothing writes it any more, and no read of
 * it completes. A peer on the same host that was stopped in the middle of a copy of memory that the engine allocated is
 * waited for as long as progress_timeout_ms; then the bytes move to pages of their own, and what the peer still writes
 * goes nowhere. MP_REGION_BUSY while a transfer of this engine uses it. Idempotent. */
MP_API mp_status mp_region_release(mp_region *region, mp_error *error);
MP_API void mp_region_free(mp_region *region);
MP_API void mp_region_get_info(const mp_region *region, mp_region_info *info);

/* ---------------------------------------------------------------- peers */

typedef struct mp_remote_region {
  uint64_t key;
  uint64_t length;
  uint64_t generation;
  uint32_t flags;
  uint8_t incarnation[16]; /* of the peer that owns it: a handle never outlives it */
  char name[256];
} mp_remote_region;

typedef enum mp_peer_state {
  MP_PEER_CONNECTING = 0,
  MP_PEER_READY = 1,
  MP_PEER_LOST_STATE = 2,
  MP_PEER_CLOSED = 3
} mp_peer_state;

typedef struct mp_peer_info {
  int32_t state;           /* mp_peer_state */
  uint8_t incarnation[16]; /* of the present connection */
  char name[128];
  char address[128];
  char path[16];      /* what would carry the next transfer: "local", "shm", "rdma" or "tcp"; "" when nothing would */
  char fallback[256]; /* why cheaper transports would not, "" when there is none */
  uint64_t regions;   /* known remote regions */
} mp_peer_info;

/* Asked about every 100 ms by calls that wait for a connection; anything but 0 ends them with MP_CANCELLED. */
typedef int32_t (*mp_interrupt)(void *context);

/* Connects, proves the secret both ways, learns the regions. timeout_ms 0: the configured one. interrupt: NULL for
 * none. */
MP_API mp_status mp_peer_connect(mp_engine *engine, const char *address, uint32_t timeout_ms, mp_interrupt interrupt,
                                 void *context, mp_peer **peer, mp_error *error);
/* Makes sure the peer is connected, connecting again if it was lost (with back-off between attempts). */
MP_API mp_status mp_peer_ensure(mp_peer *peer, uint32_t timeout_ms, mp_interrupt interrupt, void *context,
                                mp_error *error);
/* Ends its transfers and connections. Idempotent. */
MP_API mp_status mp_peer_close(mp_peer *peer, mp_error *error);
MP_API void mp_peer_free(mp_peer *peer);
MP_API void mp_peer_get_info(const mp_peer *peer, mp_peer_info *info);
/* Looks a name up among the regions the peer has announced; waits up to timeout_ns for it to be announced. A peer
 * that was lost is connected again first, within the connect time-out. */
MP_API mp_status mp_peer_find_region(mp_peer *peer, const char *name, int64_t timeout_ns, mp_remote_region *region,
                                     mp_error *error);
/* Copies up to `capacity` named regions, ordered by name; returns how many there are. */
MP_API size_t mp_peer_list_regions(mp_peer *peer, mp_remote_region *regions, size_t capacity);

/* ---------------------------------------------------------------- transfers */

typedef enum mp_op { MP_READ = 1, MP_WRITE = 2 } mp_op; /* READ: remote to local; WRITE: local to remote */

/* `count` items as arrays. A stride of 0 repeats the first element for every item, 1 walks the array (units:
 * elements). An index of NULL uses entry 0 of its table for every item. A local that is NULL stands for a region that
 * was released: its items get MP_REGION_RELEASED. */
typedef struct mp_batch {
  size_t count;
  const int64_t *local_offsets;
  size_t local_offsets_stride;
  const int64_t *remote_offsets;
  size_t remote_offsets_stride;
  const int64_t *lengths;
  size_t lengths_stride;
  mp_region *const *locals;
  size_t locals_count;
  const uint32_t *local_index;
  const mp_remote_region *const *remotes;
  size_t remotes_count;
  const uint32_t *remote_index;
} mp_batch;

typedef struct mp_options {
  int64_t deadline_ns;    /* from now; 0: the engine's default; negative: already passed */
  const void *notify;     /* delivered to the peer after the bytes are visible there; NULL: none */
  size_t notify_bytes;    /* at most 65536 */
  int32_t digest;         /* 1: digest every item at both ends and compare */
  int64_t deadline_at_ns; /* the same as a time of CLOCK_MONOTONIC, for who may be stopped between looking at the clock
                             and submitting; 0: none. The earlier of both holds */
  uint64_t cuda_stream;   /* with cuda_stream_given 1: a CUstream. No byte is moved before what was queued there up to
                             the call has ended. The batch needs a local region of a GPU, in the stream's context */
  int32_t cuda_stream_given;
} mp_options;

typedef enum mp_transfer_state {
  MP_RUNNING = 0,
  MP_COMPLETED = 1, /* every item MP_OK, bytes in place at the destination */
  MP_FAILED = 2,    /* at least one item failed; the others have their own status */
  MP_STOPPED = 3,   /* cancelled, and nothing can write its buffers any more */
  MP_EXPIRED = 4,   /* its deadline passed, and nothing can write its buffers any more */
  MP_UNSETTLED = 5  /* failed, cancelled or expired, but the far side may still write: buffers stay owned. Becomes
                       one of FAILED, STOPPED, EXPIRED when the far side is known to have stopped, or COMPLETED when
                       its late answer says that everything is in place */
} mp_transfer_state;

/* Submits one batch. Never blocks on the network. A bad item gets its own status and does not hide the others;
 * when no item is good nothing is submitted and the first item's error is returned. */
MP_API mp_status mp_submit(mp_peer *peer, mp_op op, const mp_batch *batch, const mp_options *options,
                           mp_transfer **transfer, mp_error *error);
/* Checks a batch once, for many posts. */
MP_API mp_status mp_plan_create(mp_peer *peer, const mp_batch *batch, mp_plan **plan, mp_error *error);
/* Posts the items named by `indices` (NULL: all). The plan may be posted from several threads. */
MP_API mp_status mp_plan_post(mp_plan *plan, mp_op op, const int64_t *indices, size_t count, const mp_options *options,
                              mp_transfer **transfer, mp_error *error);
MP_API size_t mp_plan_count(const mp_plan *plan);
MP_API void mp_plan_free(mp_plan *plan);

MP_API mp_transfer_state mp_transfer_get_state(const mp_transfer *transfer);
/* Waits for any state but MP_RUNNING. MP_OK: reached. MP_WAIT_TIMEOUT: not within timeout_ns. */
MP_API mp_status mp_transfer_wait(mp_transfer *transfer, int64_t timeout_ns);
/* Waits for a state that is neither MP_RUNNING nor MP_UNSETTLED; with a negative timeout_ns until the deadline and then
 * for the progress time-out, because the far side may never answer. */
MP_API mp_status mp_transfer_wait_settled(mp_transfer *transfer, int64_t timeout_ns);
/* Stops it and waits up to timeout_ns until it is settled. MP_OK: settled (it may have completed first);
 * MP_WAIT_TIMEOUT: still unsettled. */
MP_API mp_status mp_transfer_cancel(mp_transfer *transfer, int64_t timeout_ns);
/* The first cause, when the state is not COMPLETED; code MP_OK otherwise. */
MP_API void mp_transfer_get_error(const mp_transfer *transfer, mp_error *error);
MP_API size_t mp_transfer_count(const mp_transfer *transfer);
/* One mp_status per item. */
MP_API void mp_transfer_item_status(const mp_transfer *transfer, uint8_t *status, size_t count);
/* One digest per item (see mp_digest); zeros for items without one. MP_INVALID_ARGUMENT when it was not asked for. */
MP_API mp_status mp_transfer_digests(const mp_transfer *transfer, uint64_t *digests, size_t count);
/* Writes 1 to `fd` (an eventfd) once the state leaves MP_RUNNING; at once when it already has. -1 takes it back. */
MP_API mp_status mp_transfer_set_eventfd(mp_transfer *transfer, int fd);
/* Drops the handle. A running transfer goes on. */
MP_API void mp_transfer_free(mp_transfer *transfer);

/* The digest of `nbytes` bytes: XXH3-64 of the little-endian XXH3-64 values of its 256 KiB leaves; one leaf is its
 * own digest. Leaves make it computable out of order and in parallel. */
#define MP_DIGEST_LEAF_BYTES 262144u
MP_API uint64_t mp_digest(const void *data, uint64_t nbytes);
/* The digests of `count` ranges of the `nbytes` bytes at `memory`. A stride is 1 for an array and 0 for one number that
 * holds for all. MP_OUT_OF_RANGE: the range *bad is not inside, and nothing was computed. A range may be empty. */
MP_API mp_status mp_digest_batch(const void *memory, uint64_t nbytes, const int64_t *offsets, size_t offsets_stride,
                                 const int64_t *lengths, size_t lengths_stride, size_t count, uint64_t *digests,
                                 size_t *bad);
/* The digests of `count` wholes whose leaves have the digests that lie in these ranges of `memory`, 8 bytes each, at
 * any address. Further as mp_digest_batch. MP_INVALID_ARGUMENT: the range *bad is not 8, 16, 24, ... bytes. */
MP_API mp_status mp_combine_batch(const void *memory, uint64_t nbytes, const int64_t *offsets, size_t offsets_stride,
                                  const int64_t *lengths, size_t lengths_stride, size_t count, uint64_t *digests,
                                  size_t *bad);
/* Some memory of this process. */
typedef struct mp_memory {
  const void *data;
  uint64_t nbytes;
} mp_memory;
/* The digests of `wholes` wholes that lie in pieces: the next counts[i] of `count` ranges, one after the other, are
 * whole i. Range i lies in memories[which[i]]. Strides as in mp_digest_batch; a whole may be empty. Much is computed on
 * several threads. MP_OUT_OF_RANGE: the range *bad is not inside its memory, or names none; MP_INVALID_ARGUMENT: the
 * whole *bad has a negative count or more ranges than are left, or *bad is `wholes` and ranges are left over. Nothing
 * was computed then. */
MP_API mp_status mp_digest_joined(const mp_memory *memories, size_t memories_count, const int64_t *which,
                                  size_t which_stride, const int64_t *offsets, size_t offsets_stride,
                                  const int64_t *lengths, size_t lengths_stride, size_t count, const int64_t *counts,
                                  size_t counts_stride, size_t wholes, uint64_t *digests, size_t *bad);
/* Copies `count` ranges of the `source_bytes` bytes at `source` to `target`. Strides as in mp_digest_batch. Much is
 * copied on several threads. MP_OUT_OF_RANGE: the range *bad is not inside both, and nothing was copied. Source and
 * target may be the same memory: then one range is copied after the other. Otherwise it is undefined which byte stays
 * where two ranges of the target overlap. */
MP_API mp_status mp_copy_batch(void *target, uint64_t target_bytes, const int64_t *target_offsets,
                               size_t target_offsets_stride, const void *source, uint64_t source_bytes,
                               const int64_t *source_offsets, size_t source_offsets_stride, const int64_t *lengths,
                               size_t lengths_stride, size_t count, size_t *bad);

/* The same where one side, or both, are memory of a GPU: `target_region` or `source_region` is a region of it, and the
 * memory beside it is not looked at; with NULL that memory, of the host, is the side. Ranges are copied in any order,
 * in a number of driver calls that does not grow with `count` but with the bytes. Host memory that is not pinned passes
 * through that of the engine. Not ordered with any stream of the caller. MP_DEADLINE: a GPU that made no progress for
 * progress_timeout_ms; the regions stay in use until it has. */
MP_API mp_status mp_region_copy_batch(mp_region *target_region, void *target, uint64_t target_bytes,
                                      const int64_t *target_offsets, size_t target_offsets_stride,
                                      mp_region *source_region, const void *source, uint64_t source_bytes,
                                      const int64_t *source_offsets, size_t source_offsets_stride,
                                      const int64_t *lengths, size_t lengths_stride, size_t count, mp_error *error);

/* ---------------------------------------------------------------- notifications */

typedef struct mp_notification {
  char peer[128];          /* name of the sender */
  uint8_t incarnation[16]; /* of the sender */
  uint8_t *payload;
  size_t payload_bytes;
} mp_notification;

/* Takes the oldest one; waits up to timeout_ns (0: does not wait). MP_OK or MP_WAIT_TIMEOUT or MP_CLOSED. */
MP_API mp_status mp_notification_take(mp_engine *engine, int64_t timeout_ns, mp_notification *notification);
/* Frees the payload. */
MP_API void mp_notification_clear(mp_notification *notification);

#ifdef __cplusplus
}
#endif
#endif /* MOONPOOL_ENGINE_H */

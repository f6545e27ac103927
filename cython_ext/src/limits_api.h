/* SPDX-License-Identifier: Apache-2.0
 *
 * limits_api.h - what this machine can do at best, for mooncake-bench: memcpy, plain sockets, and the kernel's copy
 * between processes.
 *
 * The engine does not use any of this. Both sides of a socket run walk the same descriptor list, cut it over the
 * connections in the same way, and move the bytes with sendmsg and recvmsg straight from and into the caller's memory.
 *
 * Errors: functions that can fail return an mpl_status and fill `*error`.
 * Threads: a link or a listener is used by one thread at a time; only the `*_abort` functions may be called meanwhile.
 * No function blocks without a bound: every socket operation ends within the time-out given when the link was made.
 */
#ifndef MOONPOOL_LIMITS_API_H
#define MOONPOOL_LIMITS_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MPL_TOKEN_BYTES 16
#define MPL_CONNECTIONS_MAX 256
#define MPL_STREAMS_MAX 64
/* A batch is cut over another connection only when each gets at least this much. */
#define MPL_SHARE_BYTES_MIN 524288

typedef enum mpl_status {
  MPL_OK = 0,
  MPL_INVALID = 1, /* the call itself is wrong */
  MPL_SYSTEM = 2,  /* an operating-system call failed; see sys_errno */
  MPL_TIMEOUT = 3, /* a socket operation took longer than the time-out */
  MPL_CLOSED = 4,  /* the other side closed the connection */
  MPL_ABORTED = 5,
  MPL_PROTOCOL = 6, /* the other side is not our counterpart, or runs another work */
  MPL_NO_MEMORY = 7
} mpl_status;

typedef struct mpl_error {
  int32_t code;      /* mpl_status */
  int32_t sys_errno; /* 0 or errno */
  char message[256];
} mpl_error;

typedef enum mpl_op { MPL_READ = 1, MPL_WRITE = 2 } mpl_op; /* READ: server to client; WRITE: client to server */

typedef enum mpl_mode {
  MPL_ACKED = 1, /* write: every connection answers one byte per batch, and all answers are awaited before the next
                    batch; read: a 64-byte request per batch and connection. A batch of one is a blocking ping-pong */
  MPL_STREAM = 2 /* batches follow each other without waiting; one answer at the very end */
} mpl_mode;

/* One side's descriptors. `streams` user threads walk it at the same time: thread t has the t-th equal part, as
 * batches of `batch` descriptors, over and over. `count` is a multiple of streams * batch. */
typedef struct mpl_list {
  void *memory;
  uint64_t memory_bytes;
  const int64_t *offsets; /* count entries, in bytes */
  const int64_t *lengths; /* count entries, in bytes; the same on both sides */
  size_t count;
  size_t batch;
  size_t streams;
} mpl_list;

typedef struct mpl_result {
  int64_t window_ns; /* from the common start to the last completion */
  uint64_t batches;  /* completed inside the window */
  uint64_t bytes;
  int64_t *samples_ns; /* caller's room for the time of single batches, or NULL. Not filled by MPL_STREAM */
  size_t samples_capacity;
  size_t samples_count; /* when the room is too small, every 2nd, 4th, ... batch is kept */
} mpl_result;

typedef struct mpl_listener mpl_listener;
typedef struct mpl_link mpl_link;

/* `host` is a numeric address; `port` 0 picks one. */
mpl_status mpl_listen(const char *host, uint16_t port, mpl_listener **listener, uint16_t *bound_port, mpl_error *error);
/* Takes `connections` connections that know the token, within timeout_ms; turns others away. timeout_ms is also the
 * bound of each socket operation of the link. */
mpl_status mpl_accept(mpl_listener *listener, const uint8_t token[MPL_TOKEN_BYTES], size_t connections,
                      uint32_t timeout_ms, mpl_link **link, mpl_error *error);
void mpl_listener_abort(mpl_listener *listener);
void mpl_listener_free(mpl_listener *listener);

mpl_status mpl_connect(const char *host, uint16_t port, const uint8_t token[MPL_TOKEN_BYTES], size_t connections,
                       uint32_t timeout_ms, mpl_link **link, mpl_error *error);
/* Ends a running mpl_client_run or mpl_server_run with MPL_ABORTED. The link is of no use afterwards. */
void mpl_link_abort(mpl_link *link);
void mpl_link_free(mpl_link *link);

/* Drives the work for `duration_ns` (at least one batch per stream), or until `*stop` is not 0 (NULL: never).
 * `next_batch[streams]` says with which batch each stream goes on, and is advanced by what was completed. The link's
 * connections are divided evenly among the streams. */
mpl_status mpl_client_run(mpl_link *link, const mpl_list *list, mpl_op op, mpl_mode mode, int64_t duration_ns,
                          const int32_t *stop, uint64_t *next_batch, mpl_result *result, mpl_error *error);
/* Serves `runs` calls of mpl_client_run by the other side. */
mpl_status mpl_server_run(mpl_link *link, const mpl_list *list, mpl_op op, mpl_mode mode, uint32_t runs,
                          uint64_t *next_batch, mpl_error *error);

/* memcpy of every descriptor of `source` to the same one of `destination`. `threads` are divided evenly among the
 * streams; a batch is cut over several where it would be cut over several connections. */
mpl_status mpl_copy_run(const mpl_list *destination, const mpl_list *source, size_t threads, int64_t duration_ns,
                        const int32_t *stop, uint64_t *next_batch, mpl_result *result, mpl_error *error);

/* process_vm_readv (MPL_READ) or process_vm_writev (MPL_WRITE) of every descriptor between `own` memory and `other`,
 * whose memory is an address in process `pid`. A batch is one call for as many descriptors as a call takes, in each of
 * the threads it is cut over. */
mpl_status mpl_process_run(int32_t pid, const mpl_list *own, const mpl_list *other, mpl_op op, size_t threads,
                           int64_t duration_ns, const int32_t *stop, uint64_t *next_batch, mpl_result *result,
                           mpl_error *error);

#ifdef __cplusplus
}
#endif
#endif /* MOONPOOL_LIMITS_API_H */

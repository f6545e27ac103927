// SPDX-License-Identifier: Apache-2.0
//
// Two engines of one process order the bytes of their regions by the sockets between them. The thread sanitizer follows
// that order only in part (sanitizer_common_interceptors.inc of LLVM): send() does not release the descriptor, and
// sendmsg() releases it before it notes which memory was read, so what the receiver does next looks like a race with
// it. Here both say what they read first and then send. No race has to be suppressed, and none is hidden.
#if defined(__SANITIZE_THREAD__)
#include <dlfcn.h>
#include <sys/socket.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" void __tsan_read_range(void *address, unsigned long nbytes);

// The interceptor notes no reads of its own, which would come too late.
EXPORTED const char *__tsan_default_options() { return "intercept_send=0"; }

EXPORTED ssize_t sendmsg(int fd, const msghdr *message, int flags) {
  using Sendmsg = ssize_t (*)(int, const msghdr *, int);
  static const auto next = reinterpret_cast<Sendmsg>(dlsym(RTLD_NEXT, "sendmsg"));
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    __tsan_read_range(message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
  }
  return next(fd, message, flags);
}

EXPORTED ssize_t send(int fd, const void *data, size_t nbytes, int flags) {
  iovec piece{const_cast<void *>(data), nbytes};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  return sendmsg(fd, &message, flags);
}
#endif

// SPDX-License-Identifier: Apache-2.0
#include "support_shm.hpp"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "address.hpp"

namespace moonpool::testing {

std::vector<int> served_unix_sockets() {
  std::vector<int> found;
  DIR *directory = opendir("/proc/self/fd");
  while (const dirent *entry = readdir(directory)) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_un ours{}, theirs{};
    socklen_t ours_bytes = sizeof ours, theirs_bytes = sizeof theirs;
    // The listening socket has the same name, and nobody on the other side.
    if (getsockname(fd, reinterpret_cast<sockaddr *>(&ours), &ours_bytes) != 0 || ours.sun_family != AF_UNIX ||
        getpeername(fd, reinterpret_cast<sockaddr *>(&theirs), &theirs_bytes) != 0) {
      continue;
    }
    if (std::strncmp(ours.sun_path + 1, "moonpool-", 9) == 0) found.push_back(fd);
  }
  closedir(directory);
  return found;
}

bool RawShmClient::connect() {
  if (!raw_.open_control()) return false;
  for (const wire::Offer &offer : raw_.offers()) {
    shm::HostIdentity identity;
    if (offer.transport == "shm" && shm::decode_identity(offer.blob, &identity)) socket_ = identity.socket;
  }
  fd_ = dial(wire::kShm, raw_.session(), 1);
  return static_cast<bool>(fd_);
}

Fd RawShmClient::dial_without_handshake() {
  const SocketAddress address = SocketAddress::abstract(socket_);
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return ::connect(fd.get(), address.get(), address.length) == 0 ? std::move(fd) : Fd();
}

Fd RawShmClient::dial(wire::Kind kind, const Id128 &session, uint64_t lane_id) {
  return raw_.open_over(dial_without_handshake(), kind, session, lane_id);
}

bool RawShmClient::open() {
  const uint64_t proof = random_u64();
  Fd table;
  if (!send(shm::request_header(shm::kOpen, reinterpret_cast<uintptr_t>(&proof), proof))) return false;
  const auto response = receive(&table);
  if (!response || response->header.type != shm::kOpened) return false;
  status_ = static_cast<mp_status>(response->header.status);
  std::string why_not;
  table_ = UseTable::open(table, &why_not);
  return table_ != nullptr;
}

bool RawShmClient::map(uint64_t key, Mapped *out) {
  Fd fd;
  if (!send(shm::request_header(shm::kMap, key))) return false;
  const auto response = receive(&fd);
  if (!response || response->header.id != key) return false;
  const bool readable = response->header.type == shm::kReadable;
  if (!readable && response->header.type != shm::kMapped) return false;
  out->status = static_cast<mp_status>(response->header.status);
  out->slot = response->header.value;
  out->address = response->address;
  out->length = response->header.bytes;
  if (readable) return true;
  std::string why_not;
  if (out->status == MP_OK) out->memory = Mapping::open(fd, response->header.bytes, &why_not);
  return out->status != MP_OK || out->memory != nullptr;
}

bool RawShmClient::send(const shm::RequestHeader &header, const std::vector<shm::Desc> &descs) {
  std::string bytes;
  shm::encode(header, descs.data(), &bytes);
  return send_bytes(bytes);
}

std::optional<shm::CopyResponse> RawShmClient::receive(Fd *fd) {
  shm::CopyResponse response;
  for (;;) {
    std::string_view rest = in_;
    const shm::Decoded decoded = shm::decode_response(&rest, &response);
    if (decoded == shm::Decoded::kBad) return {};
    if (decoded == shm::Decoded::kFrame) {
      in_.erase(0, in_.size() - rest.size());
      return response;
    }
    char part[4096];
    iovec piece{part, sizeof part};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const timeval patience{kPatienceNs / 1'000'000'000, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const ssize_t n = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (n <= 0) return {};
    if (const cmsghdr *header = CMSG_FIRSTHDR(&message); header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int number;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      Fd came(number);
      if (fd != nullptr) *fd = std::move(came);
    }
    in_.append(part, static_cast<size_t>(n));
  }
}

std::optional<shm::CopyResponse> RawShmClient::copy(mp_op op, const std::vector<shm::Desc> &descs, uint8_t flags) {
  shm::RequestHeader header = shm::request_header(shm::kCopy, 77);
  header.op = static_cast<uint8_t>(op);
  header.flags = flags;
  header.count = static_cast<uint32_t>(descs.size());
  for (const shm::Desc &desc : descs) header.bytes += desc.length;
  return send(header, descs) ? receive() : std::nullopt;
}

}  // namespace moonpool::testing

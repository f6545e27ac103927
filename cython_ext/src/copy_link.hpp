// SPDX-License-Identifier: Apache-2.0
// What paths have in common whose bytes this process copies itself: by the submitting thread when it is little, by the
// I/O threads and the waiting thread when it is much.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "link.hpp"
#include "work_queue.hpp"

namespace moonpool {

class CopyLink : public Link, public std::enable_shared_from_this<CopyLink> {
 public:
  CopyLink(const std::shared_ptr<Peer> &peer, const char *path);

  const char *path() const override { return path_; }
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override;
  void cancel(Transfer &transfer) override;
  void assist(Transfer &transfer, int64_t until) override;
  void shutdown(const Error &cause, bool settled) override;

 protected:
  // What became of the descriptors of a piece of work. Places are counted from its beginning.
  struct Moved {
    std::vector<uint64_t> digests;                       // of each, when they are wanted
    std::vector<std::pair<uint32_t, mp_status>> failed;  // in order
  };

  // Moves every descriptor of `work` and reports each.
  virtual void copy(const Work &work) = 0;
  // Copies the descriptors. `resolve(place, desc, &address)` says where the remote bytes are, or why they may not be
  // touched; without an address they are left out.
  template <class Resolve>
  Moved move_descs(const Work &work, Resolve resolve);
  // After everything that was held for the copy has been let go: an owner who waits for the end may release the region
  // right away.
  void report_moved(const Work &work, const Moved &moved);
  Error refusal(mp_status status) const;
  virtual void not_moved(Work work, const Error &cause) { fail_work({work}, cause); }
  // The link was closed before the transfer came.
  virtual void turned_away(const std::shared_ptr<Transfer> &transfer);
  // What is queued and was not begun; nothing is taken any more.
  std::vector<Work> close_queue() { return queue_.close(); }

  Engine &engine_;
  const std::string label_;

 private:
  bool copy_one();
  void post_copy();
  void start(size_t slices);

  const char *const path_;
  WorkQueue queue_;
};

template <class Resolve>
CopyLink::Moved CopyLink::move_descs(const Work &work, Resolve resolve) {
  const Transfer &transfer = *work.transfer;
  const bool write = transfer.op == MP_WRITE;
  const bool streaming = transfer.bytes >= kStreamingBytes;
  Moved moved;
  if (transfer.digest) moved.digests.resize(work.end - work.begin);
  for (uint32_t place = 0; place < work.end - work.begin; ++place) {
    const Desc &desc = transfer.descs[work.begin + place];
    uint8_t *remote = nullptr;
    const mp_status status = resolve(place, desc, &remote);
    if (status != MP_OK) moved.failed.emplace_back(place, status);
    if (status != MP_OK || remote == nullptr) continue;
    uint8_t *to = write ? remote : desc.local;
    const uint8_t *from = write ? desc.local : remote;
    if (transfer.digest) {
      moved.digests[place] = copy_leaf(to, from, desc.length, streaming);
    } else {
      copy_bytes(to, from, desc.length, streaming);
    }
  }
  return moved;
}

}  // namespace moonpool

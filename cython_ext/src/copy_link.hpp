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
  // Moves every descriptor of `work` and reports each.
  virtual void copy(const Work &work) = 0;
  // Copies the descriptors. `resolve(desc, &address)` says where the remote bytes are, or why they may not be
  // touched. `release()` is called before anything is reported, because an owner who waits for the end may release the
  // region right away; when it returns an error, nothing of `work` counts, and all of it is handed to not_moved().
  template <class Resolve, class Release>
  void copy_descs(const Work &work, Resolve resolve, Release release);
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

template <class Resolve, class Release>
void CopyLink::copy_descs(const Work &work, Resolve resolve, Release release) {
  Transfer &transfer = *work.transfer;
  const uint32_t begin = work.begin, end = work.end;
  const bool write = transfer.op == MP_WRITE;
  const bool streaming = transfer.bytes >= kStreamingBytes;
  std::vector<uint64_t> digests(transfer.digest ? end - begin : 0);
  std::vector<std::pair<uint32_t, mp_status>> failed;
  for (uint32_t i = begin; i < end; ++i) {
    const Desc &desc = transfer.descs[i];
    uint8_t *remote = nullptr;
    const mp_status status = resolve(desc, &remote);
    if (status != MP_OK) {
      failed.emplace_back(i, status);
      continue;
    }
    uint8_t *to = write ? remote : desc.local;
    const uint8_t *from = write ? desc.local : remote;
    if (transfer.digest) {
      digests[i - begin] = copy_leaf(to, from, desc.length, streaming);
    } else {
      copy_bytes(to, from, desc.length, streaming);
    }
  }
  if (const Error lost = release()) return not_moved(work, lost);
  uint32_t at = begin;
  const auto moved_until = [&](uint32_t until) {
    if (at < until) transfer.descs_done(at, until, transfer.digest ? digests.data() + (at - begin) : nullptr);
    at = until + 1;
  };
  for (const auto &[index, status] : failed) {
    moved_until(index);
    transfer.descs_failed(index, index + 1, refusal(status));
  }
  moved_until(end);
}

}  // namespace moonpool

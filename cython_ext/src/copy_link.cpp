// SPDX-License-Identifier: Apache-2.0
#include "copy_link.hpp"

#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kDescsPerSlice = 1000;
// So much is copied about as fast as another thread is woken.
constexpr uint64_t kInlineBytes = 1u << 20;

class Copying {
 public:
  explicit Copying(Engine &engine) : engine_(engine) { engine_.begin_copying(); }
  ~Copying() { engine_.end_copying(); }
  Copying(const Copying &) = delete;

 private:
  Engine &engine_;
};

}  // namespace

CopyLink::CopyLink(const std::shared_ptr<Peer> &peer, const char *path)
    : engine_(peer->engine()), label_(peer->label()), path_(path), queue_(kDescsPerSlice) {}

void CopyLink::submit(const std::shared_ptr<Transfer> &transfer) {
  const uint64_t slice = engine_.config.slice_bytes;
  if (!queue_.push(transfer, slice)) return turned_away(transfer);
  if (transfer->bytes <= kInlineBytes) {
    while (!transfer->finished() && copy_one()) {
    }
    return;
  }
  start(transfer->bytes / slice + 1);
}

void CopyLink::adopt(std::vector<Work> work, const Error &cause) {
  for (Work &one : work) {
    if (!queue_.push_front(one, engine_.config.slice_bytes)) not_moved(std::move(one), cause);
  }
  start(work.size());
}

void CopyLink::cancel(Transfer &transfer) {
  // Slices that are being copied right now end by themselves.
  fail_work(queue_.remove(transfer), transfer.stop_cause());
}

void CopyLink::assist(Transfer &transfer, int64_t until) {
  while (!transfer.finished() && now_ns() < until && copy_one()) {
  }
}

void CopyLink::shutdown(const Error &cause, bool) { fail_work(queue_.close(), cause); }

void CopyLink::turned_away(const std::shared_ptr<Transfer> &transfer) {
  transfer->fail(connection_ended(label_, path_));
}

void CopyLink::start(size_t slices) {
  for (size_t i = std::min(slices, engine_.io_count()); i > 0; --i) post_copy();
}

void CopyLink::post_copy() {
  engine_.next_io().post([weak = weak_from_this()] {
    // One slice a turn, so that sockets of the same thread are not kept waiting.
    if (auto self = weak.lock(); self != nullptr && self->copy_one() && !self->queue_.empty()) self->post_copy();
  });
}

void CopyLink::report_moved(const Work &work, const Moved &moved) {
  Transfer &transfer = *work.transfer;
  uint32_t at = work.begin;
  const auto moved_until = [&](uint32_t until) {
    const uint64_t *digests = transfer.digest ? moved.digests.data() + (at - work.begin) : nullptr;
    if (at < until) transfer.descs_done(at, until, digests);
    at = until + 1;
  };
  for (const auto &[place, status] : moved.failed) {
    const uint32_t index = work.begin + place;
    moved_until(index);
    transfer.descs_failed(index, index + 1, refusal(status));
  }
  moved_until(work.end);
}

Error CopyLink::refusal(mp_status status) const {
  Error error = refused_by_peer(status);
  error.peer = label_;
  error.path = path_;
  return error;
}

bool CopyLink::copy_one() {
  Work work;
  const Copying copying(engine_);  // counted first, so that what is pulled is counted
  if (!queue_.pull(&work)) return false;
  if (work.transfer->stopping()) {
    work.transfer->descs_failed(work.begin, work.end, work.transfer->stop_cause());
  } else {
    copy(work);
  }
  return true;
}

}  // namespace moonpool

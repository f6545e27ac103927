// SPDX-License-Identifier: Apache-2.0
// The local transport: two engines of one process, or one engine and itself. Bytes are copied by whoever has time: the
// submitting thread when it is little, the I/O threads and the waiting thread when it is much.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "digest.hpp"
#include "engine.hpp"
#include "link.hpp"
#include "peer.hpp"
#include "work_queue.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kDescsPerSlice = 1000;
// Less than this is copied faster than another thread is woken.
constexpr uint64_t kInlineBytes = 256 * 1024;

class LocalLink final : public Link, public std::enable_shared_from_this<LocalLink> {
 public:
  LocalLink(const std::shared_ptr<Peer> &peer, std::weak_ptr<Engine> target)
      : engine_(peer->engine()), label_(peer->label()), target_(std::move(target)), queue_(kDescsPerSlice) {}

  const char *path() const override { return "local"; }

  void submit(const std::shared_ptr<Transfer> &transfer) override {
    const uint64_t slice = engine_.config.slice_bytes;
    if (!queue_.push(transfer, slice)) {
      transfer->fail(make_error(MP_PEER_LOST, "the connection to the peer ended"));
      return;
    }
    if (transfer->bytes <= kInlineBytes) {
      while (!transfer->finished() && copy_one()) {
      }
      return;
    }
    const uint64_t slices = std::min<uint64_t>(transfer->bytes / slice + 1, engine_.io_count());
    for (uint64_t i = 0; i < slices; ++i) post_copy();
  }

  void cancel(Transfer &transfer) override {
    // Slices that are being copied right now end by themselves.
    for (const Work &work : queue_.remove(transfer)) {
      transfer.descs_failed(work.begin, work.end, transfer.stop_cause());
    }
  }

  void assist(Transfer &transfer, int64_t until) override {
    while (!transfer.finished() && now_ns() < until && copy_one()) {
    }
  }

  void fenced(uint64_t) override {}

  void shutdown(const Error &cause, bool) override {
    for (const Work &work : queue_.close()) {
      const bool stopping = work.transfer->stopping();
      work.transfer->descs_failed(work.begin, work.end, stopping ? work.transfer->stop_cause() : cause);
    }
  }

  size_t lanes_ready() const override { return 0; }

 private:
  void post_copy() {
    engine_.next_io().post([weak = weak_from_this()] {
      // One slice a turn, so that sockets of the same thread are not kept waiting.
      if (auto self = weak.lock(); self != nullptr && self->copy_one() && !self->queue_.empty()) self->post_copy();
    });
  }

  Error refusal(mp_status status) const {
    Error error = make_error(status, std::string("the peer refused a descriptor: ") + status_text(status));
    error.peer = label_;
    error.path = "local";
    return error;
  }

  bool copy_one() {
    Work work;
    if (!queue_.pull(&work)) return false;
    Transfer &transfer = *work.transfer;
    if (transfer.stopping()) {
      transfer.descs_failed(work.begin, work.end, transfer.stop_cause());
      return true;
    }
    const std::shared_ptr<Engine> target = target_.lock();
    if (target == nullptr) {
      Error error = refusal(MP_PEER_LOST);
      error.message = "the peer's engine was closed";
      transfer.descs_failed(work.begin, work.end, error);
      return true;
    }
    copy(transfer, work, *target);
    return true;
  }

  void copy(Transfer &transfer, const Work &work, Engine &target) {
    const bool write = transfer.op == MP_WRITE;
    std::vector<uint64_t> digests(transfer.digest ? work.end - work.begin : 0);
    uint32_t good_from = work.begin;
    RequestChecker checker(target.regions);
    std::vector<std::pair<uint32_t, mp_status>> failed;
    for (uint32_t i = work.begin; i < work.end; ++i) {
      const Desc &desc = transfer.descs[i];
      uint8_t *remote = nullptr;
      const mp_status status = checker.check({desc.key, desc.offset, desc.length}, write, &remote);
      if (status != MP_OK) {
        failed.emplace_back(i, status);
        continue;
      }
      uint8_t *to = write ? remote : desc.local;
      std::memmove(to, write ? desc.local : remote, desc.length);
      if (transfer.digest) digests[i - work.begin] = leaf_digest(to, desc.length);
    }
    // Pins go before the transfer may end: an owner who waits for the end may release the region right away.
    checker.reset();
    const auto done_until = [&](uint32_t end) {
      const uint64_t *values = transfer.digest ? digests.data() + (good_from - work.begin) : nullptr;
      if (good_from < end) transfer.descs_done(good_from, end, values);
      good_from = end + 1;
    };
    for (const auto &[index, status] : failed) {
      done_until(index);
      transfer.descs_failed(index, index + 1, refusal(status));
    }
    done_until(work.end);
  }

  Engine &engine_;
  const std::string label_;
  const std::weak_ptr<Engine> target_;
  WorkQueue queue_;
};

class LocalTransport final : public Transport {
 public:
  const char *name() const override { return "local"; }
  Probe probe() const override { return {true, "engines of the same process"}; }
  bool reaches(const Reach &reach) const override { return reach.same_process; }
  int cost() const override { return 1; }
  std::shared_ptr<Link> connect(const std::shared_ptr<Peer> &peer) override {
    mp_peer_info info;
    peer->info(&info);
    Id128 incarnation;
    std::copy(info.incarnation, info.incarnation + incarnation.size(), incarnation.begin());
    return std::make_shared<LocalLink>(peer, Engine::in_this_process(incarnation));
  }
};

}  // namespace

std::unique_ptr<Transport> make_local_transport() { return std::make_unique<LocalTransport>(); }

}  // namespace moonpool

// SPDX-License-Identifier: Apache-2.0
#include "fault_link.hpp"

#include <atomic>

#include "digest.hpp"
#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

// Stands for `real` towards the wrapped link.
class ShadowTransfer final : public Transfer {
 public:
  ShadowTransfer(std::shared_ptr<Transfer> real, std::weak_ptr<FaultLink> owner, const FaultPlan &plan)
      : Transfer(real->peer, real->op, real->digest, real->deadline_ns),
        real_(std::move(real)),
        owner_(std::move(owner)),
        plan_(plan) {
    count = real_->count;
    target_incarnation = real_->target_incarnation;
    remote_on_device = real_->remote_on_device;
    staged = real_->staged;
    auto failing = plan_.failing.begin();
    for (uint32_t i = 0; i < real_->descs.size(); ++i) {
      if (failing != plan_.failing.end() && *failing == i) {
        ++failing;
        continue;
      }
      if (plan_.corrupt && i == plan_.corrupt_desc) corrupted_ = static_cast<uint32_t>(descs.size());
      descs.push_back(real_->descs[i]);
      real_index_.push_back(i);
      bytes += real_->descs[i].length;
    }
    left_.store(static_cast<uint32_t>(descs.size()));
    // A write goes out from a changed copy: what the caller gave is not ours to change.
    if (corrupted_ != kNone && op == MP_WRITE) {
      Desc &desc = descs[corrupted_];
      changed_.assign(desc.local, desc.local + desc.length);
      desc.local = changed_.data();
      flip(desc);
    }
  }

  void descs_done(uint32_t begin, uint32_t end, const uint64_t *digests) override {
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t at = real_index_[i];
      const uint64_t *digest_at = digests == nullptr ? nullptr : digests + (i - begin);
      const bool wrong = i == corrupted_ && spoilt(descs[i], real_->descs[at], digest_at);
      if (wrong) {
        real_->descs_failed(at, at + 1, make_error(MP_DIGEST, "bytes arrived that are not the bytes sent"));
      } else {
        real_->descs_done(at, at + 1, digest_at);
      }
    }
    reported(end - begin);
  }

  void descs_failed(uint32_t begin, uint32_t end, const Error &error) override {
    for (uint32_t i = begin; i < end; ++i) real_->descs_failed(real_index_[i], real_index_[i] + 1, error);
    reported(end - begin);
  }

  // The peer stops what it has to settle later. The real one stops the shadow in turn, see stop_moving().
  void stop(const Error &cause) override { real_->stop(cause); }
  void stop_moving(const Error &cause) { Transfer::stop(cause); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  void flip(const Desc &desc) const { desc.local[plan_.corrupt_at % desc.length] ^= plan_.corrupt_bit; }

  // Spoils what a read has brought. True when the digests tell.
  bool spoilt(const Desc &moved, const Desc &wanted, const uint64_t *moved_digest) const {
    if (op == MP_READ) flip(wanted);
    if (moved_digest == nullptr) return false;
    // What is there after a read, and what was to be sent by a write, against the digest of what was moved.
    return leaf_digest(wanted.local, moved.length) != *moved_digest;
  }

  void reported(uint32_t n) {
    if (left_.fetch_sub(n) != n) return;
    if (const std::shared_ptr<FaultLink> owner = owner_.lock()) owner->ended(*real_);
  }

  const std::shared_ptr<Transfer> real_;
  const std::weak_ptr<FaultLink> owner_;
  const FaultPlan plan_;
  std::vector<uint32_t> real_index_;  // of each descriptor
  std::vector<uint8_t> changed_;
  uint32_t corrupted_ = kNone;
  std::atomic<uint32_t> left_{0};
};

void FaultTransport::connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
                             Connected connected) {
  inner_->connect(peer, offer, deadline_ns,
                  [weak = std::weak_ptr<Peer>(peer), rules = rules_, connected = std::move(connected)](
                      std::shared_ptr<Link> link, const Error &error) {
                    const std::shared_ptr<Peer> owner = weak.lock();
                    if (link != nullptr && owner != nullptr) {
                      link = std::make_shared<FaultLink>(owner, std::move(link), rules);
                    }
                    connected(std::move(link), error);
                  });
}

FaultLink::FaultLink(const std::shared_ptr<Peer> &peer, std::shared_ptr<Link> inner, std::shared_ptr<FaultRules> rules)
    : engine_(peer->engine()), label_(peer->label()), inner_(std::move(inner)), rules_(std::move(rules)) {}

void FaultLink::submit(const std::shared_ptr<Transfer> &transfer) {
  FaultPlan plan = rules_->draw(static_cast<uint32_t>(transfer->descs.size()));
  if (plan.error != MP_OK) {
    Error error = make_error(plan.error, "a fault was injected", "this engine was opened for tests, with faults");
    error.peer = label_;
    error.path = path();
    return transfer->fail(error);
  }
  if (!plan.drop && plan.delay_ns == 0) return pass_on(transfer, plan);
  const bool comes = !plan.drop;
  const int64_t when = now_ns() + plan.delay_ns;
  hold(transfer, std::move(plan));
  if (!comes) return;
  engine_.next_io().call_at(when, [weak = weak_from_this(), waiting = std::weak_ptr<Transfer>(transfer)] {
    const auto self = weak.lock();
    const std::shared_ptr<Transfer> held = waiting.lock();
    if (self != nullptr && held != nullptr) self->release(held);
  });
}

void FaultLink::hold(const std::shared_ptr<Transfer> &transfer, FaultPlan plan) {
  bool closed;
  {
    std::lock_guard lock(mutex_);
    closed = closed_;
    if (!closed) held_[transfer.get()] = {transfer, std::move(plan)};
  }
  if (closed) return transfer->fail(connection_ended(transfer->peer->label(), path()));
  // A stop that came before it was held has not found it here.
  Held held;
  if (transfer->stopping() && take_held(*transfer, &held)) transfer->fail(transfer->stop_cause());
}

bool FaultLink::take_held(const Transfer &transfer, Held *held) {
  std::lock_guard lock(mutex_);
  const auto it = held_.find(&transfer);
  if (it == held_.end()) return false;
  *held = std::move(it->second);
  held_.erase(it);
  return true;
}

void FaultLink::release(const std::shared_ptr<Transfer> &transfer) {
  Held held;
  if (take_held(*transfer, &held)) pass_on(transfer, held.plan);
}

void FaultLink::pass_on(const std::shared_ptr<Transfer> &transfer, const FaultPlan &plan) {
  const auto shadow = std::make_shared<ShadowTransfer>(transfer, weak_from_this(), plan);
  const bool moves = !shadow->descs.empty();
  if (moves) {
    shadow->set_carrier(inner_);
    std::lock_guard lock(mutex_);
    shadows_[transfer.get()] = shadow;
  }
  for (const uint32_t index : plan.failing) {
    Error error = make_error(plan.failing_status, "a fault was injected into some of the descriptors",
                             "this engine was opened for tests, with faults");
    error.peer = label_;
    error.path = path();
    transfer->descs_failed(index, index + 1, error);
  }
  if (!moves) return;
  // A stop that came before it was listed has not found it.
  if (transfer->stopping()) shadow->stop_moving(transfer->stop_cause());
  inner_->submit(shadow);
}

void FaultLink::ended(const Transfer &real) {
  std::shared_ptr<ShadowTransfer> gone;
  std::lock_guard lock(mutex_);
  const auto it = shadows_.find(&real);
  if (it == shadows_.end()) return;
  gone = std::move(it->second);
  shadows_.erase(it);
}

void FaultLink::adopt(std::vector<Work> work, const Error &cause) {
  for (const Work &one : work) one.transfer->set_carrier(inner_);
  inner_->adopt(std::move(work), cause);
}

void FaultLink::cancel(Transfer &transfer) {
  // What another path of the same peer has passed on is a shadow already.
  if (dynamic_cast<ShadowTransfer *>(&transfer) != nullptr) return inner_->cancel(transfer);
  Held held;
  if (take_held(transfer, &held)) return transfer.fail(transfer.stop_cause());
  std::shared_ptr<ShadowTransfer> shadow;
  {
    std::lock_guard lock(mutex_);
    const auto it = shadows_.find(&transfer);
    if (it != shadows_.end()) shadow = it->second;
  }
  if (shadow != nullptr) shadow->stop_moving(transfer.stop_cause());
}

void FaultLink::shutdown(const Error &cause, bool settled) {
  std::unordered_map<const Transfer *, Held> held;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    held.swap(held_);
  }
  for (const auto &entry : held) {
    const std::shared_ptr<Transfer> &transfer = entry.second.transfer;
    transfer->fail(transfer->stopping() ? transfer->stop_cause() : cause);
  }
  inner_->shutdown(cause, settled);
}

}  // namespace moonpool

// SPDX-License-Identifier: Apache-2.0
// A transport around another one that misbehaves by rules: what moonpool/testing.h opens engines with.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "fault_rules.hpp"
#include "link.hpp"

namespace moonpool {

class ShadowTransfer;

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, std::shared_ptr<FaultRules> rules)
      : inner_(std::move(inner)), rules_(std::move(rules)) {}

  const char *name() const override { return inner_->name(); }
  Probe probe() const override { return inner_->probe(); }
  int cost() const override { return inner_->cost(); }
  std::string offer(const Engine &engine) const override { return inner_->offer(engine); }
  std::string unreachable(const Engine &engine, const Id128 &incarnation, std::string_view offer) const override {
    return inner_->unreachable(engine, incarnation, offer);
  }
  bool comes_back() const override { return inner_->comes_back(); }
  bool suits(const Transfer &transfer) const override { return inner_->suits(transfer); }
  bool for_gpus_only() const override { return inner_->for_gpus_only(); }
  void connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
               Connected connected) override;
  FaultRules &rules() const { return *rules_; }

 private:
  const std::unique_ptr<Transport> inner_;
  const std::shared_ptr<FaultRules> rules_;
};

// The wrapped link never sees the caller's transfer, only a shadow of it, whose descriptors are those that are to be
// moved and whose reports go to the real one. A transfer that is dropped or delayed waits here.
class FaultLink final : public Link, public std::enable_shared_from_this<FaultLink> {
 public:
  FaultLink(const std::shared_ptr<Peer> &peer, std::shared_ptr<Link> inner, std::shared_ptr<FaultRules> rules);

  const char *path() const override { return inner_->path(); }
  bool is(const Link &other) const override { return this == &other || inner_->is(other); }
  bool takes(const Transfer &transfer) const override { return inner_->takes(transfer); }
  bool usable() const override { return inner_->usable(); }
  std::string shortcoming() const override { return inner_->shortcoming(); }
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override;
  void cancel(Transfer &transfer) override;
  // The I/O threads do the work: a waiter knows the real transfer, and the wrapped link its shadow.
  void assist(Transfer &, int64_t) override {}
  void fenced(uint64_t lane_id) override { inner_->fenced(lane_id); }
  void offered(std::string_view offer) override { inner_->offered(offer); }
  void region_gone(uint64_t key) override { inner_->region_gone(key); }
  void shutdown(const Error &cause, bool settled) override;
  size_t lanes_ready() const override { return inner_->lanes_ready(); }

  // ---- for shadows: every descriptor was reported
  void ended(const Transfer &real);

 private:
  struct Held {
    std::shared_ptr<Transfer> transfer;
    FaultPlan plan;
  };

  void hold(const std::shared_ptr<Transfer> &transfer, FaultPlan plan);
  void release(const std::shared_ptr<Transfer> &transfer);
  void pass_on(const std::shared_ptr<Transfer> &transfer, const FaultPlan &plan);
  bool take_held(const Transfer &transfer, Held *held);

  Engine &engine_;
  const std::string label_;
  const std::shared_ptr<Link> inner_;
  const std::shared_ptr<FaultRules> rules_;
  std::mutex mutex_;
  bool closed_ = false;
  std::unordered_map<const Transfer *, Held> held_;
  std::unordered_map<const Transfer *, std::shared_ptr<ShadowTransfer>> shadows_;
};

}  // namespace moonpool

// SPDX-License-Identifier: Apache-2.0
// From a caller's arrays to descriptors: checks every item, merges neighbours, splits large items.
#pragma once

#include <memory>
#include <vector>

#include "peer.hpp"
#include "transfer.hpp"

namespace moonpool {

// One item that passed its checks, or why it did not.
struct Item {
  uint8_t *local;
  uint64_t key;
  uint64_t offset;
  uint64_t length;
  uint8_t status;  // mp_status
  bool on_device;  // `local`
  bool local_writable;
  bool remote_writable;
};

// A batch whose regions were looked at; items are checked one by one.
class Batch {
 public:
  // Errors that concern the call as a whole: NULLs, foreign or released regions, stale handles.
  static Error open(Peer &peer, const mp_batch &raw, Batch *out);

  size_t count() const { return raw_->count; }
  Item item(size_t i) const;
  // Why item i was refused, in words.
  Error explain(size_t i, mp_status status) const;
  const std::vector<std::shared_ptr<Region>> &locals() const { return locals_; }
  const Id128 &incarnation() const { return incarnation_; }
  bool remote_on_device() const { return remote_on_device_; }

 private:
  const mp_batch *raw_ = nullptr;
  std::vector<std::shared_ptr<Region>> locals_;
  Id128 incarnation_{};
  bool remote_on_device_ = false;
};

// Collects items into the descriptors of a transfer.
class DescBuilder {
 public:
  DescBuilder(Transfer &transfer, uint64_t slice_bytes);
  // `index` counts up from 0.
  void add(uint32_t index, const Item &item);

 private:
  Transfer &transfer_;
  const uint64_t piece_bytes_;
};

// MP_OK, or MP_REGION_READ_ONLY when `op` would write where the item's region forbids it.
mp_status check_direction(const Item &item, mp_op op);

struct Plan {
  std::shared_ptr<Peer> peer;
  std::vector<Item> items;
  std::vector<std::shared_ptr<Region>> locals;
  Id128 incarnation;
  bool remote_on_device;
};

}  // namespace moonpool

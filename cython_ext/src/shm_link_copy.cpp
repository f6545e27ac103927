// SPDX-License-Identifier: Apache-2.0
// What a ShmLink copies by itself: to and from mapped regions, and from those that are read where they lie.
#include <poll.h>

#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"
#include "shm_link.hpp"

namespace moonpool {

// The regions that one slice uses, counted in the table that the peer looks at before it lets go of memory.
class ShmLink::Uses {
 public:
  explicit Uses(ShmLink &link) : link_(link) {}
  ~Uses() { end(); }

  // MP_OK and where the bytes are mapped, or nullptr when they were added to `pieces`.
  mp_status resolve(uint32_t place, const Desc &desc, bool write, uint8_t **address) {
    if (last_ == nullptr || desc.key != last_key_) {
      const mp_status status = begin(desc.key);
      if (status != MP_OK) return status;
    }
    if (desc.length == 0 || desc.length > last_->length || desc.offset > last_->length - desc.length) {
      return MP_OUT_OF_RANGE;
    }
    if (last_->memory == nullptr) {
      if (write) return MP_TRANSPORT_UNAVAILABLE;
      pieces.add(place, desc.local, last_->address + desc.offset, desc.length);
      return MP_OK;
    }
    if (write && !last_->memory->writable()) return MP_REGION_READ_ONLY;
    *address = last_->memory->base() + desc.offset;
    return MP_OK;
  }

  // Returns the keys of those that were released without waiting for it: of mapped ones because this process was
  // stopped for long, of others whenever it happens.
  std::vector<uint64_t> end() {
    std::vector<uint64_t> released;
    for (const auto &[key, reached] : used_) {
      if (!link_.table_->end_use(reached->slot)) released.push_back(key);
    }
    used_.clear();
    last_ = nullptr;
    return released;
  }

  OtherProcess::Pieces pieces;

 private:
  mp_status begin(uint64_t key) {
    ReachedPtr reached;
    {
      std::shared_lock lock(link_.regions_mutex_);
      const auto it = link_.reached_.find(key);
      if (it == link_.reached_.end()) return MP_REGION_RELEASED;
      reached = it->second;
    }
    if (!link_.table_->begin_use(reached->slot)) return MP_REGION_RELEASED;
    last_ = reached.get();
    last_key_ = key;
    used_.emplace_back(key, std::move(reached));
    return MP_OK;
  }

  ShmLink &link_;
  std::vector<std::pair<uint64_t, ReachedPtr>> used_;
  const Reached *last_ = nullptr;
  uint64_t last_key_ = 0;
};

void ShmLink::copy(const Work &work) {
  const Transfer &transfer = *work.transfer;
  Uses uses(*this);
  Moved moved = move_descs(work, [&](uint32_t place, const Desc &desc, uint8_t **remote) {
    return uses.resolve(place, desc, transfer.op == MP_WRITE, remote);
  });
  OtherProcess::ReadFault fault;
  if (!uses.pieces.empty()) {
    fault = owner_.read(owner_proof_, &uses.pieces, transfer.digest ? moved.digests.data() : nullptr);
  }
  const std::vector<uint64_t> released = uses.end();
  // The memory outlives its owner, and its owner the memory, so the copy alone proves nothing.
  if (fault.kind == OtherProcess::ReadFault::kElsewhere || hung_up()) {
    usable_.store(false);
    Error lost = refusal(MP_PEER_LOST);
    lost.message = "the peer ended while its memory was being used";
    return not_moved(work, lost);
  }
  if (fault.kind != OtherProcess::ReadFault::kNone) return not_read(work, fault);
  if (!released.empty()) {
    const auto is_gone = [&](uint32_t place) {
      const uint64_t key = transfer.descs[work.begin + place].key;
      return std::find(released.begin(), released.end(), key) != released.end();
    };
    std::erase_if(moved.failed, [&](const auto &one) { return is_gone(one.first); });
    for (uint32_t place = 0; place < work.end - work.begin; ++place) {
      if (is_gone(place)) moved.failed.emplace_back(place, MP_REGION_RELEASED);
    }
    std::sort(moved.failed.begin(), moved.failed.end());
  }
  report_moved(work, moved);
}

// The peer is asked to copy what this process cannot read. It knows whether its memory is there, and what it may do.
void ShmLink::not_read(const Work &work, const OtherProcess::ReadFault &fault) {
  if (fault.kind == OtherProcess::ReadFault::kForbidden) {
    reads_errno_.store(fault.err);
  } else {
    // Memory of a device, say, which only its own process can copy.
    std::shared_lock lock(regions_mutex_);
    const auto it = reached_.find(work.transfer->descs[work.begin + fault.place].key);
    if (it != reached_.end()) it->second->readable.store(false);
  }
  adopt({work}, not_reached());
}

bool ShmLink::hung_up() const {
  pollfd both[2] = {{fd(), POLLRDHUP, 0}, {owner_.pidfd().get(), POLLIN, 0}};
  return poll(both, 2, 0) > 0;
}

}  // namespace moonpool

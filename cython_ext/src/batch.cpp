// SPDX-License-Identifier: Apache-2.0
#include "batch.hpp"

#include <algorithm>

#include "cuda_stager.hpp"
#include "digest.hpp"
#include "engine.hpp"
#include "handles.hpp"

namespace moonpool {

namespace {

std::string label(const mp_remote_region &region) { return "region \"" + std::string(region.name) + "\""; }

}  // namespace

Error Batch::open(Peer &peer, const mp_batch &raw, Batch *out) {
  if (raw.count == 0) return make_error(MP_INVALID_ARGUMENT, "the batch has no items", "pass at least one item");
  if (raw.count > UINT32_MAX) return make_error(MP_LIMIT, "a batch holds at most 2^32 - 1 items", "split it");
  if (raw.local_offsets == nullptr || raw.remote_offsets == nullptr || raw.lengths == nullptr ||
      raw.locals == nullptr || raw.remotes == nullptr || raw.locals_count == 0 || raw.remotes_count == 0) {
    return make_error(MP_INVALID_ARGUMENT, "the batch lacks offsets, lengths or regions",
                      "mp_batch needs all three arrays, a local and a remote region");
  }
  out->raw_ = &raw;
  out->locals_.reserve(raw.locals_count);
  for (size_t i = 0; i < raw.locals_count; ++i) {
    if (raw.locals[i] == nullptr) {
      out->locals_.emplace_back();
      continue;
    }
    const mp_region &handle = *raw.locals[i];
    if (handle.engine.get() != &peer.engine()) {
      return make_error(MP_INVALID_ARGUMENT, handle.region->label() + " belongs to another engine",
                        "use regions and peers of the same engine");
    }
    out->locals_.push_back(handle.region->released() ? nullptr : handle.region);
  }
  for (size_t i = 0; i < raw.remotes_count; ++i) {
    if (raw.remotes[i] == nullptr)
      return make_error(MP_INVALID_ARGUMENT, "a remote region is missing", "look each one up at the peer");
    if (Error error = peer.check_handle(*raw.remotes[i])) return error;
    if ((raw.remotes[i]->flags & MP_REGION_CUDA) != 0) out->remote_on_device_ = true;
  }
  std::copy_n(raw.remotes[0]->incarnation, out->incarnation_.size(), out->incarnation_.begin());
  return {};
}

Item Batch::item(size_t i) const {
  Item item{};
  const size_t local_at = raw_->local_index == nullptr ? 0 : raw_->local_index[i];
  const size_t remote_at = raw_->remote_index == nullptr ? 0 : raw_->remote_index[i];
  const int64_t local_offset = raw_->local_offsets[i * raw_->local_offsets_stride];
  const int64_t remote_offset = raw_->remote_offsets[i * raw_->remote_offsets_stride];
  const int64_t length = raw_->lengths[i * raw_->lengths_stride];
  item.status = MP_OUT_OF_RANGE;
  if (local_at >= raw_->locals_count || remote_at >= raw_->remotes_count) {
    item.status = MP_INVALID_ARGUMENT;
    return item;
  }
  if (locals_[local_at] == nullptr) {
    item.status = MP_REGION_RELEASED;
    return item;
  }
  if (local_offset < 0 || remote_offset < 0 || length <= 0) return item;
  const Region &local = *locals_[local_at];
  const mp_remote_region &remote = *raw_->remotes[remote_at];
  const auto nbytes = static_cast<uint64_t>(length);
  const auto offset = static_cast<uint64_t>(remote_offset);
  if (!local.contains(static_cast<uint64_t>(local_offset), nbytes)) return item;
  if (nbytes > remote.length || offset > remote.length - nbytes) return item;
  item.local = local.base + local_offset;
  item.on_device = local.device != nullptr;
  item.key = remote.key;
  item.offset = offset;
  item.length = nbytes;
  item.local_writable = local.writable_here();
  item.remote_writable = (remote.flags & MP_REGION_WRITABLE) != 0;
  item.status = MP_OK;
  return item;
}

Error Batch::explain(size_t i, mp_status status) const {
  const size_t local_at = raw_->local_index == nullptr ? 0 : raw_->local_index[i];
  const size_t remote_at = raw_->remote_index == nullptr ? 0 : raw_->remote_index[i];
  Error error = make_error(status, "item " + std::to_string(i) + ": ");
  error.item = static_cast<int64_t>(i);
  if (status == MP_INVALID_ARGUMENT) {
    error.message += "its region index is beyond the batch's regions";
    return error;
  }
  if (status == MP_REGION_RELEASED) {
    error.message += "its local region was released";
    error.hint = "register the memory again";
    return error;
  }
  const Region &local = *locals_[local_at];
  const mp_remote_region &remote = *raw_->remotes[remote_at];
  const int64_t length = raw_->lengths[i * raw_->lengths_stride];
  if (status == MP_REGION_READ_ONLY) {
    const bool is_local = !local.writable_here();
    error.message += is_local ? "local " + local.label() : "remote " + label(remote);
    error.message += " is read-only";
    error.hint = "register it as writable";
    return error;
  }
  if (length <= 0) {
    error.message += "length " + std::to_string(length) + " is not positive";
    error.hint = "leave empty items out of the batch";
    return error;
  }
  const auto describe = [length](const char *side, int64_t offset, const std::string &region, uint64_t size) {
    return std::string(side) + " offset " + std::to_string(offset) + " + " + std::to_string(length) +
           " bytes is outside " + region + " of " + std::to_string(size) + " bytes";
  };
  const int64_t local_offset = raw_->local_offsets[i * raw_->local_offsets_stride];
  const bool local_bad =
      local_offset < 0 || !local.contains(static_cast<uint64_t>(local_offset), static_cast<uint64_t>(length));
  error.message += local_bad ? describe("local", local_offset, local.label(), local.length)
                             : describe("remote", raw_->remote_offsets[i * raw_->remote_offsets_stride], label(remote),
                                        remote.length);
  error.hint = "offsets are bytes from the start of the region";
  return error;
}

mp_status check_direction(const Item &item, mp_op op) {
  if (item.status != MP_OK) return static_cast<mp_status>(item.status);
  const bool allowed = op == MP_WRITE ? item.remote_writable : item.local_writable;
  return allowed ? MP_OK : MP_REGION_READ_ONLY;
}

static uint64_t piece_bytes(const Transfer &transfer, uint64_t slice_bytes) {
  if (transfer.digest) return kDigestLeafBytes;
  return transfer.in_pieces() ? std::min(slice_bytes, cuda::kPieceBytes) : slice_bytes;
}

DescBuilder::DescBuilder(Transfer &transfer, uint64_t slice_bytes)
    : transfer_(transfer), piece_bytes_(piece_bytes(transfer, slice_bytes)) {}

void DescBuilder::add(uint32_t index, const Item &item) {
  std::vector<Desc> &descs = transfer_.descs;
  transfer_.bytes += item.length;
  if (!descs.empty() && !transfer_.digest) {
    Desc &last = descs.back();
    if (last.local + last.length == item.local && last.offset + last.length == item.offset && last.key == item.key &&
        last.item + last.items == index && last.length + item.length <= piece_bytes_) {
      last.length += item.length;
      ++last.items;
      return;
    }
  }
  for (uint64_t at = 0; at < item.length; at += piece_bytes_) {
    descs.push_back({item.local + at, item.key, item.offset + at, std::min(piece_bytes_, item.length - at), index, 1,
                     item.on_device});
  }
}

}  // namespace moonpool

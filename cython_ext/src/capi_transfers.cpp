// SPDX-License-Identifier: Apache-2.0
// The C face of transfers, plans and notifications.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "batch.hpp"
#include "capi_support.hpp"
#include "cuda_memory.hpp"

using namespace moonpool;

namespace {

// Once for each region of a transfer, however many pieces it has.
Error check_device(const Transfer &transfer, const Region &region) {
  if (transfer.device != nullptr && transfer.device->context() != region.device->context()) {
    return make_error(MP_INVALID_ARGUMENT, "the local regions are memory of several GPUs or contexts",
                      "one transfer for each of them");
  }
  Error error = region.check_memory();
  if (error) error.message = "local " + region.label() + ": " + error.message;
  return error;
}

std::shared_ptr<Transfer> make_transfer(const std::shared_ptr<Peer> &peer, mp_op op, const mp_options &options,
                                        const Id128 &incarnation, const std::vector<std::shared_ptr<Region>> &locals,
                                        Error *error) {
  const int64_t relative =
      options.deadline_ns != 0 ? options.deadline_ns : int64_t{peer->engine().config.deadline_ms} * kMillisecond;
  int64_t deadline = deadline_after(relative);
  if (options.deadline_at_ns != 0) deadline = std::min(deadline, options.deadline_at_ns);
  auto transfer = std::make_shared<Transfer>(peer, op, options.digest != 0, deadline);
  transfer->target_incarnation = incarnation;
  for (const auto &region : locals) {
    if (region == nullptr) continue;
    if (!region->begin_use()) {
      *error = make_error(MP_REGION_RELEASED, "local " + region->label() + " was released", "register it again");
      return nullptr;
    }
    transfer->locals.push_back(region);
    if (region->device == nullptr) continue;
    if ((*error = check_device(*transfer, *region))) return nullptr;
    transfer->device = region->device;
  }
  if (options.cuda_stream_given != 0 && transfer->device == nullptr) {
    *error = make_error(MP_INVALID_ARGUMENT, "a CUDA stream was given, but no local region is memory of a GPU",
                        "wait for the stream before the transfer, or leave it out");
    return nullptr;
  }
  transfer->after_stream = options.cuda_stream_given != 0;
  transfer->cuda_stream = options.cuda_stream;
  if (options.notify != nullptr) {
    transfer->notify.assign(static_cast<const char *>(options.notify), options.notify_bytes);
    transfer->has_notify = true;
  }
  return transfer;
}

Error check_call(mp_op op, const mp_options &options) {
  if (op != MP_READ && op != MP_WRITE)
    return make_error(MP_INVALID_ARGUMENT, "op is neither MP_READ nor MP_WRITE", "choose one of them");
  if (options.notify_bytes > wire::kNotifyBytesMax) {
    return make_error(MP_LIMIT, "a notification has at most 65536 bytes", "send a reference instead of the data");
  }
  return {};
}

void reject(Transfer &transfer, size_t index, size_t count, mp_status status) {
  if (transfer.rejected.empty()) transfer.rejected.assign(count, MP_OK);
  transfer.rejected[index] = static_cast<uint8_t>(status);
}

Error start(const std::shared_ptr<Transfer> &transfer, mp_transfer **out) {
  if (transfer->descs.empty()) return transfer->peer->describe(transfer->rejection, "");
  auto handle = std::make_unique<mp_transfer>(mp_transfer{transfer});
  transfer->peer->engine().run(transfer);
  *out = handle.release();
  return {};
}

}  // namespace

mp_status mp_submit(mp_peer *peer, mp_op op, const mp_batch *batch, const mp_options *options, mp_transfer **transfer,
                    mp_error *error) {
  return call(peer, "peer", error, [&]() -> Error {
    if (batch == nullptr || transfer == nullptr) return null_argument("batch or transfer");
    const mp_options chosen = options == nullptr ? mp_options{} : *options;
    if (Error bad = check_call(op, chosen)) return bad;
    Batch checked;
    Error bad = Batch::open(*peer->peer, *batch, &checked);
    if (bad) return bad;
    auto made = make_transfer(peer->peer, op, chosen, checked.incarnation(), checked.locals(), &bad);
    if (made == nullptr) return bad;
    made->count = checked.count();
    made->remote_on_device = checked.remote_on_device();
    DescBuilder builder(*made, peer->peer->engine().config.slice_bytes);
    for (size_t i = 0; i < made->count; ++i) {
      const Item item = checked.item(i);
      const mp_status status = check_direction(item, op);
      if (status == MP_OK) {
        builder.add(static_cast<uint32_t>(i), item);
        continue;
      }
      if (made->rejected.empty()) made->rejection = checked.explain(i, status);
      reject(*made, i, made->count, status);
    }
    return start(made, transfer);
  });
}

mp_status mp_plan_create(mp_peer *peer, const mp_batch *batch, mp_plan **plan, mp_error *error) {
  return call(peer, "peer", error, [&]() -> Error {
    if (batch == nullptr || plan == nullptr) return null_argument("batch or plan");
    Batch checked;
    if (Error bad = Batch::open(*peer->peer, *batch, &checked)) return bad;
    auto made = std::make_shared<Plan>(
        Plan{peer->peer, {}, checked.locals(), checked.incarnation(), checked.remote_on_device()});
    made->items.reserve(checked.count());
    for (size_t i = 0; i < checked.count(); ++i) {
      const Item item = checked.item(i);
      if (item.status != MP_OK) return checked.explain(i, static_cast<mp_status>(item.status));
      made->items.push_back(item);
    }
    *plan = new mp_plan{std::move(made)};
    return {};
  });
}

mp_status mp_plan_post(mp_plan *plan, mp_op op, const int64_t *indices, size_t count, const mp_options *options,
                       mp_transfer **transfer, mp_error *error) {
  return call(plan, "plan", error, [&]() -> Error {
    if (transfer == nullptr) return null_argument("transfer");
    const Plan &core = *plan->plan;
    const mp_options chosen = options == nullptr ? mp_options{} : *options;
    if (Error bad = check_call(op, chosen)) return bad;
    const size_t n = indices == nullptr ? core.items.size() : count;
    if (n == 0) return make_error(MP_INVALID_ARGUMENT, "the post names no items", "pass at least one index");
    if (n > UINT32_MAX) return make_error(MP_LIMIT, "a transfer holds at most 2^32 - 1 items", "split it");
    Error bad;
    auto made = make_transfer(core.peer, op, chosen, core.incarnation, core.locals, &bad);
    if (made == nullptr) return bad;
    made->count = n;
    made->remote_on_device = core.remote_on_device;
    DescBuilder builder(*made, core.peer->engine().config.slice_bytes);
    for (size_t i = 0; i < n; ++i) {
      const int64_t index = indices == nullptr ? static_cast<int64_t>(i) : indices[i];
      const bool known = index >= 0 && static_cast<uint64_t>(index) < core.items.size();
      const mp_status status = known ? check_direction(core.items[static_cast<size_t>(index)], op) : MP_OUT_OF_RANGE;
      if (status == MP_OK) {
        builder.add(static_cast<uint32_t>(i), core.items[static_cast<size_t>(index)]);
        continue;
      }
      if (made->rejected.empty()) {
        made->rejection =
            known ? make_error(status, "item " + std::to_string(index) + " of the plan would write a read-only region",
                               "register it as writable")
                  : make_error(status,
                               "index " + std::to_string(index) + " is outside the plan of " +
                                   std::to_string(core.items.size()) + " items",
                               "indices count from 0");
        made->rejection.item = static_cast<int64_t>(i);
      }
      reject(*made, i, n, status);
    }
    return start(made, transfer);
  });
}

size_t mp_plan_count(const mp_plan *plan) { return plan->plan->items.size(); }

void mp_plan_free(mp_plan *plan) {
  if (plan == nullptr || inherited(*plan)) return;
  delete plan;
}

mp_transfer_state mp_transfer_get_state(const mp_transfer *transfer) {
  // The threads that would end it live in the parent.
  return inherited(*transfer) ? MP_FAILED : transfer->transfer->state();
}

mp_status mp_transfer_wait(mp_transfer *transfer, int64_t timeout_ns) {
  if (inherited(*transfer)) return MP_FORKED;
  return transfer->transfer->wait(timeout_ns, false);
}

mp_status mp_transfer_wait_settled(mp_transfer *transfer, int64_t timeout_ns) {
  if (inherited(*transfer)) return MP_FORKED;
  return transfer->transfer->wait(timeout_ns, true);
}

mp_status mp_transfer_cancel(mp_transfer *transfer, int64_t timeout_ns) {
  if (inherited(*transfer)) return MP_FORKED;
  Transfer &core = *transfer->transfer;
  core.stop(core.peer->describe(make_error(MP_CANCELLED, "the transfer was cancelled"), ""));
  return core.wait(timeout_ns, true);
}

void mp_transfer_get_error(const mp_transfer *transfer, mp_error *error) {
  export_error(inherited(*transfer) ? forked_error() : transfer->transfer->error(), error);
}

size_t mp_transfer_count(const mp_transfer *transfer) { return transfer->transfer->count; }

void mp_transfer_item_status(const mp_transfer *transfer, uint8_t *status, size_t count) {
  if (inherited(*transfer)) {
    std::memset(status, MP_FORKED, std::min(count, transfer->transfer->count));
    return;
  }
  transfer->transfer->item_status(status, count);
}

mp_status mp_transfer_digests(const mp_transfer *transfer, uint64_t *digests, size_t count) {
  if (inherited(*transfer)) return MP_FORKED;
  const Transfer &core = *transfer->transfer;
  const mp_transfer_state state = core.state();
  if (!core.digest || state == MP_RUNNING || state == MP_UNSETTLED) return MP_INVALID_ARGUMENT;
  core.digests(digests, count);
  return MP_OK;
}

mp_status mp_transfer_set_eventfd(mp_transfer *transfer, int fd) {
  if (inherited(*transfer)) return MP_FORKED;
  transfer->transfer->set_eventfd(fd);
  return MP_OK;
}

void mp_transfer_free(mp_transfer *transfer) {
  if (transfer == nullptr || inherited(*transfer)) return;
  delete transfer;
}

// ---------------------------------------------------------------- notifications

mp_status mp_notification_take(mp_engine *engine, int64_t timeout_ns, mp_notification *notification) {
  if (inherited(*engine)) return MP_FORKED;
  Engine &core = *engine->engine;
  Notice notice;
  if (!core.notifications.take(timeout_ns, &notice)) return core.notifications.closed() ? MP_CLOSED : MP_WAIT_TIMEOUT;
  std::memset(notification, 0, sizeof *notification);
  notification->payload = static_cast<uint8_t *>(std::malloc(notice.payload.size() + 1));
  if (notification->payload == nullptr) return MP_NO_MEMORY;
  std::memcpy(notification->payload, notice.payload.data(), notice.payload.size());
  notification->payload_bytes = notice.payload.size();
  std::memcpy(notification->incarnation, notice.incarnation.data(), notice.incarnation.size());
  wire::set_text(notification->peer, notice.peer);
  return MP_OK;
}

void mp_notification_clear(mp_notification *notification) {
  std::free(notification->payload);
  notification->payload = nullptr;
  notification->payload_bytes = 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// What the stand-in's devices do with requests.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <utility>

#include "standin_world.hpp"

namespace moonpool::standin {

namespace {

struct Range {
  uint8_t *at;
  uint64_t bytes;
};

// What one request came to.
struct Outcome {
  enum Kind { kDone, kWaits, kDropped } kind = kDone;
  ibv_wc_status status = IBV_WC_SUCCESS;
  uint32_t vendor_code = 0;
  std::shared_ptr<Qp> broken = nullptr;  // the other side, which has to look
};

const Device &device_of(const Qp &qp) { return static_cast<const Device &>(*qp.context->device); }

// Null unless all of it is inside a live registration of this protection domain with these rights.
uint8_t *find_memory(const std::unordered_map<uint32_t, Mr *> &keys, uint32_t key, const ibv_pd *pd, uint64_t address,
                     uint64_t bytes, unsigned access) {
  const auto it = keys.find(key);
  if (it == keys.end()) return nullptr;
  const Mr &mr = *it->second;
  if (mr.pd != pd || (mr.access & access) != access) return nullptr;
  if (address < mr.start || bytes > mr.length || address - mr.start > mr.length - bytes) return nullptr;
  return static_cast<uint8_t *>(mr.addr) + (address - mr.start);
}

bool find_pieces(const Qp &qp, const Request &request, std::vector<Range> *out) {
  const unsigned access = request.wr.opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
  for (const ibv_sge &piece : request.pieces) {
    uint8_t *at = find_memory(world().by_lkey, piece.lkey, qp.pd, piece.addr, piece.length, access);
    if (at == nullptr) return false;
    out->push_back({at, piece.length});
  }
  return true;
}

// The other end, when packets reach it and it takes them.
std::shared_ptr<Qp> find_responder(const Qp &qp) {
  const auto it = world().queue_pairs.find(qp.attributes.dest_qp_num);
  if (it == world().queue_pairs.end()) return nullptr;
  const std::shared_ptr<Qp> &other = it->second;
  const ibv_qp_state state = other->now.load();
  if (state != IBV_QPS_RTR && state != IBV_QPS_RTS) return nullptr;
  const Device &there = device_of(*other);
  const ibv_qp_attr &ours = qp.attributes, &theirs = other->attributes;
  if (!device_of(qp).up || !there.up) return nullptr;
  if (theirs.dest_qp_num != qp.qp_num || theirs.rq_psn != ours.sq_psn || theirs.path_mtu != ours.path_mtu) {
    return nullptr;
  }
  const auto gid = std::find_if(there.gids.begin(), there.gids.end(),
                                [&](const GidRow &row) { return row.index == theirs.ah_attr.grh.sgid_index; });
  if (gid == there.gids.end() || std::memcmp(gid->gid.data(), ours.ah_attr.grh.dgid.raw, gid->gid.size()) != 0) {
    return nullptr;
  }
  return other;
}

bool take_receive(Qp &qp, uint64_t *id) {
  std::lock_guard lock(qp.work_mutex);
  if (qp.receives.empty()) return false;
  *id = qp.receives.front();
  qp.receives.pop_front();
  return true;
}

void move_bytes(const Request &request, const std::vector<Range> &pieces, uint8_t *remote) {
  if (!request.inlined.empty()) std::memcpy(remote, request.inlined.data(), request.inlined.size());
  for (const Range &piece : pieces) {
    if (request.wr.opcode == IBV_WR_RDMA_READ) {
      std::memcpy(piece.at, remote, piece.bytes);
    } else {
      std::memcpy(remote, piece.at, piece.bytes);
    }
    remote += piece.bytes;
  }
}

Outcome move(const std::shared_ptr<Qp> &qp, const Request &request) {
  std::vector<Range> pieces;
  if (!find_pieces(*qp, request, &pieces)) return {.status = IBV_WC_LOC_PROT_ERR};
  const std::shared_ptr<Qp> other = find_responder(*qp);
  if (other == nullptr) {
    if (world().retries_over.load()) return {.status = IBV_WC_RETRY_EXC_ERR, .vendor_code = 0x81};
    return {.kind = Outcome::kWaits};
  }
  const bool reads = request.wr.opcode == IBV_WR_RDMA_READ;
  const auto refused = [&](ibv_wc_status status) {
    break_qp(other);
    raise(static_cast<Context &>(*other->context),
          status == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR, other);
    return Outcome{.status = status, .vendor_code = 0x88, .broken = other};
  };
  if (reads &&
      (qp->attributes.max_rd_atomic == 0 || qp->attributes.max_rd_atomic > other->attributes.max_dest_rd_atomic)) {
    return refused(IBV_WC_REM_INV_REQ_ERR);
  }
  uint8_t *remote = nullptr;
  if (request.bytes > 0) {
    const unsigned access = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if ((static_cast<unsigned>(other->attributes.qp_access_flags) & access) == 0) {
      return refused(IBV_WC_REM_ACCESS_ERR);
    }
    remote = find_memory(world().by_rkey, request.wr.wr.rdma.rkey, other->pd, request.wr.wr.rdma.remote_addr,
                         request.bytes, access);
    if (remote == nullptr) return refused(IBV_WC_REM_ACCESS_ERR);
  }
  const bool immediate = request.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  uint64_t receive = 0;
  if (immediate && !take_receive(*other, &receive)) {
    count(world().counted.waited);
    return {.kind = Outcome::kWaits};
  }
  move_bytes(request, pieces, remote);
  count(reads ? world().counted.read_bytes : world().counted.written_bytes, request.bytes);
  if (immediate) {
    ibv_wc wc{};
    wc.wr_id = receive;
    wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    wc.byte_len = static_cast<uint32_t>(request.bytes);
    wc.imm_data = request.wr.imm_data;
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.qp_num = other->qp_num;
    wc.src_qp = qp->qp_num;
    complete(static_cast<Cq &>(*other->recv_cq), {wc, other, 0, Side::kReceive});
  }
  return {};
}

void answer(const std::shared_ptr<Qp> &qp, const Request &request, const Outcome &outcome) {
  ++qp->unretired;
  const bool failed = outcome.status != IBV_WC_SUCCESS;
  if (failed && outcome.status != IBV_WC_WR_FLUSH_ERR) count(world().counted.failed);
  if (failed) break_qp(qp);
  if (!failed && (request.wr.send_flags & IBV_SEND_SIGNALED) == 0) return;
  ibv_wc wc{};
  wc.wr_id = request.wr.wr_id;
  wc.status = outcome.status;
  wc.vendor_err = outcome.vendor_code;
  wc.opcode = request.wr.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
  wc.byte_len = static_cast<uint32_t>(request.bytes);
  wc.qp_num = qp->qp_num;
  complete(static_cast<Cq &>(*qp->send_cq), {wc, qp, std::exchange(qp->unretired, 0), Side::kSend});
}

// Under the gate from its first look to its completion, so that whoever has had the gate for himself knows it over.
Outcome execute(const std::shared_ptr<Qp> &qp, const Request &request) {
  std::shared_lock gate(world().gate);
  if (qp->gone) return {.kind = Outcome::kDropped};
  Outcome outcome;
  RequestFault fault{};
  if (qp->now.load() != IBV_QPS_RTS) {
    outcome.status = IBV_WC_WR_FLUSH_ERR;
  } else if (world().met(*qp, request, &fault)) {
    if (fault.landed) move(qp, request);
    outcome.status = fault.status;
    outcome.vendor_code = fault.vendor_code;
  } else {
    outcome = move(qp, request);
  }
  if (outcome.kind == Outcome::kDone) answer(qp, request, outcome);
  return outcome;
}

bool ready_locked(const Qp &qp) {
  return !qp.busy && !qp.requests.empty() && !qp.waits && !qp.stop &&
         (!world().requests_held.load() || qp.now.load() == IBV_QPS_ERR);
}

}  // namespace

void drain(const std::shared_ptr<Qp> &qp) {
  for (;;) {
    Request request;
    uint64_t before;
    {
      std::lock_guard lock(qp->work_mutex);
      if (!ready_locked(*qp)) return;
      qp->busy = true;
      before = qp->wake_ups;
      request = std::move(qp->requests.front());
      qp->requests.pop_front();
    }
    const Outcome outcome = execute(qp, request);
    if (outcome.broken != nullptr) kick(outcome.broken);
    std::lock_guard lock(qp->work_mutex);
    qp->busy = false;
    if (outcome.kind != Outcome::kWaits) continue;
    qp->requests.push_front(std::move(request));
    qp->waits = qp->wake_ups == before;
  }
}

void kick(const std::shared_ptr<Qp> &qp) {
  bool deferred;
  {
    std::lock_guard lock(qp->work_mutex);
    if (world().deferred.load() && !qp->worker.joinable() && !qp->stop && !qp->requests.empty()) {
      ++world().workers;
      qp->worker = std::thread([self = qp] {
        std::unique_lock inner(self->work_mutex);
        while (!self->stop) {
          self->work_changed.wait(inner, [&] { return self->stop || ready_locked(*self); });
          inner.unlock();
          drain(self);
          inner.lock();
        }
      });
    }
    deferred = qp->worker.joinable();
  }
  if (deferred) {
    qp->work_changed.notify_all();
  } else {
    drain(qp);
  }
}

void wake(const std::shared_ptr<Qp> &qp) {
  {
    std::lock_guard lock(qp->work_mutex);
    ++qp->wake_ups;
    qp->waits = false;
  }
  kick(qp);
}

void wake_all() {
  std::vector<std::shared_ptr<Qp>> all;
  {
    std::shared_lock gate(world().gate);
    for (const auto &entry : world().queue_pairs) all.push_back(entry.second);
  }
  for (const auto &qp : all) wake(qp);
}

void break_qp(const std::shared_ptr<Qp> &qp) {
  if (qp->now.exchange(IBV_QPS_ERR) == IBV_QPS_ERR) return;
  std::deque<uint64_t> receives;
  {
    std::lock_guard lock(qp->work_mutex);
    receives.swap(qp->receives);
    ++qp->wake_ups;
    qp->waits = false;
  }
  for (const uint64_t id : receives) {
    ibv_wc wc{};
    wc.wr_id = id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.qp_num = qp->qp_num;
    complete(static_cast<Cq &>(*qp->recv_cq), {wc, qp, 0, Side::kReceive});
  }
}

// ---------------------------------------------------------------- completions and events

namespace {

void add_locked(Cq &cq, Completion completion) {
  if (cq.entries.size() >= static_cast<size_t>(cq.cqe)) {
    cq.broken = true;
    world().misused("a completion queue of " + std::to_string(cq.cqe) + " entries overflows");
    return;
  }
  cq.entries.push_back(std::move(completion));
  if (!std::exchange(cq.armed, false) || cq.channel == nullptr) return;
  auto &channel = static_cast<Channel &>(*cq.channel);
  count(world().counted.events);
  std::lock_guard lock(channel.events_mutex);
  channel.unread.push_back(&cq);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(channel.fd, &one, sizeof one);
}

bool held(const Completion &completion) { return world().completions_held[static_cast<size_t>(completion.side)]; }

}  // namespace

void complete(Cq &cq, Completion completion) {
  std::lock_guard lock(cq.entries_mutex);
  if (!cq.held.empty() || held(completion)) {
    cq.held.push_back(std::move(completion));
  } else {
    add_locked(cq, std::move(completion));
  }
}

void let_go(Cq &cq) {
  std::lock_guard lock(cq.entries_mutex);
  while (!cq.held.empty() && !held(cq.held.front())) {
    add_locked(cq, std::move(cq.held.front()));
    cq.held.pop_front();
  }
}

void raise(Context &context, ibv_event_type type, const std::shared_ptr<Qp> &qp) {
  Event one{};
  one.event.event_type = type;
  if (qp != nullptr) {
    one.event.element.qp = qp.get();
  } else {
    one.event.element.port_num = 1;
  }
  one.qp = qp;
  std::lock_guard lock(context.events_mutex);
  context.unread.push_back(std::move(one));
  const uint64_t count = 1;
  [[maybe_unused]] const ssize_t n = write(context.async_fd, &count, sizeof count);
}

void raise_port_event(int device, ibv_event_type type) {
  std::shared_lock gate(world().gate);
  for (Context *context : world().contexts) {
    if (index_of(context) == device) raise(*context, type);
  }
}

}  // namespace moonpool::standin

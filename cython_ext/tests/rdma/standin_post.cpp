// SPDX-License-Identifier: Apache-2.0
//
// Work requests and completions: the functions of verbs.h that go through the table of a context.
#include <cerrno>
#include <shared_mutex>

#include "standin_world.hpp"

namespace moonpool::standin {

namespace {

int poll(ibv_cq *raw, int max, ibv_wc *out) {
  auto &cq = static_cast<Cq &>(*raw);
  if (world().met(Call::kPoll, cq.context) != 0) return -1;
  std::lock_guard lock(cq.entries_mutex);
  if (cq.broken) return -1;
  int n = 0;
  for (; n < max && !cq.entries.empty(); ++n) {
    out[n] = cq.entries.front().wc;
    cq.entries.front().qp->used.fetch_sub(cq.entries.front().retires, std::memory_order_relaxed);
    cq.entries.pop_front();
  }
  return n;
}

int arm(ibv_cq *raw, int) {
  auto &cq = static_cast<Cq &>(*raw);
  if (const int err = world().met(Call::kArm, cq.context)) return err;
  count(world().counted.arms);
  std::lock_guard lock(cq.entries_mutex);
  cq.armed = true;
  return 0;
}

int check(const Qp &qp, const ibv_send_wr &wr, uint64_t *bytes) {
  const bool writes = wr.opcode == IBV_WR_RDMA_WRITE || wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  const bool inlined = (wr.send_flags & IBV_SEND_INLINE) != 0;
  if (!writes && (wr.opcode != IBV_WR_RDMA_READ || inlined)) return EINVAL;
  if (wr.num_sge < 0 || static_cast<uint32_t>(wr.num_sge) > qp.cap.max_send_sge) return EINVAL;
  *bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) *bytes += wr.sg_list[i].length;
  if (*bytes > uint64_t{1} << 31) return EINVAL;
  if (inlined && *bytes > qp.cap.max_inline_data) return EINVAL;
  return 0;
}

Request copy_of(const ibv_send_wr &wr, uint64_t bytes) {
  Request request;
  request.wr = wr;
  request.wr.next = nullptr;
  request.wr.sg_list = nullptr;
  request.bytes = bytes;
  if ((wr.send_flags & IBV_SEND_INLINE) == 0) {
    request.pieces.assign(wr.sg_list, wr.sg_list + wr.num_sge);
    return request;
  }
  for (int i = 0; i < wr.num_sge; ++i) {
    const auto *from = reinterpret_cast<const uint8_t *>(wr.sg_list[i].addr);
    request.inlined.insert(request.inlined.end(), from, from + wr.sg_list[i].length);
  }
  return request;
}

int post_send_list(ibv_qp *raw, ibv_send_wr *wr, ibv_send_wr **bad) {
  auto &qp = static_cast<Qp &>(*raw);
  std::shared_ptr<Qp> self;
  {
    std::shared_lock gate(world().gate);
    self = world().queue_pairs.at(qp.qp_num);
  }
  *bad = wr;
  if (const int err = world().met(Call::kPostSend, qp.context)) return err;
  auto &c = world().counted;
  count(c.posts);
  int err = 0;
  for (; wr != nullptr; wr = wr->next) {
    *bad = wr;
    uint64_t bytes = 0;
    const ibv_qp_state state = qp.now.load();
    if (state != IBV_QPS_RTS && state != IBV_QPS_ERR) {
      world().misused("a request for a queue pair in state " + std::to_string(state));
      err = EINVAL;
    } else if (qp.used.load(std::memory_order_relaxed) >= qp.cap.max_send_wr) {
      world().misused("a send queue of " + std::to_string(qp.cap.max_send_wr) + " requests overflows");
      err = ENOMEM;
    } else {
      err = check(qp, *wr, &bytes);
      if (err != 0) world().misused("a request that no device takes");
    }
    if (err != 0) break;
    qp.used.fetch_add(1, std::memory_order_relaxed);
    count(c.requests);
    count(c.pieces, static_cast<uint64_t>(wr->num_sge));
    if ((wr->send_flags & IBV_SEND_SIGNALED) != 0) count(c.signalled);
    if ((wr->send_flags & IBV_SEND_INLINE) != 0) count(c.inlined);
    if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) count(c.immediate);
    Request request = copy_of(*wr, bytes);
    std::lock_guard lock(qp.work_mutex);
    qp.requests.push_back(std::move(request));
  }
  kick(self);
  return err;
}

int post_receive_list(ibv_qp *raw, ibv_recv_wr *wr, ibv_recv_wr **bad) {
  auto &qp = static_cast<Qp &>(*raw);
  for (; wr != nullptr; wr = wr->next) {
    *bad = wr;
    if (const int err = world().met(Call::kPostReceive, qp.context)) return err;
    std::lock_guard lock(qp.work_mutex);
    if (qp.now.load() == IBV_QPS_RESET) return EINVAL;
    if (qp.receives.size() >= qp.cap.max_recv_wr) {
      world().misused("a receive queue of " + std::to_string(qp.cap.max_recv_wr) + " overflows");
      return ENOMEM;
    }
    qp.receives.push_back(wr->wr_id);
  }
  std::shared_ptr<Qp> waiting;
  {
    std::shared_lock gate(world().gate);
    const auto it = world().queue_pairs.find(qp.attributes.dest_qp_num);
    if (it != world().queue_pairs.end()) waiting = it->second;
  }
  if (waiting != nullptr) wake(waiting);
  return 0;
}

}  // namespace

void fill_table(ibv_context_ops *table) {
  table->poll_cq = poll;
  table->req_notify_cq = arm;
  table->post_send = post_send_list;
  table->post_recv = post_receive_list;
}

}  // namespace moonpool::standin

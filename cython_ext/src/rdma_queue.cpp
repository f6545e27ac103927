// SPDX-License-Identifier: Apache-2.0
#include "rdma_queue.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

namespace moonpool {

namespace {

// 4.096 us * 2^14 = 67 ms without an acknowledgement, eight times: about half a second to a few, as devices round.
constexpr uint8_t kTimeout = 14;
constexpr uint8_t kRetries = 7;
constexpr uint8_t kRnrRetries = 7;  // for ever; the progress time-out ends it
constexpr uint8_t kRnrTimer = 12;   // 0.64 ms
constexpr uint8_t kHopLimit = 64;
constexpr uint32_t kPiecesWanted = 16;
// Marks that have arrived and were not looked at yet. More wait at the sender.
constexpr uint32_t kMarks = 64;

const char *mtu_text(uint8_t mtu) {
  static constexpr const char *kTexts[] = {"unknown", "256", "512", "1024", "2048", "4096"};
  return mtu < std::size(kTexts) ? kTexts[mtu] : "unknown";
}

std::string describe(const rdma::QueuePairInfo &info) {
  return "GID " + gid_text(info.gid) + ", LID " + std::to_string(info.lid) + ", MTU " + mtu_text(info.mtu);
}

}  // namespace

RdmaQueue::RdmaQueue(std::shared_ptr<Rail> rail, const RdmaConfig &config)
    : rail_(std::move(rail)), verbs_(rail_->device->verbs), config_(config), state_(rail_->state()) {
  rail_->queue_pairs.fetch_add(1);
}

RdmaQueue::~RdmaQueue() {
  if (qp_ != nullptr) verbs_.destroy_qp(qp_);
  if (cq_ != nullptr) verbs_.destroy_cq(cq_);
  if (channel_ != nullptr) verbs_.destroy_comp_channel(channel_);
  rail_->queue_pairs.fetch_sub(1);
}

Error RdmaQueue::failed(const char *what, int err) const {
  Error error = system_error(MP_TRANSPORT_UNAVAILABLE, err, "rail " + rail_->label() + ": cannot " + what,
                             "`mooncake-bench doctor` shows the port, its GIDs and the limits");
  if (!remote_.empty()) error.message += " (" + describe(info_) + "; the peer: " + remote_ + ")";
  return error;
}

Error RdmaQueue::make(const std::shared_ptr<Rail> &rail, const RdmaConfig &config, bool serves,
                      std::unique_ptr<RdmaQueue> *out) {
  std::unique_ptr<RdmaQueue> made(new RdmaQueue(rail, config));
  const RdmaDevice &device = *rail->device;
  const ibv_device_attr &limits = device.attributes;
  if (Error error = rail->unusable(made->state_)) return error;
  made->depth_ = serves ? 1 : std::min(config.queue_depth, static_cast<uint32_t>(limits.max_qp_wr));
  made->channel_ = device.verbs.create_comp_channel(device.context);
  if (made->channel_ == nullptr) return made->failed("make a completion channel", errno);
  const int fd = made->channel_->fd;
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  // One completion for each request at worst, when everything is flushed.
  const uint32_t marks = serves ? std::min(kMarks, static_cast<uint32_t>(limits.max_qp_wr)) : 1;
  made->cq_ =
      device.verbs.create_cq(device.context, static_cast<int>(made->depth_ + marks), nullptr, made->channel_, 0);
  if (made->cq_ == nullptr) return made->failed("make a completion queue", errno);
  ibv_qp_init_attr wanted{};
  wanted.qp_type = IBV_QPT_RC;
  wanted.send_cq = wanted.recv_cq = made->cq_;
  wanted.cap.max_send_wr = made->depth_;
  wanted.cap.max_recv_wr = marks;
  wanted.cap.max_send_sge = serves ? 1 : std::min(kPiecesWanted, static_cast<uint32_t>(limits.max_sge));
  wanted.cap.max_recv_sge = 1;
  wanted.cap.max_inline_data = serves ? 0 : config.inline_bytes;
  made->qp_ = device.verbs.create_qp(device.pd, &wanted);
  if (made->qp_ == nullptr && wanted.cap.max_inline_data > 0) {
    // What a device can inline is not among its attributes.
    wanted.cap.max_inline_data = 0;
    made->qp_ = device.verbs.create_qp(device.pd, &wanted);
  }
  if (made->qp_ == nullptr) return made->failed("make a queue pair", errno);
  made->pieces_max_ = std::max(wanted.cap.max_send_sge, 1u);
  made->inline_max_ = std::min(wanted.cap.max_inline_data, config.inline_bytes);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = static_cast<uint16_t>(config.pkey_index);
  attributes.port_num = rail->port;
  attributes.qp_access_flags = serves ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE : 0;
  if (const int err = device.verbs.modify_qp(made->qp_, &attributes,
                                             IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
    return made->failed("bring a queue pair to INIT", err);
  }
  if (serves) {
    if (const int err = made->expect_marks(marks)) return made->failed("post a receive", err);
  }
  rdma::QueuePairInfo &info = made->info_;
  info.gid = made->state_.gid;
  info.number = made->qp_->qp_num;
  info.psn = static_cast<uint32_t>(random_u64() & 0xffffff);
  info.lid = made->state_.lid;
  info.mtu = made->state_.mtu;
  info.reads_initiated = static_cast<uint8_t>(std::clamp(limits.max_qp_init_rd_atom, 1, 255));
  info.reads_served = static_cast<uint8_t>(std::clamp(limits.max_qp_rd_atom, 1, 255));
  *out = std::move(made);
  return {};
}

Error RdmaQueue::connect(const rdma::QueuePairInfo &remote) {
  remote_ = describe(remote);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(info_.mtu, remote.mtu));
  attributes.dest_qp_num = remote.number;
  attributes.rq_psn = remote.psn;
  attributes.max_dest_rd_atomic = std::min(info_.reads_served, remote.reads_initiated);
  attributes.min_rnr_timer = kRnrTimer;
  ibv_ah_attr &address = attributes.ah_attr;
  address.is_global = state_.ethernet ? 1 : 0;
  std::copy(remote.gid.begin(), remote.gid.end(), address.grh.dgid.raw);
  address.grh.sgid_index = static_cast<uint8_t>(state_.gid_index);
  address.grh.hop_limit = kHopLimit;
  address.grh.traffic_class = static_cast<uint8_t>(config_.traffic_class);
  address.dlid = remote.lid;
  address.sl = static_cast<uint8_t>(config_.service_level);
  address.port_num = rail_->port;
  if (const int err = verbs_.modify_qp(qp_, &attributes,
                                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
    return failed("bring a queue pair to RTR", err);
  }
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRnrRetries;
  attributes.sq_psn = info_.psn;
  attributes.max_rd_atomic = std::min(info_.reads_initiated, remote.reads_served);
  if (const int err = verbs_.modify_qp(qp_, &attributes,
                                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) {
    return failed("bring a queue pair to RTS", err);
  }
  return {};
}

int RdmaQueue::expect_marks(uint32_t n) {
  for (; n > 0; --n) {
    ibv_recv_wr one{};
    ibv_recv_wr *bad = nullptr;
    if (const int err = ibv_post_recv(qp_, &one, &bad)) return err;
  }
  return 0;
}

int RdmaQueue::post(ibv_send_wr *chain) {
  ibv_send_wr *bad = nullptr;
  return ibv_post_send(qp_, chain, &bad);
}

Error RdmaQueue::arm() {
  if (const int err = ibv_req_notify_cq(cq_, 0)) {
    return system_error(MP_TRANSPORT_UNAVAILABLE, err, "the completion queue cannot be armed");
  }
  return {};
}

void RdmaQueue::clear() {
  ibv_cq *cq = nullptr;
  void *context = nullptr;
  // Acknowledged at once: the end of the completion queue waits for that.
  while (verbs_.get_cq_event(channel_, &cq, &context) == 0) verbs_.ack_cq_events(cq, 1);
}

Fd RdmaQueue::descriptor() const { return Fd(fcntl(channel_->fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace moonpool

// SPDX-License-Identifier: Apache-2.0
//
// The stand-in's face: the functions of libibverbs that the engine looks up by name.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <shared_mutex>

#include "standin_world.hpp"

namespace moonpool::standin {

namespace {

template <class T>
T *refused(int err) {
  errno = err;
  return nullptr;
}

Context &context_of(const ibv_context *context) { return *static_cast<Context *>(const_cast<ibv_context *>(context)); }

const Limits &limits_of(const ibv_context *context) { return static_cast<const Device *>(context->device)->limits; }

// The kernel pins pages that can be read; without them it says EFAULT.
bool readable(const void *address, size_t bytes) {
  for (const size_t at : {size_t{0}, bytes - 1}) {
    uint8_t seen;
    iovec ours{&seen, 1}, theirs{static_cast<uint8_t *>(const_cast<void *>(address)) + at, 1};
    if (process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0) != 1) return false;
  }
  return true;
}

// With the gate.
ibv_mr *add_registration(ibv_pd *pd, void *address, size_t bytes, uint64_t start, unsigned access) {
  auto *mr = new Mr();
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->start = start;
  mr->access = access;
  mr->lkey = world().next_key++;
  mr->rkey = world().next_key++;
  world().by_lkey[mr->lkey] = mr;
  world().by_rkey[mr->rkey] = mr;
  ++static_cast<Pd *>(pd)->objects;
  ++world().registrations;
  return mr;
}

// What destroying an object waits for. Whoever never acknowledges would wait for ever.
template <class Condition>
void wait_acknowledged(Condition acknowledged, const char *what) {
  for (int i = 0; !acknowledged(); ++i) {
    if (i > 60'000) {
      std::fprintf(stderr, "an event of a %s is never acknowledged\n", what);
      std::abort();
    }
    usleep(1000);
  }
}

// True when an event was read from the descriptor.
bool read_event(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof count) == sizeof count;
}

// ---------------------------------------------------------------- states

int to_init(Qp &qp, const ibv_qp_attr &wanted, int mask) {
  if (mask != (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return EINVAL;
  if (qp.now.load() != IBV_QPS_RESET || wanted.pkey_index != 0 || wanted.port_num != 1) return EINVAL;
  qp.attributes.qp_access_flags = wanted.qp_access_flags;
  return 0;
}

int to_rtr(Qp &qp, const ibv_qp_attr &wanted, int mask) {
  if (mask != (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
    return EINVAL;
  }
  const auto &device = static_cast<const Device &>(*qp.context->device);
  const auto row = std::find_if(device.gids.begin(), device.gids.end(),
                                [&](const GidRow &one) { return one.index == wanted.ah_attr.grh.sgid_index; });
  if (qp.now.load() != IBV_QPS_INIT || wanted.ah_attr.is_global == 0 || row == device.gids.end() ||
      wanted.path_mtu > device.limits.mtu || wanted.path_mtu < IBV_MTU_256 ||
      wanted.max_dest_rd_atomic > device.limits.reads_max || wanted.rq_psn > 0xffffff) {
    return EINVAL;
  }
  qp.attributes.path_mtu = wanted.path_mtu;
  qp.attributes.dest_qp_num = wanted.dest_qp_num;
  qp.attributes.rq_psn = wanted.rq_psn;
  qp.attributes.max_dest_rd_atomic = wanted.max_dest_rd_atomic;
  qp.attributes.ah_attr = wanted.ah_attr;
  return 0;
}

int to_rts(Qp &qp, const ibv_qp_attr &wanted, int mask) {
  if (mask !=
      (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) {
    return EINVAL;
  }
  const Limits &limits = limits_of(qp.context);
  if (qp.now.load() != IBV_QPS_RTR || wanted.max_rd_atomic > limits.reads_max || wanted.sq_psn > 0xffffff ||
      wanted.timeout == 0 || wanted.timeout > 31 || wanted.retry_cnt > 7 || wanted.rnr_retry > 7) {
    return EINVAL;
  }
  qp.attributes.sq_psn = wanted.sq_psn;
  qp.attributes.max_rd_atomic = wanted.max_rd_atomic;
  return 0;
}

}  // namespace
}  // namespace moonpool::standin

// ---------------------------------------------------------------- functions of the library

using namespace moonpool::standin;

extern "C" {

ibv_device **ibv_get_device_list(int *n) {
  auto **list = static_cast<ibv_device **>(std::calloc(kDevices + 1, sizeof(ibv_device *)));
  for (size_t i = 0; i < kDevices; ++i) list[i] = &world().devices[i];
  if (n != nullptr) *n = kDevices;
  return list;
}

void ibv_free_device_list(ibv_device **list) { std::free(list); }

const char *ibv_get_device_name(ibv_device *device) { return device->name; }

ibv_context *ibv_open_device(ibv_device *device) {
  auto context = std::make_unique<Context>();
  context->device = device;
  if (const int err = world().met(Call::kOpen, context.get())) return refused<ibv_context>(err);
  context->async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  context->cmd_fd = -1;
  context->num_comp_vectors = 1;
  fill_table(&context->ops);
  std::lock_guard gate(world().gate);
  world().contexts.insert(context.get());
  return context.release();
}

int ibv_close_device(ibv_context *raw) {
  Context *context = &context_of(raw);
  if (context->objects.load() != 0) world().misused("a device is closed before what was made of it has gone");
  {
    std::lock_guard gate(world().gate);
    world().contexts.erase(context);
  }
  close(context->async_fd);
  delete context;
  return 0;
}

int ibv_query_device(ibv_context *context, ibv_device_attr *out) {
  std::shared_lock gate(world().gate);
  const Limits &limits = limits_of(context);
  *out = {};
  out->max_mr_size = limits.mr_bytes_max;
  out->max_qp_wr = limits.qp_wr_max;
  out->max_sge = limits.sge_max;
  out->max_cqe = 65536;
  out->max_qp = 65536;
  out->max_mr = 65536;
  out->max_qp_rd_atom = out->max_qp_init_rd_atom = limits.reads_max;
  out->phys_port_cnt = 1;
  return 0;
}

int ibv_query_port(ibv_context *context, uint8_t port, _compat_ibv_port_attr *raw) {
  if (port != 1) return EINVAL;
  std::shared_lock gate(world().gate);
  const auto &device = static_cast<const Device &>(*context->device);
  // The library fills what it had when this function was made.
  auto *out = reinterpret_cast<ibv_port_attr *>(raw);
  std::memset(out, 0, offsetof(ibv_port_attr, port_cap_flags2));
  out->state = device.up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  out->max_mtu = out->active_mtu = static_cast<ibv_mtu>(device.limits.mtu);
  out->gid_tbl_len = 256;
  out->max_msg_sz = 1u << 31;
  out->pkey_tbl_len = 1;
  out->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

ssize_t _ibv_query_gid_table(ibv_context *context, ibv_gid_entry *out, size_t max, uint32_t flags, size_t entry_size) {
  if (flags != 0 || entry_size != sizeof(ibv_gid_entry)) return -EINVAL;
  std::shared_lock gate(world().gate);
  const auto &device = static_cast<const Device &>(*context->device);
  if (device.gids.size() > max) return -EINVAL;
  for (const GidRow &row : device.gids) {
    *out = {};
    std::memcpy(out->gid.raw, row.gid.data(), row.gid.size());
    out->gid_index = row.index;
    out->port_num = 1;
    out->gid_type = row.type;
    ++out;
  }
  return static_cast<ssize_t>(device.gids.size());
}

ibv_pd *ibv_alloc_pd(ibv_context *context) {
  auto *pd = new Pd();
  pd->context = context;
  ++context_of(context).objects;
  ++world().domains;
  return pd;
}

int ibv_dealloc_pd(ibv_pd *raw) {
  auto *pd = static_cast<Pd *>(raw);
  if (pd->objects.load() != 0) {
    world().misused("a protection domain goes before what was made of it");
    return EBUSY;
  }
  --context_of(pd->context).objects;
  --world().domains;
  delete pd;
  return 0;
}

ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *address, size_t bytes, uint64_t start, unsigned access) {
  if (const int err = world().met(Call::kRegister, pd->context)) return refused<ibv_mr>(err);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const bool remote_write = (access & IBV_ACCESS_REMOTE_WRITE) != 0;
  std::lock_guard gate(world().gate);
  if (bytes == 0 || bytes > limits_of(pd->context).mr_bytes_max ||
      start % page != reinterpret_cast<uintptr_t>(address) % page ||
      (remote_write && (access & IBV_ACCESS_LOCAL_WRITE) == 0)) {
    return refused<ibv_mr>(EINVAL);
  }
  if (!readable(address, bytes)) return refused<ibv_mr>(EFAULT);
  return add_registration(pd, address, bytes, start, access);
}

// A dma-buf here is a memfd whose position is where its bytes begin, and it ends where they do.
ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t start, int fd, int access) {
  if (const int err = world().met(Call::kRegisterDmabuf, pd->context)) return refused<ibv_mr>(err);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::lock_guard gate(world().gate);
  if (bytes == 0 || bytes > limits_of(pd->context).mr_bytes_max || start % page != offset % page) {
    return refused<ibv_mr>(EINVAL);
  }
  const off_t begin = lseek(fd, 0, SEEK_CUR);
  if (begin < 0) return refused<ibv_mr>(EBADF);
  const size_t mapped_bytes = offset % page + bytes;
  void *mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                      begin + static_cast<off_t>(offset / page * page));
  if (mapped == MAP_FAILED) return refused<ibv_mr>(errno);
  auto *mr = static_cast<Mr *>(add_registration(pd, static_cast<uint8_t *>(mapped) + offset % page, bytes, start,
                                                static_cast<unsigned>(access)));
  mr->mapped = mapped;
  mr->mapped_bytes = mapped_bytes;
  return mr;
}

int ibv_dereg_mr(ibv_mr *raw) {
  if (const int err = world().met(Call::kDeregister, raw->context)) return err;
  auto *mr = static_cast<Mr *>(raw);
  std::lock_guard gate(world().gate);
  world().by_lkey.erase(mr->lkey);
  world().by_rkey.erase(mr->rkey);
  --static_cast<Pd *>(mr->pd)->objects;
  --world().registrations;
  if (mr->mapped != nullptr) munmap(mr->mapped, mr->mapped_bytes);
  delete mr;
  return 0;
}

ibv_comp_channel *ibv_create_comp_channel(ibv_context *context) {
  if (const int err = world().met(Call::kCreateChannel, context)) return refused<ibv_comp_channel>(err);
  auto *channel = new Channel();
  channel->context = context;
  channel->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  ++context_of(context).objects;
  ++world().channels;
  return channel;
}

int ibv_destroy_comp_channel(ibv_comp_channel *raw) {
  auto *channel = static_cast<Channel *>(raw);
  if (channel->users.load() != 0) {
    world().misused("a completion channel goes before its queues");
    return EBUSY;
  }
  close(channel->fd);
  --context_of(channel->context).objects;
  --world().channels;
  delete channel;
  return 0;
}

ibv_cq *ibv_create_cq(ibv_context *context, int entries, void *cq_context, ibv_comp_channel *channel, int) {
  if (const int err = world().met(Call::kCreateCq, context)) return refused<ibv_cq>(err);
  if (entries < 1 || entries > 65536) return refused<ibv_cq>(EINVAL);
  auto *cq = new Cq();
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = entries;
  if (channel != nullptr) ++static_cast<Channel *>(channel)->users;
  ++context_of(context).objects;
  std::lock_guard gate(world().gate);
  world().completion_queues.insert(cq);
  return cq;
}

int ibv_destroy_cq(ibv_cq *raw) {
  auto *cq = static_cast<Cq *>(raw);
  if (cq->users.load() != 0) {
    world().misused("a completion queue goes before its queue pairs");
    return EBUSY;
  }
  {
    std::lock_guard gate(world().gate);
    world().completion_queues.erase(cq);
  }
  if (cq->channel != nullptr) {
    auto *channel = static_cast<Channel *>(cq->channel);
    {
      std::lock_guard lock(channel->events_mutex);
      for (const Cq *one : channel->unread) {
        if (one == cq) read_event(channel->fd);
      }
      std::erase(channel->unread, cq);
    }
    wait_acknowledged([&] { return cq->events_got.load() == cq->events_acknowledged.load(); }, "completion queue");
    --channel->users;
  }
  --context_of(cq->context).objects;
  delete cq;
  return 0;
}

int ibv_get_cq_event(ibv_comp_channel *raw, ibv_cq **cq, void **cq_context) {
  auto *channel = static_cast<Channel *>(raw);
  if (!read_event(channel->fd)) return -1;
  std::lock_guard lock(channel->events_mutex);
  if (channel->unread.empty()) return -1;
  Cq *one = channel->unread.front();
  channel->unread.pop_front();
  ++one->events_got;
  *cq = one;
  *cq_context = one->cq_context;
  return 0;
}

void ibv_ack_cq_events(ibv_cq *cq, unsigned n) { static_cast<Cq *>(cq)->events_acknowledged += n; }

ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *wanted) {
  if (const int err = world().met(Call::kCreateQp, pd->context)) return refused<ibv_qp>(err);
  const Limits &limits = limits_of(pd->context);
  const ibv_qp_cap &cap = wanted->cap;
  const auto wr_max = static_cast<uint32_t>(limits.qp_wr_max), sge_max = static_cast<uint32_t>(limits.sge_max);
  if (wanted->qp_type != IBV_QPT_RC || cap.max_send_wr > wr_max || cap.max_recv_wr > wr_max ||
      cap.max_send_sge > sge_max || cap.max_recv_sge > sge_max || cap.max_inline_data > limits.inline_max) {
    return refused<ibv_qp>(EINVAL);
  }
  auto qp = std::make_shared<Qp>();
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = wanted->send_cq;
  qp->recv_cq = wanted->recv_cq;
  qp->qp_type = wanted->qp_type;
  qp->cap = cap;
  ++static_cast<Cq *>(qp->send_cq)->users;
  ++static_cast<Cq *>(qp->recv_cq)->users;
  ++static_cast<Pd *>(pd)->objects;
  std::lock_guard gate(world().gate);
  qp->qp_num = world().next_number++;
  world().queue_pairs[qp->qp_num] = qp;
  return qp.get();
}

int ibv_modify_qp(ibv_qp *raw, ibv_qp_attr *wanted, int mask) {
  auto &qp = static_cast<Qp &>(*raw);
  const ibv_qp_state to = wanted->qp_state;
  const Call call = to == IBV_QPS_INIT ? Call::kToInit : to == IBV_QPS_RTR ? Call::kToRtr : Call::kToRts;
  if (const int err = world().met(call, qp.context)) return err;
  {
    std::lock_guard gate(world().gate);
    const int err = to == IBV_QPS_INIT  ? to_init(qp, *wanted, mask)
                    : to == IBV_QPS_RTR ? to_rtr(qp, *wanted, mask)
                    : to == IBV_QPS_RTS ? to_rts(qp, *wanted, mask)
                                        : EINVAL;
    if (err != 0) return err;
    qp.now.store(to);
    qp.state = to;
  }
  // The other end may have tried already.
  std::shared_ptr<Qp> other;
  {
    std::shared_lock gate(world().gate);
    const auto it = world().queue_pairs.find(qp.attributes.dest_qp_num);
    if (to != IBV_QPS_INIT && it != world().queue_pairs.end()) other = it->second;
  }
  if (other != nullptr) wake(other);
  return 0;
}

int ibv_destroy_qp(ibv_qp *raw) {
  std::shared_ptr<Qp> qp;
  {
    // Whatever was being executed for it, or through it, is over; nothing begins any more.
    std::lock_guard gate(world().gate);
    qp = std::move(world().queue_pairs.at(raw->qp_num));
    world().queue_pairs.erase(raw->qp_num);
    qp->gone = true;
  }
  {
    std::lock_guard lock(qp->work_mutex);
    qp->stop = true;
  }
  qp->work_changed.notify_all();
  if (qp->worker.joinable()) {
    qp->worker.join();
    --world().workers;
  }
  Context &context = context_of(qp->context);
  const auto about_it = [&](const Event &one) { return one.qp == qp; };
  {
    std::lock_guard lock(context.events_mutex);
    const auto n = std::count_if(context.unread.begin(), context.unread.end(), about_it);
    for (auto i = n; i > 0; --i) read_event(context.async_fd);
    std::erase_if(context.unread, about_it);
  }
  wait_acknowledged(
      [&] {
        std::lock_guard lock(context.events_mutex);
        return std::none_of(context.unacknowledged.begin(), context.unacknowledged.end(), about_it);
      },
      "queue pair");
  --static_cast<Cq *>(qp->send_cq)->users;
  --static_cast<Cq *>(qp->recv_cq)->users;
  --static_cast<Pd *>(qp->pd)->objects;
  return 0;
}

int ibv_get_async_event(ibv_context *raw, ibv_async_event *out) {
  Context &context = context_of(raw);
  if (!read_event(context.async_fd)) return -1;
  std::lock_guard lock(context.events_mutex);
  if (context.unread.empty()) return -1;
  Event one = std::move(context.unread.front());
  context.unread.pop_front();
  *out = one.event;
  if (one.qp != nullptr) context.unacknowledged.push_back(std::move(one));
  return 0;
}

void ibv_ack_async_event(ibv_async_event *event) {
  if (event->event_type != IBV_EVENT_QP_ACCESS_ERR && event->event_type != IBV_EVENT_QP_REQ_ERR) return;
  auto *qp = static_cast<Qp *>(event->element.qp);
  Context &context = context_of(qp->context);
  Event acknowledged;  // with the queue pair, which goes without the lock
  std::lock_guard lock(context.events_mutex);
  const auto it = std::find_if(context.unacknowledged.begin(), context.unacknowledged.end(),
                               [&](const Event &one) { return one.qp.get() == qp; });
  if (it == context.unacknowledged.end()) return;
  acknowledged = std::move(*it);
  context.unacknowledged.erase(it);
}

const char *ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "Work Request Flushed Error";
    case IBV_WC_REM_INV_REQ_ERR:
      return "remote invalid request error";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_OP_ERR:
      return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
      return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "RNR retry counter exceeded";
    default:
      return "unknown";
  }
}

const char *ibv_port_state_str(ibv_port_state state) {
  return state == IBV_PORT_ACTIVE ? "active" : state == IBV_PORT_DOWN ? "down" : "unknown";
}

}  // extern "C"

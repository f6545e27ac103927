// SPDX-License-Identifier: Apache-2.0
#include "rdma_device.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "rdma_frames.hpp"

namespace moonpool {

namespace {

constexpr size_t kGidsMax = 1024;

class DeviceList {
 public:
  explicit DeviceList(const Verbs &verbs) : verbs_(verbs), list_(verbs.get_device_list(&count_)) {
    if (list_ == nullptr) errno_ = errno;
  }
  ~DeviceList() {
    if (list_ != nullptr) verbs_.free_device_list(list_);
  }
  DeviceList(const DeviceList &) = delete;
  DeviceList &operator=(const DeviceList &) = delete;

  size_t size() const { return list_ == nullptr ? 0 : static_cast<size_t>(count_); }
  ibv_device *operator[](size_t i) const { return list_[i]; }
  std::string name(size_t i) const { return verbs_.get_device_name(list_[i]); }
  std::string why_empty() const {
    // Without the kernel's half the library says so with this.
    if (errno_ == ENOSYS) return "the kernel has no RDMA support loaded (ib_uverbs)";
    if (errno_ != 0) return "the RDMA devices cannot be listed: " + errno_text(errno_);
    return "this host shows no RDMA device; in a container, pass /dev/infiniband into it";
  }

 private:
  const Verbs &verbs_;
  int count_ = 0;
  int errno_ = 0;
  ibv_device **list_;
};

bool parse_number(const std::string &text, int low, int high, int *out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc{} && end == text.data() + text.size() && *out >= low && *out <= high;
}

std::string join(const std::vector<std::string> &texts, const char *between) {
  std::string all;
  for (const std::string &text : texts) all += (all.empty() ? "" : between) + text;
  return all;
}

}  // namespace

Error parse_device_choices(const std::string &text, std::vector<DeviceChoice> *out) {
  size_t at = 0;
  while (at <= text.size() && !text.empty()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    std::string one = text.substr(at, comma - at);
    at = comma + 1;
    const std::string whole = one;
    DeviceChoice choice;
    bool good = true;
    if (const size_t sign = one.find('@'); sign != std::string::npos) {
      good = parse_number(one.substr(sign + 1), 0, kGidIndexMax, &choice.gid_index);
      one.resize(sign);
    }
    if (const size_t colon = one.find(':'); colon != std::string::npos) {
      good = good && parse_number(one.substr(colon + 1), 1, 255, &choice.port);
      one.resize(colon);
    }
    choice.name = one;
    if (!good || one.empty() || one.find_first_of(" \t/") != std::string::npos) {
      return make_error(MP_CONFIG, "rdma_devices has \"" + whole + "\", which names no device",
                        "write NAME, NAME:PORT or NAME:PORT@GID_INDEX, with commas between, such as mlx5_0:1@3");
    }
    const bool twice = std::any_of(out->begin(), out->end(), [&](const DeviceChoice &other) {
      return other.name == choice.name && (other.port == choice.port || other.port == 0 || choice.port == 0);
    });
    if (twice) {
      return make_error(MP_CONFIG, "rdma_devices names a port of \"" + choice.name + "\" twice",
                        "name each port once, or the device without a port for all of them");
    }
    out->push_back(std::move(choice));
  }
  return {};
}

// ---------------------------------------------------------------- devices

RdmaDevice::RdmaDevice(const Verbs &verbs, std::string name) : verbs(verbs), name(std::move(name)) {}

RdmaDevice::~RdmaDevice() {
  if (pd != nullptr) verbs.dealloc_pd(pd);
  if (context != nullptr) verbs.close_device(context);
}

Error RdmaDevice::open(const Verbs &verbs, ibv_device *device, std::shared_ptr<RdmaDevice> *out) {
  std::shared_ptr<RdmaDevice> made(new RdmaDevice(verbs, verbs.get_device_name(device)));
  const auto failed = [&](const char *what, int err) {
    return system_error(MP_TRANSPORT_UNAVAILABLE, err, "device " + made->name + ": cannot " + what,
                        "check the permissions of /dev/infiniband/uverbs*, and `mooncake-bench doctor`");
  };
  made->context = verbs.open_device(device);
  if (made->context == nullptr) return failed("be opened", errno);
  made->pd = verbs.alloc_pd(made->context);
  if (made->pd == nullptr) return failed("allocate a protection domain", errno);
  if (const int err = verbs.query_device(made->context, &made->attributes)) return failed("be asked", err);
  made->place = pci::place_at(std::string(device->ibdev_path) + "/device");
  *out = std::move(made);
  return {};
}

// ---------------------------------------------------------------- rails

bool Rail::refresh() {
  const Verbs &verbs = device->verbs;
  RailState now;
  ibv_port_attr attributes{};
  if (const int err = verbs.query_port(device->context, port, &attributes)) {
    now.reason = "the port cannot be asked: " + errno_text(err);
  } else {
    now.ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    now.lid = attributes.lid;
    now.mtu = static_cast<uint8_t>(attributes.active_mtu);
    std::vector<ibv_gid_entry> entries(kGidsMax);
    const ssize_t n = verbs.query_gid_table(device->context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
    std::vector<GidEntry> table;
    for (ssize_t i = 0; i < n; ++i) {
      const ibv_gid_entry &entry = entries[static_cast<size_t>(i)];
      if (entry.port_num != port) continue;
      GidEntry one{entry.gid_index, static_cast<GidType>(entry.gid_type), {}};
      std::memcpy(one.gid.data(), entry.gid.raw, one.gid.size());
      table.push_back(one);
    }
    const GidChoice choice = choose_gid(table, now.ethernet, wanted_gid_);
    now.gid = choice.entry.gid;
    now.gid_index = choice.entry.index;
    now.reason = choice.reason;
    if (attributes.state != IBV_PORT_ACTIVE) {
      now.reason = std::string("the port is ") + verbs.port_state_str(attributes.state);
    }
    now.up = attributes.state == IBV_PORT_ACTIVE && choice.found;
  }
  std::lock_guard lock(mutex_);
  const bool changed = now.up != state_.up || now.gid != state_.gid || now.mtu != state_.mtu;
  state_ = std::move(now);
  return changed;
}

RailState Rail::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

Error Rail::unusable(const RailState &state) const {
  if (state.up) return {};
  return make_error(MP_TRANSPORT_UNAVAILABLE, "rail " + label() + " cannot be used: " + state.reason,
                    "see `mooncake-bench doctor`");
}

// ---------------------------------------------------------------- host

std::string find_rdma_devices(std::vector<std::string> *names) {
  std::string why_not;
  const Verbs *verbs = Verbs::load(&why_not);
  if (verbs == nullptr) return why_not;
  const DeviceList list(*verbs);
  for (size_t i = 0; i < list.size(); ++i) names->push_back(list.name(i));
  return names->empty() ? list.why_empty() : std::string();
}

bool RdmaHost::take_queue_pair(std::function<bool()> its_turn) {
  std::lock_guard lock(queue_pairs_mutex_);
  if (queue_pairs_ < queue_pairs_max_ && turns_.empty()) {
    ++queue_pairs_;
    return true;
  }
  turns_.push_back(std::move(its_turn));
  waiting_.store(turns_.size());
  return false;
}

void RdmaHost::give_queue_pair() {
  std::unique_lock lock(queue_pairs_mutex_);
  while (!turns_.empty()) {
    const auto its_turn = std::move(turns_.front());
    turns_.pop_front();
    waiting_.store(turns_.size());
    lock.unlock();
    if (its_turn()) return;  // goes from one to the other
    lock.lock();
  }
  --queue_pairs_;
}

Error RdmaHost::open(const RdmaConfig &config) {
  queue_pairs_max_ = config.queue_pairs_max;
  std::string why_not;
  const Verbs *verbs = Verbs::load(&why_not);
  std::vector<DeviceChoice> choices;
  if (Error error = parse_device_choices(config.devices, &choices)) return error;
  Error absent = make_error(MP_TRANSPORT_UNAVAILABLE, "RDMA cannot be used here", "see `mooncake-bench doctor`");
  absent.cause = why_not;
  if (verbs == nullptr) return absent;
  const DeviceList list(*verbs);
  std::vector<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) names.push_back(list.name(i));
  for (const DeviceChoice &choice : choices) {
    if (std::find(names.begin(), names.end(), choice.name) != names.end()) continue;
    absent.cause = list.why_empty();
    if (names.empty()) return absent;
    return make_error(MP_CONFIG, "rdma_devices names \"" + choice.name + "\", which is not here",
                      "choose from " + join(names, ", "));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    std::vector<DeviceChoice> wanted;
    std::copy_if(choices.begin(), choices.end(), std::back_inserter(wanted),
                 [&](const DeviceChoice &choice) { return choice.name == names[i]; });
    if (!choices.empty() && wanted.empty()) continue;
    if (choices.empty()) wanted.push_back({names[i], 0, -1});
    std::shared_ptr<RdmaDevice> device;
    if (Error error = RdmaDevice::open(*verbs, list[i], &device)) {
      problems_.push_back(error.message + (error.cause.empty() ? "" : ": " + error.cause));
      continue;
    }
    const int ports = device->attributes.phys_port_cnt;
    for (const DeviceChoice &choice : wanted) {
      if (choice.port > ports) {
        return make_error(MP_CONFIG,
                          "rdma_devices names port " + std::to_string(choice.port) + " of \"" + choice.name + "\"",
                          "it has " + std::to_string(ports));
      }
      for (int port = 1; port <= ports && rails_.size() < rdma::kRailsMax; ++port) {
        if (choice.port != 0 && choice.port != port) continue;
        auto rail = std::make_shared<Rail>(device, devices_.size(), static_cast<uint8_t>(port), choice.gid_index);
        rail->refresh();
        rails_.push_back(std::move(rail));
      }
    }
    devices_.push_back(std::move(device));
  }
  return {};
}

bool RdmaHost::any_up() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const auto &rail) { return rail->state().up; });
}

std::string RdmaHost::why_not() const {
  std::vector<std::string> reasons = problems_;
  for (const auto &rail : rails_) {
    const RailState state = rail->state();
    if (!state.up) reasons.push_back(rail->label() + ": " + state.reason);
  }
  return reasons.empty() ? "there is no RDMA device" : join(reasons, "; ");
}

// ---------------------------------------------------------------- events

// Asynchronous events of one device. Each is acknowledged at once, because destroying what it is about waits for that.
class RdmaHost::Watcher : public Handler {
 public:
  Watcher(RdmaHost &host, std::shared_ptr<RdmaDevice> device, IoThread &io,
          std::function<void(const std::shared_ptr<Rail> &)> changed)
      : host_(host), device_(std::move(device)), io_(io), changed_(std::move(changed)) {
    const int fd = device_->context->async_fd;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fd_ = Fd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }

  void on_events(uint32_t) override {
    ibv_async_event event;
    bool look = false;
    while (device_->verbs.get_async_event(device_->context, &event) == 0) {
      device_->verbs.ack_async_event(&event);
      look = true;
    }
    if (!look) return;
    for (const auto &rail : host_.rails_) {
      if (rail->device == device_ && rail->refresh()) changed_(rail);
    }
  }
  void stop() { io_.remove(*this); }

 private:
  RdmaHost &host_;
  const std::shared_ptr<RdmaDevice> device_;
  IoThread &io_;
  const std::function<void(const std::shared_ptr<Rail> &)> changed_;
};

void RdmaHost::look_at(const std::shared_ptr<Rail> &rail) const {
  if (rail->refresh() && io_ != nullptr) io_->post([changed = changed_, rail] { changed(rail); });
}

void RdmaHost::look_at_those_down() const {
  for (const auto &rail : rails_) {
    if (!rail->state().up) look_at(rail);
  }
}

Error RdmaHost::watch(IoThread &io, std::function<void(const std::shared_ptr<Rail> &)> changed) {
  io_ = &io;
  changed_ = changed;
  for (const auto &device : devices_) {
    auto watcher = std::make_shared<Watcher>(*this, device, io, changed);
    if (Error error = io.add(watcher, EPOLLIN)) return error;
    watchers_.push_back(std::move(watcher));
  }
  return {};
}

void RdmaHost::unwatch() {
  for (const auto &watcher : watchers_) watcher->stop();
  watchers_.clear();
}

}  // namespace moonpool

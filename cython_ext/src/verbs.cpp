// SPDX-License-Identifier: Apache-2.0
#include "verbs.hpp"

#include <dlfcn.h>

namespace moonpool {

namespace {

struct Loaded {
  Verbs verbs{};
  std::string why_not;

  Loaded() {
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char *reason = dlerror();
      why_not = std::string("libibverbs cannot be opened (") + (reason == nullptr ? "unknown" : reason) +
                "); install libibverbs1 with the provider of the NIC (ibverbs-providers, or rdma-core)";
      return;
    }
    const auto find_optional = [&](auto *function, const char *name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    };
    const auto find = [&](auto *function, const char *name) {
      find_optional(function, name);
      if (*function == nullptr && why_not.empty()) {
        why_not = std::string("libibverbs has no ") + name + "; install rdma-core 32 or later";
      }
    };
    find(&verbs.get_device_list, "ibv_get_device_list");
    find(&verbs.free_device_list, "ibv_free_device_list");
    find(&verbs.get_device_name, "ibv_get_device_name");
    find(&verbs.open_device, "ibv_open_device");
    find(&verbs.close_device, "ibv_close_device");
    find(&verbs.query_device, "ibv_query_device");
    find(&verbs.query_port, "ibv_query_port");
    find(&verbs.query_gid_table, "_ibv_query_gid_table");
    find(&verbs.alloc_pd, "ibv_alloc_pd");
    find(&verbs.dealloc_pd, "ibv_dealloc_pd");
    find(&verbs.reg_mr_iova2, "ibv_reg_mr_iova2");
    find_optional(&verbs.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
    find(&verbs.dereg_mr, "ibv_dereg_mr");
    find(&verbs.create_comp_channel, "ibv_create_comp_channel");
    find(&verbs.destroy_comp_channel, "ibv_destroy_comp_channel");
    find(&verbs.create_cq, "ibv_create_cq");
    find(&verbs.destroy_cq, "ibv_destroy_cq");
    find(&verbs.get_cq_event, "ibv_get_cq_event");
    find(&verbs.ack_cq_events, "ibv_ack_cq_events");
    find(&verbs.create_qp, "ibv_create_qp");
    find(&verbs.modify_qp, "ibv_modify_qp");
    find(&verbs.destroy_qp, "ibv_destroy_qp");
    find(&verbs.get_async_event, "ibv_get_async_event");
    find(&verbs.ack_async_event, "ibv_ack_async_event");
    find(&verbs.wc_status_str, "ibv_wc_status_str");
    find(&verbs.port_state_str, "ibv_port_state_str");
  }
};

}  // namespace

const Verbs *Verbs::load(std::string *why_not) {
  static const Loaded loaded;
  *why_not = loaded.why_not;
  return loaded.why_not.empty() ? &loaded.verbs : nullptr;
}

}  // namespace moonpool

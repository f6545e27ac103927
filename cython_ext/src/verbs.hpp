// SPDX-License-Identifier: Apache-2.0
// libibverbs, opened when it is first asked for, so that one build runs on hosts with and without it. Functions that
// verbs.h defines inline go through the context and may be called as they are; the others only through this table.
#pragma once

#include <infiniband/verbs.h>

#include <string>

// Macros around functions of the library: they would link to it.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace moonpool {

struct Verbs {
  ibv_device **(*get_device_list)(int *);
  void (*free_device_list)(ibv_device **);
  const char *(*get_device_name)(ibv_device *);
  ibv_context *(*open_device)(ibv_device *);
  int (*close_device)(ibv_context *);
  int (*query_device)(ibv_context *, ibv_device_attr *);
  int (*query_port)(ibv_context *, uint8_t, ibv_port_attr *);
  ssize_t (*query_gid_table)(ibv_context *, ibv_gid_entry *, size_t, uint32_t, size_t);
  ibv_pd *(*alloc_pd)(ibv_context *);
  int (*dealloc_pd)(ibv_pd *);
  ibv_mr *(*reg_mr_iova2)(ibv_pd *, void *, size_t, uint64_t, unsigned);
  ibv_mr *(*reg_dmabuf_mr)(ibv_pd *, uint64_t, size_t, uint64_t, int, int);  // nullptr before rdma-core 34
  int (*dereg_mr)(ibv_mr *);
  ibv_comp_channel *(*create_comp_channel)(ibv_context *);
  int (*destroy_comp_channel)(ibv_comp_channel *);
  ibv_cq *(*create_cq)(ibv_context *, int, void *, ibv_comp_channel *, int);
  int (*destroy_cq)(ibv_cq *);
  int (*get_cq_event)(ibv_comp_channel *, ibv_cq **, void **);
  void (*ack_cq_events)(ibv_cq *, unsigned);
  ibv_qp *(*create_qp)(ibv_pd *, ibv_qp_init_attr *);
  int (*modify_qp)(ibv_qp *, ibv_qp_attr *, int);
  int (*destroy_qp)(ibv_qp *);
  int (*get_async_event)(ibv_context *, ibv_async_event *);
  void (*ack_async_event)(ibv_async_event *);
  const char *(*wc_status_str)(ibv_wc_status);
  const char *(*port_state_str)(ibv_port_state);

  // nullptr with the reason when it cannot be used here. The library stays open to the end of the process.
  static const Verbs *load(std::string *why_not);
};

}  // namespace moonpool

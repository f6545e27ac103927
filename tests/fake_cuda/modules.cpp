// SPDX-License-Identifier: Apache-2.0
//
// Modules and kernels.
#include <cstdio>
#include <cstring>

#include "ptx.hpp"

namespace fake {

namespace {

struct Module;

struct Function {
  const Kernel *kernel;
  Module *module;
};

struct Module {
  Context *context = nullptr;
  std::map<std::string, Kernel> kernels;
  std::map<std::string, Function> functions;
};

bool is_block(unsigned x, unsigned y, unsigned z) {
  return x > 0 && y > 0 && z > 0 && x <= 1024 && y <= 1024 && z <= 64 && x * y * z <= 1024;
}

bool is_grid(unsigned x, unsigned y, unsigned z) {
  return x > 0 && y > 0 && z > 0 && x <= 0x7fffffffu && y <= 65535 && z <= 65535;
}

}  // namespace

}  // namespace fake

using namespace fake;

FAKE_API int cuModuleLoadData(void **out, const void *image) {
  FAKE_ENTER(kContext);
  auto module = std::make_shared<Module>();
  module->context = current_context();
  std::string why;
  if (!parse_ptx(static_cast<const char *>(image), &module->kernels, &why)) {
    std::fprintf(stderr, "the stand-in for libcuda cannot use this PTX: %s\n", why.c_str());
    return kInvalidPtx;
  }
  for (const auto &[name, kernel] : module->kernels) module->functions[name] = {&kernel, module.get()};
  std::lock_guard gate(world().gate);
  *out = module.get();
  world().modules[module.get()] = module;
  return kSuccess;
}

FAKE_API int cuModuleUnload(void *handle) {
  FAKE_ENTER(kContext);
  std::lock_guard gate(world().gate);
  return world().modules.erase(handle) == 1 ? kSuccess : kInvalidHandle;
}

FAKE_API int cuModuleGetFunction(void **out, void *handle, const char *name) {
  FAKE_ENTER(kContext);
  std::shared_lock gate(world().gate);
  const auto found = world().modules.find(handle);
  if (found == world().modules.end()) return kInvalidHandle;
  auto &functions = static_cast<Module *>(found->second.get())->functions;
  const auto function = functions.find(name);
  if (function == functions.end()) return kNotFound;
  *out = &function->second;
  return kSuccess;
}

FAKE_API int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream_handle,
                            void **parameters, void **extra) {
  FAKE_ENTER(kContext);
  const auto stream = stream_of(stream_handle);
  if (handle == nullptr || stream == nullptr || stream->context != current_context()) return kInvalidHandle;
  if (!is_grid(grid_x, grid_y, grid_z) || !is_block(block_x, block_y, block_z)) return kInvalidValue;
  if (shared_bytes != 0 || extra != nullptr) return kNotSupported;
  const Function &function = *static_cast<Function *>(handle);
  std::shared_ptr<void> keep;
  {
    std::shared_lock gate(world().gate);
    const auto found = world().modules.find(function.module);
    if (found == world().modules.end()) return kInvalidHandle;
    keep = found->second;
  }
  const Kernel &kernel = *function.kernel;
  Launch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, std::vector<uint8_t>(kernel.parameter_bytes)};
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::memcpy(launch.parameters.data() + kernel.parameter_offsets[i], parameters[i], kernel.parameters[i]);
  }
  const int device = device_of(current_context());
  submit(stream, {[=, &kernel] {
                    (void)keep;
                    static std::atomic<uint64_t> &kernels = count_of("kernels");
                    count(kernels);
                    return run_ptx(kernel, launch, device);
                  },
                  0, true});
  return kSuccess;
}

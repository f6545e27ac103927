// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ptx.hpp"

namespace fake {

namespace {

using Op = Instruction::Op;

constexpr int kMisalignedAddress = 716;

// The bytes behind addresses, as the device sees them: memory of devices, and pinned memory of the host.
class View {
 public:
  explicit View(int device) : device_(device) {}

  uint8_t *at(uint64_t address, size_t nbytes, bool write) {
    for (const Window &window : windows_) {
      if (address >= window.begin && address + nbytes <= window.end && (!write || window.writable)) {
        return window.data + (address - window.begin);
      }
    }
    return look(address, nbytes, write);
  }

 private:
  struct Window {
    uint64_t begin = 0, end = 0;
    uint8_t *data = nullptr;
    bool writable = false;
    std::shared_ptr<Physical> keep;
  };

  uint8_t *look(uint64_t address, size_t nbytes, bool write) {
    std::shared_lock gate(world().gate);
    const Range *range = range_at(address);
    if (range == nullptr || address + nbytes > range->base + range->nbytes) return nullptr;
    bool readable = true, writable = true;
    if (range->kind == Kind::kMapped) {
      const auto access = range->access.find(device_);
      readable = access != range->access.end() && access->second != 0;
      writable = readable && access->second == 3;
    }
    if (!readable || (write && !writable)) return nullptr;
    Window &window = windows_[next_++ % windows_.size()];
    window = {range->base, range->base + range->nbytes, range->bytes(range->base), writable, range->physical};
    return window.data + (address - window.begin);
  }

  const int device_;
  std::array<Window, 4> windows_;
  size_t next_ = 0;
};

uint64_t cut(uint64_t value, size_t nbytes) {
  return nbytes == 8 ? value : value & ((uint64_t{1} << (8 * nbytes)) - 1);
}

bool compares(const std::string &how, uint64_t a, uint64_t b) {
  if (how == "eq") return a == b;
  if (how == "ne") return a != b;
  if (how == "lt" || how == "lo") return a < b;
  if (how == "le" || how == "ls") return a <= b;
  if (how == "gt" || how == "hi") return a > b;
  return a >= b;  // ge, hs
}

class Thread {
 public:
  Thread(const Kernel &kernel, const Launch &launch, View *view)
      : kernel_(kernel), launch_(launch), view_(view), registers_(kernel.registers) {}

  int run(const std::array<uint64_t, 12> &specials) {
    specials_ = &specials;
    for (size_t at = 0; at < kernel_.code.size();) {
      const Instruction &one = kernel_.code[at++];
      if (one.guard >= 0 && (registers_[static_cast<size_t>(one.guard)] != 0) == one.guard_negated) continue;
      if (one.op == Op::kReturn) break;
      if (one.op == Op::kBranch) {
        at = one.target;
      } else if (one.op == Op::kLoad || one.op == Op::kStore) {
        if (const int code = access(one)) return code;
      } else {
        registers_[one.operands[0].index] = result(one);
      }
    }
    return kSuccess;
  }

 private:
  uint64_t value(const Operand &operand) const {
    switch (operand.kind) {
      case Operand::Kind::kRegister:
        return registers_[operand.index];
      case Operand::Kind::kSpecial:
        return (*specials_)[operand.index];
      default:
        return operand.value;
    }
  }

  // Of unsigned numbers: no kernel here has others.
  uint64_t result(const Instruction &one) const {
    const auto in = [&](size_t i) { return i < one.operands.size() ? cut(value(one.operands[i]), one.nbytes) : 0; };
    if (one.op == Op::kLoadParameter) {
      uint64_t loaded = 0;
      std::memcpy(&loaded, launch_.parameters.data() + one.operands[1].index, one.nbytes);
      return loaded;
    }
    const size_t nbytes = one.wide ? 2 * one.nbytes : one.nbytes;
    switch (one.op) {
      case Op::kAdd:
        return cut(in(1) + in(2), nbytes);
      case Op::kSub:
        return cut(in(1) - in(2), nbytes);
      case Op::kMul:
        return cut(in(1) * in(2), nbytes);
      case Op::kMad:
        return cut(in(1) * in(2) + cut(value(one.operands[3]), nbytes), nbytes);
      case Op::kAnd:
        return in(1) & in(2);
      case Op::kOr:
        return in(1) | in(2);
      case Op::kShiftLeft:
        return value(one.operands[2]) >= 8 * nbytes ? 0 : cut(in(1) << value(one.operands[2]), nbytes);
      case Op::kShiftRight:
        return value(one.operands[2]) >= 8 * nbytes ? 0 : in(1) >> value(one.operands[2]);
      case Op::kMin:
        return in(1) < in(2) ? in(1) : in(2);
      case Op::kSetIf:
        return compares(one.compare, in(1), in(2));
      default:
        return in(1);
    }
  }

  int access(const Instruction &one) {
    // ld {a, b}, [address] and st [address], {a, b}
    const bool store = one.op == Op::kStore;
    const size_t n = one.operands.size() - 1;
    const Operand &where = store ? one.operands.front() : one.operands.back();
    const uint64_t address = registers_[where.index] + where.value;
    if (address % (n * one.nbytes) != 0) return kMisalignedAddress;
    uint8_t *const data = view_->at(address, n * one.nbytes, store);
    if (data == nullptr) return kIllegalAddress;
    for (size_t i = 0; i < n; ++i) {
      uint64_t &element = registers_[one.operands[store ? i + 1 : i].index];
      if (store) {
        std::memcpy(data + i * one.nbytes, &element, one.nbytes);
      } else {
        element = 0;
        std::memcpy(&element, data + i * one.nbytes, one.nbytes);
      }
    }
    return kSuccess;
  }

  const Kernel &kernel_;
  const Launch &launch_;
  View *view_;
  std::vector<uint64_t> registers_;
  const std::array<uint64_t, 12> *specials_ = nullptr;
};

// The next place in a box, x first. False: that was the last.
bool next(std::array<uint32_t, 3> *at, const std::array<uint32_t, 3> &box) {
  for (size_t axis = 0; axis < 3; ++axis) {
    if (++(*at)[axis] < box[axis]) return true;
    (*at)[axis] = 0;
  }
  return false;
}

}  // namespace

int run_ptx(const Kernel &kernel, const Launch &launch, int device) {
  View view(device);
  Thread thread(kernel, launch, &view);
  std::array<uint32_t, 3> block{}, of_block{};
  do {
    do {
      std::array<uint64_t, 12> specials;
      for (size_t axis = 0; axis < 3; ++axis) {
        specials[axis] = of_block[axis];
        specials[3 + axis] = launch.block[axis];
        specials[6 + axis] = block[axis];
        specials[9 + axis] = launch.grid[axis];
      }
      if (const int code = thread.run(specials)) return code;
    } while (next(&of_block, launch.block));
  } while (next(&block, launch.grid));
  return kSuccess;
}

}  // namespace fake

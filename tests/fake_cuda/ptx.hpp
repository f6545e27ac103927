// SPDX-License-Identifier: Apache-2.0
//
// Executes PTX text: the few instructions that the engine's own kernels are made of, one thread after the other. So it
// is the kernel itself that tests run. https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "world.hpp"

namespace fake {

struct Operand {
  enum class Kind { kRegister, kNumber, kSpecial, kParameter };
  Kind kind = Kind::kNumber;
  size_t index = 0;    // of a register, a special one, or the byte of a parameter
  uint64_t value = 0;  // of a number; added to an address
};

struct Instruction {
  enum class Op {
    kLoadParameter,
    kLoad,
    kStore,
    kMove,
    kAdd,
    kSub,
    kMul,
    kMad,
    kAnd,
    kOr,
    kShiftLeft,
    kShiftRight,
    kMin,
    kSetIf,
    kBranch,
    kReturn
  };
  Op op = Op::kReturn;
  size_t nbytes = 8;  // of one element
  bool wide = false;  // a result of twice the bytes
  std::string compare;
  int guard = -1;  // register of the predicate
  bool guard_negated = false;
  size_t target = 0;              // of a branch
  std::vector<Operand> operands;  // the result first; of a load or store the elements, and the address last
};

struct Kernel {
  std::vector<size_t> parameters;  // bytes of each, and where it begins
  std::vector<size_t> parameter_offsets;
  size_t parameter_bytes = 0;
  std::vector<Instruction> code;
  size_t registers = 0;
};

// The entries of a module by name. False: this is no PTX, or has something that the stand-in does not know; `why` says.
bool parse_ptx(const std::string &text, std::map<std::string, Kernel> *out, std::string *why);

struct Launch {
  std::array<uint32_t, 3> grid, block;
  std::vector<uint8_t> parameters;
};
// 0, or the code that the context has then: an address that is not the device's, or not aligned.
int run_ptx(const Kernel &kernel, const Launch &launch, int device);

}  // namespace fake

// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <linux/mman.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

namespace moonpool {

namespace {

constexpr uint64_t kHugePage = 2u << 20;
// Newer than the C library's headers on some of the systems this is built on.
constexpr int kMadvPopulateWrite = 23;
constexpr int kMadvCollapse = 25;

// Descriptors are a scarce good of the whole process, so shared memory takes at most half of them.
std::atomic<int64_t> g_shared{0};

bool descriptors_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
  return static_cast<rlim_t>(g_shared.load() + 1) <= limit.rlim_cur / 2;
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

Error no_memory(uint64_t nbytes, int err) {
  std::string hint = "check free memory, `ulimit -v` and the memory limit of the container";
  struct sysinfo host{};
  if (sysinfo(&host) == 0) {
    const uint64_t there = (uint64_t{host.totalram} + host.totalswap) * host.mem_unit;
    if (nbytes > there) hint = "ask for less: this host has " + std::to_string(there) + " bytes of memory";
  }
  return system_error(MP_NO_MEMORY, err, "cannot allocate " + std::to_string(nbytes) + " bytes", std::move(hint));
}

// Address space of which `nbytes` from the returned address on are aligned to huge pages. Whatever is around is given
// back.
uint8_t *reserve(uint64_t nbytes) {
  const uint64_t slack = nbytes >= kHugePage ? kHugePage : 0;
  void *space = mmap(nullptr, nbytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  auto *begin = static_cast<uint8_t *>(space);
  if (slack == 0) return begin;
  const uint64_t head = round_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  if (head > 0) munmap(begin, head);
  if (slack > head) munmap(begin + head + nbytes, slack - head);
  return begin + head;
}

std::vector<int> online_nodes() {
  // "0-1,3"
  std::ifstream file("/sys/devices/system/node/online");
  std::vector<int> nodes;
  int first = 0, last = 0;
  char sign = ',';
  while (sign == ',' && file >> first) {
    last = first;
    if (file.peek() == '-') file.get(), file >> last;
    for (int node = first; node <= last; ++node) nodes.push_back(node);
    sign = static_cast<char>(file.get());
  }
  return nodes;
}

Error bind_to_node(void *base, uint64_t nbytes, int node) {
  const std::vector<int> nodes = online_nodes();
  bool online = false;
  std::string names;
  for (const int one : nodes) {
    online |= one == node;
    names += (names.empty() ? "" : ", ") + std::to_string(one);
  }
  if (!online) {
    return make_error(MP_INVALID_ARGUMENT, "this host has no NUMA node " + std::to_string(node),
                      "choose from " + (names.empty() ? "none: it shows no nodes" : names));
  }
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kWordBits + 1, 0);
  mask[static_cast<size_t>(node) / kWordBits] |= 1ul << (static_cast<size_t>(node) % kWordBits);
  // Preferred and not bound: a full node then costs speed, not the process.
  if (syscall(SYS_mbind, base, nbytes, MPOL_PREFERRED, mask.data(), mask.size() * kWordBits + 1, 0) == 0) return {};
  return system_error(MP_SYSTEM, errno, "cannot place memory on NUMA node " + std::to_string(node),
                      "containers often forbid mbind(): allow it, or leave numa_node out and start the process with "
                      "numactl --preferred");
}

}  // namespace

// False with errno when this kind is not to be had.
bool Memory::map(bool shared, bool reserved_pages) {
  if (!shared && reserved_pages) {
    void *space = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
    if (space == MAP_FAILED) return false;
    base_ = static_cast<uint8_t *>(space);
    return true;
  }
  Fd file;
  if (shared) {
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (reserved_pages ? MFD_HUGETLB | MAP_HUGE_2MB : 0u);
    file = Fd(memfd_create("moonpool", flags));
    if (!file || ftruncate(file.get(), static_cast<off_t>(mapped_bytes_)) != 0) return false;
  }
  uint8_t *space = reserve(mapped_bytes_);
  if (space == nullptr) return false;
  const int flags = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_FIXED;
  if (mmap(space, mapped_bytes_, PROT_READ | PROT_WRITE, flags, file.get(), 0) == MAP_FAILED) {
    const int err = errno;
    munmap(space, mapped_bytes_);
    errno = err;
    return false;
  }
  base_ = space;
  if (file) {
    shared_ = true;
    fd_ = std::make_shared<const Fd>(std::move(file));
    g_shared.fetch_add(1);
  }
  return true;
}

Error Memory::allocate(const Allocation &wanted, std::unique_ptr<Memory> *out) {
  const auto ordinary_page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (wanted.nbytes > INT64_MAX - kHugePage) return no_memory(wanted.nbytes, ENOMEM);
  const bool must_huge = wanted.huge_pages == MP_HUGE_PAGES_REQUIRED;
  std::unique_ptr<Memory> memory(new Memory());
  memory->mapped_bytes_ = round_up(wanted.nbytes, must_huge ? kHugePage : ordinary_page);
  memory->page_bytes_ = must_huge ? kHugePage : ordinary_page;
  const bool shared = wanted.shared && descriptors_left();
  const bool reserved = must_huge && memory->map(shared, true);
  if (!reserved && !memory->map(shared, false)) {
    // Without a descriptor to spare it is memory that peers reach in other ways.
    const bool scarce = shared && (errno == EMFILE || errno == ENFILE);
    if (!scarce || !memory->map(false, false)) return no_memory(wanted.nbytes, errno);
  }
  uint8_t *base = memory->base_;
  const uint64_t nbytes = memory->mapped_bytes_;
  if (wanted.numa_node >= 0) {
    if (Error error = bind_to_node(base, nbytes, wanted.numa_node)) return error;
  }
  if (wanted.huge_pages == MP_HUGE_PAGES_NEVER) {
    madvise(base, nbytes, MADV_NOHUGEPAGE);
  } else if (!reserved && nbytes >= kHugePage) {
    madvise(base, nbytes, MADV_HUGEPAGE);
  }
  // None are reserved: the kernel is asked to make them now, out of pages that are there.
  if (must_huge && !reserved &&
      (madvise(base, nbytes, kMadvPopulateWrite) != 0 || madvise(base, nbytes, kMadvCollapse) != 0)) {
    return system_error(MP_NO_MEMORY, errno, "there are no huge pages for " + std::to_string(wanted.nbytes) + " bytes",
                        "reserve some with `sysctl vm.nr_hugepages=N` (2 MiB each), use Linux 6.1 or later, or leave "
                        "huge_pages out to use them where there are any");
  }
  if (memory->fd_ != nullptr) {
    // After our own mapping, which stays writable.
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (wanted.peers_write ? 0 : F_SEAL_FUTURE_WRITE);
    if (fcntl(memory->fd_->get(), F_ADD_SEALS, seals) != 0) {
      return system_error(MP_SYSTEM, errno, "cannot seal shared memory", "use Linux 5.1 or later");
    }
  }
  *out = std::move(memory);
  return {};
}

Memory::~Memory() {
  if (base_ == nullptr) return;
  // The pages go now, whoever still has them mapped. Sealed against writing they cannot, and go with the last mapping.
  if (shared_) madvise(base_, mapped_bytes_, MADV_REMOVE);
  munmap(base_, mapped_bytes_);
  forget_fd();
}

void Memory::forget_fd() {
  if (fd_ == nullptr) return;
  fd_.reset();
  g_shared.fetch_sub(1);
}

bool Memory::detach() {
  if (!shared_) return true;
  void *fresh = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  std::memcpy(fresh, base_, mapped_bytes_);
  if (mremap(fresh, mapped_bytes_, mapped_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED) {
    munmap(fresh, mapped_bytes_);
    return false;
  }
  shared_ = false;
  return true;
}

std::shared_ptr<Mapping> Mapping::open(const Fd &fd, uint64_t nbytes, std::string *why_not) {
  struct stat status{};
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (nbytes == 0 || fstat(fd.get(), &status) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<uint64_t>(status.st_size) < nbytes) {
    *why_not = "the peer sent memory that is too small or could shrink";
    return nullptr;
  }
  const bool writable = (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0;
  struct statfs files{};
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (fstatfs(fd.get(), &files) == 0 && files.f_type == HUGETLBFS_MAGIC) page = static_cast<uint64_t>(files.f_bsize);
  const uint64_t whole = round_up(nbytes, page);
  uint8_t *space = reserve(whole);
  if (space != nullptr && mmap(space, whole, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED,
                               fd.get(), 0) == MAP_FAILED) {
    const int err = errno;
    munmap(space, whole);
    errno = err;
    space = nullptr;
  }
  if (space == nullptr) {
    *why_not = errno_text(errno);
    return nullptr;
  }
  // A forked child has no business with a peer's memory.
  madvise(space, whole, MADV_DONTFORK);
  return std::shared_ptr<Mapping>(new Mapping(space, whole, writable));
}

Mapping::~Mapping() { munmap(base_, mapped_bytes_); }

std::string why_no_shared_memory() {
  const Fd fd(memfd_create("moonpool-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return "memfd_create(): " + errno_text(errno);
  if (ftruncate(fd.get(), 1) != 0) return "ftruncate() of a memfd: " + errno_text(errno);
  // The newest thing that is needed.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) return "sealing a memfd: " + errno_text(errno);
  return {};
}

}  // namespace moonpool

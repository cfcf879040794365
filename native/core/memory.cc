#include "core/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/guard.h"
#include "core/size.h"
#include "ktk/abi.h"

namespace ktk {
namespace {

// x86-64's huge page, and aarch64's with 4 KiB pages.
constexpr size_t kHugePage = size_t{2} << 20;

// MPOL_BIND and not MPOL_PREFERRED: after a checkpoint was read the node is full of page cache, and
// "preferred" would rather use a remote node than drop some of it.
void bind(void* data, size_t bytes, int node) {
  constexpr long kMpolBind = 2;
  constexpr int kBits = CHAR_BIT * sizeof(unsigned long);
  std::vector<unsigned long> nodes(static_cast<size_t>(node / kBits + 1));
  nodes.back() = 1ul << node % kBits;
  // The kernel reads one bit less than it is told.
  const unsigned long max_node = nodes.size() * kBits + 1;
  // Refused by seccomp in containers (EPERM), without NUMA (ENOSYS) and for nodes without memory
  // (EINVAL): then first touch has to do.
  static_cast<void>(syscall(SYS_mbind, data, bytes, kMpolBind, nodes.data(), max_node, 0u));
}

// std::bad_alloc with a sentence.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes)
      : message_("the system refuses " + std::to_string(bytes) +
                 " bytes of memory; ulimit -v, vm.overcommit_memory and vm.max_map_count bound "
                 "what it gives, beside what there is") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

char* map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw OutOfMemory(bytes);
  return static_cast<char*>(data);
}

// A mapping that starts on a huge page: maps more and gives both ends back.
char* map_huge(size_t bytes) {
  const size_t kept = round_up(bytes, page_size());
  char* whole = map(sum(kept, kHugePage));
  const size_t head = -reinterpret_cast<uintptr_t>(whole) % kHugePage;  // to the next boundary
  if (head != 0) munmap(whole, head);
  if (head != kHugePage) munmap(whole + head + kept, kHugePage - head);
  madvise(whole + head, kept, MADV_HUGEPAGE);  // a wish: kernels may be built or set up without
  return whole + head;
}

// The page that an address is in.
char* page_of(char* address) {
  return address - reinterpret_cast<uintptr_t>(address) % page_size();
}

}  // namespace

Memory::Memory(size_t bytes, int node) : Memory() {
  if (bytes == 0) return;
  if (guard_mode) {
    map_guarded(bytes);
  } else {
    data_ = bytes >= kHugePage ? map_huge(bytes) : map(bytes);
    size_ = bytes;
  }
  if (node >= 0) bind(page_of(data_), bytes, node);
}

// | ... data | no access |, where data begin on a page if they are whole pages.
void Memory::map_guarded(size_t bytes) {
  const size_t page = page_size(), kept = round_up(bytes, page);
  char* const whole = map(sum(kept, page));
  data_ = whole + kept - round_up(bytes, KTK_ALIGNMENT);
  size_ = bytes;
  forbid(whole + kept, page);
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  char* const whole = page_of(data_);
  munmap(whole, static_cast<size_t>(data_ - whole) + size_ + (guard_mode ? page_size() : 0));
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Memory::discard(size_t offset, size_t bytes) {
  assert(offset <= size_ && bytes <= size_ - offset);
  char* const begin = page_of(data_ + offset + page_size() - 1);
  char* const end = page_of(data_ + offset + bytes);
  if (begin < end) madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

void Memory::wish_huge(bool wanted) {
  if (guard_mode || size_ < kHugePage) return;
  madvise(data_, round_up(size_, page_size()), wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

// Large mappings start on a huge page.
Memory::Range Memory::touched(size_t offset, size_t bytes) const {
  if (guard_mode || size_ < kHugePage) return {offset, offset + bytes};
  return {offset / kHugePage * kHugePage, std::min(round_up(offset + bytes, kHugePage), size_)};
}

}  // namespace ktk

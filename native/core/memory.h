// Anonymous memory on a chosen NUMA node.
#pragma once

#include <cstddef>

namespace ktk {

// A private mapping, zero-filled, page aligned. Movable, not copyable. In guard mode it ends at a
// page that nobody may touch, and is page aligned if it is whole pages.
//
// Memory is bound to `node` with mbind; where that is refused (containers without the capability,
// kernels without NUMA) pages land where they are first touched, which is logged nowhere and costs
// nothing on one node. Large mappings ask for huge pages: expert weights are read in long streams,
// and a 4 KiB page per 64 lines stops the hardware prefetcher and costs a TLB miss.
class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc with the bytes in its message, std::length_error (see size.h), and in
  // guard mode std::runtime_error. node < 0: no binding. 0 bytes: an empty mapping.
  explicit Memory(size_t bytes, int node = -1);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Gives the pages of [offset, offset + bytes) that lie wholly inside back to the system; they
  // read as zero afterwards.
  void discard(size_t offset, size_t bytes);

  // Whether pages that are touched from now on may be huge. Those that are huge stay so. Without
  // the wish khugepaged, which fills gaps between pages to make a huge one, leaves them alone.
  void wish_huge(bool wanted);
  // The bytes of all huge pages that [offset, offset + bytes) lies in: what touching it may fill.
  struct Range {
    size_t begin, end;
  };
  Range touched(size_t offset, size_t bytes) const;

 private:
  void map_guarded(size_t bytes);

  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ktk

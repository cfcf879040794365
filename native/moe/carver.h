// Places in memory that is allocated at once.
#pragma once

#include <cstddef>
#include <vector>

#include "core/guard.h"
#include "core/size.h"
#include "ktk/abi.h"

namespace ktk {

// Floats between the rows of a panel: whole cache lines, and an odd number of them, because rows a
// power of two apart would share a few sets of the L1 cache.
inline size_t odd_stride(size_t columns) { return (round_up(columns, 16) / 16 | 1) * 16; }

// Cuts one allocation into aligned pieces; in guard mode, each ends at a page of its own.
class Carver {
 public:
  // Returns the offset of a piece.
  size_t add(size_t bytes) {
    const size_t padded = round_up(bytes, KTK_ALIGNMENT);
    const size_t end = sum(size_, guard_mode ? round_up(padded, page_size()) : padded);
    size_ = end;
    if (guard_mode) {
      guards_.push_back(end);
      size_ = sum(end, page_size());
    }
    return end - padded;
  }
  // `rows` of `stride` bytes.
  size_t add(size_t rows, size_t stride) { return add(product(rows, stride)); }
  // The pieces of another one, whose offsets then count from the result.
  size_t add(const Carver& pieces) {
    const size_t at = size_;
    for (const size_t guard : pieces.guards_) guards_.push_back(at + guard);
    size_ = sum(size_, pieces.size_);
    return at;
  }
  size_t size() const { return size_; }

  // In guard mode, makes size() bytes that start on a page what nobody wrote, ahead of each use.
  // Throws std::runtime_error.
  void guard(char* memory) const {
    if (!guards_.empty()) make_unwritten(memory, size_);
    for (const size_t guard : guards_) forbid(memory + guard, page_size());
  }

 private:
  size_t size_ = 0;
  std::vector<size_t> guards_;  // offsets of pages that nobody may touch
};

}  // namespace ktk

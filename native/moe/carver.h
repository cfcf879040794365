// Places in scratch memory.
#pragma once

#include <cstddef>

#include "core/size.h"
#include "ktk/abi.h"

namespace ktk {

// Floats between the rows of a panel: whole cache lines, and an odd number of them, because rows a
// power of two apart would share a few sets of the L1 cache.
inline size_t odd_stride(size_t columns) { return (round_up(columns, 16) / 16 | 1) * 16; }

// Cuts one allocation into aligned pieces.
class Carver {
 public:
  size_t add(size_t bytes) {
    const size_t at = size_;
    size_ = sum(size_, round_up(bytes, KTK_ALIGNMENT));
    return at;
  }
  // `rows` of `stride` bytes.
  size_t add(size_t rows, size_t stride) { return add(product(rows, stride)); }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

}  // namespace ktk

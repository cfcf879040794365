// Blocks of packed weights, unpacked and packed again for products with the transposed weight.
//
//   dx[m][k] = dy[m][n] x weight[n][k]: depth is n, which a packed weight has as its columns.
//
// A block is a range of its rows, decoded as f32 while it is in cache, transposed and packed for a
// backend that stores floats; sums over blocks are added up in f32, always in the same order. So
// any backend's weights have a gradient, and no second copy of them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "moe/carver.h"
#include "moe/table.h"

namespace ktk {

// The backend whose micro-kernels multiply, as it runs on this CPU.
struct FloatBackend {
  // Throws std::invalid_argument for a backend that stores no floats, and what
  // BackendTable::select throws.
  explicit FloatBackend(std::shared_ptr<const BackendTable> table);

  std::shared_ptr<const BackendTable> table;
  const Variant& variant;
  ktk_format given;   // what blocks are handed to it as
  ktk_format stored;  // and what it makes of them
};

struct TransposedBlock {
  const ktk_matrix* source = nullptr;
  const char* packed = nullptr;
  float factor = 1;
  size_t begin = 0, end = 0;  // rows of the source
  ktk_matrix matrix{};        // n: columns of the source, k: end - begin
  size_t act_bytes = 0;       // of an encoded row
  size_t at = 0, bytes = 0;   // where it is packed again
};

class Transposing {
 public:
  // Of matrices that have up to so many columns.
  Transposing(const Variant& stored, const FloatBackend& floats, size_t columns);

  // Rows of a block; cuts between panels of columns are multiples of it, too.
  size_t depth() const { return depth_; }
  // [begin, end) of the rows of a block and of the columns of a panel: parts of `extent`.
  size_t count(size_t extent) const { return (extent + depth_ - 1) / depth_; }

  // Appends the blocks of a matrix, each with a place in memory.
  void add(const ktk_matrix& source, const char* packed, float factor, Carver& memory,
           std::vector<TransposedBlock>& blocks) const;
  // The same without a place: what acts for such blocks are encoded for.
  TransposedBlock block(const ktk_matrix& source, size_t index) const;
  // Scratch memory that pack() wants.
  const Carver& own() const { return own_; }
  void pack(const TransposedBlock& block, char* memory, char* own) const;

  // dst[m][n_end - n_begin] = act x block. `scratch` is scratch_bytes() long.
  void multiply(const TransposedBlock& block, const char* memory, size_t m, const char* act,
                size_t n_begin, size_t n_end, float* dst, size_t dst_stride, char* scratch) const;
  size_t scratch_bytes(const std::vector<TransposedBlock>& blocks, size_t m) const;

  const Variant& variant() const { return floats_.variant; }
  size_t pad(size_t rows) const;

 private:
  const Variant& stored_;
  const FloatBackend& floats_;
  size_t depth_, unpacked_rows_;
  Carver own_;
  size_t own_unpacked_, own_turned_;
};

}  // namespace ktk

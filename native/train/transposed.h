// Packed weights, decoded and packed again for products with the transposed weight.
//
//   dx[m][k] = dy[m][n] x weight[n][k]: depth is n, which a packed weight has as its columns.
//
// A transposed matrix is rows of weights behind each other as its depth, of one weight or of
// several:
//
//            columns of the weights                 activations of one row
//          +-----------------------+
//   depth  | rows of the first     |                | gradient of the first product |
//     |    | zeros, to a step      |                | zeros                         |
//     v    | rows of the second    |                | gradient of the second        |
//          | ...                   |                | ...                           |
//          +-----------------------+
//
// Rows are decoded as f32 while they are in cache and packed as pairs (ops/products.h), which is
// how backends of bf16 weights want them: nothing is transposed. So any backend's weights have a
// gradient, and no second copy of them. What that backend itself has packed is in pairs already,
// and these are transposed.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "moe/carver.h"
#include "moe/order.h"
#include "moe/table.h"
#include "ops/products.h"

namespace ktk {

// The backend whose micro-kernels multiply, as it runs on this CPU.
struct FloatBackend {
  // Throws std::invalid_argument for a backend that does not store bf16 as pack_pairs() packs it,
  // or whose encoded rows are not plain elements, and what BackendTable::select throws.
  explicit FloatBackend(std::shared_ptr<const BackendTable> table);

  std::shared_ptr<const BackendTable> table;
  const Variant& variant;
  ktk_format stored;
  size_t act_element;  // bytes of an element of an encoded row
};

struct TransposedMatrix {
  ktk_matrix matrix{};
  size_t act_bytes = 0;  // of an encoded row
  size_t bytes = 0;
};

// Rows [begin, end) of a packed weight, times a factor.
struct WeightRows {
  const ktk_matrix* source = nullptr;
  const char* packed = nullptr;
  float factor = 1;
  Order order;  // of the source's columns; they are restored
  size_t begin = 0, end = 0;
};

class Transposing {
 public:
  // Of weights that have up to so many columns.
  Transposing(const Variant& stored, const FloatBackend& floats, size_t columns);

  TransposedMatrix matrix(size_t columns, size_t depth) const;
  // Where in the depth of a matrix the next weight may begin, and acts may be cut.
  static size_t pad_depth(size_t rows) { return round_up(rows, KTK_PAIR_DEPTH); }
  // What micro-kernels may read and write of so many rows.
  size_t pad(size_t rows) const { return round_up(rows, variant().tile.m_step); }

  // Scratch memory that pack() wants.
  const Carver& own() const { return own_; }
  // Packs rows of a weight as depth [at, at + end - begin) of a matrix in `memory`, and zeros up to
  // the next pad_depth().
  void pack(const WeightRows& rows, const TransposedMatrix& to, size_t at, char* memory,
            char* own) const;
  // The same of `count` rows of f32, `stride` floats apart.
  static void pack(const float* rows, size_t stride, size_t count, const TransposedMatrix& to,
                   size_t at, char* memory);
  // Room in own() for rows of f32, up to stride() floats apart, for the latter. They are a multiple
  // of KTK_PAIR_DEPTH.
  size_t rows() const { return rows_; }
  size_t stride() const { return stride_; }
  float* buffer(char* own) const { return reinterpret_cast<float*>(own + own_unpacked_); }

  // Encodes columns [begin, end) of `count` rows for a matrix; `end` is in whole steps, or all.
  void encode(const TransposedMatrix& matrix, size_t count, size_t begin, size_t end,
              const float* rows, size_t stride, char* acts) const {
    variant().pack_act(&matrix.matrix, count, begin, end, rows, stride, acts, matrix.act_bytes);
  }
  // dst[m][end - begin] = act x matrix. `scratch` is scratch_bytes() long.
  void multiply(const TransposedMatrix& matrix, const char* memory, size_t m, const char* act,
                size_t begin, size_t end, float* dst, size_t dst_stride, char* scratch) const {
    multiply_part(matrix, memory, m, act, matrix.act_bytes, 0, begin, end, dst, dst_stride,
                  scratch);
  }
  // The same of rows `act_bytes` apart that were encoded for a deeper matrix: what they have from
  // `depth` on, which is in steps of pad_depth().
  void multiply_part(const TransposedMatrix& matrix, const char* memory, size_t m, const char* act,
                     size_t act_bytes, size_t depth, size_t begin, size_t end, float* dst,
                     size_t dst_stride, char* scratch) const;
  size_t scratch_bytes(const TransposedMatrix& matrix, size_t m) const;

  const Variant& variant() const { return floats_.variant; }

 private:
  // pack() of what is stored in pairs.
  static void turn(const WeightRows& rows, const TransposedMatrix& to, size_t at, char* memory);

  const Variant& stored_;
  const FloatBackend& floats_;
  size_t rows_, stride_;
  Carver own_;
  size_t own_unpacked_;
};

}  // namespace ktk

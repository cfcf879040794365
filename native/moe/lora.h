// Factors of low rank beside the matrices of experts: y = W x + scale * B (A x).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/carver.h"
#include "moe/config.h"
#include "moe/route.h"
#include "moe/weights.h"
#include "ops/select.h"

namespace ktk {

// One factor for all experts, the elements of each side by side. No data: the matrix has none.
struct LoraFactor {
  const void* data = nullptr;
  ktk_element type = KTK_F32;

  explicit operator bool() const { return data != nullptr; }
};

struct Adapter {
  size_t rank = 0;
  float scale = 1;
  Parts<LoraFactor> a;  // [experts, rank, columns of the matrix]
  Parts<LoraFactor> b;  // [experts, rows of the matrix, rank]
};

struct Lora {
  std::vector<Adapter> adapters;
  // The number of an adapter for each token, or any other for none. NULL: the first for all.
  const int32_t* of_tokens = nullptr;

  const Adapter* of(size_t token) const;
  size_t most_rank() const;
};

// Products with the factors of one expert's matrix [rows, columns]. Rows, or columns, that are said
// to be in an order, which may be NULL, are counted in it: row i is row order[i] of the factor.
class LowRank {
 public:
  // Columns of a matrix, or rows of it, that are multiplied at once.
  static constexpr size_t kBlock = 512;

  LowRank(size_t rank, const LoraFactor& a, const LoraFactor& b, size_t expert, size_t rows,
          size_t columns, const uint32_t* row_order, const uint32_t* column_order)
      : rank_(rank),
        a_(a),
        b_(b),
        expert_(expert),
        rows_(rows),
        columns_(columns),
        row_order_(row_order),
        column_order_(column_order) {}

  // Floats of a row that reduce() writes, the last of them zeros: whole vectors.
  static size_t width(size_t rank) { return (rank + 15) / 16 * 16; }
  // Bytes of the scratch memory that turn_a(), reduce() and expand() want.
  static size_t own_bytes(size_t rank);

  // A^T: to[end - begin][width(rank)], zeros behind the rank, for columns [begin, end) of A.
  void turn_a(size_t begin, size_t end, float* to, char* own) const;
  // p[m] += x[m] A^T, for columns [begin, end) of A, where x begins.
  void reduce(size_t begin, size_t end, size_t m, const float* x, size_t x_row, float* p,
              size_t p_row, char* own) const;
  // y[m] += p[m] B^T, for rows [begin, end) of B, where y begins.
  void expand(size_t begin, size_t end, size_t m, const float* p, size_t p_row, float* y,
              size_t y_row, char* own) const;
  // Columns [begin, end) of rows [first, first + count) of A, as f32 rows `stride` apart.
  void read_a(size_t first, size_t count, size_t begin, size_t end, float* to, size_t stride) const;
  // Whole rows of B, one behind the other.
  void read_b(size_t first, size_t count, float* to) const;

 private:
  size_t rank_;
  const LoraFactor &a_, &b_;
  size_t expert_, rows_, columns_;
  const uint32_t *row_order_, *column_order_;  // or NULL
};

// Calls part(adapter, first, count) for the runs of rows [first, first + m) of a route, whose
// tokens are counted from `begin`, that have one adapter.
template <typename Part>
void for_adapters(const Lora& lora, const Route& route, size_t begin, size_t first, size_t m,
                  Part part) {
  for (size_t at = first; at < first + m;) {
    const Adapter* const adapter = lora.of(begin + route.tokens[at]);
    size_t end = at + 1;
    while (end < first + m && lora.of(begin + route.tokens[end]) == adapter) ++end;
    if (adapter) part(*adapter, at, end - at);
    at = end;
  }
}

}  // namespace ktk

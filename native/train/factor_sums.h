// The gradient of a factor of low rank for some of its columns, while it grows.
#pragma once

#include <algorithm>
#include <cstddef>

#include "moe/carver.h"
#include "ops/select.h"

namespace ktk {

// Sums over all rows of an expert, in a worker's own memory: where a factor's gradient is, lines
// are scattered, and each product would wait for them one by one.
//
//   A [rank][columns] += p^T x rows        B [columns][rank] += rows^T x p
//
// B grows in its transpose, so that vectors are parts of rows, which are read as they lie. Either
// way an element is one chain of additions in the order of the rows.
class FactorSums {
 public:
  // Floats of `own` for so many columns.
  static size_t floats(size_t columns, size_t rank) { return product(rank, odd_stride(columns)); }

  // Of columns [0, columns) from `a` on, where rows of A are `a_row` floats apart. NULL: no sums.
  // `zero` says that it holds zeros, which are not read: pages that nobody has written would be
  // mapped for that, and once more to be written.
  static FactorSums of_a(float* a, size_t columns, size_t rank, size_t a_row, bool zero,
                         float* own) {
    return {a, columns, rank, a_row, zero, own};
  }
  static FactorSums of_b(float* b, size_t columns, size_t rank, bool zero, float* own) {
    return {b, columns, rank, 0, zero, own};
  }

  void add(size_t m, const float* p, size_t p_row, const float* rows, size_t row) const {
    if (to_) products().gemm(rank_, columns_, m, p, 1, p_row, rows, row, own_, stride_);
  }

  // Writes them back.
  void finish() const {
    if (to_ && is_b()) products().transpose(rank_, columns_, own_, stride_, to_, rank_);
    if (!to_ || is_b()) return;
    for (size_t r = 0; r < rank_; ++r) std::copy_n(own_ + r * stride_, columns_, to_ + r * a_row_);
  }

 private:
  FactorSums(float* to, size_t columns, size_t rank, size_t a_row, bool zero, float* own)
      : to_(to),
        columns_(columns),
        rank_(rank),
        a_row_(a_row),
        stride_(odd_stride(columns)),
        own_(own) {
    if (to_) begin(zero);
  }
  void begin(bool zero) const {
    if (zero) return void(std::fill_n(own_, rank_ * stride_, 0.0f));
    if (is_b()) return products().transpose(columns_, rank_, to_, rank_, own_, stride_);
    for (size_t r = 0; r < rank_; ++r) std::copy_n(to_ + r * a_row_, columns_, own_ + r * stride_);
  }
  bool is_b() const { return a_row_ == 0; }

  float* const to_;
  const size_t columns_, rank_, a_row_, stride_;
  float* const own_;
};

}  // namespace ktk

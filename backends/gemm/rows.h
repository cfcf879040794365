// The rows of a tile: where their next act values are, and the tile for each number of rows.
#pragma once

#include "gemm/compiler.h"
#include "gemm/math.h"

namespace ktk {
namespace {

// Pointers three rows apart; the stride times 0, 1, 2 is left to addressing modes, so that 12 rows
// take five registers.
template <size_t kRows>
struct RowPointers {
  static constexpr size_t kCount = (kRows + 2) / 3;
  const char* third[kCount];
  size_t stride;

  RowPointers(const char* act, size_t act_stride) : stride(act_stride) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) third[i] = act + 3 * i * stride;
  }
  const char* row(size_t i) const { return third[i / 3] + i % 3 * stride; }
  void advance(ptrdiff_t bytes) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) third[i] = third[i] + bytes;
  }
};

// Functions by number of rows, from 1 on.
template <class Function, size_t kMost>
struct RowTable {
  Function of_rows[kMost + 1];
  constexpr Function operator[](size_t rows) const { return of_rows[rows]; }
};

template <size_t kRows, class Table, class Choose>
constexpr void fill_rows(Table& table, Choose choose) {
  table.of_rows[kRows] = choose.template operator()<kRows>();
  if constexpr (kRows > 1) fill_rows<kRows - 1>(table, choose);
}

// row_table<12>([]<size_t kRows> { return &multiply_tile<kRows>; })
template <size_t kMost, class Choose>
constexpr auto row_table(Choose choose) {
  RowTable<decltype(choose.template operator()<1>()), kMost> table = {};
  fill_rows<kMost>(table, choose);
  return table;
}

}  // namespace
}  // namespace ktk

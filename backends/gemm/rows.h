// The rows of a tile: where their next act values are, and the tile for each number of rows.
#pragma once

#include "gemm/compiler.h"
#include "gemm/math.h"

namespace ktk {
namespace {

// Pointers kApart rows apart. Three: the stride times 0, 1, 2 is left to addressing modes, so that
// 12 rows take five registers.
template <size_t kRows, size_t kApart = 3>
struct RowPointers {
  static constexpr size_t kCount = ceil_div(kRows, kApart);
  const char* pointers[kCount];
  size_t stride;

  RowPointers(const char* act, size_t act_stride) : stride(act_stride) {
#pragma GCC unroll 6
    for (size_t i = 0; i < kCount; ++i) pointers[i] = act + kApart * i * stride;
  }
  const char* row(size_t i) const { return pointers[i / kApart] + i % kApart * stride; }
  void advance(ptrdiff_t bytes) {
#pragma GCC unroll 6
    for (size_t i = 0; i < kCount; ++i) pointers[i] = pointers[i] + bytes;
  }
  // Between two uses of all rows: the compiler does not keep the address of every row for the next.
  void forget_rows() {
#pragma GCC unroll 6
    for (size_t i = 0; i < kCount; ++i) pointers[i] = hidden(pointers[i]);
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

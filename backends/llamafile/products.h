// Products of operands in memory (operands.h), for tiles of rows.
#pragma once

#include "gemm/rows.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

// Adds the products of kCount steps of a sub-block, from step kFirst on.
template <size_t kFirst, size_t kCount, int kRows>
[[gnu::always_inline]] inline void add_steps(Dot::Int (&sums)[kRows][kVectors],
                                             const uint8_t* operands,
                                             const RowPointers<kRows>& act) {
  unroll<kCount>([&]<size_t kIndex>() __attribute__((always_inline)) {
    constexpr size_t kStep = kFirst + kIndex;
    Dot::Int operand[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      operand[v] = Dot::load_bytes(operands + kStep * kPlaneBytes + v * sizeof(Dot::Int));
      pin(operand[v]);  // loaded once
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Dot::Int four = Dot::broadcast_row<kKr * kStep>(act.pointers[r / 3], act.stride, r % 3);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot::dot(sums[r][v], operand[v], four);
    }
  });
}

// Calls visit(row, its ActGroup).
template <int kRows, class Visit>
[[gnu::always_inline]] inline void for_each_row(const char* act_groups, size_t act_stride,
                                                Visit visit) {
  act_groups = hidden(act_groups);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, act_groups += act_stride) {
    visit(r, *reinterpret_cast<const ActGroup*>(act_groups));
  }
}

}  // namespace
}  // namespace ktk::llamafile

// A register tile of NEON: up to 4 rows of act times 16 columns, or up to 2 rows times 32, for any
// product of four k, which are two lines of weights.
//
//   wide, 3 or 4 rows                        thin, 1 or 2 rows
//     passes over a run of steps twice,        both tiles of columns of a step, one after the
//     for a tile of columns each               other: weights are used in the order of memory
//
// A `Sums<kRows, kTiles>` offers kActBytes, of an act value, and
//   load(dst, stride), store(dst, stride)    kRows rows x 16 * kTiles columns, row-major
//   zero()
//   kLineProducts                            as gemm/driver.h has it
//   add(tile, weight, rows, offset)          two lines and four k, at `offset` bytes of each row
#pragma once

#include <arm_neon.h>

#include "bf16/kernel.h"

namespace ktk::bf16 {
namespace {

template <template <size_t, size_t> class Sums, size_t kRows, size_t kTiles>
inline void multiply_columns(const Tile& t, size_t first_tile, Fetch& fetch) {
  using Target = Sums<kRows, kTiles>;
  float* dst = t.dst + first_tile * kTileCols;
  Target sums;
  if (t.is_first()) {
    sums.zero();
  } else {
    sums.load(dst, t.dst_stride);
  }
  const char* rows[kRows];
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i) {
    rows[i] = first_act<Target::kActBytes>(t) + i * t.act_stride;
  }
  const char* weight = first_weight(t) + first_tile * kTileBytes;
  for (size_t slab = t.begin; slab < t.end; ++slab) {
#pragma GCC unroll 2
    for (size_t tile = 0; tile < kTiles; ++tile) {
      size_t offset = (slab - t.begin) * kStepDepth * Target::kActBytes;
#pragma GCC unroll 1
      for (const char* end = weight + kTileBytes; weight != end; weight += 2 * kLine) {
        fetch.next();
        fetch.next();
        sums.add(tile, weight, rows, offset);
        offset += 4 * Target::kActBytes;
      }
    }
    if (kTiles == 1) weight += kTileBytes;
  }
  sums.store(dst, t.dst_stride);
}

constexpr size_t kOnePassRows = 2;

template <template <size_t, size_t> class Sums, size_t kRows>
void multiply_tile(const Tile& t) {
  Fetch fetch = t.fetch;
  if constexpr (kRows <= kOnePassRows) {
    multiply_columns<Sums, kRows, 2>(t, 0, fetch);
  } else {
    multiply_columns<Sums, kRows, 1>(t, 0, fetch);
    multiply_columns<Sums, kRows, 1>(t, 1, fetch);
  }
}

template <template <size_t, size_t> class Sums>
struct NeonKernel : KernelBase {
  using KernelBase::KernelBase;
  static constexpr size_t kMr = 4;
  static constexpr size_t kLineProducts = Sums<1, 1>::kLineProducts;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Sums, kRows>; });

  static size_t passes(size_t rows) { return rows <= kOnePassRows ? 1 : 2; }
  static void tile(const Tile& t) { kTiles[t.rows](t); }
};

}  // namespace
}  // namespace ktk::bf16

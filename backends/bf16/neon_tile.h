// A register tile of NEON: up to 4 rows of act times 16 columns, or up to 2 rows times 32, for any
// product of four k, which are two lines of weights.
//
//   wide, 3 or 4 rows                        thin, 1 or 2 rows
//     passes over a run of steps twice,        both tiles of columns of a step, one after the
//     for a tile of columns each               other: weights are used in the order of memory
//
// A target `Sums<kM, kTiles>` offers kActBytes, of an act value, and
//   load(dst, stride), store(dst, stride)    kM rows x 16 * kTiles columns, row-major
//   zero()
//   add(tile, weight, rows, offset)          two lines and four k, at `offset` bytes of each row
#pragma once

#include <arm_neon.h>

#include "bf16/loops.h"

namespace ktk::bf16 {
namespace {

template <template <size_t, size_t> class Sums, size_t kM, size_t kTiles, class Share>
inline void neon_tiles(const TileWork<Share>& work, size_t first_tile) {
  constexpr bool kLone = __is_same(Share, LoneShare);
  using Target = Sums<kM, kTiles>;
  float* dst = work.dst + first_tile * kTileCols;
  Target sums;
  if (work.first) {
    sums.zero();
  } else {
    sums.load(dst, work.dst_stride);
  }
  const char* rows[kM];
#pragma GCC unroll 4
  for (size_t i = 0; i < kM; ++i) rows[i] = work.act + i * work.act_stride;
  const char* weight = work.weight + first_tile * kTileBytes;
  for (size_t step = 0; step < work.steps; ++step) {
    if constexpr (kLone) {
      const char* ahead = work.stream.at(step, kWideAhead);
      for (size_t i = 0; i < kTiles * kPairs; ++i) {
        prefetch_l2(ahead + (first_tile * kPairs + i) * kLine);
      }
    } else if (first_tile == 0) {
      prefetch_step(work, step, weight);
    }
#pragma GCC unroll 2
    for (size_t tile = 0; tile < kTiles; ++tile) {
      size_t offset = step * kStepDepth * Target::kActBytes;
#pragma GCC unroll 1
      for (const char* end = weight + kTileBytes; weight != end; weight += 2 * kLine) {
        sums.add(tile, weight, rows, offset);
        offset += 4 * Target::kActBytes;
      }
    }
    if (kTiles == 1) weight += kTileBytes;
  }
  sums.store(dst, work.dst_stride);
}

template <template <size_t, size_t> class Sums, size_t kM, class Share>
void neon_tile(const TileWork<Share>& work) {
  if constexpr (kM <= 2) {
    neon_tiles<Sums, kM, 2>(work, 0);
  } else {
    neon_tiles<Sums, kM, 1>(work, 0);
    neon_tiles<Sums, kM, 1>(work, 1);
  }
}

template <template <size_t, size_t> class Sums>
struct NeonTile {
  static constexpr size_t kRows = 4;
  static constexpr size_t kRowStep = 1;
  static constexpr size_t kSteps = 8;      // 16 KiB of weights
  static constexpr size_t kLoneSteps = 8;  // the two passes share them
  static constexpr size_t kActBytes = Sums<1, 1>::kActBytes;

  template <class Share>
  static void run(const TileWork<Share>& work) {
    static constexpr void (*kTiles[kRows])(const TileWork<Share>&) = {
        neon_tile<Sums, 1>,
        neon_tile<Sums, 2>,
        neon_tile<Sums, 3>,
        neon_tile<Sums, 4>,
    };
    kTiles[work.rows - 1](work);
  }
};

// No load moves across: gcc 12 takes loads to the front of a loop, and spills sums to make room.
inline void keep_order() { asm volatile("" : : : "memory"); }

}  // namespace
}  // namespace ktk::bf16

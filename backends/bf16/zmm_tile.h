// A register tile of 512-bit sums: up to 12 rows of act times 32 columns, for any product of a pair
// of act values with a cache line of weights (a pair for each of 16 columns).
//
//   wide                                        thin, up to Dot::kThinRows
//            columns c..c+15    c+16..c+31        the same sums, but first all pairs of a step
//   row 0:   acc[0][0]          acc[0][1]         for one tile of columns, then for the other:
//   ...                                           weights are used in the order of memory, which
//   row 11:  acc[11][0]         acc[11][1]        the CPU's prefetchers follow; act is read twice
//
// 24 sums hide the latency of two products a cycle; 14 loads for 24 products keep within two a
// cycle.
//
// A target `Dot` offers kActBytes, of an act value, kThinRows, and add(acc, weight, act):
// acc[i][tile] += pair of row i times a line of weights, for kM rows and kTiles lines.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "bf16/loops.h"
#include "gemm/rows.h"

namespace ktk::bf16 {
namespace {

template <class Dot, size_t kM, class Share>
inline void thin_steps(const TileWork<Share>& work, __m512 (&acc)[kM][2]) {
  constexpr bool kLone = __is_same(Share, LoneShare);
  constexpr ptrdiff_t kPairBytes = 2 * Dot::kActBytes;
  RowPointers<kM> act(work.act, work.act_stride);
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step) {
    const char* ahead = nullptr;
    if constexpr (kLone) {
      ahead = work.stream.at(step, bytes_ahead(kM));
    } else {
      prefetch_step(work, step, weight);
    }
#pragma GCC unroll 2
    for (size_t tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 1
      for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
        if constexpr (kLone) {
          prefetch_l2(ahead);
          ahead += kLine;
        }
        Dot::template add<kM, 1>(acc, tile, weight, act);
        act.advance(kPairBytes);
      }
      if (tile == 0) act.advance(-static_cast<ptrdiff_t>(kPairs) * kPairBytes);
    }
  }
}

template <class Dot, size_t kM, class Share>
inline void wide_steps(const TileWork<Share>& work, __m512 (&acc)[kM][2]) {
  constexpr bool kLone = __is_same(Share, LoneShare);
  RowPointers<kM> act(work.act, work.act_stride);
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step, weight += kTileBytes) {
    const char* ahead = nullptr;
    if constexpr (kLone) {
      ahead = work.stream.at(step, kWideAhead);
    } else {
      prefetch_step(work, step, weight);
    }
#pragma GCC unroll 1
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
      if constexpr (kLone) {
        prefetch_l2(ahead);
        prefetch_l2(ahead + kLine);
        ahead += 2 * kLine;
      }
      Dot::template add<kM, 2>(acc, 0, weight, act);
      act.advance(2 * Dot::kActBytes);
    }
  }
}

template <class Dot, size_t kM, class Share>
void zmm_tile(const TileWork<Share>& work) {
  __m512 acc[kM][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    const float* dst = work.dst + i * work.dst_stride;
    acc[i][0] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + kTileCols);
  }
  if constexpr (kM <= Dot::kThinRows) {
    thin_steps<Dot>(work, acc);
  } else {
    wide_steps<Dot>(work, acc);
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    float* dst = work.dst + i * work.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + kTileCols, acc[i][1]);
  }
}

template <class Dot>
struct ZmmTile {
  static constexpr size_t kRows = 12;
  static constexpr size_t kRowStep = 1;
  static constexpr size_t kSteps = 8;  // 16 KiB of weights
  static constexpr size_t kLoneSteps = SIZE_MAX;
  static constexpr size_t kActBytes = Dot::kActBytes;

  template <class Share>
  static void run(const TileWork<Share>& work) {
    static constexpr void (*kTiles[kRows])(const TileWork<Share>&) = {
        zmm_tile<Dot, 1>, zmm_tile<Dot, 2>,  zmm_tile<Dot, 3>,  zmm_tile<Dot, 4>,
        zmm_tile<Dot, 5>, zmm_tile<Dot, 6>,  zmm_tile<Dot, 7>,  zmm_tile<Dot, 8>,
        zmm_tile<Dot, 9>, zmm_tile<Dot, 10>, zmm_tile<Dot, 11>, zmm_tile<Dot, 12>,
    };
    kTiles[work.rows - 1](work);
  }
};

}  // namespace
}  // namespace ktk::bf16

// BF16 with AVX2 and FMA: f32 rows.
//
// A cache line of weights holds pairs (k, k+1) of 16 columns, two registers. A shift makes f32 of
// the even k, a mask of the odd ones; each is multiplied with an act value broadcast from memory:
//
//   for even, odd k:   f32 of w0 (8 columns)   f32 of w1 (8 columns)
//   row 0:  act[0][k]  acc[0][0]               acc[0][1]
//   ...
//   row 5:  act[5][k]  acc[5][0]               acc[5][1]       12 sums, 2 weights, mask, broadcast
//
// Up to 3 rows have registers for both tiles of columns of a block. A single tile of rows uses
// weights in the order of memory; where several share them, or BF16Z has just decoded them, a line
// of either tile of columns in turn. More rows pass over a run of steps in L1 twice, for a tile of
// columns each, or once if nobody wants the second.
#pragma once

#include <immintrin.h>

#include "bf16/kernel.h"

namespace ktk::bf16 {
namespace {

constexpr size_t kVectorCols = 8;
constexpr size_t kFetchLines = 4;
static_assert(kPairs % kFetchLines == 0);
constexpr ptrdiff_t kPairBytes = 2 * sizeof(float);  // of act

inline __m256 even_k(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
// The mask stays in memory: a register for it would be the seventeenth of the largest tile.
inline __m256 odd_k(__m256i pairs) {
  alignas(32) static constexpr uint32_t kOdd[] = {
      0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
      0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
  };
  __m256 odd;
  asm("vpand %2, %1, %0" : "=x"(odd) : "x"(pairs), "m"(kOdd));
  return odd;
}

// All sixteen registers are taken, so the order of instructions must stay as written: gcc 12 would
// load values early, or overwrite `a` or `w` with a sum, and spill. Hence volatile asm.
inline __m256 broadcast(const char* value) {
  __m256 a;
  asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*reinterpret_cast<const float*>(value)));
  return a;
}
inline void multiply_add(__m256& sum, __m256 a, __m256 w) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
}

// Sums += products of one line of weights and a pair of each row.
template <size_t kRows, size_t kVectors>
inline void add_line(__m256 (&acc)[kRows][kVectors], size_t first, const char* weight,
                     const RowPointers<kRows>& act) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    // For the same reason: no loads of the odd half among the even ones.
    keep_order();
    __m256 w[2];
#pragma GCC unroll 2
    for (size_t j = 0; j < 2; ++j) {
      const __m256i pairs =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(weight + j * kLine / 2));
      w[j] = odd ? odd_k(pairs) : even_k(pairs);
    }
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 a = broadcast(act.row(i) + odd * sizeof(float));
#pragma GCC unroll 2
      for (size_t j = 0; j < 2; ++j) multiply_add(acc[i][first + j], a, w[j]);
    }
  }
}

// The same for a line of either tile: values of act stay in registers meanwhile, and twice as many
// sums hide the latency of products.
template <size_t kRows>
inline void add_line_of_both(__m256 (&acc)[kRows][4], const char* weight,
                             const RowPointers<kRows>& act) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    keep_order();
    __m256 a[kRows];
#pragma GCC unroll 3
    for (size_t i = 0; i < kRows; ++i) a[i] = broadcast(act.row(i) + odd * sizeof(float));
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      const __m256i pairs = _mm256_load_si256(
          reinterpret_cast<const __m256i*>(weight + j / 2 * kTileBytes + j % 2 * kLine / 2));
      const __m256 w = odd ? odd_k(pairs) : even_k(pairs);
#pragma GCC unroll 3
      for (size_t i = 0; i < kRows; ++i) multiply_add(acc[i][j], a[i], w);
    }
  }
}

// The products of a step of weights that come from memory: in its order, line by line.
template <size_t kRows, size_t kTiles>
inline void add_step_from_memory(__m256 (&acc)[kRows][2 * kTiles], const char* weight,
                                 RowPointers<kRows>& act, Fetch& fetch) {
#pragma GCC unroll 2
  for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 1
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
      fetch.next();
      add_line(acc, 2 * tile, weight, act);
      act.advance(kPairBytes);
    }
    if (tile + 1 < kTiles) act.advance(-static_cast<ptrdiff_t>(kPairs) * kPairBytes);
  }
}

// The same of weights that are in a cache, and where other tiles fetch as well: for several lines
// at once, to branch less often. From memory that would be too many at a time.
template <size_t kRows, size_t kTiles>
inline void add_step(__m256 (&acc)[kRows][2 * kTiles], const char* weight, RowPointers<kRows>& act,
                     Fetch& fetch) {
#pragma GCC unroll 1
  for (const char* tile_end = weight + kTileBytes; weight != tile_end;) {
    fetch.next_shared<kFetchLines>();
#pragma GCC unroll 1
    for (const char* end = weight + kFetchLines / kTiles * kLine; weight != end; weight += kLine) {
      if constexpr (kTiles == 2) {
        add_line_of_both(acc, weight, act);
      } else {
        add_line(acc, 0, weight, act);
      }
      act.advance(kPairBytes);
    }
  }
}

// `kTiles` tiles of columns, from number `first_tile` on.
template <size_t kRows, size_t kTiles, bool kIsFromMemory>
inline void multiply_columns(const Tile& t, size_t first_tile, Fetch& fetch) {
  __m256 acc[kRows][2 * kTiles];
  float* dst = t.dst + first_tile * kTileCols;
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 2 * kTiles; ++j) {
      acc[i][j] = t.is_first() ? _mm256_setzero_ps()
                               : _mm256_loadu_ps(dst + i * t.dst_stride + j * kVectorCols);
    }
  }
  RowPointers<kRows> act(first_act<sizeof(float)>(t), t.act_stride);
  const char* weight = first_weight(t) + first_tile * kTileBytes;
  Fetch mine = fetch;  // a copy that gcc 12 keeps in registers
  for (size_t slab = t.begin; slab < t.end; ++slab, weight += kStepBytes) {
    if constexpr (kIsFromMemory) {
      add_step_from_memory<kRows, kTiles>(acc, weight, act, mine);
    } else {
      add_step<kRows, kTiles>(acc, weight, act, mine);
    }
  }
  fetch = mine;
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 2 * kTiles; ++j) {
      _mm256_storeu_ps(dst + i * t.dst_stride + j * kVectorCols, acc[i][j]);
    }
  }
}

constexpr size_t kOnePassRows = 3;

template <size_t kRows, bool kIsFromMemory>
void multiply_tile(const Tile& t) {
  Fetch fetch = t.fetch;
  if constexpr (kRows <= kOnePassRows) {
    multiply_columns<kRows, 2, kIsFromMemory>(t, 0, fetch);
  } else {
    multiply_columns<kRows, 1, kIsFromMemory>(t, 0, fetch);
    if (t.columns > kTileCols) multiply_columns<kRows, 1, kIsFromMemory>(t, 1, fetch);
  }
}

struct YmmKernel : KernelBase {
  using KernelBase::KernelBase;
  static constexpr size_t kMr = 6;
  static constexpr size_t kLineProducts = 2;
  static constexpr size_t kRowSums = 2;
  static constexpr size_t kShortRows = kOnePassRows;
  static constexpr auto kFromMemory =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<kRows, true>; });
  static constexpr auto kFromCache =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<kRows, false>; });

  static size_t passes(size_t rows) { return rows <= kOnePassRows ? 1 : 2; }
  static void tile(const Tile& t) { (t.from_memory ? kFromMemory : kFromCache)[t.rows](t); }
};

}  // namespace
}  // namespace ktk::bf16

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
// Up to 3 rows have registers for both tiles of columns of a block: they use weights in the order
// of memory, step by step. More rows pass over a run of steps in L1 twice, for a tile each, or once
// if nobody wants the second.
#pragma once

#include <immintrin.h>

#include "bf16/kernel.h"

namespace ktk::bf16 {
namespace {

constexpr size_t kVectorCols = 8;
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
template <size_t kRows, size_t kTiles>
inline void add_line(__m256 (&acc)[kRows][2 * kTiles], size_t tile, const char* weight,
                     const RowPointers<kRows>& act) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    // For the same reason: no loads of the odd half among the even ones.
    asm volatile("" : : : "memory");
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
      for (size_t j = 0; j < 2; ++j) multiply_add(acc[i][2 * tile + j], a, w[j]);
    }
  }
}

// `kTiles` tiles of columns, from number `first_tile` on.
template <size_t kRows, size_t kTiles>
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
  for (size_t slab = t.begin; slab < t.end; ++slab) {
#pragma GCC unroll 2
    for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 1
      for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
        fetch.next();
        add_line<kRows, kTiles>(acc, tile, weight, act);
        act.advance(kPairBytes);
      }
      if (tile + 1 < kTiles) act.advance(-static_cast<ptrdiff_t>(kPairs) * kPairBytes);
    }
    if (kTiles == 1) weight += kTileBytes;
  }
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 2 * kTiles; ++j) {
      _mm256_storeu_ps(dst + i * t.dst_stride + j * kVectorCols, acc[i][j]);
    }
  }
}

constexpr size_t kOnePassRows = 3;

template <size_t kRows>
void multiply_tile(const Tile& t) {
  Fetch fetch = t.fetch;
  if constexpr (kRows <= kOnePassRows) {
    multiply_columns<kRows, 2>(t, 0, fetch);
  } else {
    multiply_columns<kRows, 1>(t, 0, fetch);
    if (t.columns > kTileCols) multiply_columns<kRows, 1>(t, 1, fetch);
  }
}

struct YmmKernel : KernelBase {
  using KernelBase::KernelBase;
  static constexpr size_t kMr = 6;
  static constexpr size_t kLineProducts = 2;
  static constexpr auto kTiles = row_table<kMr>([]<size_t kRows> { return &multiply_tile<kRows>; });

  static size_t passes(size_t rows) { return rows <= kOnePassRows ? 1 : 2; }
  static void tile(const Tile& t) { kTiles[t.rows](t); }
};

}  // namespace
}  // namespace ktk::bf16

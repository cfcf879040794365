// A register tile of 512-bit sums: up to 12 rows of act times 32 columns, for any product of a pair
// of act values with a cache line of weights (a pair for each of 16 columns).
//
//   wide                                        in order, for few rows where the CPU wants it
//            columns c..c+15    c+16..c+31        the same sums, but first all pairs of a step
//   row 0:   acc[0][0]          acc[0][1]         for one tile of columns, then for the other:
//   ...                                           weights are used in the order of memory, which
//   row 11:  acc[11][0]         acc[11][1]        the CPU's prefetchers follow; act is read twice
//
// 24 sums hide the latency of two products a cycle; 14 loads for 24 products keep within two a
// cycle. Where no more than 16 columns of a block are wanted, such as of a factor of low rank, the
// others are left out: 13 loads for 12 products.
//
// A `Dot` offers kActBytes, of an act value, kLineProducts, kInOrderRows, the most rows that can be
// in order, and add(acc, tile, pairs, act): acc[i][tile] += pair of row i times a line of weights,
// for kRows rows and kTiles lines.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "bf16/kernel.h"

namespace ktk::bf16 {
namespace {

// Lines of weights of adjacent tiles.
template <class Dot, size_t kTiles, size_t kRows>
[[gnu::always_inline]] inline void add_lines(__m512 (&acc)[kRows][2], size_t tile,
                                             const char* weight, const RowPointers<kRows>& act) {
  __m512i pairs[kTiles];
#pragma GCC unroll 2
  for (size_t t = 0; t < kTiles; ++t) pairs[t] = _mm512_load_si512(weight + t * kTileBytes);
  Dot::add(acc, tile, pairs, act);
}

template <class Dot, size_t kRows>
inline void add_in_order(const Tile& t, __m512 (&acc)[kRows][2]) {
  constexpr ptrdiff_t kPairBytes = 2 * Dot::kActBytes;
  RowPointers<kRows> act(first_act<Dot::kActBytes>(t), t.act_stride);
  Fetch fetch = t.fetch;
  const char* weight = first_weight(t);
  for (size_t slab = t.begin; slab < t.end; ++slab) {
#pragma GCC unroll 2
    for (size_t tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 1
      for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
        fetch.next();
        add_lines<Dot, 1>(acc, tile, weight, act);
        act.advance(kPairBytes);
      }
      if (tile == 0) act.advance(-static_cast<ptrdiff_t>(kPairs) * kPairBytes);
    }
  }
}

template <class Dot, size_t kTiles, size_t kRows>
inline void add_wide(const Tile& t, __m512 (&acc)[kRows][2]) {
  RowPointers<kRows> act(first_act<Dot::kActBytes>(t), t.act_stride);
  Fetch fetch = t.fetch;
  const char* weight = first_weight(t);
  for (size_t slab = t.begin; slab < t.end; ++slab, weight += kTileBytes) {
#pragma GCC unroll 1
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
      fetch.next_unseen_of<2>();
      add_lines<Dot, kTiles>(acc, 0, weight, act);
      act.advance(2 * Dot::kActBytes);
    }
  }
}

enum class Form { kWide, kNarrow, kInOrder };

template <class Dot, size_t kRows, Form kForm>
void multiply_tile(const Tile& t) {
  constexpr size_t kTiles = kForm == Form::kNarrow ? 1 : 2;
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const float* dst = t.dst + i * t.dst_stride;
#pragma GCC unroll 2
    for (size_t c = 0; c < kTiles; ++c) {
      acc[i][c] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + c * kTileCols);
    }
  }
  if constexpr (kForm == Form::kInOrder) {
    add_in_order<Dot>(t, acc);
  } else {
    add_wide<Dot, kTiles>(t, acc);
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* dst = t.dst + i * t.dst_stride;
#pragma GCC unroll 2
    for (size_t c = 0; c < kTiles; ++c) _mm512_storeu_ps(dst + c * kTileCols, acc[i][c]);
  }
}

template <class Dot>
struct ZmmKernel : KernelBase {
  using KernelBase::KernelBase;
  static constexpr size_t kMr = 12;
  static constexpr size_t kLineProducts = Dot::kLineProducts;
  template <size_t kMost, Form kForm>
  static constexpr auto kForms =
      row_table<kMost>([]<size_t kRows> { return &multiply_tile<Dot, kRows, kForm>; });

  static size_t passes(size_t) { return 1; }
  static void tile(const Tile& t) {
    if (t.columns <= kTileCols) return kForms<kMr, Form::kNarrow>[t.rows](t);
    if (t.in_order && t.rows <= Dot::kInOrderRows) {
      return kForms<Dot::kInOrderRows, Form::kInOrder>[t.rows](t);
    }
    kForms<kMr, Form::kWide>[t.rows](t);
  }
};

}  // namespace
}  // namespace ktk::bf16

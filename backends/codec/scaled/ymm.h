// The product of the layouts of layout.h on 256-bit registers: f32 rows and FMA, codes decoded
// beside the products.
//
// Sixteen registers hold the sums of 2 rows x 32 columns or 4 x 16, those of one group of k, and
// what it takes to decode; where scales are between the codes, gcc 12 spills sums of 2 x 32, and
// two rows have 16 columns. More rows share what ymm_decoded.h decodes.
//
// Every output is one chain of additions over ascending k within a group, and one over groups, so a
// row gets the same bits in any batch.
#pragma once

#include <immintrin.h>

#include "codec/scaled/kernel.h"
#include "codec/scaled/ymm_scales.h"

namespace ktk {
namespace {

inline void fma_in_place(__m256& sum, __m256 a, __m256 w) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
}
// Volatile, as is the addition above: nearly all registers are taken, and the order of loads must
// stay as written.
inline __m256 broadcast_f32(const char* value) {
  __m256 a;
  asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*reinterpret_cast<const float*>(value)));
  return a;
}

template <size_t kRows, size_t kVectors>
inline void clear(__m256 (&sum)[kRows][kVectors]) {
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) sum[i][j] = _mm256_setzero_ps();
  }
}

// dst += scale * sum, of a group and the columns from `col` on.
template <class Decoder, class Scales, size_t kRows, size_t kVectors>
inline void add_scaled(const __m256 (&sum)[kRows][kVectors], const YmmScales<Scales>& scales,
                       size_t col, float* dst, size_t dst_stride) {
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i, dst += dst_stride) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      const __m256 value = Decoder::value(sum[i][j]), scale = scales.load(col + 8 * j);
      _mm256_storeu_ps(dst + 8 * j, _mm256_fmadd_ps(value, scale, _mm256_loadu_ps(dst + 8 * j)));
    }
  }
}

// Decoder makes two registers of 16 columns of a line, for each of its k.
template <class Decoder, size_t kRows, size_t kVectors>
inline void add_line(__m256 (&sum)[kRows][kVectors], const char* line, size_t first,
                     const RowPointers<kRows>& act) {
  const typename Decoder::Line codes(line);
#pragma GCC unroll 8
  for (size_t k = 0; k < Decoder::kLineDepth; ++k) {
    __m256 low, high;
    codes.vectors(k, low, high);
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 a = broadcast_f32(act.row(i) + k * sizeof(float));
      fma_in_place(sum[i][first], a, low);
      fma_in_place(sum[i][first + 1], a, high);
    }
  }
}

// kHalves of a block's 32 columns, from `half` on.
template <class Decoder, class Layout, size_t kRows, size_t kHalves>
inline void multiply_codes(const ScaledKernel<Layout>& kernel, const Tile& t, size_t half,
                           Fetch& fetch) {
  using Scales = typename Layout::Scales;
  constexpr size_t kVectors = 2 * kHalves;
  constexpr size_t kGroupBytes = Layout::kGroupBytes, kCodeBytes = Layout::kCodeBytes;
  constexpr size_t kGroups = kGroupBytes < kCodeBytes ? kCodeBytes / kGroupBytes : 1;
  const size_t col = half * kHalfCols;
  RowPointers<kRows> act(kernel.template act<sizeof(float)>(t), t.act_stride);
  YmmScales<Scales> scales(kernel.scales(t));
  const char* const run_end = kernel.end(t);
  for (const char* line = kernel.begin(t); line != run_end;) {
    scales.begin(line);
    if constexpr (Scales::kLineBytes) {
      if (half == 0) fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
      line += Scales::kLineBytes;
    }
#pragma GCC unroll 1
    for (size_t group = 0; group < kGroups; ++group) {
      const char* end = line + kGroupBytes;
      // The last group may be one step short.
      if (kGroupBytes > kCodeBytes && end > run_end) end = run_end;
      __m256 sum[kRows][kVectors];
      clear(sum);
#pragma GCC unroll 1
      for (; line != end; line += 2 * kLine) {
#pragma GCC unroll 2
        for (size_t i = 0; i < kHalves; ++i) {
          fetch.next_unseen();
          add_line<Decoder>(sum, line + (half + i) * kLine, 2 * i, act);
        }
        act.advance(Layout::kLineDepth * sizeof(float));
      }
      add_scaled<Decoder>(sum, scales, col, t.dst + col, t.dst_stride);
      scales.advance();
    }
  }
}

template <class Decoder, class Layout>
class YmmKernel : public ScaledKernel<Layout> {
 public:
  using ScaledKernel<Layout>::ScaledKernel;
  static constexpr size_t kMr = 4;
  static constexpr size_t kLineProducts = Layout::kLineDepth * 2;
  static size_t passes(size_t rows) { return rows <= kRowsOf32 ? 1 : 2; }

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }

 private:
  static constexpr size_t kRowsOf32 = Layout::Scales::kLineBytes ? 1 : 2;

  template <size_t kRows>
  static void multiply(const YmmKernel& kernel, const Tile& t) {
    constexpr size_t kHalves = kRows <= kRowsOf32 ? 2 : 1;
    Fetch fetch = t.fetch;
    for (size_t half = 0; half < 2; half += kHalves) {
      multiply_codes<Decoder, Layout, kRows, kHalves>(kernel, t, half, fetch);
    }
  }
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &YmmKernel::multiply<kRows>; });
};

}  // namespace
}  // namespace ktk

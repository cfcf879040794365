// E2M1 times 16-bit rows on 512-bit registers: vpdpbusd multiplies four k of sixteen columns at
// once, with the high bytes of a row's codes and then with the low ones.
//
// Half of the nibbles of a line are the bytes that vpshufb wants as they are, the other half after
// a shift. It looks up twice a value, an integer, plus kCodeOffset, which makes it unsigned: [0,
// 24].
//
//   sum of a group = 256 * (sum of weights * high) + (sum of weights * low) + start
//
// where start takes the offset away (act_bytes.h). Sums are below 2^24 and exact, and every output
// is dst = fma(sum * (act scale / 2), weight scale, dst), group after group of ascending k: a row
// gets the same bits in any batch.
#pragma once

#include "codec/scaled/zmm.h"
#include "mxfp4/act_bytes.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

constexpr size_t kFour = 4;  // k, and bytes of act, of one product

// Groups of weights that share a group of act.
template <class Scales>
constexpr size_t kActShare = ActGroup::kDepth / Scales::kGroupDepth;

// sum += weights, unsigned, times a dword of act that is broadcast from memory. asm because gcc 12
// would load and broadcast early, and run out of registers.
inline void add_fours(__m512i& sum, __m512i weights, const int8_t* act) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(weights), "m"(*reinterpret_cast<const int*>(act)));
}

inline void add_fours(__m512i& sum, __m512i weights, __m512i act) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(act));
}

struct ByteLookup {
  __m512i bytes = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  __m512i mask = _mm512_set1_epi8(15);

  // Of sixteen columns k 0 4 1 5, or 2 6 3 7.
  __m512i low(__m512i codes) const {
    return _mm512_shuffle_epi8(bytes, _mm512_and_si512(codes, mask));
  }
  __m512i high(__m512i codes) const { return low(_mm512_srli_epi16(codes, 4)); }
};

// What the sums of a group begin with, which is `part` of those that share a group of act.
template <class Scales>
inline __m512i group_start(const ActGroup& act, size_t part) {
  return _mm512_set1_epi32(kActShare<Scales> == 1 ? act.start : act.part_start[part]);
}

// dst += a scaled sum of sixteen columns, which is of twice the weights' values.
inline void add_scaled(float* dst, __m512i sum, float half_act_scale, __m512 scale) {
  const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(half_act_scale));
  _mm512_storeu_ps(dst, _mm512_fmadd_ps(value, scale, _mm512_loadu_ps(dst)));
}

// Of one group of sixteen columns.
template <class Scales>
inline __m512 weight_scale(const ZmmScales<Scales>& scales, size_t half) {
  const __m512 scale = scales.load(half);
  if constexpr (Scales::kUnit == 1) return scale;
  return _mm512_mul_ps(scale, _mm512_set1_ps(Scales::kUnit));
}

// A group, `part` of those that share `act`, of the first row.
template <class Layout, size_t kRows, size_t kPart>
[[gnu::always_inline]] inline void multiply_group(const ByteLookup& lookup, const char*& line,
                                                  const ActGroup* act, size_t act_stride,
                                                  const ZmmScales<typename Layout::Scales>& scales,
                                                  float* dst, size_t dst_stride, Fetch& fetch) {
  using Scales = typename Layout::Scales;
  const auto row = [&](size_t i) -> const ActGroup& {
    return *reinterpret_cast<const ActGroup*>(reinterpret_cast<const char*>(act) + i * act_stride);
  };
  __m512i high[kRows][2], low[kRows][2];
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i) {
    high[i][0] = high[i][1] = _mm512_setzero_si512();
    low[i][0] = low[i][1] = group_start<Scales>(row(i), kPart);
  }
#pragma GCC unroll 4
  for (size_t u = 0; u < Scales::kGroupDepth; u += Codes::kLineDepth) {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half, line += kLine) {
      fetch.next_unseen();
      const __m512i codes = _mm512_load_si512(line);
#pragma GCC unroll 2
      for (size_t four = 0; four < 2; ++four) {
        const __m512i weights = four ? lookup.high(codes) : lookup.low(codes);
        const size_t at = kPart * Scales::kGroupDepth + u + four * kFour;
#pragma GCC unroll 4
        for (size_t i = 0; i < kRows; ++i) {
          add_fours(high[i][half], weights, row(i).high + at);
          add_fours(low[i][half], weights, row(i).low + at);
        }
      }
    }
  }
  const __m512 scale[2] = {weight_scale(scales, 0), weight_scale(scales, 1)};
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i, dst += dst_stride) {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[i][half], 8), low[i][half]);
      add_scaled(dst + half * kHalfCols, sum, row(i).half_scale, scale[half]);
    }
  }
}

template <class Layout, size_t kRows>
void multiply_bytes(const ScaledKernel<Layout>& kernel, const Tile& t) {
  using Scales = typename Layout::Scales;
  const ByteLookup lookup;
  Fetch fetch = t.fetch;
  ZmmScales<Scales> scales(nullptr);
  const ActGroup* act =
      reinterpret_cast<const ActGroup*>(t.act) + t.begin * kStepDepth / ActGroup::kDepth;
  for (const char *line = kernel.begin(t), *const end = kernel.end(t); line != end;) {
    scales.begin(line);
    fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
    line += Scales::kLineBytes;
#pragma GCC unroll 1
    for (size_t i = 0; i < kStepDepth; i += ActGroup::kDepth, ++act) {
      unroll<kActShare<Scales>>([&]<size_t part>() __attribute__((always_inline)) {
        multiply_group<Layout, kRows, part>(lookup, line, act, t.act_stride, scales, t.dst,
                                            t.dst_stride, fetch);
        scales.advance();
      });
    }
  }
}

template <class Layout>
struct BytesKernel : ScaledKernel<Layout> {
  using ScaledKernel<Layout>::ScaledKernel;
  static constexpr size_t kMr = 4;
  // Two registers of bytes are multiplied twice; decoding them takes about as long as one product.
  static constexpr size_t kLineProducts = 5;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_bytes<Layout, kRows>; });

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }
};

}  // namespace
}  // namespace ktk::mxfp4

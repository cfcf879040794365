// E2M1 times 16-bit rows on 512-bit registers: vpdpbusd multiplies four k of sixteen columns at
// once, with the high bytes of a row's codes and then with the low ones.
//
// Half of the nibbles of a line are the bytes that vpshufb wants as they are, the other half after
// a shift. It looks up twice a value, an integer, plus kCodeOffset, which makes it unsigned: [0,
// 24].
//
//   sum of a group = 256 * (sum of weights * high) + (sum of weights * low) + start
//
// where start takes the offset away (act_codes.h). Sums are below 2^24 and exact, and every output
// is dst = fma(sum * (act scale / 2), weight scale, dst), group after group of ascending k. Groups
// of 16 k, two of which share an act scale, are multiplied with that together:
//
//   dst = fma(fma(sum 1, weight scale 1, sum 0 * weight scale 0), act scale / 2, dst)
//
// A row gets the same bits in any batch, also from zmm_words.h.
#pragma once

#include "codec/scaled/zmm.h"
#include "mxfp4/act_codes.h"
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
inline __m512i group_start(const ActGroupEnd& act, size_t part) {
  return _mm512_set1_epi32(kActShare<Scales> == 1 ? act.start : act.part_start[part]);
}

// Ends a group, `kPart` of those that share a group of act, for sixteen columns of a row: dst +=
// the scaled sum, which is of twice the weights' values. That of the first part rests in `first`.
template <class Scales, size_t kPart>
inline void add_scaled(float* dst, __m512i sum, float half_act_scale, __m512 scale, __m512& first) {
  const __m512 value = _mm512_cvtepi32_ps(sum), half = _mm512_set1_ps(half_act_scale);
  if constexpr (kActShare<Scales> == 1) {
    const __m512 of_act = _mm512_mul_ps(value, half);
    _mm512_storeu_ps(dst, _mm512_fmadd_ps(of_act, scale, _mm512_loadu_ps(dst)));
  } else if constexpr (kPart == 0) {
    first = _mm512_mul_ps(value, scale);
  } else {
    const __m512 both = _mm512_fmadd_ps(value, scale, first);
    _mm512_storeu_ps(dst, _mm512_fmadd_ps(both, half, _mm512_loadu_ps(dst)));
  }
}

// Of one group of sixteen columns.
template <class Scales>
inline __m512 weight_scale(const ZmmScales<Scales>& scales, size_t half) {
  const __m512 scale = scales.load(half);
  if constexpr (Scales::kUnit == 1) return scale;
  return _mm512_mul_ps(scale, _mm512_set1_ps(Scales::kUnit));
}

// Bytes and ends of groups of act, of the rows of a tile.
struct ByteRows {
  const char *bytes, *ends;
  size_t stride;

  ByteRows(const ktk_matrix* matrix, const Tile& t)
      : bytes(t.act + first_group(t) * sizeof(ActGroupBytes)),
        ends(t.act + ActCodes::ends_offset(matrix) + first_group(t) * sizeof(ActGroupEnd)),
        stride(t.act_stride) {}

  static size_t first_group(const Run& run) { return run.begin * kStepDepth / ActGroup::kDepth; }
  const ActGroupBytes& group(size_t row) const {
    return *reinterpret_cast<const ActGroupBytes*>(bytes + row * stride);
  }
  const ActGroupEnd& end(size_t row) const {
    return *reinterpret_cast<const ActGroupEnd*>(ends + row * stride);
  }
  void advance() {
    bytes += sizeof(ActGroupBytes);
    ends += sizeof(ActGroupEnd);
  }
};

// A group, `kPart` of those that share the group of act.
template <class Layout, size_t kRows, size_t kPart>
[[gnu::always_inline]] inline void multiply_group(const ByteLookup& lookup, const char*& line,
                                                  const ByteRows& act,
                                                  const ZmmScales<typename Layout::Scales>& scales,
                                                  __m512 (&first)[kRows][2], const Tile& t,
                                                  Fetch& fetch) {
  using Scales = typename Layout::Scales;
  __m512i high[kRows][2], low[kRows][2];
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i) {
    high[i][0] = high[i][1] = _mm512_setzero_si512();
    low[i][0] = low[i][1] = group_start<Scales>(act.end(i), kPart);
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
          add_fours(high[i][half], weights, act.group(i).high + at);
          add_fours(low[i][half], weights, act.group(i).low + at);
        }
      }
    }
  }
  const __m512 scale[2] = {weight_scale(scales, 0), weight_scale(scales, 1)};
  float* dst = t.dst;
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i, dst += t.dst_stride) {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[i][half], 8), low[i][half]);
      add_scaled<Scales, kPart>(dst + half * kHalfCols, sum, act.end(i).half_scale, scale[half],
                                first[i][half]);
    }
  }
}

template <class Layout, size_t kRows>
void multiply_bytes(const ScaledKernel<Layout>& kernel, const ktk_matrix* matrix,
                    const Tile& tile) {
  using Scales = typename Layout::Scales;
  const Tile t = tile;  // a copy that stores to dst cannot change
  const ByteLookup lookup;
  Fetch fetch = t.fetch;
  ZmmScales<Scales> scales(nullptr);
  ByteRows act(matrix, t);
  for (const char *line = kernel.begin(t), *const end = kernel.end(t); line != end;) {
    scales.begin(line);
    fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
    line += Scales::kLineBytes;
#pragma GCC unroll 1
    for (size_t i = 0; i < kStepDepth; i += ActGroup::kDepth, act.advance()) {
      __m512 first[kRows][2];
      unroll<kActShare<Scales>>([&]<size_t part>() __attribute__((always_inline)) {
        multiply_group<Layout, kRows, part>(lookup, line, act, scales, first, t, fetch);
        scales.advance();
      });
    }
  }
}

template <class Layout>
class BytesKernel : public ScaledKernel<Layout> {
 public:
  static constexpr size_t kMr = 4;
  // Two registers of bytes are multiplied twice; decoding them takes about as long as one product.
  static constexpr size_t kLineProducts = 5;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_bytes<Layout, kRows>; });

  explicit BytesKernel(const ktk_matmul* mm) : ScaledKernel<Layout>(mm), matrix_(mm->matrix) {}

  void tile(const Tile& t) const { kTiles[t.rows](*this, matrix_, t); }

 private:
  const ktk_matrix* matrix_;
};

}  // namespace
}  // namespace ktk::mxfp4

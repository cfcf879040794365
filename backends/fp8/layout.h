// "e4m3-n32k64": FP8 in memory. codec/scaled/layout.h has the order of lines and scales.
//
//   line, 64 bytes: 16 columns, 4 deep
//
//   columns 0..3                                      4..7   8..11   12..15
//   k0 k1 | k0 k1 | k0 k1 | k0 k1 | k2 k3 | k2 k3 | k2 k3 | k2 k3 |  ...
//   c 0     c 1     c 2     c 3     c 0     c 1     c 2     c 3
//
// Decoding makes two bytes of each. Unpacking the low, then the high eight bytes of each quarter
// gives the bf16 pairs (k0, k1), then (k2, k3), of sixteen columns.
#pragma once

#include <immintrin.h>

#include "codec/scaled/codec.h"

namespace ktk::fp8 {
namespace {

struct Codes {
  static constexpr size_t kLineDepth = 4;

  static size_t position(size_t col, size_t i) {
    return col / 4 * 16 + i / 2 * 8 + col % 4 * 2 + i % 2;
  }
  static bool is_nan(const uint8_t* row, size_t k) {
    uint8_t nan = 0;  // not bool, which gcc 12 does not vectorize
    for (size_t i = 0; i < k; ++i) nan |= static_cast<uint8_t>(E4m3::is_nan(row[i]));
    return nan;
  }
  static void copy(const uint8_t* row, size_t k, size_t count, uint8_t* line, size_t col) {
    for (size_t i = 0; i < kLineDepth; ++i) line[position(col, i)] = i < count ? row[k + i] : 0;
  }
  static __m128i arrange(__m128i codes) {
    const __m128i pairs = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm_shuffle_epi8(codes, pairs);
  }
  static void write(const uint8_t* line, size_t col, size_t count, uint8_t* row, size_t k) {
    for (size_t i = 0; i < count; ++i) row[k + i] = line[position(col, i)];
  }
  static void write_line(const uint8_t* line, uint8_t* rows, size_t stride, size_t k) {
    const __m128i columns = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (size_t col = 0; col < kHalfCols; col += 4) {
      const __m128i pairs =
          _mm_load_si128(reinterpret_cast<const __m128i*>(line + col * kLineDepth));
      int32_t four[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(four), _mm_shuffle_epi8(pairs, columns));
      for (size_t i = 0; i < 4; ++i) memcpy(rows + (col + i) * stride + k, four + i, kLineDepth);
    }
  }
  struct Values {
    float of[256];

    constexpr Values() : of() {
      for (uint32_t code = 0; code < 256; ++code)
        of[code] = E4m3::value(static_cast<uint8_t>(code));
    }
  };
  static float value(const uint8_t* line, size_t col, size_t i) {
    static constexpr Values kValues;
    return kValues.of[line[position(col, i)]];
  }
};

using BlockCodec = ScaledCodec<Codes, BlockScaleCodec>;
using RowCodec = ScaledCodec<Codes, RowScaleCodec>;
using MxCodec = ScaledCodec<Codes, MxScaleCodec>;

struct Formats {
  static constexpr char kLayout[] = "e4m3-n32k64";

  template <class With>
  static auto dispatch(const ktk_matrix* matrix, const With& with) {
    if (matrix->format.scale == KTK_UE8M0) return with(MxCodec());
    return matrix->format.group_k ? with(BlockCodec()) : with(RowCodec());
  }
};

}  // namespace
}  // namespace ktk::fp8

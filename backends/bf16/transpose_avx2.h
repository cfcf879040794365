// One step of rows to the packed layout: transposes of 8 x 8 pairs of bf16.
//
// AVX2 serves every variant of x86: the 24 shuffles of a transpose move 256 bytes, far above the
// speed of memory, so wider registers would buy nothing.
#pragma once

#include <immintrin.h>

#include "bf16/layout.h"
#include "simd/bf16.h"

namespace ktk::bf16 {
namespace {

// Sixteen consecutive elements of a row as bf16.
template <ktk_element kElement>
inline __m256i load_bf16(const char* row) {
  if constexpr (kElement == KTK_BF16) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
  } else if constexpr (kElement == KTK_F16) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(row);
    return bf16_from_f32(_mm256_cvtph_ps(_mm_loadu_si128(halves)),
                         _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
  } else {
    const float* values = reinterpret_cast<const float*>(row);
    return bf16_from_f32(_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8));
  }
}

// Transposes blocks of 4 x 4 pairs: in each 128-bit half, those of the first four vectors and those
// of the last four.
__attribute__((always_inline)) inline void transpose_halves(__m256i (&v)[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
}

// Eight rows of sixteen elements become eight half rows of a tile (pairs x columns).
template <ktk_element kElement>
inline void transpose_pairs(const char* rows, size_t stride, char* tile_row) {
  __m256i v[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = load_bf16<kElement>(rows + i * stride);
  transpose_halves(v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile_row + i * kLine),
                       _mm256_permute2x128_si256(v[i], v[i + 4], 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile_row + (i + 4) * kLine),
                       _mm256_permute2x128_si256(v[i], v[i + 4], 0x31));
  }
}

// One full step of 32 rows x 32 elements.
template <ktk_element kElement>
inline void pack_step(const char* rows, size_t stride, char* step) {
  constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  for (size_t col = 0; col < kNr; col += 8) {
    char* out = step + col / kTileCols * kTileBytes + col % kTileCols * 4;
    for (size_t pair = 0; pair < kPairs; pair += 8) {
      transpose_pairs<kElement>(rows + col * stride + pair * 2 * kBytes, stride,
                                out + pair * kLine);
    }
  }
}

// The inverse for f32: eight half rows of a tile become eight rows of sixteen elements.
inline void unpack_pairs(const char* tile_row, float* rows, size_t stride) {
  __m256i v[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_row + i * kLine));
  }
  transpose_halves(v);
  const auto store = [&](int row, __m256i pairs) {
    const __m256i low = _mm256_slli_epi32(pairs, 16);
    const __m256i high = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    const __m256i a = _mm256_unpacklo_epi32(low, high), b = _mm256_unpackhi_epi32(low, high);
    float* const to = rows + static_cast<size_t>(row) * stride;
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x20)));
    _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x31)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store(i, _mm256_permute2x128_si256(v[i], v[i + 4], 0x20));
    store(i + 4, _mm256_permute2x128_si256(v[i], v[i + 4], 0x31));
  }
}

// One full step to 32 rows x 32 elements.
inline void unpack_step(const char* step, float* rows, size_t stride) {
  for (size_t col = 0; col < kNr; col += 8) {
    const char* from = step + col / kTileCols * kTileBytes + col % kTileCols * 4;
    for (size_t pair = 0; pair < kPairs; pair += 8) {
      unpack_pairs(from + pair * kLine, rows + col * stride + pair * 2, stride);
    }
  }
}

}  // namespace
}  // namespace ktk::bf16

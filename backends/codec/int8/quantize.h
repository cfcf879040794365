// 8-bit symmetric quantisation, and the 16 x 16 dword transpose of x86 layouts, for codecs.
//
// Everything sits in an unnamed namespace: each kernel library keeps the copy that was compiled
// with its own flags. Vectors are handled 16 floats at a time: one register of AVX-512, two of AVX2
// or four of NEON.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "simd/f16.h"

#if defined(__aarch64__)
#include "simd/neon.h"
#else
#include <immintrin.h>
#endif

namespace ktk {
namespace {

#if defined(__aarch64__)
// In int8_neon.h.
#elif defined(__AVX512F__)
struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};

inline F32x16 load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline I32x16 round_product(F32x16 x, float factor) {
  return {_mm512_cvtps_epi32(_mm512_mul_ps(x.v, _mm512_set1_ps(factor)))};
}
inline I32x16 round_quotient(F32x16 x, float divisor) {
  return {_mm512_cvtps_epi32(_mm512_div_ps(x.v, _mm512_set1_ps(divisor)))};
}
inline I32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline int32_t sum(I32x16 a) { return _mm512_reduce_add_epi32(a.v); }
inline __m128i narrow(I32x16 a) { return _mm512_cvtsepi32_epi8(a.v); }
// 16 bytes as f32, each times `factor`.
inline void store_product(float* out, __m128i q, float factor) {
  const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
  _mm512_storeu_ps(out, _mm512_mul_ps(x, _mm512_set1_ps(factor)));
}
#else
struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};

inline F32x16 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 load_f16(const uint16_t* p) {
  const __m128i* bits = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(bits)), _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
}
inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m128i* bits = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(bits)), widen_bf16(_mm_loadu_si128(bits + 1))};
}
inline I32x16 round_product(F32x16 x, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  return {_mm256_cvtps_epi32(_mm256_mul_ps(x.lo, f)), _mm256_cvtps_epi32(_mm256_mul_ps(x.hi, f))};
}
inline I32x16 round_quotient(F32x16 x, float divisor) {
  const __m256 d = _mm256_set1_ps(divisor);
  return {_mm256_cvtps_epi32(_mm256_div_ps(x.lo, d)), _mm256_cvtps_epi32(_mm256_div_ps(x.hi, d))};
}
inline I32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32x16 add(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline int32_t sum(I32x16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline __m128i narrow(I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_product(float* out, __m128i q, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  const __m256 lo = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
  const __m256 hi = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q)));
  _mm256_storeu_ps(out, _mm256_mul_ps(lo, f));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(hi, f));
}
#endif

#if !defined(__aarch64__)
inline __m128i load_bytes(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline void store_bytes(uint8_t* p, __m128i bytes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
#endif

// Elements that are quantised: how 16 of them are read, and the largest magnitude of a row. The
// magnitude is found on the bit patterns, whose order is that of the values; NaN and Inf come out
// as something above the largest float.
struct ElementF32 {
  using Storage = float;
  static F32x16 load(const float* p) { return load_f32(p); }
  static float absmax(const float* p, size_t count) {
    uint32_t max = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, p[i]) & 0x7fffffff;
      max = bits > max ? bits : max;
    }
    return __builtin_bit_cast(float, max);
  }
};

inline uint16_t absmax_u16(const uint16_t* p, size_t count) {
  uint16_t max = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = p[i] & 0x7fff;
    max = bits > max ? bits : max;
  }
  return max;
}

struct ElementF16 {
  using Storage = uint16_t;
  static F32x16 load(const uint16_t* p) { return load_f16(p); }
  static float absmax(const uint16_t* p, size_t count) {
    return f32_from_f16(absmax_u16(p, count));
  }
};

struct ElementBf16 {
  using Storage = uint16_t;
  static F32x16 load(const uint16_t* p) { return load_bf16(p); }
  static float absmax(const uint16_t* p, size_t count) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(absmax_u16(p, count)) << 16);
  }
};

// Loads the first `count` of 16 elements, zero behind them.
template <class Element>
inline F32x16 load_some(const typename Element::Storage* p, size_t count) {
  if (count >= 16) return Element::load(p);
  typename Element::Storage some[16] = {};
  for (size_t i = 0; i < count; ++i) some[i] = p[i];
  return Element::load(some);
}

// The scale of a group whose largest magnitude is `absmax`, so that |x / scale| <= 127.
struct SymmetricScale {
  float scale;   // NaN: the group holds NaN or Inf; 0: nothing but zeros
  float factor;  // 1 / scale; 0: that would overflow or be rounded coarsely, so divide

  bool is_zero() const { return !(scale > 0); }
};

inline SymmetricScale symmetric_scale(float absmax) {
  constexpr float kLargest = 0x1.fffffep+127f, kSmallestNormal = 0x1p-126f;
  if (!(absmax <= kLargest)) return {__builtin_nanf(""), 0};
  float scale = absmax / 127;
  if (scale >= kSmallestNormal) return {scale, 1 / scale};
  // A subnormal scale has few bits: rounded down, it would push the largest value past 127.
  if (scale * 127 < absmax) {
    scale = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scale) + 1);
  }
  return {scale, 0};
}

// Codes of 16 values, rounded to nearest even.
inline I32x16 quantise(F32x16 x, SymmetricScale s) {
  if (s.is_zero()) return zero_i32();
  return s.factor > 0 ? round_product(x, s.factor) : round_quotient(x, s.scale);
}

#if !defined(__aarch64__)
// Stores 16 rows of 16 dwords as 16 columns, with every byte's top bit flipped: two's complement
// becomes offset binary. tile[r][c] = rows[c][r].
inline void transpose_to_offset_binary(const uint8_t rows[16][64], uint8_t* tile) {
  const __m128i flip = _mm_set1_epi8(-128);
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) {
      __m128i in[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from = rows[4 * c + i] + 16 * r;
        in[i] = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), flip);
      }
      const __m128i ab_lo = _mm_unpacklo_epi32(in[0], in[1]);
      const __m128i ab_hi = _mm_unpackhi_epi32(in[0], in[1]);
      const __m128i cd_lo = _mm_unpacklo_epi32(in[2], in[3]);
      const __m128i cd_hi = _mm_unpackhi_epi32(in[2], in[3]);
      __m128i* to = reinterpret_cast<__m128i*>(tile + 256 * r + 16 * c);
      _mm_storeu_si128(to, _mm_unpacklo_epi64(ab_lo, cd_lo));
      _mm_storeu_si128(to + 4, _mm_unpackhi_epi64(ab_lo, cd_lo));
      _mm_storeu_si128(to + 8, _mm_unpacklo_epi64(ab_hi, cd_hi));
      _mm_storeu_si128(to + 12, _mm_unpackhi_epi64(ab_hi, cd_hi));
    }
  }
}
#endif

}  // namespace
}  // namespace ktk

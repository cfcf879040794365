// x16.h in pairs of 256-bit registers.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

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
inline void store_words(int16_t* out, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words);
}
inline void store_product(float* out, __m128i q, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  const __m256 lo = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
  const __m256 hi = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q)));
  _mm256_storeu_ps(out, _mm256_mul_ps(lo, f));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(hi, f));
}

}  // namespace
}  // namespace ktk

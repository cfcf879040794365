// x16.h in 512-bit registers.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

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
inline void store_words(int16_t* out, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtsepi32_epi16(a.v));
}
// 16 bytes as f32, each times `factor`.
inline void store_product(float* out, __m128i q, float factor) {
  const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
  _mm512_storeu_ps(out, _mm512_mul_ps(x, _mm512_set1_ps(factor)));
}

}  // namespace
}  // namespace ktk

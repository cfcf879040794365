// bfloat16 <-> f32 in integer arithmetic: rounds to nearest even, keeps subnormals (vcvtneps2bf16
// flushes them) and returns every NaN as a quiet NaN of the same sign. MXCSR has no influence.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ktk {
namespace {

inline float f32_from_bf16(uint16_t value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16);
}

inline uint16_t bf16_from_f32(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX2__)

// Eight values; each result is in the low half of its dword, the high half is zero.
inline __m256i bf16_dwords_from_f32(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}

// Sixteen consecutive values.
inline __m256i bf16_from_f32(__m256 low, __m256 high) {
  const __m256i lanes = _mm256_packus_epi32(bf16_dwords_from_f32(low), bf16_dwords_from_f32(high));
  return _mm256_permute4x64_epi64(lanes, 0xd8);
}

#elif defined(__aarch64__)

// Four consecutive values, rounded to nearest even.
inline uint16x4_t bf16_from_f32(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value), high = vshrq_n_u32(bits, 16);
  const uint32x4_t bias = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
  const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet));
}

#endif

}  // namespace
}  // namespace ktk

// The scale, and zero point, of the least squared error for one group of weights.
//
// A quantiser of four bits is   code = clamp(round(x / scale + zero), 0, 15). Sixteen of them, the
// lanes of a vector, are tried on every value; for the codes v = code - zero that each one makes,
// the scale of the least squared error is (sum of x v) / (sum of v v), and it explains
// (sum of x v)^2 / (sum of v v) of the squares of the group. The one that explains the most wins.
//
// The scale is rounded to bf16 before the final codes are made with it, so that its rounding is
// part of what they make up for. Sums are taken value by value: any instruction set finds the same.
#pragma once

#include "codec/int4/weight.h"
#include "codec/int8/quantize.h"
#include "simd/bf16.h"

namespace ktk::amxint4 {
namespace {

using int4::Group;

#if defined(__AVX512F__)
inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 divide(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// The second of two values where one is NaN.
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// To the nearest integer from 0 to 15, ties to even; NaN becomes 0.
inline F32x16 to_code(F32x16 x) {
  const __m512 least = _mm512_max_ps(_mm512_roundscale_ps(x.v, 8), _mm512_setzero_ps());
  return {_mm512_min_ps(least, _mm512_set1_ps(15))};
}
inline void store_f32(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
inline __m128i to_bytes(F32x16 x) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)); }
#else
inline F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F32x16 divide(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// The second of two values where one is NaN.
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline __m256 to_code(__m256 x) {
  const __m256 least = _mm256_max_ps(_mm256_round_ps(x, 8), _mm256_setzero_ps());
  return _mm256_min_ps(least, _mm256_set1_ps(15));
}
// To the nearest integer from 0 to 15, ties to even; NaN becomes 0.
inline F32x16 to_code(F32x16 x) { return {to_code(x.lo), to_code(x.hi)}; }
inline void store_f32(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline __m128i to_bytes(F32x16 x) {
  return narrow({_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)});
}
#endif

// What is known of a group before the search.
struct Range {
  float lowest = 0, highest = 0;  // of the finite values, and zero
  uint32_t size_bits = 0;         // of the largest magnitude, NaN above all

  void add(const float* x, size_t count) {
    const float size = ElementF32::absmax(x, count);
    const uint32_t bits = __builtin_bit_cast(uint32_t, size);
    size_bits = bits > size_bits ? bits : size_bits;
    F32x16 least = splat(lowest), most = splat(highest);
    for (size_t i = 0; i < count; i += 16) {
      const F32x16 values = load_some<ElementF32>(x + i, count - i);
      least = min(values, least);
      most = max(values, most);
    }
    float lows[16], highs[16];
    store_f32(lows, least);
    store_f32(highs, most);
    for (size_t lane = 0; lane < 16; ++lane) {
      lowest = lows[lane] < lowest ? lows[lane] : lowest;
      highest = highs[lane] > highest ? highs[lane] : highest;
    }
  }
  bool is_finite() const { return size_bits < 0x7f800000; }
  // 2^-e for a largest magnitude of about 2^e: what makes squares of any group fit.
  float normalizer() const {
    const uint32_t e = size_bits >> 23;
    return __builtin_bit_cast(float, (254 - (e < 1 ? 1 : e > 253 ? 253 : e)) << 23);
  }
};

class Search {
 public:
  Search(const ktk_format& format, const Range& range) : normalizer_(range.normalizer()) {
    const float lowest = range.lowest * normalizer_, highest = range.highest * normalizer_;
    if (format.zero == KTK_NONE) {
      // The code 0 is one step further from zero than the code 15, and a negative scale gives that
      // step to the positive side. Groups of 32 lose least when next to nothing is cut off, rows
      // when the largest magnitude is twice what fits.
      constexpr float kSteps[8] = {6.4f, 7, 7.5f, 8, 8.6f, 9.4f, 10.4f, 12};
      const float size = -lowest > highest ? -lowest : highest;
      for (size_t i = 0; i < 16; ++i) {
        inverse_[i] = (i % 2 ? -kSteps[i / 2] : kSteps[i / 2]) / size;
        zero_[i] = int4::kFixedZero;
      }
    } else {
      // Either end of the range may be cut off a little, or none.
      constexpr float kShares[4] = {1.02f, 0.96f, 0.9f, 0.84f};
      for (size_t i = 0; i < 16; ++i) {
        const float low = lowest * kShares[i / 4], high = highest * kShares[i % 4];
        inverse_[i] = 15 / (high - low);
        const float zero = -low * inverse_[i];
        zero_[i] =
            format.zero == KTK_U8 ? __builtin_rintf(zero) : f32_from_bf16(bf16_from_f32(zero));
      }
    }
  }

  // Multiplies the values by what makes their squares fit, and tries all quantisers on each.
  // Not inlined: this is the hot loop, and wants all registers.
  [[gnu::noinline]] void add(float* x, size_t count) {
    // Ahead of the loop, so that a load gives a value to all lanes; from a register, that takes
    // operations from the products, 2.9 ns a value in place of 2.1 (Zen 2).
    const float normalizer = normalizer_;
    for (size_t i = 0; i < count; ++i) x[i] *= normalizer;
    const F32x16 inverse = load_f32(inverse_), zero = load_f32(zero_);
    F32x16 xv = load_f32(xv_), vv = load_f32(vv_);
    for (size_t i = 0; i < count; ++i) {
      const F32x16 value = splat(x[i]);
      const F32x16 v = sub(to_code(fma(value, inverse, zero)), zero);
      xv = fma(value, v, xv);
      vv = fma(v, v, vv);
    }
    store_f32(xv_, xv);
    store_f32(vv_, vv);
  }

  // Not inlined: the loops of those who call it keep their registers.
  [[gnu::noinline]] Group best() const {
    const F32x16 xv = load_f32(xv_), vv = load_f32(vv_), zero = load_f32(zero_);
    // Neither end of the codes may overflow, even after the scale was rounded.
    const F32x16 reach = max(zero, sub(splat(15), zero));
    const F32x16 limit = mul(divide(splat(0x1.fdp+127f), reach), splat(normalizer_));
    const F32x16 scale = max(min(divide(xv, vv), limit), sub(splat(0), limit));
    float scales[16], explained[16];
    store_f32(scales, scale);
    store_f32(explained, mul(fma(sub(splat(0), scale), vv, mul(splat(2), xv)), scale));
    float most = 0;
    size_t best = 16;
    for (size_t i = 0; i < 16; ++i) {
      if (!(vv_[i] > 0 && explained[i] > most)) continue;
      most = explained[i];
      best = i;
    }
    if (best == 16) return {0, bf16_from_f32(int4::kFixedZero)};
    return {bf16_from_f32(scales[best] / normalizer_), bf16_from_f32(zero_[best])};
  }

 private:
  float normalizer_;
  float inverse_[16], zero_[16];
  float xv_[16] = {}, vv_[16] = {};
};

}  // namespace
}  // namespace ktk::amxint4

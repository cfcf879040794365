// Symmetric quantization, to 8 bits where nothing is said, for codecs of weights and activations.
#pragma once

#include "simd/f16.h"
#include "simd/x16.h"

namespace ktk {
namespace {

// Elements that are quantized: how 16 of them are read, and the largest magnitude of a row. The
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

// The scale of a group whose largest magnitude is `absmax`, so that |x / scale| <= levels.
struct SymmetricScale {
  float scale;   // NaN: the group holds NaN or Inf; 0: nothing but zeros
  float factor;  // 1 / scale; 0: that would overflow or be rounded coarsely, so divide

  bool is_zero() const { return !(scale > 0); }
};

inline SymmetricScale symmetric_scale(float absmax, float levels = 127) {
  constexpr float kLargest = 0x1.fffffep+127f, kSmallestNormal = 0x1p-126f;
  if (!(absmax <= kLargest)) return {__builtin_nanf(""), 0};
  float scale = absmax / levels;
  if (scale >= kSmallestNormal) return {scale, 1 / scale};
  // A subnormal scale has few bits: rounded down, it would push the largest value past them.
  if (scale * levels < absmax) {
    scale = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scale) + 1);
  }
  return {scale, 0};
}

// Codes of 16 values, rounded to nearest even.
inline I32x16 quantize(F32x16 x, SymmetricScale s) {
  if (s.is_zero()) return zero_i32();
  return s.factor > 0 ? round_product(x, s.factor) : round_quotient(x, s.scale);
}

// Codes of a group of `count` values, and zeros behind them up to `padded`: take(i, codes) gets
// those of values i to i + 15.
template <class Take>
inline void quantize_group(const float* x, size_t count, size_t padded, SymmetricScale s,
                           Take take) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) take(i, quantize(load_f32(x + i), s));
  if (i < count) {
    take(i, quantize(load_some<ElementF32>(x + i, count - i), s));
    i += 16;
  }
  for (; i < padded; i += 16) take(i, zero_i32());
}

// The same with the scale of the group, which is returned.
template <class Take>
inline float quantize_group(const float* x, size_t count, size_t padded, Take take,
                            float levels = 127) {
  const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, count), levels);
  quantize_group(x, count, padded, s, take);
  return s.scale;
}

}  // namespace
}  // namespace ktk

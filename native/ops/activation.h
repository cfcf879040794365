// The activation functions of experts, of one number each: plain code that gcc vectorises inside
// the loops of ops.cc. A function of gate and a function of up are multiplied with each other. NaN
// goes through all of them (a comparison with NaN is false and keeps the value).
#pragma once

#include "ops/ops.h"

namespace {

inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float between(float x, float low, float high) {
  x = x > high ? high : x;
  return x < low ? low : x;
}

// e^x to about 1e-7 relative: 2^i * 2^f, with a degree 6 minimax polynomial for 2^f on [-.5, .5]
// (its own error is 2e-9). Arguments are clamped to +-87, where e^x is a normal number. NaN stays
// NaN.
inline float exp_clamped(float x) {
  x = between(x, -87.0f, 87.0f);
  // Two-part log2(e): the product with the rounded constant alone loses 7 bits at |x| = 87.
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float i = shifted - 12582912.0f;
  float f = x - i * 0.693145752f;  // ln 2, upper bits: i * this is exact
  f = f - i * 1.42860677e-6f;      // ln 2, the rest
  f = f * 1.44269504f;
  float p = 1.5345811994e-04f;
  p = p * f + 1.3399931219e-03f;
  p = p * f + 9.6184889571e-03f;
  p = p * f + 5.5503287770e-02f;
  p = p * f + 2.4022646891e-01f;
  p = p * f + 6.9314720574e-01f;
  p = p * f + 1.0f;
  // 2^i from the integer in the low mantissa bits; a product, so that a NaN in p stays one.
  return p * from_bits((to_bits(shifted) << 23) + 0x3f800000);
}

// Exactly 0 below -87, so that g * sigmoid(g) vanishes for any finite g there.
inline float sigmoid(float x) {
  const float s = 1.0f / (1.0f + exp_clamped(-x));
  return x < -87.0f ? 0.0f : s;
}

// tanh to about 1e-7 relative. Near 0, where 1 - 2 / (e^2x + 1) would cancel, a minimax polynomial
// of degree 9 for |x| <= .65 (its own error is 7e-9).
inline float tanh_of(float x) {
  const float s = x * x;
  float p = -5.51503e-3f;
  p = p * s + 2.04693e-2f;
  p = p * s - 5.368799e-2f;
  p = p * s + 1.333083e-1f;
  p = p * s - 3.333326e-1f;
  const float near = x + x * s * p;
  const float size = x < 0 ? -x : x;
  const float far = 1.0f - 2.0f / (exp_clamped(2.0f * size) + 1.0f);
  const float signed_far = x < 0 ? -far : far;
  return size > 0.65f ? signed_far : near;
}

struct Normal {
  float cdf, density;
};

// The standard normal distribution. Phi(-x) = e^(-x^2 / 2) * p(1 / (1 + 0.4 x)) for x >= 0, with a
// minimax polynomial p of degree 8 (its own error is 7e-8), so that the lower tail keeps its
// relative accuracy; exactly 0 where e^(-x^2 / 2) leaves the normal numbers.
inline Normal normal(float x) {
  const float size = between(x < 0 ? -x : x, 0.0f, 1e18f);
  const float half = 0.5f * size * size;
  const float e = exp_clamped(-half);
  const float t = 1.0f / (1.0f + 0.4f * size);
  float p = -0.0400748812f;
  p = p * t + 0.202646539f;
  p = p * t + -0.377394348f;
  p = p * t + 0.25465712f;
  p = p * t + -0.0145655097f;
  p = p * t + 0.159201115f;
  p = p * t + 0.155619368f;
  p = p * t + 0.159923449f;
  p = p * t + -1.29048476e-05f;
  const float tail = half > 87.0f ? 0.0f : e * p;
  return {x < 0 ? tail : 1.0f - tail, half > 87.0f ? 0.0f : 0.398942280f * e};
}

// The argument of sigmoid in g * sigmoid(z), and g times its slope, both bounded: beyond +-88 the
// slope of the product is 0 or 1, and products would overflow.
template <ktk_activation kKind>
inline void arguments(const ktk_glu& glu, float g, float& z, float& gz) {
  z = gz = between(g, -88.0f, 88.0f);
  if constexpr (kKind == KTK_SWIGLUOAI) z = gz = between(glu.alpha * g, -88.0f, 88.0f);
  if constexpr (kKind == KTK_GELU_TANH) {
    const float c = between(g, -16.0f, 16.0f);
    z = 1.5957691216f * (c + 0.044715f * c * c * c);
    gz = 1.5957691216f * (c + 0.134145f * c * c * c);
  }
}

template <ktk_activation kKind>
inline float of_gate(const ktk_glu& glu, float g) {
  if constexpr (kKind == KTK_SWIGLUOAI) return g * sigmoid(glu.alpha * g);
  if constexpr (kKind == KTK_GELU_TANH) {
    // 0.5 g (1 + tanh z) = g * sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
    return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g));
  }
  if constexpr (kKind == KTK_GELU) return g * normal(g).cdf;
  if constexpr (kKind == KTK_RELU) return g < 0 ? 0.0f : g;
  if constexpr (kKind == KTK_RELU2) {
    const float r = g < 0 ? 0.0f : g;
    return r * r;
  }
  if constexpr (kKind == KTK_SITU) {
    return glu.gate_softcap * tanh_of(g / glu.gate_softcap) * sigmoid(g);
  }
  return g * sigmoid(g);
}

// The derivative of of_gate.
template <ktk_activation kKind>
inline float slope_of_gate(const ktk_glu& glu, float g) {
  if constexpr (kKind == KTK_RELU) return g > 0 ? 1.0f : g <= 0 ? 0.0f : g;
  if constexpr (kKind == KTK_RELU2) return g < 0 ? 0.0f : 2.0f * g;
  if constexpr (kKind == KTK_GELU) {
    const Normal at = normal(g);
    return at.cdf + between(g, -16.0f, 16.0f) * at.density;
  }
  float z, gz;
  arguments<kKind>(glu, g, z, gz);
  const float e = exp_clamped(-z), s = 1.0f / (1.0f + e);
  const float low = z < -87.0f ? 0.0f : s;
  if constexpr (kKind == KTK_SITU) {
    const float t = tanh_of(g / glu.gate_softcap);
    return low * ((1.0f - t * t) + glu.gate_softcap * t * (e * s));
  }
  // g * sigmoid(z(g)) has the slope sigmoid(z) * (1 + g * z'(g) * sigmoid(-z)).
  return low * (1.0f + gz * (e * s));
}

template <ktk_activation kKind>
inline float of_up(const ktk_glu& glu, float u) {
  if constexpr (kKind == KTK_SWIGLUOAI) return u + 1.0f;
  if constexpr (kKind == KTK_SITU) {
    // Computed without a cap, too, where it is inf * 0: a branch would keep gcc from sharing tanh
    // with the slope.
    const float capped = glu.up_softcap * tanh_of(u / glu.up_softcap);
    return glu.up_softcap < __builtin_inff() ? capped : u;
  }
  return u;
}

// The derivative of of_up.
template <ktk_activation kKind>
inline float slope_of_up(const ktk_glu& glu, float u) {
  if constexpr (kKind == KTK_SITU) {
    const float t = tanh_of(u / glu.up_softcap);
    return glu.up_softcap < __builtin_inff() ? 1.0f - t * t : 1.0f;
  }
  return 1.0f;
}

}  // namespace

// One source for every instruction set: plain loops that gcc vectorises with the flags of the
// target. NaN goes through every clamp (a comparison with NaN is false and keeps the value).
#include "ops/ops.h"

#include "ktk/target.h"

namespace {

#if defined(__aarch64__)
using Half = __fp16;  // gcc 12 has no _Float16 in C++ there
#else
using Half = _Float16;
#endif

inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

void to_f32(const void* src, ktk_element type, size_t n, float* dst) {
  if (type == KTK_BF16) {
    const uint16_t* in = static_cast<const uint16_t*>(src);
    for (size_t i = 0; i < n; ++i) dst[i] = from_bits(static_cast<uint32_t>(in[i]) << 16);
  } else if (type == KTK_F16) {
    const Half* in = static_cast<const Half*>(src);
    for (size_t i = 0; i < n; ++i) dst[i] = static_cast<float>(in[i]);
  } else {
    __builtin_memcpy(dst, src, n * sizeof(float));
  }
}

void from_f32(const float* src, ktk_element type, size_t n, void* dst) {
  if (type == KTK_BF16) {
    uint16_t* out = static_cast<uint16_t*>(dst);
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = to_bits(src[i]);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      // Rounding could carry a NaN's payload into infinity; the quiet bit keeps it a NaN.
      const uint32_t quiet = bits >> 16 | 0x40;
      out[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
    }
  } else if (type == KTK_F16) {
    Half* out = static_cast<Half*>(dst);
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<Half>(src[i]);
  } else {
    __builtin_memcpy(dst, src, n * sizeof(float));
  }
}

// e^x to about 1e-7 relative: 2^i * 2^f, with a degree 6 minimax polynomial for 2^f on [-.5, .5]
// (its own error is 2e-9). Arguments are clamped to +-87, where e^x is a normal number. NaN stays
// NaN.
inline float exp_clamped(float x) {
  x = x > 87.0f ? 87.0f : x;
  x = x < -87.0f ? -87.0f : x;
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

template <ktk_activation kKind>
inline float apply(float g, float u, float alpha) {
  if constexpr (kKind == KTK_SILU) return g * sigmoid(g) * u;
  if constexpr (kKind == KTK_SWIGLUOAI) return g * sigmoid(alpha * g) * (u + 1.0f);
  // 0.5 g (1 + tanh z) = g * sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
  return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)) * u;
}

template <ktk_activation kKind>
void glu_rows(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, size_t stride,
              const float* gate_bias, const float* up_bias) {
  const float alpha = glu->alpha, high = glu->limit, low = -glu->limit;
  const float gate_low = glu->clamp_gate_below ? low : -__builtin_inff();
  for (size_t row = 0; row < m; ++row) {
    float* __restrict g = gate + row * stride;
    float* __restrict u = up + row * stride;
    if (gate_bias) {
      for (size_t i = 0; i < n; ++i) g[i] += gate_bias[i];
    }
    if (up_bias) {
      for (size_t i = 0; i < n; ++i) u[i] += up_bias[i];
    }
    for (size_t i = 0; i < n; ++i) {
      float gi = g[i], ui = u[i];
      gi = gi > high ? high : gi;
      gi = gi < gate_low ? gate_low : gi;
      ui = ui > high ? high : ui;
      ui = ui < low ? low : ui;
      g[i] = apply<kKind>(gi, ui, alpha);
    }
  }
}

void glu(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, size_t stride,
         const float* gate_bias, const float* up_bias) {
  switch (glu->kind) {
    case KTK_SILU:
      return glu_rows<KTK_SILU>(glu, m, n, gate, up, stride, gate_bias, up_bias);
    case KTK_SWIGLUOAI:
      return glu_rows<KTK_SWIGLUOAI>(glu, m, n, gate, up, stride, gate_bias, up_bias);
    case KTK_GELU_TANH:
      return glu_rows<KTK_GELU_TANH>(glu, m, n, gate, up, stride, gate_bias, up_bias);
  }
}

// How apply's result changes with g and with u.
struct Slopes {
  float g, u;
};

// g * sigmoid(z(g)) has the slope sigmoid(z) * (1 + g * z'(g) * sigmoid(-z)).
template <ktk_activation kKind>
inline Slopes slopes(float g, float u, float alpha) {
  // Beyond these bounds the slope is 0 or 1, and products would overflow.
  const auto bounded = [](float x, float most) {
    x = x > most ? most : x;
    return x < -most ? -most : x;
  };
  float z = bounded(g, 88.0f), gz = z;  // the argument of sigmoid, and g times its slope
  if constexpr (kKind == KTK_SWIGLUOAI) z = gz = bounded(alpha * g, 88.0f);
  if constexpr (kKind == KTK_GELU_TANH) {
    const float c = bounded(g, 16.0f);
    z = 1.5957691216f * (c + 0.044715f * c * c * c);
    gz = 1.5957691216f * (c + 0.134145f * c * c * c);
  }
  const float e = exp_clamped(-z), s = 1.0f / (1.0f + e);
  const float low = z < -87.0f ? 0.0f : s;
  const float slope = low * (1.0f + gz * (e * s));
  return {slope * (kKind == KTK_SWIGLUOAI ? u + 1.0f : u), g * low};
}

template <ktk_activation kKind>
void glu_backward_rows(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up,
                       const float* dh, float* h, size_t stride, const float* gate_bias,
                       const float* up_bias, const float* weights, float* dots) {
  constexpr size_t kLanes = 16;
  const float alpha = glu->alpha, high = glu->limit, low = -glu->limit;
  const float gate_low = glu->clamp_gate_below ? low : -__builtin_inff();
  for (size_t row = 0; row < m; ++row) {
    float* __restrict g = gate + row * stride;
    float* __restrict u = up + row * stride;
    float* __restrict out = h + row * stride;
    const float* __restrict d = dh + row * stride;
    const float weight = weights[row];
    if (gate_bias) {
      for (size_t i = 0; i < n; ++i) g[i] += gate_bias[i];
    }
    if (up_bias) {
      for (size_t i = 0; i < n; ++i) u[i] += up_bias[i];
    }
    for (size_t i = 0; i < n; ++i) {
      float gi = g[i], ui = u[i];
      gi = gi > high ? high : gi;
      gi = gi < gate_low ? gate_low : gi;
      ui = ui > high ? high : ui;
      ui = ui < low ? low : ui;
      const Slopes slope = slopes<kKind>(gi, ui, alpha);
      const float weighted = weight * d[i];
      out[i] = apply<kKind>(gi, ui, alpha);
      // Nothing passes where a clamp holds a value.
      g[i] = gi == g[i] || g[i] != g[i] ? weighted * slope.g : 0.0f;
      u[i] = ui == u[i] || u[i] != u[i] ? weighted * slope.u : 0.0f;
    }
    float lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += d[i + lane] * out[i + lane];
    }
    for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += d[i] * out[i];
    float total = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
    dots[row] += total;
  }
}

void glu_backward(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, const float* dh,
                  float* h, size_t stride, const float* gate_bias, const float* up_bias,
                  const float* weights, float* dots) {
  const auto rows = [&](auto function) {
    function(glu, m, n, gate, up, dh, h, stride, gate_bias, up_bias, weights, dots);
  };
  switch (glu->kind) {
    case KTK_SILU:
      return rows(glu_backward_rows<KTK_SILU>);
    case KTK_SWIGLUOAI:
      return rows(glu_backward_rows<KTK_SWIGLUOAI>);
    case KTK_GELU_TANH:
      return rows(glu_backward_rows<KTK_GELU_TANH>);
  }
}

void add_weighted(const float* __restrict src, const float* __restrict bias, float weight, size_t n,
                  float* __restrict dst) {
  if (bias) {
    for (size_t i = 0; i < n; ++i) dst[i] += weight * (src[i] + bias[i]);
  } else {
    for (size_t i = 0; i < n; ++i) dst[i] += weight * src[i];
  }
}

void add(const float* __restrict src, size_t n, float* __restrict dst) {
  for (size_t i = 0; i < n; ++i) dst[i] += src[i];
}

void normalize(const float* src, float epsilon, size_t n, float* dst) {
  constexpr size_t kLanes = 16;
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += src[i + lane] * src[i + lane];
  }
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += src[i] * src[i];
  float total = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + epsilon);
  for (i = 0; i < n; ++i) dst[i] = src[i] * factor;
}

void multiply(const float* __restrict src, size_t n, float* __restrict dst) {
  for (size_t i = 0; i < n; ++i) dst[i] *= src[i];
}

void scale(float factor, size_t m, size_t n, float* dst, size_t stride) {
  for (size_t row = 0; row < m; ++row, dst += stride) {
    for (size_t i = 0; i < n; ++i) dst[i] *= factor;
  }
}

}  // namespace

extern "C" const ktk_ops KTK_VARIANT(ops);
extern "C" const ktk_ops KTK_VARIANT(ops) = {
    .to_f32 = to_f32,
    .from_f32 = from_f32,
    .glu = glu,
    .glu_backward = glu_backward,
    .add_weighted = add_weighted,
    .add = add,
    .normalize = normalize,
    .multiply = multiply,
    .scale = scale,
};

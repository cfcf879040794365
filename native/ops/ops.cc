// One source for every instruction set: plain loops that gcc vectorises with the flags of the
// target.
#include "ops/ops.h"

#include "ktk/target.h"
#include "ops/activation.h"

namespace {

#if defined(__aarch64__)
using Half = __fp16;  // gcc 12 has no _Float16 in C++ there
#else
using Half = _Float16;
#endif

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

// What clamps leave of gate and up, before the function or, of KTK_SWIGLUSTEP, after that of gate.
struct Bounds {
  float high, low, gate_low;

  explicit Bounds(const ktk_glu& glu)
      : high(glu.limit),
        low(-glu.limit),
        gate_low(glu.clamp_gate_below ? low : -__builtin_inff()) {}

  float gate(float g) const { return between(g, gate_low, high); }
  float up(float u) const { return between(u, low, high); }
};

// The function of gate with its clamp.
template <ktk_activation kKind>
inline float clamped_gate(const ktk_glu& glu, const Bounds& bounds, float g) {
  if constexpr (kKind == KTK_SWIGLUSTEP) return bounds.gate(of_gate<kKind>(glu, g));
  return of_gate<kKind>(glu, bounds.gate(g));
}

void add_bias(const float* __restrict bias, size_t n, float* __restrict row) {
  if (!bias) return;
  for (size_t i = 0; i < n; ++i) row[i] += bias[i];
}

// In sixteen sums, whatever vectors the target has: an order that n alone decides.
template <typename Value>
inline float sixteen_sums(size_t n, Value value) {
  constexpr size_t kLanes = 16;
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += value(i);
  float total = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

float dot(const float* a, const float* b, size_t n) {
  return sixteen_sums(n, [=](size_t i) { return a[i] * b[i]; });
}

float dot_with(const float* a, const void* b, ktk_element type, size_t n) {
  if (type == KTK_BF16) {
    const uint16_t* const in = static_cast<const uint16_t*>(b);
    return sixteen_sums(
        n, [&](size_t i) { return a[i] * from_bits(static_cast<uint32_t>(in[i]) << 16); });
  }
  if (type == KTK_F16) {
    const Half* const in = static_cast<const Half*>(b);
    return sixteen_sums(n, [&](size_t i) { return a[i] * static_cast<float>(in[i]); });
  }
  return dot(a, static_cast<const float*>(b), n);
}

float exponentials(float most, size_t n, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] = exp_clamped(x[i] - most);
  return sixteen_sums(n, [&](size_t i) { return x[i]; });
}

// Experts without a gate: the function of gate is that of up.
template <ktk_activation kKind>
void activate_rows(const ktk_glu* given, size_t m, size_t n, float* up, size_t stride,
                   const float* up_bias) {
  const ktk_glu glu = *given;
  const Bounds bounds(glu);
  for (size_t row = 0; row < m; ++row) {
    float* __restrict u = up + row * stride;
    add_bias(up_bias, n, u);
    for (size_t i = 0; i < n; ++i) u[i] = clamped_gate<kKind>(glu, bounds, u[i]);
  }
}

template <ktk_activation kKind>
void glu_rows(const ktk_glu* given, size_t m, size_t n, float* gate, float* up, size_t stride,
              const float* gate_bias, const float* up_bias) {
  const ktk_glu glu = *given;
  const Bounds bounds(glu);
  for (size_t row = 0; row < m; ++row) {
    float* __restrict g = gate + row * stride;
    float* __restrict u = up + row * stride;
    add_bias(gate_bias, n, g);
    add_bias(up_bias, n, u);
    for (size_t i = 0; i < n; ++i) {
      g[i] = clamped_gate<kKind>(glu, bounds, g[i]) * of_up<kKind>(glu, bounds.up(u[i]));
    }
  }
}

// Calls `function` with the kind of an activation, as a constant.
template <size_t kIndex = 0, class Function>
void with_kind(ktk_activation kind, Function function) {
  if constexpr (kIndex < sizeof(kActivations) / sizeof(*kActivations)) {
    constexpr ktk_activation kKind = kActivations[kIndex].kind;
    if (kind == kKind) return function.template operator()<kKind>();
    with_kind<kIndex + 1>(kind, function);
  }
}

void glu(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, size_t stride,
         const float* gate_bias, const float* up_bias) {
  with_kind(glu->kind, [&]<ktk_activation kKind>() {
    if (!gate) return activate_rows<kKind>(glu, m, n, up, stride, up_bias);
    glu_rows<kKind>(glu, m, n, gate, up, stride, gate_bias, up_bias);
  });
}

// What a clamp makes of a value. Nothing passes back where it holds one; NaN goes through.
inline bool passes(float held, float given) { return held == given || given != given; }

// The function of gate with its clamp, its derivative, and whether anything passes back.
struct OfGate {
  float value, slope;
  bool passes;
};

template <ktk_activation kKind>
inline OfGate of_gate_and_slope(const ktk_glu& glu, const Bounds& bounds, float g) {
  if constexpr (kKind == KTK_SWIGLUSTEP) {
    const float value = of_gate<kKind>(glu, g), held = bounds.gate(value);
    return {held, slope_of_gate<kKind>(glu, g), passes(held, value)};
  }
  const float held = bounds.gate(g);
  return {of_gate<kKind>(glu, held), slope_of_gate<kKind>(glu, held), passes(held, g)};
}

template <ktk_activation kKind>
void activate_backward_rows(const ktk_glu* given, size_t m, size_t n, float* up, const float* dh,
                            float* h, size_t stride, const float* up_bias, const float* weights,
                            float* dots) {
  const ktk_glu glu = *given;
  const Bounds bounds(glu);
  for (size_t row = 0; row < m; ++row) {
    float* __restrict u = up + row * stride;
    float* __restrict out = h + row * stride;
    const float* __restrict d = dh + row * stride;
    const float weight = weights[row];
    add_bias(up_bias, n, u);
    for (size_t i = 0; i < n; ++i) {
      const OfGate of = of_gate_and_slope<kKind>(glu, bounds, u[i]);
      out[i] = of.value;
      u[i] = of.passes ? weight * d[i] * of.slope : 0.0f;
    }
    dots[row] += dot(d, out, n);
  }
}

template <ktk_activation kKind>
void glu_backward_rows(const ktk_glu* given, size_t m, size_t n, float* gate, float* up,
                       const float* dh, float* h, size_t stride, const float* gate_bias,
                       const float* up_bias, const float* weights, float* dots) {
  const ktk_glu glu = *given;
  const Bounds bounds(glu);
  for (size_t row = 0; row < m; ++row) {
    float* __restrict g = gate + row * stride;
    float* __restrict u = up + row * stride;
    float* __restrict out = h + row * stride;
    const float* __restrict d = dh + row * stride;
    const float weight = weights[row];
    add_bias(gate_bias, n, g);
    add_bias(up_bias, n, u);
    for (size_t i = 0; i < n; ++i) {
      const OfGate of = of_gate_and_slope<kKind>(glu, bounds, g[i]);
      const float ui = bounds.up(u[i]), other = of_up<kKind>(glu, ui);
      const float weighted = weight * d[i];
      out[i] = of.value * other;
      g[i] = of.passes ? weighted * (of.slope * other) : 0.0f;
      u[i] = passes(ui, u[i]) ? weighted * (of.value * slope_of_up<kKind>(glu, ui)) : 0.0f;
    }
    dots[row] += dot(d, out, n);
  }
}

void glu_backward(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, const float* dh,
                  float* h, size_t stride, const float* gate_bias, const float* up_bias,
                  const float* weights, float* dots) {
  with_kind(glu->kind, [&]<ktk_activation kKind>() {
    if (!gate) {
      return activate_backward_rows<kKind>(glu, m, n, up, dh, h, stride, up_bias, weights, dots);
    }
    glu_backward_rows<kKind>(glu, m, n, gate, up, dh, h, stride, gate_bias, up_bias, weights, dots);
  });
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
  const float mean = dot(src, src, n) / static_cast<float>(n);
  const float factor = 1.0f / __builtin_sqrtf(mean + epsilon);
  for (size_t i = 0; i < n; ++i) dst[i] = src[i] * factor;
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
    .dot = dot,
    .dot_with = dot_with,
    .exponentials = exponentials,
    .scale = scale,
};

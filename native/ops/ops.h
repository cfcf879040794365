// Element-wise work between the matrix products, compiled once per instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ktk/abi.h"

// How gate and up become the input of the down projection.
typedef enum ktk_activation {
  KTK_SILU = 0,        // silu(g) * u
  KTK_SWIGLUOAI = 1,   // g * sigmoid(alpha * g) * (u + 1), gpt-oss and MiniMax-M3
  KTK_GELU_TANH = 2,   // gelu_tanh(g) * u
  KTK_GELU = 3,        // g * Phi(g) * u, Phi of the standard normal distribution
  KTK_RELU = 4,        // max(g, 0) * u, SmallThinker
  KTK_RELU2 = 5,       // max(g, 0)^2 * u
  KTK_SWIGLUSTEP = 6,  // silu(g) * u with silu(g), not g, clamped: Step-3.7
  KTK_SITU = 7,  // a tanh(g / a) sigmoid(g) * b tanh(u / b), soft caps a, b: Inkling-2, Kimi-K3
} ktk_activation;

// By the names that users give them. ktk.config says what checkpoints call them.
constexpr struct {
  const char* name;
  ktk_activation kind;
} kActivations[] = {
    {"silu", KTK_SILU},
    {"swigluoai", KTK_SWIGLUOAI},
    {"gelu_tanh", KTK_GELU_TANH},
    {"gelu", KTK_GELU},
    {"relu", KTK_RELU},
    {"relu2", KTK_RELU2},
    {"swiglustep", KTK_SWIGLUSTEP},
    {"situ", KTK_SITU},
};

// An activation with its constants. Both clamps come before the function, but for KTK_SWIGLUSTEP.
typedef struct ktk_glu {
  ktk_activation kind;
  float alpha;
  float limit;            // +inf: no clamp. Otherwise g <= limit and -limit <= u <= limit
  bool clamp_gate_below;  // also g >= -limit
  float gate_softcap;     // of KTK_SITU
  float up_softcap;       // +inf: none
} ktk_glu;

// Calls visit(name, value) for each field of ktk.MoEConfig that is one of an activation's.
template <class Visit>
void visit_fields(ktk_glu& glu, Visit visit) {
  visit("activation", glu.kind);
  visit("activation_alpha", glu.alpha);
  visit("activation_limit", glu.limit);
  visit("clamp_gate_below", glu.clamp_gate_below);
  visit("gate_softcap", glu.gate_softcap);
  visit("up_softcap", glu.up_softcap);
}

typedef struct ktk_ops {
  // n elements of KTK_F32, KTK_F16 or KTK_BF16 to f32, and back (round to nearest even).
  void (*to_f32)(const void* src, ktk_element type, size_t n, float* dst);
  void (*from_f32)(const float* src, ktk_element type, size_t n, void* dst);
  // gate[m][n] becomes the activation of (gate + gate_bias, up + up_bias); a bias may be NULL.
  // Rows are `stride` floats apart. `up` is overwritten with anything. Without a gate, which is
  // NULL then, up[m][n] becomes the function of gate of (up + up_bias).
  void (*glu)(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up, size_t stride,
              const float* gate_bias, const float* up_bias);
  // The derivative of glu. `gate` and `up` are what glu is handed, and dh the gradient of its
  // result, all [m][n]. gate and up become their own gradients times weights[row]; h becomes what
  // glu returns, and dots[row] grows by the sum of dh * h, in an order that n alone decides. `gate`
  // may be NULL.
  void (*glu_backward)(const ktk_glu* glu, size_t m, size_t n, float* gate, float* up,
                       const float* dh, float* h, size_t stride, const float* gate_bias,
                       const float* up_bias, const float* weights, float* dots);
  // dst += weight * (src + bias), n elements; bias may be NULL.
  void (*add_weighted)(const float* src, const float* bias, float weight, size_t n, float* dst);
  // dst += src.
  void (*add)(const float* src, size_t n, float* dst);
  // dst = src / sqrt(mean of src^2 + epsilon), n elements; dst may be src.
  void (*normalize)(const float* src, float epsilon, size_t n, float* dst);
  // dst *= src.
  void (*multiply)(const float* src, size_t n, float* dst);
  // The sum of a * b over n elements, in an order that n alone decides.
  float (*dot)(const float* a, const float* b, size_t n);
  // The same, where b has n elements of KTK_F32, KTK_F16 or KTK_BF16.
  float (*dot_with)(const float* a, const void* b, ktk_element type, size_t n);
  // x becomes e^(x - most), n elements. Returns their sum, in an order that n alone decides.
  float (*exponentials)(float most, size_t n, float* x);
  // dst[m][n] *= factor. Rows are `stride` floats apart.
  void (*scale)(float factor, size_t m, size_t n, float* dst, size_t stride);
} ktk_ops;

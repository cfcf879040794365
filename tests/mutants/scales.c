/* Backends that keep int8 with f16 scales per 32 columns, with int8 zero points or without: a sound
 * one, and some that take scales, or where they are, for something else.
 *
 * What is packed is the f32 value of each code, so that there is nothing to decode and nothing else
 * to get wrong. Activations are f32, and sums are double.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kColumnStep = 4, kGroup = 32 };

static size_t row_bytes(const ktk_matrix* matrix) {
  return round_up(matrix->k * sizeof(float), KTK_ALIGNMENT);
}

static size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumnStep) * row_bytes(matrix);
}

static float half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = (float)(bits & 1023), sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexpf(fraction, -24);
  return sign * ldexpf(1024 + fraction, exponent - 25);
}

static float half_flushed(uint16_t bits) { return bits & 0x7c00 ? half(bits) : 0; }
static float half_absolute(uint16_t bits) { return half(bits & 0x7fff); }
static float half_not_zero(uint16_t bits) { return bits & 0x7fff ? half(bits) : 1; }

static float value_at(const ktk_source* source, size_t n, size_t k, float (*of_scale)(uint16_t)) {
  const size_t group = k / kGroup;
  const int8_t code = ((const int8_t*)source->data + n * source->data_stride)[k];
  int zero = 0;
  if (source->zero) zero = ((const int8_t*)source->zero + n * source->zero_stride)[group];
  uint16_t scale;
  const char* scales = (const char*)source->scale + n * source->scale_stride;
  memcpy(&scale, scales + group * sizeof scale, sizeof scale);
  return (float)(code - zero) * of_scale(scale);
}

static void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                      size_t n_end, void* packed, float (*of_scale)(uint16_t)) {
  for (size_t n = n_begin; n < n_end; ++n) {
    float* out = (float*)((char*)packed + n * row_bytes(matrix));
    memset(out, 0, row_bytes(matrix));
    for (size_t k = 0; k < matrix->k; ++k) out[k] = value_at(source, n, k, of_scale);
  }
  pad(matrix, n_end, packed, row_bytes(matrix), weight_size(matrix));
}

#define PACK_WEIGHT(name, of_scale, ...)                                               \
  static void name(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, \
                   size_t n_end, void* packed) {                                       \
    ktk_source taken = *source;                                                        \
    __VA_ARGS__;                                                                       \
    pack_rows(matrix, &taken, n_begin, n_end, packed, of_scale);                       \
  }
PACK_WEIGHT(pack_weight, half, )
PACK_WEIGHT(pack_weight_flushed, half_flushed, )
PACK_WEIGHT(pack_weight_absolute, half_absolute, )
PACK_WEIGHT(pack_weight_not_zero, half_not_zero, )
PACK_WEIGHT(pack_weight_tight_scales, half,
            taken.scale_stride = round_up(matrix->k, kGroup) / kGroup * sizeof(uint16_t))
PACK_WEIGHT(pack_weight_tight_zeros, half, taken.zero_stride = round_up(matrix->k, kGroup) / kGroup)

static void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const char* in = (const char*)packed + n * row_bytes(matrix);
    memcpy(out + (n - n_begin) * out_stride, in, matrix->k * sizeof(float));
  }
}

static size_t act_size(const ktk_matrix* matrix) { return row_bytes(matrix); }

static void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  (void)matrix;
  for (size_t row = 0; row < m; ++row) {
    float* out = (float*)((char*)act + row * act_stride);
    memcpy(out + k_begin, x + row * x_stride, (k_end - k_begin) * sizeof(float));
  }
}

static void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    const char* in = (const char*)act + row * act_stride;
    memcpy(out + row * out_stride, in, matrix->k * sizeof(float));
  }
}

static void run(const ktk_matmul* mm) {
  for (size_t row = 0; row < mm->m; ++row) {
    const float* act = (const float*)((const char*)mm->act + row * mm->act_stride);
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const char* at = (const char*)mm->weight + n * row_bytes(mm->matrix);
      const float* weight = (const float*)at;
      double sum = 0;
      for (size_t k = 0; k < mm->matrix->k; ++k) sum += (double)act[k] * weight[k];
      mm->dst[row * mm->dst_stride + n - mm->n_begin] = (float)sum;
    }
  }
}

#define SCALED(zero_type) \
  {.element = KTK_I8, .scale = KTK_F16, .zero = zero_type, .group_n = 1, .group_k = kGroup}
static const ktk_format kFormats[] = {SCALED(KTK_NONE), SCALED(KTK_I8)};
static const ktk_accept kAccepts[] = {{SCALED(KTK_NONE), 0}, {SCALED(KTK_I8), 1}};

static const ktk_ukernel kUkernel = {
    .struct_size = sizeof(ktk_ukernel), .name = "dot", .m_max = SIZE_MAX, .run = run};

#define MUTANT(symbol, pack)                                            \
  static const ktk_variant symbol##_variant = {                         \
      .struct_size = sizeof(ktk_variant),                               \
      .name = "mutant",                                                 \
      .required_isa = KTK_ISA_NONE,                                     \
      .tile = {.m_step = 1, .n_step = kColumnStep, .k_step = kGroup},   \
      .act = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}, \
      .layout = "values",                                               \
      .weight_size = weight_size,                                       \
      .pack_weight = pack,                                              \
      .unpack_weight = unpack_weight,                                   \
      .act_size = act_size,                                             \
      .pack_act = pack_act,                                             \
      .unpack_act = unpack_act,                                         \
      .ukernels = &kUkernel,                                            \
      .num_ukernels = 1,                                                \
  };                                                                    \
  BACKEND(symbol, &symbol##_variant)

MUTANT(scaled, pack_weight)
MUTANT(ignores_scale_stride, pack_weight_tight_scales)
MUTANT(ignores_zero_stride, pack_weight_tight_zeros)
MUTANT(flushes_scales, pack_weight_flushed)
MUTANT(takes_scales_absolute, pack_weight_absolute)
MUTANT(reads_no_scale_as_one, pack_weight_not_zero)

/* Backends that quantise f32 to 4 bits with a scale per 32 columns: one sound, one that declares
 * the groups but takes a scale per row.
 *
 * What is packed is the f32 value of each code, so that there is nothing to decode and nothing else
 * to get wrong. The sound one searches the scale of least squared error among some below that of
 * the largest magnitude, and therefore cuts off values by more than half a step.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kColumnStep = 4, kGroup = 32, kCandidates = 16 };

static size_t row_bytes(const ktk_matrix* matrix) {
  return round_up(matrix->k * sizeof(float), KTK_ALIGNMENT);
}

static size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumnStep) * row_bytes(matrix);
}

static float coded(float value, float scale) {
  if (scale == 0) return 0;
  return (float)fmin(fmax(rint((double)value / scale), -8), 7) * scale;
}

static double squared_error(const float* values, size_t count, float scale) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double error = (double)values[i] - coded(values[i], scale);
    sum += error * error;
  }
  return sum;
}

static float scale_of_largest(const float* values, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i) largest = fmax(largest, fabs((double)values[i]));
  return (float)(largest / 7);
}

static float best_scale(const float* values, size_t count) {
  const float whole = scale_of_largest(values, count);
  float best = whole;
  for (int i = 1; i < kCandidates; ++i) {
    const float scale = whole * (float)(1 - 0.5 * i / kCandidates);
    if (squared_error(values, count, scale) < squared_error(values, count, best)) best = scale;
  }
  return best;
}

typedef float choose_scale(const float* values, size_t count);

static void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                      size_t n_end, void* packed, size_t group, choose_scale* choose) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const float* in = (const float*)((const char*)source->data + n * source->data_stride);
    float* out = (float*)((char*)packed + n * row_bytes(matrix));
    memset(out, 0, row_bytes(matrix));
    for (size_t k = 0; k < matrix->k; k += group) {
      const size_t count = matrix->k - k < group ? matrix->k - k : group;
      const float scale = choose(in + k, count);
      for (size_t i = k; i < k + count; ++i) out[i] = coded(in[i], scale);
    }
  }
  pad(matrix, n_end, packed, row_bytes(matrix), weight_size(matrix));
}

static void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  pack_rows(matrix, source, n_begin, n_end, packed, kGroup, best_scale);
}

static void pack_weight_by_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                                size_t n_end, void* packed) {
  pack_rows(matrix, source, n_begin, n_end, packed, matrix->k, scale_of_largest);
}

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
  const size_t depth = mm->matrix->k;
  for (size_t row = 0; row < mm->m; ++row) {
    const float* act = (const float*)((const char*)mm->act + row * mm->act_stride);
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const char* at = (const char*)mm->weight + n * row_bytes(mm->matrix);
      const float* weight = (const float*)at;
      double sum = 0;
      for (size_t k = 0; k < depth; ++k) sum += (double)act[k] * weight[k];
      mm->dst[row * mm->dst_stride + n - mm->n_begin] = (float)sum;
    }
  }
}

static const ktk_format kFormats[] = {
    {.element = KTK_U4, .scale = KTK_F32, .zero = KTK_NONE, .group_n = 1, .group_k = kGroup}};
static const ktk_accept kAccepts[] = {
    {.given = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}, .stored = 0}};

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

MUTANT(least_squares, pack_weight)
MUTANT(one_scale_per_row, pack_weight_by_rows)

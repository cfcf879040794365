/* What backends have that pack the f32 value of each code, so that there is nothing to decode and
 * nothing else to get wrong: codes in groups of 32 columns, activations in f32, sums in double. A
 * mutant says how weights are packed.
 */
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kColumnStep = 4, kGroup = 32 };

static inline size_t row_bytes(const ktk_matrix* matrix) {
  return round_up(matrix->k * sizeof(float), KTK_ALIGNMENT);
}

static inline size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumnStep) * row_bytes(matrix);
}

static inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                 size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const char* in = (const char*)packed + n * row_bytes(matrix);
    memcpy(out + (n - n_begin) * out_stride, in, matrix->k * sizeof(float));
  }
}

static inline size_t act_size(const ktk_matrix* matrix) { return row_bytes(matrix); }

static inline void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                            const float* x, size_t x_stride, void* act, size_t act_stride) {
  (void)matrix;
  for (size_t row = 0; row < m; ++row) {
    float* out = (float*)((char*)act + row * act_stride);
    memcpy(out + k_begin, x + row * x_stride, (k_end - k_begin) * sizeof(float));
  }
}

static inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act,
                              size_t act_stride, float* out, size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    const char* in = (const char*)act + row * act_stride;
    memcpy(out + row * out_stride, in, matrix->k * sizeof(float));
  }
}

static inline void run(const ktk_matmul* mm) {
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

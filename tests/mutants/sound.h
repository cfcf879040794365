/* A sound backend: it stores bf16 weights and activations row by row, in packed rows of whole cache
 * lines that are zero behind the last column, and behind the last row.
 *
 * A mutant is its table with one function exchanged.
 */
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kRowStep = 2, kColumnStep = 4, kDepthStep = 8 };

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline int is_finite(uint32_t bits) { return (bits & 0x7f800000) != 0x7f800000; }

static inline uint16_t nearest_even(float value) {
  const uint32_t bits = bits_of(value);
  if (!is_finite(bits)) return (uint16_t)(bits >> 16 | ((bits & 0x7fffff) != 0) << 6);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumnStep) * round_up(matrix->k, 32) * sizeof(uint16_t);
}

static inline size_t weight_at(const ktk_matrix* matrix, size_t n) {
  return n * round_up(matrix->k, 32);
}

static inline void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                             size_t n_end, void* packed, uint16_t (*to_bf16)(float)) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const char* row = (const char*)source->data + n * source->data_stride;
    uint16_t* out = (uint16_t*)packed + weight_at(matrix, n);
    for (size_t k = 0; k < matrix->k; ++k) {
      float value;
      if (source->format.element == KTK_BF16) {
        value = float_of(((const uint16_t*)row)[k]);
      } else {
        value = ((const float*)row)[k];
      }
      out[k] = to_bf16(value);
    }
  }
}

/* Zeros behind the last column, and behind the last row. */
static inline void pad_rows(const ktk_matrix* matrix, size_t n_begin, size_t n_end, void* packed) {
  const size_t end = n_end >= matrix->n ? round_up(matrix->n, kColumnStep) : n_end;
  for (size_t n = n_begin; n < end; ++n) {
    uint16_t* row = (uint16_t*)packed + weight_at(matrix, n);
    const size_t used = n < matrix->n ? matrix->k : 0;
    memset(row + used, 0, (round_up(matrix->k, 32) - used) * sizeof *row);
  }
}

#define PACK_WEIGHT(name, to_bf16, end)                                                       \
  static inline void name(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, \
                          size_t n_end, void* packed) {                                       \
    pack_rows(matrix, source, n_begin, end, packed, to_bf16);                                 \
    pad_rows(matrix, n_begin, end, packed);                                                   \
  }
PACK_WEIGHT(pack_weight, nearest_even, n_end)

static inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                 size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const uint16_t* in = (const uint16_t*)packed + weight_at(matrix, n);
    for (size_t k = 0; k < matrix->k; ++k) out[(n - n_begin) * out_stride + k] = float_of(in[k]);
  }
}

static inline void export_rows(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                               size_t n_end, const ktk_export* target, size_t count) {
  for (size_t n = n_begin; n < n_end; ++n) {
    char* row = (char*)target->data + n * target->data_stride;
    memset(row, 0, matrix->k * sizeof(uint16_t));
    memcpy(row, (const uint16_t*)packed + weight_at(matrix, n), count * sizeof(uint16_t));
  }
}

static inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                 size_t n_end, const ktk_export* target) {
  export_rows(matrix, packed, n_begin, n_end, target, matrix->k);
}

static inline size_t act_size(const ktk_matrix* matrix) {
  return round_up(2 * matrix->k, KTK_ALIGNMENT);
}

static inline void pack_rows_of_act(size_t m, size_t k_begin, size_t k_end, const float* x,
                                    size_t x_stride, void* act, size_t act_stride,
                                    uint16_t (*to_bf16)(float)) {
  for (size_t row = 0; row < m; ++row) {
    uint16_t* out = (uint16_t*)((char*)act + row * act_stride);
    for (size_t k = k_begin; k < k_end; ++k) out[k] = to_bf16(x[row * x_stride + k - k_begin]);
  }
}

#define PACK_ACT(name, to_bf16, begin)                                                          \
  static inline void name(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,     \
                          const float* x, size_t x_stride, void* act, size_t act_stride) {      \
    (void)matrix;                                                                               \
    pack_rows_of_act(m, begin, begin + k_end - k_begin, x, x_stride, act, act_stride, to_bf16); \
  }
PACK_ACT(pack_act, nearest_even, k_begin)

static inline const uint16_t* act_row(const void* act, size_t act_stride, size_t row) {
  return (const uint16_t*)((const char*)act + row * act_stride);
}

static inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act,
                              size_t act_stride, float* out, size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    const uint16_t* in = act_row(act, act_stride, row);
    for (size_t k = 0; k < matrix->k; ++k) out[row * out_stride + k] = float_of(in[k]);
  }
}

static inline float dot(const uint16_t* act, const uint16_t* weight, size_t depth, int reversed) {
  float sum = 0;
  for (size_t i = 0; i < depth; ++i) {
    const size_t k = reversed ? depth - 1 - i : i;
    sum += float_of(act[k]) * float_of(weight[k]);
  }
  return sum;
}

static inline void run(const ktk_matmul* mm) {
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    float* dst = mm->dst + row * mm->dst_stride;
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const uint16_t* weight = (const uint16_t*)mm->weight + weight_at(mm->matrix, n);
      dst[n - mm->n_begin] = dot(act, weight, mm->matrix->k, 0);
    }
  }
}

#define UKERNELS(gemv, gemm)                                                             \
  .num_ukernels = 2, .ukernels = (const ktk_ukernel[]) {                                 \
    {.struct_size = sizeof(ktk_ukernel), .name = "gemv", .m_max = 1, .run = gemv}, {     \
      .struct_size = sizeof(ktk_ukernel), .name = "gemm", .m_max = SIZE_MAX, .run = gemm \
    }                                                                                    \
  }

#define BF16 {.element = KTK_BF16, .scale = KTK_NONE, .zero = KTK_NONE}

static const ktk_format kFormats[] = {BF16};
static const ktk_accept kAccepts[] = {
    {.given = BF16, .stored = 0},
    {.given = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}, .stored = 0},
};

/* Later designators win: a mutant names what it exchanges. */
#define SOUND                                                                             \
  .struct_size = sizeof(ktk_variant), .name = "sound", .required_isa = KTK_ISA_NONE,      \
  .tile = {.m_step = kRowStep, .n_step = kColumnStep, .k_step = kDepthStep}, .act = BF16, \
  .layout = "rows", .weight_size = weight_size, .pack_weight = pack_weight,               \
  .unpack_weight = unpack_weight, .act_size = act_size, .pack_act = pack_act,             \
  .unpack_act = unpack_act, UKERNELS(run, run), .export_weight = export_weight

static const ktk_variant kSound = {SOUND};

/* A backend of one variant. */
#define ALONE(symbol, ...)                                                            \
  static const ktk_variant symbol##_variant = {SOUND, .name = "mutant", __VA_ARGS__}; \
  BACKEND(symbol, &symbol##_variant)

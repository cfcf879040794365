/* Backends that are right but for one thing each, to prove that the conformance kit notices it.
 *
 * The sound one stores bf16 weights and activations row by row. A mutant is its table with one
 * function exchanged; which property it breaks is said in test_mutants.py.
 */
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kRowStep = 2, kColumnStep = 4, kDepthStep = 8 };

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static int is_finite(uint32_t bits) { return (bits & 0x7f800000) != 0x7f800000; }

/* --- to bf16 --------------------------------------------------------------------------------- */

static uint16_t nearest_even(float value) {
  const uint32_t bits = bits_of(value);
  if (!is_finite(bits)) return (uint16_t)(bits >> 16 | ((bits & 0x7fffff) != 0) << 6);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static uint16_t truncated(float value) { return (uint16_t)(bits_of(value) >> 16); }
static uint16_t nearest_away(float value) { return (uint16_t)((bits_of(value) + 0x8000) >> 16); }
static uint16_t nearest_flushed(float value) {
  return bits_of(value) & 0x7f800000 ? nearest_even(value) : 0;
}
static uint16_t nearest_finite(float value) {
  return is_finite(bits_of(value)) ? nearest_even(value) : 0;
}

/* --- weight codec ---------------------------------------------------------------------------- */

static size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumnStep) * round_up(matrix->k, 32) * sizeof(uint16_t);
}

static size_t weight_at(const ktk_matrix* matrix, size_t n) { return n * round_up(matrix->k, 32); }

static void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
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

#define PACK_WEIGHT(name, to_bf16, end)                                                \
  static void name(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, \
                   size_t n_end, void* packed) {                                       \
    pack_rows(matrix, source, n_begin, end, packed, to_bf16);                          \
  }
PACK_WEIGHT(pack_weight, nearest_even, n_end)
PACK_WEIGHT(pack_weight_truncated, truncated, n_end)
PACK_WEIGHT(pack_weight_away, nearest_away, n_end)
PACK_WEIGHT(pack_weight_flushed, nearest_flushed, n_end)
PACK_WEIGHT(pack_weight_finite, nearest_finite, n_end)
PACK_WEIGHT(pack_weight_one_more, nearest_even, n_end + (n_end < matrix->n))

static void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const uint16_t* in = (const uint16_t*)packed + weight_at(matrix, n);
    for (size_t k = 0; k < matrix->k; ++k) out[(n - n_begin) * out_stride + k] = float_of(in[k]);
  }
}

static void unpack_weight_from_zero(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                    size_t n_end, float* out, size_t out_stride) {
  unpack_weight(matrix, packed, 0, n_end - n_begin, out, out_stride);
}

/* Every value with its sign changed: sound by itself, no match for the others of its layout. */
static uint16_t negated(float value) { return nearest_even(value) ^ 0x8000; }
PACK_WEIGHT(pack_weight_negated, negated, n_end)
static void unpack_weight_negated(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                  size_t n_end, float* out, size_t out_stride) {
  unpack_weight(matrix, packed, n_begin, n_end, out, out_stride);
  for (size_t n = 0; n < n_end - n_begin; ++n) {
    for (size_t k = 0; k < matrix->k; ++k) out[n * out_stride + k] *= -1;
  }
}

static void export_rows(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                        const ktk_target* target, size_t count) {
  for (size_t n = n_begin; n < n_end; ++n) {
    char* row = (char*)target->data + n * target->data_stride;
    memset(row, 0, matrix->k * sizeof(uint16_t));
    memcpy(row, (const uint16_t*)packed + weight_at(matrix, n), count * sizeof(uint16_t));
  }
}

static void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_target* target) {
  export_rows(matrix, packed, n_begin, n_end, target, matrix->k);
}
static void export_weight_short(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                size_t n_end, const ktk_target* target) {
  export_rows(matrix, packed, n_begin, n_end, target, matrix->k - 1);
}

/* --- activation codec ------------------------------------------------------------------------ */

static size_t act_size(const ktk_matrix* matrix) { return round_up(2 * matrix->k, KTK_ALIGNMENT); }

static void pack_rows_of_act(size_t m, size_t k_begin, size_t k_end, const float* x,
                             size_t x_stride, void* act, size_t act_stride,
                             uint16_t (*to_bf16)(float)) {
  for (size_t row = 0; row < m; ++row) {
    uint16_t* out = (uint16_t*)((char*)act + row * act_stride);
    for (size_t k = k_begin; k < k_end; ++k) out[k] = to_bf16(x[row * x_stride + k - k_begin]);
  }
}

#define PACK_ACT(name, to_bf16, begin)                                                          \
  static void name(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,            \
                   const float* x, size_t x_stride, void* act, size_t act_stride) {             \
    (void)matrix;                                                                               \
    pack_rows_of_act(m, begin, begin + k_end - k_begin, x, x_stride, act, act_stride, to_bf16); \
  }
PACK_ACT(pack_act, nearest_even, k_begin)
PACK_ACT(pack_act_truncated, truncated, k_begin)
PACK_ACT(pack_act_finite, nearest_finite, k_begin)
PACK_ACT(pack_act_from_zero, nearest_even, 0)

static const uint16_t* act_row(const void* act, size_t act_stride, size_t row) {
  return (const uint16_t*)((const char*)act + row * act_stride);
}

static void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    const uint16_t* in = act_row(act, act_stride, row);
    for (size_t k = 0; k < matrix->k; ++k) out[row * out_stride + k] = float_of(in[k]);
  }
}

/* --- micro-kernels --------------------------------------------------------------------------- */

typedef struct {
  int odd_depth, reversed, reversed_batch, from_zero, one_column_more, nan_leaks, reads_padding;
  float sign;
} fault;

static float dot(const uint16_t* act, const uint16_t* weight, size_t depth, int reversed) {
  float sum = 0;
  for (size_t i = 0; i < depth; ++i) {
    const size_t k = reversed ? depth - 1 - i : i;
    sum += float_of(act[k]) * float_of(weight[k]);
  }
  return sum;
}

static void matmul(const ktk_matmul* mm, fault is) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t depth = is.odd_depth && matrix->k > 1 ? matrix->k & ~(size_t)1 : matrix->k;
  const int reversed = is.reversed || (is.reversed_batch && mm->m > 1);
  const size_t width = round_up(mm->n_end - mm->n_begin, kColumnStep);
  const float nan = float_of(0x7fc0);
  int found_nan = 0;
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    for (size_t k = 0; k < matrix->k; ++k) found_nan |= float_of(act[k]) != float_of(act[k]);
  }
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    float* dst = mm->dst + row * mm->dst_stride;
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const size_t column = is.from_zero ? n - mm->n_begin : n;
      const uint16_t* weight = (const uint16_t*)mm->weight + weight_at(matrix, column);
      dst[n - mm->n_begin] = is.sign * dot(act, weight, depth, reversed);
      if (is.nan_leaks && found_nan) dst[n - mm->n_begin] = nan;
    }
    if (is.one_column_more && width < mm->dst_stride) dst[width] = 0;
    if (is.reads_padding && mm->m % kRowStep &&
        act_row(mm->act, mm->act_stride, mm->m)[0] == 0xffff) {
      dst[0] = nan;
    }
  }
}

#define RUN(name, ...) \
  static void name(const ktk_matmul* mm) { matmul(mm, (fault){.sign = 1, __VA_ARGS__}); }
RUN(run, .odd_depth = 0)
RUN(run_odd_depth, .odd_depth = 1)
RUN(run_reversed, .reversed = 1)
RUN(run_reversed_batch, .reversed_batch = 1)
RUN(run_from_zero, .from_zero = 1)
RUN(run_one_column_more, .one_column_more = 1)
RUN(run_nan_leaks, .nan_leaks = 1)
RUN(run_reads_padding, .reads_padding = 1)
static void run_negated(const ktk_matmul* mm) { matmul(mm, (fault){.sign = -1}); }

/* --- tables ---------------------------------------------------------------------------------- */

#define UKERNELS(gemv, gemm)                                                             \
  .num_ukernels = 2, .ukernels = (const ktk_ukernel[]) {                                 \
    {.struct_size = sizeof(ktk_ukernel), .name = "gemv", .m_max = 1, .run = gemv}, {     \
      .struct_size = sizeof(ktk_ukernel), .name = "gemm", .m_max = SIZE_MAX, .run = gemm \
    }                                                                                    \
  }

#define BF16 {.element = KTK_BF16, .scale = KTK_NONE, .zero = KTK_NONE}

/* Later designators win: a mutant names what it exchanges. */
#define SOUND                                                                             \
  .struct_size = sizeof(ktk_variant), .name = "sound", .required_isa = KTK_ISA_NONE,      \
  .tile = {.m_step = kRowStep, .n_step = kColumnStep, .k_step = kDepthStep}, .act = BF16, \
  .layout = "rows", .weight_size = weight_size, .pack_weight = pack_weight,               \
  .unpack_weight = unpack_weight, .act_size = act_size, .pack_act = pack_act,             \
  .unpack_act = unpack_act, UKERNELS(run, run), .export_weight = export_weight

static const ktk_format kFormats[] = {BF16};
static const ktk_accept kAccepts[] = {
    {.given = BF16, .stored = 0},
    {.given = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}, .stored = 0},
};

static const ktk_variant kSound = {SOUND};

/* Alone: one variant. Beside: a second variant next to the sound one. */
#define ALONE(symbol, ...)                                                            \
  static const ktk_variant symbol##_variant = {SOUND, .name = "mutant", __VA_ARGS__}; \
  BACKEND(symbol, &symbol##_variant)
#define BESIDE(symbol, ...)                                                           \
  static const ktk_variant symbol##_variant = {SOUND, .name = "mutant", __VA_ARGS__}; \
  BACKEND(symbol, &kSound, &symbol##_variant)

BACKEND(sound, &kSound)
ALONE(drops_odd_depth, UKERNELS(run_odd_depth, run_odd_depth))
ALONE(truncates_weights, .pack_weight = pack_weight_truncated)
ALONE(truncates_acts, .pack_act = pack_act_truncated)
ALONE(flushes_subnormals, .pack_weight = pack_weight_flushed)
ALONE(packs_one_row_more, .pack_weight = pack_weight_one_more)
ALONE(unpacks_from_row_zero, .unpack_weight = unpack_weight_from_zero)
ALONE(exports_one_column_less, .export_weight = export_weight_short)
ALONE(packs_acts_at_zero, .pack_act = pack_act_from_zero)
ALONE(loses_nan_weights, .pack_weight = pack_weight_finite)
ALONE(loses_nan, .pack_act = pack_act_finite)
ALONE(depends_on_batch, UKERNELS(run_reversed_batch, run_reversed_batch))
ALONE(kernels_disagree, UKERNELS(run_reversed, run))
ALONE(ignores_n_begin, UKERNELS(run_from_zero, run_from_zero))
ALONE(writes_outside, UKERNELS(run_one_column_more, run_one_column_more))
ALONE(leaks_nan, UKERNELS(run_nan_leaks, run_nan_leaks))
ALONE(reads_padding, UKERNELS(run_reads_padding, run_reads_padding))
BESIDE(stores_negated, .pack_weight = pack_weight_negated, .unpack_weight = unpack_weight_negated,
       UKERNELS(run_negated, run_negated), .export_weight = NULL)
BESIDE(rounds_ties_away, .layout = "other rows", .pack_weight = pack_weight_away)

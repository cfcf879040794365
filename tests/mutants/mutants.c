/* Backends that compute or store one thing wrongly, to prove that the conformance kit notices it.
 * Which property each of them breaks is said in test_mutants.py.
 */
#include <stdlib.h>

#include "sound.h"

/* --- to bf16 --------------------------------------------------------------------------------- */

static uint16_t truncated(float value) { return (uint16_t)(bits_of(value) >> 16); }
static uint16_t nearest_away(float value) { return (uint16_t)((bits_of(value) + 0x8000) >> 16); }
static uint16_t nearest_flushed(float value) {
  return bits_of(value) & 0x7f800000 ? nearest_even(value) : 0;
}
static uint16_t nearest_finite(float value) {
  return is_finite(bits_of(value)) ? nearest_even(value) : 0;
}

static uint16_t nearest_saturated(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) != 0x7f800000) return nearest_even(value);
  return (uint16_t)((bits >> 16 & 0x8000) | 0x7f7f);
}

/* --- weight codec ---------------------------------------------------------------------------- */

PACK_WEIGHT(pack_weight_truncated, truncated, n_end)
PACK_WEIGHT(pack_weight_away, nearest_away, n_end)
PACK_WEIGHT(pack_weight_flushed, nearest_flushed, n_end)
PACK_WEIGHT(pack_weight_finite, nearest_finite, n_end)
PACK_WEIGHT(pack_weight_saturated, nearest_saturated, n_end)
PACK_WEIGHT(pack_weight_one_more, nearest_even, n_end + (n_end < matrix->n))

static void pack_weight_without_padding(const ktk_matrix* matrix, const ktk_source* source,
                                        size_t n_begin, size_t n_end, void* packed) {
  pack_rows(matrix, source, n_begin, n_end, packed, nearest_even);
}

/* Rows of f32, which are nearly always given tight, unlike parts of bf16 checkpoints. */
static void pack_weight_tight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                              size_t n_end, void* packed) {
  ktk_source tight = *source;
  if (source->format.element == KTK_F32) tight.data_stride = matrix->k * sizeof(float);
  pack_weight(matrix, &tight, n_begin, n_end, packed);
}

static void unpack_weight_tight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                size_t n_end, float* out, size_t out_stride) {
  (void)out_stride;
  unpack_weight(matrix, packed, n_begin, n_end, out, matrix->k);
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

static void export_weight_from_zero(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                    size_t n_end, const ktk_export* target) {
  ktk_export moved = *target;
  moved.data = (char*)target->data + n_begin * target->data_stride;
  export_weight(matrix, packed, 0, n_end - n_begin, &moved);
}

static void export_weight_tight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                size_t n_end, const ktk_export* target) {
  ktk_export tight = *target;
  tight.data_stride = matrix->k * sizeof(uint16_t);
  export_weight(matrix, packed, n_begin, n_end, &tight);
}

static void export_weight_short(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                size_t n_end, const ktk_export* target) {
  export_rows(matrix, packed, n_begin, n_end, target, matrix->k - 1);
}

static void export_weight_more(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                               size_t n_end, const ktk_export* target) {
  export_weight(matrix, packed, n_begin, n_end < matrix->n ? n_end + 1 : n_end, target);
}

static void export_weight_before(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                 size_t n_end, const ktk_export* target) {
  export_weight(matrix, packed, n_begin ? n_begin - 1 : 0, n_end, target);
}

static void export_weight_behind(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                 size_t n_end, const ktk_export* target) {
  export_weight(matrix, packed, n_begin, n_end, target);
  /* Not behind the last row, where memory ends. */
  for (size_t n = n_begin; n < n_end && n + 1 < matrix->n; ++n) {
    char* end = (char*)target->data + n * target->data_stride + matrix->k * sizeof(uint16_t);
    if (target->data_stride > matrix->k * sizeof(uint16_t)) *end = 0;
  }
}

/* --- activation codec ------------------------------------------------------------------------ */

PACK_ACT(pack_act_truncated, truncated, k_begin)
PACK_ACT(pack_act_finite, nearest_finite, k_begin)
PACK_ACT(pack_act_from_zero, nearest_even, 0)

/* Looks for values that are not finite in the first column only. */
static void pack_act_later_finite(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                                  const float* x, size_t x_stride, void* act, size_t act_stride) {
  pack_act(matrix, m, k_begin, k_end, x, x_stride, act, act_stride);
  for (size_t row = 0; row < m; ++row) {
    uint16_t* out = (uint16_t*)((char*)act + row * act_stride);
    for (size_t k = k_begin > 0 ? k_begin : 1; k < k_end; ++k) {
      out[k] = nearest_finite(x[row * x_stride + k - k_begin]);
    }
  }
}

static void unpack_act_tight(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                             float* out, size_t out_stride) {
  (void)out_stride;
  unpack_act(matrix, m, act, act_stride, out, matrix->k);
}

/* --- micro-kernels --------------------------------------------------------------------------- */

typedef struct {
  int odd_depth, reversed, reversed_batch, from_zero, one_column_more, nan_leaks, reads_padding;
  float sign;
} fault;

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
RUN(run_odd_depth, .odd_depth = 1)
RUN(run_reversed, .reversed = 1)
RUN(run_reversed_batch, .reversed_batch = 1)
RUN(run_from_zero, .from_zero = 1)
RUN(run_one_column_more, .one_column_more = 1)
RUN(run_nan_leaks, .nan_leaks = 1)
RUN(run_reads_padding, .reads_padding = 1)
static void run_negated(const ktk_matmul* mm) { matmul(mm, (fault){.sign = -1}); }

/* Decodes a matrix once, and knows it again by its address. A new one begins with its act_size().
 */
static __thread struct {
  const void* weight;
  float* values;
} known;
static size_t act_size_forgetting(const ktk_matrix* matrix) {
  known.weight = NULL;
  return act_size(matrix);
}
static void run_known(const ktk_matmul* mm) {
  const size_t k = mm->matrix->k;
  if (known.weight != mm->weight) {
    known.weight = mm->weight;
    known.values = realloc(known.values, mm->matrix->n * k * sizeof(float));
    unpack_weight(mm->matrix, mm->weight, 0, mm->matrix->n, known.values, k);
  }
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      float sum = 0;
      for (size_t i = 0; i < k; ++i) sum += float_of(act[i]) * known.values[n * k + i];
      mm->dst[row * mm->dst_stride + n - mm->n_begin] = sum;
    }
  }
}

/* --- tables ---------------------------------------------------------------------------------- */

/* A second variant next to the sound one. */
#define BESIDE(symbol, ...)                                                           \
  static const ktk_variant symbol##_variant = {SOUND, .name = "mutant", __VA_ARGS__}; \
  BACKEND(symbol, &kSound, &symbol##_variant)

BACKEND(sound, &kSound)
ALONE(drops_odd_depth, UKERNELS(run_odd_depth, run_odd_depth))
ALONE(truncates_weights, .pack_weight = pack_weight_truncated)
ALONE(truncates_acts, .pack_act = pack_act_truncated)
ALONE(flushes_subnormals, .pack_weight = pack_weight_flushed)
ALONE(packs_one_row_more, .pack_weight = pack_weight_one_more)
ALONE(leaves_padding, .pack_weight = pack_weight_without_padding)
ALONE(ignores_data_stride, .pack_weight = pack_weight_tight)
ALONE(unpacks_tight, .unpack_weight = unpack_weight_tight)
ALONE(decodes_tight, .unpack_act = unpack_act_tight)
ALONE(unpacks_from_row_zero, .unpack_weight = unpack_weight_from_zero)
ALONE(exports_one_column_less, .export_weight = export_weight_short)
ALONE(exports_from_row_zero, .export_weight = export_weight_from_zero)
ALONE(exports_tight, .export_weight = export_weight_tight)
ALONE(exports_one_row_more, .export_weight = export_weight_more)
ALONE(exports_one_row_before, .export_weight = export_weight_before)
ALONE(exports_behind_rows, .export_weight = export_weight_behind)
ALONE(packs_acts_at_zero, .pack_act = pack_act_from_zero)
ALONE(loses_nan_weights, .pack_weight = pack_weight_finite)
ALONE(saturates_infinity, .pack_weight = pack_weight_saturated)
ALONE(loses_nan, .pack_act = pack_act_finite)
ALONE(loses_later_nan, .pack_act = pack_act_later_finite)
ALONE(remembers_weights, .act_size = act_size_forgetting, UKERNELS(run_known, run_known))
ALONE(depends_on_batch, UKERNELS(run_reversed_batch, run_reversed_batch))
ALONE(kernels_disagree, UKERNELS(run_reversed, run))
ALONE(ignores_n_begin, UKERNELS(run_from_zero, run_from_zero))
ALONE(writes_outside, UKERNELS(run_one_column_more, run_one_column_more))
ALONE(leaks_nan, UKERNELS(run_nan_leaks, run_nan_leaks))
ALONE(reads_padding, UKERNELS(run_reads_padding, run_reads_padding))
BESIDE(stores_negated, .pack_weight = pack_weight_negated, .unpack_weight = unpack_weight_negated,
       UKERNELS(run_negated, run_negated), .export_weight = NULL)
BESIDE(rounds_ties_away, .layout = "other rows", .pack_weight = pack_weight_away)

/* Backends that quantise f32 to 4 bits with a scale per 32 columns: one sound, one that declares
 * the groups but takes a scale per row.
 *
 * The sound one searches the scale of least squared error among some below that of the largest
 * magnitude, and therefore cuts off values by more than half a step.
 */
#include <math.h>

#include "values.h"

enum { kCandidates = 16 };

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

static const ktk_format kFormats[] = {
    {.element = KTK_U4, .scale = KTK_F32, .zero = KTK_NONE, .group_n = 1, .group_k = kGroup}};
static const ktk_accept kAccepts[] = {
    {.given = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}, .stored = 0}};

MUTANT(least_squares, pack_weight)
MUTANT(one_scale_per_row, pack_weight_by_rows)

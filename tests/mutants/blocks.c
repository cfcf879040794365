/* Backends that keep ggml's Q8_0 and Q4_K blocks as they come, and f32 beside them: a sound one,
 * one that reads nibbles in the wrong order, and one whose activations fit their own weights only.
 *
 * Blocks meet int8 activations with a scale per 32, f32 meets f32: act_format says so. There is no
 * packing: a row of weights is decoded where it is multiplied, in double.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

enum { kColumnStep = 4, kGroup = 32, kQ8 = KTK_GGML + 8, kQ4K = KTK_GGML + 12 };

static int is_f32(const ktk_matrix* matrix) { return matrix->format.element == KTK_F32; }

/* --- weights: rows as they are given --------------------------------------------------------- */

static size_t row_bytes(const ktk_matrix* matrix) {
  if (is_f32(matrix)) return matrix->k * sizeof(float);
  return matrix->format.element == kQ8 ? matrix->k / 32 * 34 : matrix->k / 256 * 144;
}

static size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n * row_bytes(matrix), KTK_ALIGNMENT);
}

static void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  const size_t bytes = row_bytes(matrix);
  for (size_t n = n_begin; n < n_end; ++n) {
    memcpy((char*)packed + n * bytes, (const char*)source->data + n * source->data_stride, bytes);
  }
  pad(matrix, n_end, packed, bytes, weight_size(matrix));
}

static float half(const uint8_t* at) {
  const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31;
  const float fraction = (float)(bits & 1023), sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexpf(fraction, -24);
  return sign * ldexpf(1024 + fraction, exponent - 25);
}

static float value_q8(const uint8_t* block, size_t i) {
  return half(block) * (float)(int8_t)block[2 + i];
}

static float value_q4k(const uint8_t* block, size_t i, int swapped) {
  const uint8_t* s = block + 4;
  const size_t group = i / 32;
  int scale, min;
  if (group < 4) {
    scale = s[group] & 63;
    min = s[group + 4] & 63;
  } else {
    scale = (s[group + 4] & 15) | s[group - 4] >> 6 << 4;
    min = s[group + 4] >> 4 | s[group] >> 6 << 4;
  }
  const uint8_t byte = block[16 + i / 64 * 32 + i % 32];
  const int code = (int)(group % 2) != swapped ? byte >> 4 : byte & 15;
  const float product = half(block) * (float)scale, offset = half(block + 2) * (float)min;
  return product * (float)code - offset;
}

static float value_at(const ktk_matrix* matrix, const void* packed, size_t n, size_t k,
                      int swapped) {
  const uint8_t* row = (const uint8_t*)packed + n * row_bytes(matrix);
  if (is_f32(matrix)) {
    float value;
    memcpy(&value, row + k * sizeof value, sizeof value);
    return value;
  }
  if (matrix->format.element == kQ8) return value_q8(row + k / 32 * 34, k % 32);
  return value_q4k(row + k / 256 * 144, k % 256, swapped);
}

static void unpack_rows(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                        float* out, size_t out_stride, int swapped) {
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    for (size_t k = 0; k < matrix->k; ++k) out[k] = value_at(matrix, packed, n, k, swapped);
  }
}

#define UNPACK_WEIGHT(name, swapped)                                                           \
  static void name(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end, \
                   float* out, size_t out_stride) {                                            \
    unpack_rows(matrix, packed, n_begin, n_end, out, out_stride, swapped);                     \
  }
UNPACK_WEIGHT(unpack_weight, 0)
UNPACK_WEIGHT(unpack_weight_swapped, 1)

/* --- activations: [scales][codes], or floats ------------------------------------------------- */

static void act_format(const ktk_matrix* matrix, ktk_format* format) {
  const ktk_format f32 = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE};
  if (is_f32(matrix)) *format = f32;
}

static size_t act_size(const ktk_matrix* matrix) {
  const size_t k = matrix->k, scales = round_up(k, kGroup) / kGroup * sizeof(float);
  return round_up(is_f32(matrix) ? k * sizeof(float) : scales + k, KTK_ALIGNMENT);
}

static int8_t* codes_of(const ktk_matrix* matrix, void* row) {
  return (int8_t*)row + matrix->k / kGroup * sizeof(float);
}

static void pack_group(const float* x, size_t count, float* scale, int8_t* codes, float sign) {
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!isfinite(x[i])) largest = NAN;
    if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
  }
  *scale = largest / 127;
  for (size_t i = 0; i < count; ++i) {
    const double code = *scale > 0 ? rint((double)x[i] / *scale) : 0;
    codes[i] = (int8_t)(sign * (float)fmin(fmax(code, -127), 127));
  }
}

static void pack_rows(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                      const float* x, size_t x_stride, void* act, size_t act_stride, float sign) {
  for (size_t row = 0; row < m; ++row, x += x_stride) {
    char* out = (char*)act + row * act_stride;
    if (is_f32(matrix)) {
      memcpy((float*)out + k_begin, x, (k_end - k_begin) * sizeof(float));
      continue;
    }
    for (size_t k = k_begin; k < k_end; k += kGroup) {
      pack_group(x + k - k_begin, kGroup, (float*)out + k / kGroup, codes_of(matrix, out) + k,
                 sign);
    }
  }
}

static float act_at(const ktk_matrix* matrix, const void* row, size_t k, float sign) {
  const float* floats = (const float*)row;
  if (is_f32(matrix)) return floats[k];
  return floats[k / kGroup] * (sign * (float)codes_of(matrix, (void*)row)[k]);
}

static void unpack_rows_of_act(const ktk_matrix* matrix, size_t m, const void* act,
                               size_t act_stride, float* out, size_t out_stride, float sign) {
  for (size_t row = 0; row < m; ++row, out += out_stride) {
    const char* in = (const char*)act + row * act_stride;
    for (size_t k = 0; k < matrix->k; ++k) out[k] = act_at(matrix, in, k, sign);
  }
}

/* --- products -------------------------------------------------------------------------------- */

static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
  (void)m;
  return matrix->k * sizeof(float);
}

static void matmul(const ktk_matmul* mm, int swapped, float sign) {
  const ktk_matrix* matrix = mm->matrix;
  float* weight = (float*)mm->scratch;
  for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
    unpack_rows(matrix, mm->weight, n, n + 1, weight, matrix->k, swapped);
    for (size_t row = 0; row < mm->m; ++row) {
      const char* act = (const char*)mm->act + row * mm->act_stride;
      double sum = 0;
      for (size_t k = 0; k < matrix->k; ++k) {
        sum += (double)act_at(matrix, act, k, sign) * weight[k];
      }
      mm->dst[row * mm->dst_stride + n - mm->n_begin] = (float)sum;
    }
  }
}

/* All codes of Q4_K's activations have the other sign, and its products take that back. */
static float sign_for(const ktk_matrix* matrix, int own) {
  return own && matrix->format.element == kQ4K ? -1 : 1;
}

#define ACTS(suffix, own)                                                                        \
  static void pack_act##suffix(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, \
                               const float* x, size_t x_stride, void* act, size_t act_stride) {  \
    const float sign = sign_for(matrix, own);                                                    \
    pack_rows(matrix, m, k_begin, k_end, x, x_stride, act, act_stride, sign);                    \
  }                                                                                              \
  static void unpack_act##suffix(const ktk_matrix* matrix, size_t m, const void* act,            \
                                 size_t act_stride, float* out, size_t out_stride) {             \
    unpack_rows_of_act(matrix, m, act, act_stride, out, out_stride, sign_for(matrix, own));      \
  }                                                                                              \
  static void run##suffix(const ktk_matmul* mm) { matmul(mm, 0, sign_for(mm->matrix, own)); }
ACTS(, 0)
ACTS(_own, 1)
static void run_swapped(const ktk_matmul* mm) { matmul(mm, 1, 1); }

/* --- tables ---------------------------------------------------------------------------------- */

#define BLOCKS(type, columns) \
  {.element = type, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 1, .group_k = columns}
#define F32 {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}

static const ktk_format kFormats[] = {BLOCKS(kQ8, 32), BLOCKS(kQ4K, 256), F32};
static const ktk_accept kAccepts[] = {
    {BLOCKS(kQ8, 32), 0},
    {BLOCKS(kQ4K, 256), 1},
    {F32, 2},
};

#define MUTANT(symbol, unpack, run_it, pack_acts, unpack_acts)                        \
  static const ktk_ukernel symbol##_kernels[] = {{.struct_size = sizeof(ktk_ukernel), \
                                                  .name = "dot",                      \
                                                  .m_max = SIZE_MAX,                  \
                                                  .scratch_size = scratch_size,       \
                                                  .run = run_it}};                    \
  static const ktk_variant symbol##_variant = {                                       \
      .struct_size = sizeof(ktk_variant),                                             \
      .name = "mutant",                                                               \
      .required_isa = KTK_ISA_NONE,                                                   \
      .tile = {.m_step = 1, .n_step = kColumnStep, .k_step = kGroup},                 \
      .act = {.element = KTK_I8, .scale = KTK_F32, .group_n = 1, .group_k = kGroup},  \
      .layout = "blocks",                                                             \
      .weight_size = weight_size,                                                     \
      .pack_weight = pack_weight,                                                     \
      .unpack_weight = unpack,                                                        \
      .act_size = act_size,                                                           \
      .pack_act = pack_acts,                                                          \
      .unpack_act = unpack_acts,                                                      \
      .ukernels = symbol##_kernels,                                                   \
      .num_ukernels = 1,                                                              \
      .act_format = act_format,                                                       \
  };                                                                                  \
  BACKEND(symbol, &symbol##_variant)

MUTANT(keeps_blocks, unpack_weight, run, pack_act, unpack_act)
MUTANT(swaps_nibbles, unpack_weight_swapped, run_swapped, pack_act, unpack_act)
MUTANT(acts_of_their_own, unpack_weight, run_own, pack_act_own, unpack_act_own)

/* Backends that keep int8 with f16 scales per 32 columns, with int8 zero points or without: a sound
 * one, and some that take scales, or where they are, for something else.
 */
#include <math.h>

#include "values.h"

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

#define SCALED(zero_type) \
  {.element = KTK_I8, .scale = KTK_F16, .zero = zero_type, .group_n = 1, .group_k = kGroup}
static const ktk_format kFormats[] = {SCALED(KTK_NONE), SCALED(KTK_I8)};
static const ktk_accept kAccepts[] = {{SCALED(KTK_NONE), 0}, {SCALED(KTK_I8), 1}};

MUTANT(scaled, pack_weight)
MUTANT(ignores_scale_stride, pack_weight_tight_scales)
MUTANT(ignores_zero_stride, pack_weight_tight_zeros)
MUTANT(flushes_scales, pack_weight_flushed)
MUTANT(takes_scales_absolute, pack_weight_absolute)
MUTANT(reads_no_scale_as_one, pack_weight_not_zero)

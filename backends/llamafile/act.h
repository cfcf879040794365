// Activation codec: rows of f32 to int8 with a scale per 32 values, and back. The same bytes for
// every block type: gate and up read the same rows.
//
//   one row   [k codes][Factor per unit of 32][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. A unit with NaN or Inf has the scale NaN
// and codes 0. Rows are an odd number of cache lines long: 16 rows at a power of two would fall
// into one L1 set.
#pragma once

#include <string.h>

#include "common/int8.h"
#include "llamafile/layout.h"

namespace ktk::llamafile {
namespace {

// Instructions that multiply unsigned by signed bytes meet weights as table[code] + kOffset, and
// sums of products that are too large by kOffset * (sum of codes): comp repairs that where sums
// start. It comes in halves, for types with groups of 16. `sum` is for minima.
constexpr int kOffset = 128;

struct Factor {
  float scale;
  int32_t comp[2];  // -kOffset * sum of the codes of a half
  float sum;        // scale * sum of the codes
};

constexpr ktk_format kActFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kUnit};

inline size_t act_size(const ktk_matrix* m) {
  return round_up(m->k + num_units(m) * sizeof(Factor), kLine) | kLine;
}
inline size_t factor_offset(const ktk_matrix* m) { return m->k; }

// The sum of 16 codes: of unsigned bytes, there is an instruction for it.
inline int32_t sum_codes(__m128i codes) {
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

inline void pack_act_unit(const float* x, uint8_t* codes, Factor* factor) {
  const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, kUnit));
  int32_t total = 0;
  for (size_t half = 0; half < 2; ++half) {
    const __m128i q = narrow(quantise(load_f32(x + 16 * half), s));
    store_bytes(codes + 16 * half, q);
    const int32_t of_half = sum_codes(q);
    factor->comp[half] = -kOffset * of_half;
    total += of_half;
  }
  factor->scale = s.scale;
  factor->sum = s.scale * static_cast<float>(total);
}

inline void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  uint8_t* row = static_cast<uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
    Factor* factors = reinterpret_cast<Factor*>(row + factor_offset(matrix));
    for (size_t k = k_begin; k < k_end; k += kUnit) {
      pack_act_unit(x + (k - k_begin), row + k, factors + k / kUnit);
    }
    if (k_end == matrix->k) {
      uint8_t* end = reinterpret_cast<uint8_t*>(factors + num_units(matrix));
      memset(end, 0, static_cast<size_t>(row + act_size(matrix) - end));
    }
  }
}

inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  const uint8_t* row = static_cast<const uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
    const Factor* factors = reinterpret_cast<const Factor*>(row + factor_offset(matrix));
    for (size_t k = 0; k < matrix->k; k += 16) {
      const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k));
      store_product(out + k, q, factors[k / kUnit].scale);
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile

// Activation codec: rows of f32 to int8 with a scale per 32 values, and back. Where a scale spans
// 64 values (scaling.h), two groups have the same one, and all else is the same.
//
//   one row   [k codes][ActGroup per 32 values][SquaredNorm per 32 values][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. Where there is a NaN or Inf, the scale is
// NaN and codes are 0. Rows are an odd number of cache lines long: 16 rows at a power of two would
// fall into one L1 set.
#pragma once

#include <string.h>

#include "codec/int8/quantize.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

// Instructions that multiply unsigned by signed bytes meet weights as table[code] + kOffset, and
// sums of products that are too large by kOffset * (sum of codes): comp repairs that where sums
// start. It comes in halves, for types with groups of 16. `sum` is for minima.
constexpr int kOffset = 128;

struct ActGroup {
  float scale;
  int32_t comp[2];  // -kOffset * sum of the codes of a half
  float sum;        // scale * sum of the codes
};

// What bounds a sum of products (gemm_i16.h): the sum of the squares of the codes of a half, the
// larger one, in units of 1024 and rounded up. No more than 16 * 127^2 / 1024, or kNoNorm.
using SquaredNorm = uint8_t;
constexpr int kNormUnit = 1024;
constexpr SquaredNorm kNoNorm = 0xff;  // of a scale that is not moderate

constexpr ktk_format act_format_of(const BlockType& type) {
  return {KTK_I8, KTK_F32, KTK_NONE, 1, uint32_t{kSubBlock} * act_span(scaling_of(type))};
}

// Where rows may be cut.
constexpr size_t kActStep = 2 * kSubBlock;

inline size_t group_offset(const ktk_matrix* matrix) { return matrix->k; }
inline size_t norm_offset(const ktk_matrix* matrix) {
  return group_offset(matrix) + num_sub_blocks(matrix) * sizeof(ActGroup);
}
inline size_t act_size(const ktk_matrix* matrix) {
  return round_up(norm_offset(matrix) + num_sub_blocks(matrix) * sizeof(SquaredNorm), kLine) |
         kLine;
}

// A scale with which neither sums of a run overflow nor products are rounded as subnormals.
inline bool is_moderate(float scale) { return scale == 0 || (scale > 0x1p-80f && scale < 0x1p80f); }

// The sum of the squares of 16 codes, of the larger half.
inline int32_t larger_square(__m256i codes) {
  const __m256i sizes = _mm256_abs_epi8(codes);
  const __m256i pairs = _mm256_maddubs_epi16(sizes, sizes);
  __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));  // four of each half
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  return _mm_cvtsi128_si32(
      _mm_max_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}

inline void pack_act_sub_block(const float* x, SymmetricScale s, uint8_t* codes, ActGroup* group,
                               SquaredNorm* norm) {
  const __m128i low = narrow(quantize(load_f32(x), s));
  const __m128i high = narrow(quantize(load_f32(x + 16), s));
  store_bytes(codes, low);
  store_bytes(codes + 16, high);
  const __m256i both = _mm256_set_m128i(high, low);
  // Sums of bytes, which only exist for unsigned ones: eight each, then those of a half.
  const __m256i eights =
      _mm256_sad_epu8(_mm256_xor_si256(both, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i first = _mm256_castsi256_si128(eights),
                second = _mm256_extracti128_si256(eights, 1);
  const __m128i sums =
      _mm_add_epi32(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second));
  const int32_t sum[2] = {_mm_cvtsi128_si32(sums) - 16 * 128,
                          _mm_extract_epi32(sums, 2) - 16 * 128};
  group->scale = s.scale;
  group->comp[0] = -kOffset * sum[0];
  group->comp[1] = -kOffset * sum[1];
  group->sum = s.scale * static_cast<float>(sum[0] + sum[1]);
  *norm = is_moderate(s.scale)
              ? static_cast<SquaredNorm>((larger_square(both) + kNormUnit - 1) / kNormUnit)
              : kNoNorm;
}

// So many scales at once, whose divisions take longer than all else if they come one by one. More
// are seldom there: the second half of a layer encodes a few hundred columns of a row.
constexpr size_t kScales = 8;
inline void act_scales(const float* x, size_t values, size_t count,
                       SymmetricScale (&scales)[kScales]) {
  float absmax[kScales] = {}, scale[kScales], factor[kScales];
  for (size_t i = 0; i < count; ++i) absmax[i] = ElementF32::absmax(x + i * values, values);
  for (size_t i = 0; i < kScales; ++i) {
    scale[i] = absmax[i] / 127;
    factor[i] = 1 / scale[i];
  }
  for (size_t i = 0; i < count; ++i) {
    const bool is_plain = absmax[i] > 0x1p-100f && absmax[i] < 0x1p100f;
    scales[i] = is_plain ? SymmetricScale{scale[i], factor[i]} : symmetric_scale(absmax[i]);
  }
}

inline void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  // Sub-blocks that share a scale: 1 << shift.
  const int shift = act_span(scaling_of(block_type(matrix->format.element))) - 1;
  uint8_t* row = static_cast<uint8_t*>(act);
  for (size_t r = 0; r < m; ++r, x += x_stride, row += act_stride) {
    ActGroup* groups = reinterpret_cast<ActGroup*>(row + group_offset(matrix));
    SquaredNorm* norms = reinterpret_cast<SquaredNorm*>(row + norm_offset(matrix));
    for (size_t k = k_begin; k < k_end;) {
      SymmetricScale scales[kScales];
      const size_t count = smaller(kScales << shift, (k_end - k) / kSubBlock);
      act_scales(x + (k - k_begin), kSubBlock << shift, count >> shift, scales);
      for (size_t i = 0; i < count; ++i, k += kSubBlock) {
        pack_act_sub_block(x + (k - k_begin), scales[i >> shift], row + k, groups + k / kSubBlock,
                           norms + k / kSubBlock);
      }
    }
    if (k_end == matrix->k) {
      uint8_t* end = reinterpret_cast<uint8_t*>(norms + num_sub_blocks(matrix));
      memset(end, 0, static_cast<size_t>(row + act_size(matrix) - end));
    }
  }
}

inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  const uint8_t* row = static_cast<const uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
    const ActGroup* groups = reinterpret_cast<const ActGroup*>(row + group_offset(matrix));
    for (size_t k = 0; k < matrix->k; k += 16) {
      const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k));
      store_product(out + k, q, groups[k / kSubBlock].scale);
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile

// Activation codec: rows of f32 to 16-bit codes in two bytes, with a scale per 32 values, for
// instructions that multiply bytes.
//
//   one row   | group: k 0..31 | k 32..63 | ... | zeros        k padded to 64
//   group     | high bytes, 32 | low bytes, 32 | f32 scale / 2 | starts, 3 int32 |
//   bytes     | k 0 4 1 5 | 2 6 3 7 | 8 12 9 13 | ...          fours as in a line (layout.h)
//   starts    of all 32 k, of the first 16, of the others: -kCodeOffset * (sum of the codes), what
//             sums begin with whose weights are stored kCodeOffset too large
//
// scale = absmax / 32639, code = x / scale to nearest even = 256 * high + low, both signed. The
// error is 2^-16 of the largest value of the group. One with NaN or Inf has the scale NaN and codes
// of 0.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "codec/int8/quantize.h"
#include "codec/scaled/layout.h"

namespace ktk::mxfp4 {
namespace {

constexpr int kCodeOffset = 12;

struct ActGroup {
  static constexpr size_t kDepth = 32;

  int8_t high[kDepth], low[kDepth];
  float half_scale;
  int32_t start, part_start[2];
};
static_assert(sizeof(ActGroup) == 80);

struct ActBytes {
  static constexpr float kLevels = 127 * 256 + 127;  // both bytes within [-128, 127]
  static constexpr ktk_format kFormat = {KTK_I16, KTK_F32, KTK_NONE, 1, ActGroup::kDepth};
  static constexpr uint32_t kKStep = kStepDepth;

  static size_t groups(const ktk_matrix* matrix) {
    return round_up(matrix->k, kStepDepth) / ActGroup::kDepth;
  }
  // An odd number of cache lines: rows at a power of two would fall into one L1 set.
  static size_t size(const ktk_matrix* matrix) {
    return round_up(groups(matrix) * sizeof(ActGroup), kLine) | kLine;
  }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    char* row = static_cast<char*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      ActGroup* const group = reinterpret_cast<ActGroup*>(row);
      if (k_end == matrix->k) {
        ActGroup* const end = group + k_end / ActGroup::kDepth;  // of whole groups
        memset(end, 0, row + size(matrix) - reinterpret_cast<char*>(end));
      }
      for (size_t k = k_begin; k < k_end; k += ActGroup::kDepth) {
        pack_group(x + (k - k_begin), smaller(ActGroup::kDepth, k_end - k),
                   group[k / ActGroup::kDepth]);
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    constexpr size_t kPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of each k of eight
    const char* row = static_cast<const char*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      for (size_t k = 0; k < matrix->k; ++k) {
        const ActGroup& group = reinterpret_cast<const ActGroup*>(row)[k / ActGroup::kDepth];
        const size_t at = k % ActGroup::kDepth / 8 * 8 + kPlace[k % 8];
        const float code = static_cast<float>(256 * group.high[at] + group.low[at]);
        out[k] = code * (2 * group.half_scale);
      }
    }
  }

 private:
  static void pack_group(const float* x, size_t count, ActGroup& group) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    // The half is what is rounded, so that twice of it is exact where it is subnormal, too.
    const SymmetricScale half = symmetric_scale(ElementF32::absmax(x, count), 2 * kLevels);
    group.half_scale = half.scale;
    quantize_group(
        x, count, ActGroup::kDepth, {2 * half.scale, half.factor / 2}, [&](size_t j, I32x16 q) {
          // The low byte is the rest of a division that rounds to nearest.
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q.v, _mm512_set1_epi32(128)), 8);
          const auto store = [&](int8_t* bytes, __m512i codes) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + j),
                             _mm_shuffle_epi8(_mm512_cvtepi32_epi8(codes), order));
          };
          store(group.high, high);
          store(group.low, q.v);
          group.part_start[j / 16] = -kCodeOffset * sum(q);
        });
    group.start = group.part_start[0] + group.part_start[1];
  }
};

}  // namespace
}  // namespace ktk::mxfp4

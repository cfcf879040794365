// Activation codec: rows of f32 to 16-bit codes with a scale per 32 values. They are there twice,
// for instructions that multiply bytes and for those that multiply words.
//
//   one row   [bytes per 32 k][words per 32 k][ends per 32 k][zeros]      k padded to 64
//   bytes     | high bytes, 32 | low bytes, 32 |, each in fours as in a line (layout.h):
//             | k 0 4 1 5 | 2 6 3 7 | 8 12 9 13 | ...
//   words     | k 0 | 1 | 2 | ... | 31 |
//   end       | f32 scale / 2 | starts, 3 int32 |
//   starts    of all 32 k, of the first 16, of the others: -kCodeOffset * (sum of the codes), what
//             sums of bytes begin with, whose weights are kCodeOffset too large
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
};

struct ActGroupBytes : ActGroup {
  int8_t high[kDepth], low[kDepth];
};
static_assert(sizeof(ActGroupBytes) == 64);

struct ActGroupWords : ActGroup {
  int16_t code[kDepth];
};

struct ActGroupEnd {
  float half_scale;
  int32_t start, part_start[2];
};
static_assert(sizeof(ActGroupEnd) == 16);

struct ActCodes {
  static constexpr float kLevels = 127 * 256 + 127;  // both bytes within [-128, 127]
  static constexpr ktk_format kFormat = {KTK_I16, KTK_F32, KTK_NONE, 1, ActGroup::kDepth};
  static constexpr uint32_t kKStep = kStepDepth;

  static size_t groups(const ktk_matrix* matrix) {
    return round_up(matrix->k, kStepDepth) / ActGroup::kDepth;
  }
  static size_t words_offset(const ktk_matrix* matrix) {
    return groups(matrix) * sizeof(ActGroupBytes);
  }
  static size_t ends_offset(const ktk_matrix* matrix) {
    return words_offset(matrix) + groups(matrix) * sizeof(ActGroupWords);
  }
  // An odd number of cache lines: rows at a power of two would fall into one L1 set.
  static size_t size(const ktk_matrix* matrix) { return round_up(row_end(matrix), kLine) | kLine; }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    char* row = static_cast<char*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      auto* const bytes = reinterpret_cast<ActGroupBytes*>(row);
      auto* const words = reinterpret_cast<ActGroupWords*>(row + words_offset(matrix));
      auto* const ends = reinterpret_cast<ActGroupEnd*>(row + ends_offset(matrix));
      if (k_end == matrix->k) {
        const size_t whole = k_end / ActGroup::kDepth, rest = groups(matrix) - whole;
        memset(bytes + whole, 0, rest * sizeof *bytes);
        memset(words + whole, 0, rest * sizeof *words);
        memset(ends + whole, 0, row + size(matrix) - reinterpret_cast<char*>(ends + whole));
      }
      for (size_t k = k_begin; k < k_end; k += ActGroup::kDepth) {
        const size_t g = k / ActGroup::kDepth;
        pack_group(x + (k - k_begin), smaller(ActGroup::kDepth, k_end - k), bytes[g], words[g],
                   ends[g]);
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    const char* row = static_cast<const char*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      const auto* codes = reinterpret_cast<const int16_t*>(row + words_offset(matrix));
      const auto* ends = reinterpret_cast<const ActGroupEnd*>(row + ends_offset(matrix));
      for (size_t k = 0; k < matrix->k; ++k) {
        out[k] = codes[k] * (2 * ends[k / ActGroup::kDepth].half_scale);
      }
    }
  }

 private:
  static size_t row_end(const ktk_matrix* matrix) {
    return ends_offset(matrix) + groups(matrix) * sizeof(ActGroupEnd);
  }

  static void pack_group(const float* x, size_t count, ActGroupBytes& bytes, ActGroupWords& words,
                         ActGroupEnd& end) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    // The half is what is rounded, so that twice of it is exact where it is subnormal, too.
    const SymmetricScale half = symmetric_scale(ElementF32::absmax(x, count), 2 * kLevels);
    end.half_scale = half.scale;
    quantize_group(
        x, count, ActGroup::kDepth, {2 * half.scale, half.factor / 2}, [&](size_t j, I32x16 q) {
          // The low byte is the rest of a division that rounds to nearest.
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q.v, _mm512_set1_epi32(128)), 8);
          const auto store = [&](int8_t* to, __m512i codes) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j),
                             _mm_shuffle_epi8(_mm512_cvtepi32_epi8(codes), order));
          };
          store(bytes.high, high);
          store(bytes.low, q.v);
          store_words(words.code + j, q);
          end.part_start[j / 16] = -kCodeOffset * sum(q);
        });
    end.start = end.part_start[0] + end.part_start[1];
  }
};

}  // namespace
}  // namespace ktk::mxfp4

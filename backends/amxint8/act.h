// Activation codec: rows of f32 to int8 with a scale per group of kGroup values, and back.
//
//   one row   [k padded to 64 codes][f32 scale per group][int32 comp per group][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. Weights are stored as q + 128, so a
// product with them is too large by 128 * (sum of the codes): comp = -128 * sum is where the
// accumulator of the group starts, and the repair costs nothing per weight. Exact: all in int32.
// A group with NaN or Inf has the scale NaN and codes 0.
//
// Rows are an odd number of cache lines long: 16 rows at a power of two would fall into one L1 set.
#pragma once

#include "amxint8/layout.h"
#include "codec/int8/quantize.h"

namespace ktk::amxint8 {
namespace {

// Codes as bytes, for instructions that multiply bytes.
struct ByteCodes {
  static constexpr size_t kBytes = 1;
  static void store(uint8_t* row, size_t k, __m128i q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + k), q);
  }
  static __m128i load(const uint8_t* row, size_t k) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k));
  }
};

// Codes as words for vpmaddwd, which meets the even and the odd bytes of a weight dword one after
// the other: k0 k2 | k1 k3.
struct WordCodes {
  static constexpr size_t kBytes = 2;
  static void store(uint8_t* row, size_t k, __m128i q) {
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(q, 8), 8);
    const __m128i odd = _mm_srai_epi16(q, 8);
    __m128i* to = reinterpret_cast<__m128i*>(row + 2 * k);
    _mm_storeu_si128(to, _mm_unpacklo_epi32(even, odd));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(even, odd));
  }
  static __m128i load(const uint8_t* row, size_t k) {
    const __m128i* from = reinterpret_cast<const __m128i*>(row + 2 * k);
    const __m128i order = _mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 0, 4, 2, 6, 8, 12, 10, 14);
    const __m128i lo = _mm_shuffle_epi8(_mm_loadu_si128(from), order);
    const __m128i hi = _mm_shuffle_epi8(_mm_loadu_si128(from + 1), order);
    return _mm_unpacklo_epi64(lo, hi);
  }
};

template <class Codes, size_t kGroup>
struct Act {
  static_assert(kGroup % kDepth == 0);
  static constexpr size_t kGroupSteps = kGroup / kDepth;
  static constexpr size_t kCodeBytes = Codes::kBytes;
  static constexpr ktk_format kFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kGroup};
  static constexpr uint32_t kKStep = kGroup;  // so that each group is quantized as a whole

  static size_t num_groups(const ktk_matrix* m) { return (padded_k(m) + kGroup - 1) / kGroup; }
  static size_t scale_offset(const ktk_matrix* m) { return padded_k(m) * kCodeBytes; }
  static size_t comp_offset(const ktk_matrix* m) { return scale_offset(m) + 4 * num_groups(m); }

  static size_t size(const ktk_matrix* m) {
    return round_up(comp_offset(m) + 4 * num_groups(m), 64) | 64;
  }

  static void pack_group(const float* x, size_t count, size_t k, uint8_t* row, float* scale,
                         int32_t* comp) {
    const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, count));
    I32x16 total = zero_i32();
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
      const I32x16 q = quantize(load_f32(x + i), s);
      total = add(total, q);
      Codes::store(row, k + i, narrow(q));
    }
    if (i < count) {
      const I32x16 q = quantize(load_some<ElementF32>(x + i, count - i), s);
      total = add(total, q);
      Codes::store(row, k + i, narrow(q));
      i += 16;
    }
    for (; i < round_up(count, kDepth); i += 16) Codes::store(row, k + i, _mm_setzero_si128());
    *scale = s.scale;
    *comp = -128 * sum(total);
  }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    uint8_t* row = static_cast<uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      float* scale = reinterpret_cast<float*>(row + scale_offset(matrix));
      int32_t* comp = reinterpret_cast<int32_t*>(row + comp_offset(matrix));
      for (size_t k = k_begin; k < k_end; k += kGroup) {
        const size_t g = k / kGroup;
        pack_group(x + (k - k_begin), smaller(kGroup, k_end - k), k, row, scale + g, comp + g);
      }
      if (k_end == matrix->k) {
        for (int32_t *end = reinterpret_cast<int32_t*>(row + size(matrix)),
                     *p = comp + num_groups(matrix);
             p < end; ++p) {
          *p = 0;
        }
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    const uint8_t* row = static_cast<const uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      const float* scale = reinterpret_cast<const float*>(row + scale_offset(matrix));
      for (size_t k = 0; k < matrix->k; k += 16) {
        const __m128i q = Codes::load(row, k);
        if (k + 16 <= matrix->k) {
          store_product(out + k, q, scale[k / kGroup]);
        } else {
          float some[16];
          store_product(some, q, scale[k / kGroup]);
          for (size_t j = 0; k + j < matrix->k; ++j) out[k + j] = some[j];
        }
      }
    }
  }
};

}  // namespace
}  // namespace ktk::amxint8

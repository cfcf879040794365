// Activation codec: rows of f32 to int8 with a scale per group of kGroup values, and back.
//
//   one row   [k padded as the weights are: codes][ActScale per slab][zeros]
//
//   eight codes      k0 k2 k4 k6 k1 k3 k5 k7       the order in which nibbles are multiplied
//
// A slab is the depth over which products are summed in integers: the smaller one of the groups of
// weights and activations. Every slab has the scale of its group at hand, and the sum of its codes,
// which corrects for the zero point of the weights.
//
// scale = absmax / 127, code = x / scale to nearest even. A group with NaN or Inf has the scale NaN
// and codes 0. Rows are an odd number of cache lines long: 16 rows at a power of two would fall
// into one L1 set.
#pragma once

#include "codec/int4/layout.h"
#include "codec/int8/quantize.h"

namespace ktk::int4 {
namespace {

struct ActScale {
  float scale;
  // sum = of the codes. Without zero points: -8 * sum, the integer that a sum of products starts
  // at. With them: -sum as f32, to be multiplied with the zero point.
  int32_t correction;
};

// Whether weights may have zero points.
enum class ZeroPoints { kNever, kPossibly };

template <size_t kGroup, ZeroPoints kWeightZeros>
struct Act {
  static constexpr ZeroPoints kZeroPoints = kWeightZeros;
  static constexpr size_t kMaxSlab = kGroup;
  static_assert(kGroup % 32 == 0);
  static constexpr ktk_format kFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kGroup};
  static constexpr uint32_t kKStep = kGroup;  // so that each group is quantized as a whole

  static size_t slab_depth(const ktk_matrix* matrix) {
    return smaller(group_depth(matrix), kMaxSlab);
  }
  static size_t num_slabs(const ktk_matrix* matrix) {
    return padded_k(matrix) / slab_depth(matrix);
  }
  static size_t size(const ktk_matrix* matrix) {
    return round_up(padded_k(matrix) + num_slabs(matrix) * sizeof(ActScale), 64) | 64;
  }

  static void pack_group(const ktk_matrix* matrix, const float* x, size_t count, size_t padded,
                         uint8_t* codes, ActScale* scales) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, count));
    const size_t slab = slab_depth(matrix);
    for (size_t begin = 0; begin < padded; begin += slab, ++scales) {
      I32x16 total = zero_i32();
      for (size_t i = begin; i < begin + slab; i += 16) {
        const size_t left = i < count ? count - i : 0;
        const I32x16 q = quantize(load_some<ElementF32>(left ? x + i : x, left), s);
        total = add(total, q);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm_shuffle_epi8(narrow(q), order));
      }
      scales->scale = s.scale;
      scales->correction = has_zeros(matrix)
                               ? __builtin_bit_cast(int32_t, static_cast<float>(-sum(total)))
                               : -kFixedZero * sum(total);
    }
  }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    const bool is_last = k_end == matrix->k;
    const size_t padded_end = is_last ? padded_k(matrix) : k_end;
    uint8_t* row = static_cast<uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      ActScale* scales = reinterpret_cast<ActScale*>(row + padded_k(matrix));
      for (size_t k = k_begin; k < padded_end; k += kGroup) {
        const size_t count = k < k_end ? smaller(kGroup, k_end - k) : 0;
        pack_group(matrix, count ? x + (k - k_begin) : x, count, smaller(kGroup, padded_end - k),
                   row + k, scales + k / slab_depth(matrix));
      }
      if (is_last) {
        for (ActScale *end = reinterpret_cast<ActScale*>(row + size(matrix)),
                      *p = scales + num_slabs(matrix);
             p < end; ++p) {
          *p = {0, 0};
        }
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const size_t slab = slab_depth(matrix);
    const uint8_t* row = static_cast<const uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      const ActScale* scales = reinterpret_cast<const ActScale*>(row + padded_k(matrix));
      for (size_t k = 0; k < matrix->k; k += 16) {
        const __m128i q =
            _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)), order);
        const float scale = scales[k / slab].scale;
        if (k + 16 <= matrix->k) {
          store_product(out + k, q, scale);
        } else {
          float some[16];
          store_product(some, q, scale);
          for (size_t j = 0; k + j < matrix->k; ++j) out[k + j] = some[j];
        }
      }
    }
  }
};

}  // namespace
}  // namespace ktk::int4

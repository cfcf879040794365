// Activation codec of both variants: rows of f32 to int8 with a scale per 512 values, and back.
//
//   one row   [k padded to 64 codes][f32 scale per group][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. A group with NaN or Inf has the scale NaN
// and codes 0. Rows are an odd number of cache lines long: the library walks down columns of them.
#pragma once

#include <string.h>

#include "blis/layout.h"
#include "codec/int8/quantize.h"

namespace ktk::blis {
namespace {

constexpr ktk_format kActFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kDepth};

inline size_t act_scale_offset(const ktk_matrix* m) { return round_up(m->k, kCodes); }

inline size_t act_size(const ktk_matrix* m) {
  return round_up(act_scale_offset(m) + num_groups(m) * sizeof(float), 64) | 64;
}

// Writes whole steps of 16 codes, zeros behind the last one.
inline float encode_group(const float* x, size_t count, uint8_t* codes) {
  const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, count));
  for (size_t i = 0; i < round_up(count, kCodes); i += 16) {
    const size_t left = i < count ? count - i : 0;
    store_bytes(codes + i, narrow(quantize(load_some<ElementF32>(left ? x + i : x, left), s)));
  }
  return s.scale;
}

inline void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  uint8_t* row = static_cast<uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
    float* scale = reinterpret_cast<float*>(row + act_scale_offset(matrix));
    for (size_t k = k_begin; k < k_end; k += kDepth) {
      scale[k / kDepth] = encode_group(x + (k - k_begin), smaller(kDepth, k_end - k), row + k);
    }
    if (k_end == matrix->k) {
      float* end = scale + num_groups(matrix);
      memset(end, 0, act_size(matrix) - static_cast<size_t>(reinterpret_cast<uint8_t*>(end) - row));
    }
  }
}

inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  const uint8_t* row = static_cast<const uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(row);
    const float* scale = reinterpret_cast<const float*>(row + act_scale_offset(matrix));
    for (size_t k = 0; k < matrix->k; ++k)
      out[k] = static_cast<float>(codes[k]) * scale[k / kDepth];
  }
}

// Depth is cut where a group ends, so that each is quantized as a whole.
struct ActCodec {
  static constexpr ktk_format kFormat = kActFormat;
  static constexpr uint32_t kKStep = kDepth;
  static constexpr auto size = act_size;
  static constexpr auto pack = pack_act;
  static constexpr auto unpack = unpack_act;
};

}  // namespace
}  // namespace ktk::blis

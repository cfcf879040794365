// Activation codec: rows of f32 to int8 with a scale per group of 256 values, and back.
//
//   one row   [k padded to 16 codes][f32 scale per group][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. A group with NaN or Inf has the scale NaN
// and codes 0. Rows are an odd number of cache lines long: rows a power of two apart would fall
// into one set of L1.
#pragma once

#include "codec/int8/quantize.h"
#include "kml/layout.h"

namespace ktk::kml {
namespace {

constexpr size_t kGroup = 256;
constexpr ktk_format kActFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kGroup};

inline size_t num_groups(const ktk_matrix* m) { return (m->k + kGroup - 1) / kGroup; }

inline size_t act_size(const ktk_matrix* m) {
  return round_up(padded_k(m) + sizeof(float) * num_groups(m), 64) | 64;
}
inline float* act_scale(const ktk_matrix* m, uint8_t* row) {
  return reinterpret_cast<float*>(row + padded_k(m));
}
inline const float* act_scale(const ktk_matrix* m, const uint8_t* row) {
  return reinterpret_cast<const float*>(row + padded_k(m));
}

// Codes of one group, zeros up to the end of its last step; returns its scale.
inline float pack_group(const float* x, size_t count, uint8_t* codes) {
  const SymmetricScale s = symmetric_scale(ElementF32::absmax(x, count));
  for (size_t i = 0; i < count; i += 16) {
    store_bytes(codes + i, narrow(quantize(load_some<ElementF32>(x + i, count - i), s)));
  }
  return s.scale;
}

inline void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  uint8_t* row = static_cast<uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
    float* scale = act_scale(matrix, row);
    for (size_t k = k_begin; k < k_end; k += kGroup) {
      scale[k / kGroup] = pack_group(x + (k - k_begin), smaller(kGroup, k_end - k), row + k);
    }
    if (k_end == matrix->k) {
      const float* end = reinterpret_cast<const float*>(row + act_size(matrix));
      for (float* p = scale + num_groups(matrix); p < end; ++p) *p = 0;
    }
  }
}

inline void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  const uint8_t* row = static_cast<const uint8_t*>(act);
  for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
    const float* scale = act_scale(matrix, row);
    for (size_t k = 0; k < matrix->k; ++k) {
      out[k] = static_cast<float>(static_cast<int8_t>(row[k])) * scale[k / kGroup];
    }
  }
}

// Depth is cut where a group ends, so that each is quantized as a whole.
struct ActCodec {
  static constexpr ktk_format kFormat = kActFormat;
  static constexpr uint32_t kKStep = kGroup;
  static constexpr auto size = act_size;
  static constexpr auto pack = pack_act;
  static constexpr auto unpack = unpack_act;
};

}  // namespace
}  // namespace ktk::kml

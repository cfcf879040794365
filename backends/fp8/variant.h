// What all variants share: the weight codec, and how activations are kept.
#pragma once

#include "codec/act_rows.h"
#include "fp8/layout.h"
#include "gemm/driver.h"
#include "ktk/backend.h"

namespace ktk::fp8 {
namespace {

inline size_t weight_size(const ktk_matrix* matrix) {
  return dispatch(matrix, [&](auto codec) { return decltype(codec)::Layout::size(matrix); });
}
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return dispatch(matrix, [&](auto codec) { return decltype(codec)::Layout::offset(matrix, n); });
}
inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  dispatch(matrix, [&](auto codec) { codec.pack(matrix, source, n_begin, n_end, packed); });
}
inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  dispatch(matrix,
           [&](auto codec) { codec.unpack(matrix, packed, n_begin, n_end, out, out_stride); });
}
inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_export* target) {
  dispatch(matrix, [&](auto codec) { codec.write(matrix, packed, n_begin, n_end, target); });
}

// Depth is cut where blocks of scales end.
struct ActBf16 : ActRowsBf16<kStepDepth> {
  static constexpr uint32_t kKStep = BlockScales::kGroupDepth;
};
struct ActF32 : ActRowsF32<kStepDepth> {
  static constexpr uint32_t kKStep = BlockScales::kGroupDepth;
};

struct WeightCodec {
  static constexpr auto kLayout = fp8::kLayout;
  static constexpr uint32_t kNStep = kBlockCols;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = weight_offset;
  static constexpr auto write = export_weight;
};

// The product, by a kernel for the layout that a matrix is stored in.
template <template <class Layout> class Kernel>
void gemm_by_layout(const ktk_matmul* mm) {
  dispatch(mm->matrix, [&](auto codec) { gemm<Kernel<typename decltype(codec)::Layout>>(mm); });
}

}  // namespace
}  // namespace ktk::fp8

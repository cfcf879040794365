// The table of a variant: the shared codecs around the micro-kernel of one instruction set.
#pragma once

#include "common/act_rows.h"
#include "common/ukernel.h"
#include "fp8/layout.h"
#include "ktk/target.h"

namespace ktk::fp8 {
namespace {

using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

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
                          size_t n_end, const ktk_target* target) {
  dispatch(matrix, [&](auto codec) { codec.write(matrix, packed, n_begin, n_end, target); });
}

template <class Act>
constexpr ktk_variant make_variant(const ktk_ukernel& ukernel, ktk_isa more_isa = KTK_ISA_NONE,
                                   uint32_t m_step = 1, void (*enter)() = nullptr,
                                   void (*leave)() = nullptr) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA | more_isa,
      // Depth is cut where blocks of scales end.
      .tile = {.m_step = m_step, .n_step = kBlockCols, .k_step = BlockScales::kGroupDepth},
      .act = {.element = Act::kElement,
              .scale = KTK_NONE,
              .zero = KTK_NONE,
              .group_n = 0,
              .group_k = 0},
      .layout = kLayout,
      .weight_size = weight_size,
      .pack_weight = pack_weight,
      .unpack_weight = unpack_weight,
      .act_size = Act::size,
      .pack_act = Act::pack,
      .unpack_act = Act::unpack,
      .ukernels = &ukernel,
      .num_ukernels = 1,
      .enter = enter,
      .leave = leave,
      .weight_offset = weight_offset,
      .act_format = nullptr,
      .export_weight = export_weight,
  };
}

}  // namespace
}  // namespace ktk::fp8

// The table of a variant: the shared codecs around the micro-kernel of one instruction set.
#pragma once

#include "common/act_rows.h"
#include "common/ukernel.h"
#include "ktk/target.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

template <class Act>
constexpr ktk_variant make_variant(const ktk_ukernel& ukernel, uint32_t m_step = 1,
                                   void (*enter)() = nullptr, void (*leave)() = nullptr) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA,
      .tile = {.m_step = m_step, .n_step = kBlockCols, .k_step = kStepDepth},
      .act = {.element = Act::kElement,
              .scale = KTK_NONE,
              .zero = KTK_NONE,
              .group_n = 0,
              .group_k = 0},
      .layout = kLayout,
      .weight_size = Layout::size,
      .pack_weight = Codec::pack,
      .unpack_weight = Codec::unpack,
      .act_size = Act::size,
      .pack_act = Act::pack,
      .unpack_act = Act::unpack,
      .ukernels = &ukernel,
      .num_ukernels = 1,
      .enter = enter,
      .leave = leave,
      .weight_offset = Layout::offset,
      .act_format = nullptr,
      .export_weight = Codec::write,
  };
}

}  // namespace
}  // namespace ktk::mxfp4

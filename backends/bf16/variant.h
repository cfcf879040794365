// The table of a variant: the shared codecs around the micro-kernel of one instruction set.
#pragma once

#include "common/act_rows.h"
#include "common/ukernel.h"
#include "ktk/target.h"
#include "loops.h"
#include "weight_codec.h"

namespace {

// How a variant keeps activations.
using ActBf16 = ActRowsBf16<kStepDepth>;
using ActF32 = ActRowsF32<kStepDepth>;

// One micro-kernel serves any number of rows: it has code for every height of its tile, down to a
// single row, which already reads weights at the rate of memory.
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

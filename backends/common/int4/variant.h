// The table of a variant: the shared codecs around the micro-kernels of one instruction set.
#pragma once

#include "common/int4/act.h"
#include "common/int4/layout.h"
#include "common/int4/weight.h"
#include "common/ukernel.h"
#include "ktk/target.h"

namespace ktk::int4 {
namespace {

using PackWeight = void(const ktk_matrix*, const ktk_source*, size_t, size_t, void*);

template <class Act, size_t kNumKernels>
constexpr ktk_variant make_variant(PackWeight* pack_weight,
                                   const ktk_ukernel (&ukernels)[kNumKernels], uint32_t m_step = 1,
                                   void (*enter)() = nullptr, void (*leave)() = nullptr) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA,
      // Depth is cut where a group of activations ends, so that each is quantised as a whole.
      .tile = {.m_step = m_step, .n_step = kColumns, .k_step = Act::kFormat.group_k},
      .act = Act::kFormat,
      .layout = kLayout,
      .weight_size = weight_size,
      .pack_weight = pack_weight,
      .unpack_weight = unpack_weight,
      .act_size = Act::size,
      .pack_act = Act::pack,
      .unpack_act = Act::unpack,
      .ukernels = ukernels,
      .num_ukernels = kNumKernels,
      .enter = enter,
      .leave = leave,
      .weight_offset = block_offset,
      .export_weight = export_weight,
  };
}

}  // namespace
}  // namespace ktk::int4

// The table of a variant: the shared codecs around the micro-kernels of one instruction set.
#pragma once

#include "ktk/target.h"
#include "llamafile/act.h"
#include "llamafile/layout.h"
#include "llamafile/weight.h"

namespace ktk::llamafile {
namespace {

template <size_t kNumKernels>
constexpr ktk_variant make_variant(const ktk_ukernel (&ukernels)[kNumKernels]) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA,
      .tile = {.m_step = 1, .n_step = kColumns, .k_step = kUnit},
      .act = kActFormat,
      .layout = kLayout,
      .weight_size = weight_size,
      .pack_weight = pack_weight,
      .unpack_weight = unpack_weight,
      .act_size = act_size,
      .pack_act = pack_act,
      .unpack_act = unpack_act,
      .ukernels = ukernels,
      .num_ukernels = kNumKernels,
      .enter = nullptr,
      .leave = nullptr,
      .weight_offset = block_offset,
      .act_format = nullptr,
  };
}

}  // namespace
}  // namespace ktk::llamafile

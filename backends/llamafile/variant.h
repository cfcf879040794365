// The table of a variant: the shared codecs around the micro-kernels of one instruction set.
#pragma once

#include "common/act_rows.h"
#include "ktk/target.h"
#include "llamafile/act.h"
#include "llamafile/either.h"
#include "llamafile/floats/codec.h"
#include "llamafile/layout.h"
#include "llamafile/weight.h"

namespace ktk::llamafile {
namespace {

using FloatAct = ActRowsF32<kUnit>;

inline void act_format(const ktk_matrix* matrix, ktk_format* out) {
  *out = floats::is_float(matrix->format) ? ktk_format{FloatAct::kElement, KTK_NONE, KTK_NONE, 0, 0}
                                          : kActFormat;
}

template <size_t kNumKernels>
constexpr ktk_variant make_variant(const ktk_ukernel (&ukernels)[kNumKernels], uint32_t m_step = 1,
                                   void (*enter)() = nullptr, void (*leave)() = nullptr) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA,
      .tile = {.m_step = m_step, .n_step = kColumns, .k_step = kUnit},
      .act = kActFormat,
      .layout = kLayout,
      .weight_size = either<weight_size, floats::weight_size>,
      .pack_weight = either<pack_weight, floats::pack_weight>,
      .unpack_weight = either<unpack_weight, floats::unpack_weight>,
      .act_size = either<act_size, FloatAct::size>,
      .pack_act = either<pack_act, FloatAct::pack>,
      .unpack_act = either<unpack_act, FloatAct::unpack>,
      .ukernels = ukernels,
      .num_ukernels = kNumKernels,
      .enter = enter,
      .leave = leave,
      .weight_offset = either<block_offset, floats::weight_offset>,
      .act_format = act_format,
  };
}

}  // namespace
}  // namespace ktk::llamafile

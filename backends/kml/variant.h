// The table of a variant: the shared codecs around the micro-kernel of one instruction set.
#pragma once

#include "common/ukernel.h"
#include "kml/act.h"
#include "kml/layout.h"
#include "kml/matmul.h"
#include "kml/weight.h"
#include "ktk/target.h"

namespace ktk::kml {
namespace {

// One micro-kernel serves any number of rows: it has code for every height of its tile, down to a
// single row.
constexpr ktk_variant make_variant(const ktk_ukernel& ukernel) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = KTK_STRING(KTK_TARGET),
      .required_isa = KTK_TARGET_ISA,
      // Depth is cut where a group of activations ends, so that each is quantised as a whole.
      .tile = {.m_step = 1, .n_step = kColumns, .k_step = kGroup},
      .act = kActFormat,
      .layout = kLayout,
      .weight_size = weight_size,
      .pack_weight = pack_weight,
      .unpack_weight = unpack_weight,
      .act_size = act_size,
      .pack_act = pack_act,
      .unpack_act = unpack_act,
      .ukernels = &ukernel,
      .num_ukernels = 1,
      .enter = nullptr,
      .leave = nullptr,
      .weight_offset = block_offset,
  };
}

}  // namespace
}  // namespace ktk::kml

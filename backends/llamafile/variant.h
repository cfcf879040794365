// The table of block types, F32 and F16: the shared codecs around the micro-kernels of one
// instruction set. What a variant needs besides comes with BF16 (with_bf16.h).
#pragma once

#include "codec/act_rows.h"
#include "llamafile/act.h"
#include "llamafile/either.h"
#include "llamafile/floats/codec.h"
#include "llamafile/gguf/layout.h"
#include "llamafile/gguf/weight_codec.h"
#include "llamafile/with_bf16.h"

namespace ktk::llamafile {
namespace {

using FloatAct = ActRowsF32<kSubBlock>;

inline void act_format(const ktk_matrix* matrix, ktk_format* out) {
  *out = floats::is_float(matrix->format) ? FloatAct::kFormat
                                          : act_format_of(block_type(matrix->format.element));
}

template <size_t kNumKernels>
constexpr ktk_variant make_table(const ktk_ukernel (&ukernels)[kNumKernels]) {
  ktk_variant v = {};
  v.weight_size = either<weight_size, floats::weight_size>;
  v.pack_weight = either<pack_weight, floats::pack_weight>;
  v.unpack_weight = either<unpack_weight, floats::unpack_weight>;
  v.weight_offset = either<weight_offset, floats::weight_offset>;
  v.act_format = act_format;
  v.act_size = either<act_size, FloatAct::size>;
  v.pack_act = either<pack_act, FloatAct::pack>;
  v.unpack_act = either<unpack_act, FloatAct::unpack>;
  v.ukernels = ukernels;
  v.num_ukernels = kNumKernels;
  return v;
}

}  // namespace
}  // namespace ktk::llamafile

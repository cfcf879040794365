// What all variants share.
#pragma once

#include "bf16/variant.h"
#include "bf16z/kernel.h"
#include "bf16z/weight_codec.h"

namespace ktk::bf16z {
namespace {

using bf16::ActBf16;
using bf16::ActF32;

// A micro-kernel that multiplies what it decodes with the tile of a kernel of BF16.
template <class Plain, class Decoder>
constexpr ktk_ukernel decoding_ukernel(const char* name) {
  return ukernel(name, run<gemm<DecodedKernel<Plain, Decoder>>, gemm<Plain>>, scratch_size);
}

// One that decodes in registers, for up to m_max rows.
template <class Kernel, class Plain>
constexpr ktk_ukernel register_ukernel(const char* name, size_t m_max) {
  return ukernel(name, m_max, run<gemm<Kernel>, gemm<Plain>>);
}

}  // namespace
}  // namespace ktk::bf16z

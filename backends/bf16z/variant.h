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

// The same for rows that waits for memory.
template <class Kernel, class Plain>
constexpr ktk_ukernel register_ukernel(const char* name) {
  return ukernel(name, Kernel::kMr, run<gemm<Kernel>, gemm<Plain>>, scratch_size);
}

}  // namespace
}  // namespace ktk::bf16z

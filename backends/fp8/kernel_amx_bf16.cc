// FP8 with AMX: bf16 rows, up to 32 rows x 32 columns. Every CPU with AMX has AVX512-VBMI.
#include "codec/scaled/amx_vector.h"
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

template <class Layout>
using Kernel = AmxKernel<DecodeBf16, Layout>;

// Few rows wait for memory, or for decoding: the vector kernel, with the same bits, stores nothing.
template <class Layout>
using VectorKernel = AmxVectorKernel<DecodeHalves<DecodeBf16>, Layout, 2>;

struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_isa kMoreIsa = KTK_ISA_AVX512_VBMI;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_2x32_avx512", 2, gemm_by_layout<Formats, VectorKernel>,
              amx_vector_scratch_size),
      ukernel("gemm_32x32_amx_bf16", gemm_by_layout<Formats, Kernel>, amx_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)

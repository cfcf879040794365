// FP8 with vdpbf16ps: bf16 rows, up to 12 rows x 32 columns.
//
// The tables of bf16 values need AVX512-VBMI, which all CPUs with AVX512-BF16 have but Cooper Lake.
#include "codec/scaled/zmm_decoded.h"
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

template <class Layout>
using Kernel = ZmmKernel<DecodeBf16, Layout>;

template <class Layout>
using DecodedKernel = ZmmDecodedKernel<DecodeBf16, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_isa kMoreIsa = KTK_ISA_AVX512_VBMI;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_bf16", gemm_decoded_or_not<Formats, Kernel, DecodedKernel>,
              decoded_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)

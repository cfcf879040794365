// FP8 with AVX-512 FMA, VBMI and GFNI: f32 rows, up to 12 rows x 32 columns.
#include "codec/scaled/zmm_decoded.h"
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

template <class Layout>
using Kernel = ZmmKernel<DecodeHalves<DecodeAffine>, Layout>;

template <class Layout>
using DecodedKernel = ZmmDecodedKernel<DecodeHalves<DecodeAffine>, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vbmi", gemm_decoded_or_not<Formats, Kernel, DecodedKernel>,
              decoded_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)

// MXFP4 with AVX-512 FMA: f32 rows, up to 12 rows x 32 columns.
#include "codec/scaled/zmm_decoded.h"
#include "mxfp4/variant.h"
#include "mxfp4/zmm.h"

namespace ktk::mxfp4 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512", 12, gemm<ZmmKernel<DecodeF32, Layout>>),
      ukernel("gemm_decoded_12x32_avx512", gemm<ZmmDecodedKernel<DecodeF32, Layout>>,
              decoded_scratch_size)};
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)

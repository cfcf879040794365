// E2M1 with AVX-512 FMA: f32 rows, up to 12 rows x 32 columns.
#include "codec/scaled/zmm_decoded.h"
#include "mxfp4/variant.h"
#include "mxfp4/zmm.h"

namespace ktk::mxfp4 {
namespace {

template <class Layout>
using Kernel = ZmmKernel<DecodeF32<typename Layout::Scales>, Layout>;

template <class Layout>
using DecodedKernel = ZmmDecodedKernel<DecodeF32<typename Layout::Scales>, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512", gemm_decoded_or_not<Formats, Kernel, DecodedKernel>,
              decoded_scratch_size)};
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)

// FP8 with AVX2 and FMA: f32 rows, up to 2 rows x 32 columns, 4 x 16 or, decoded ahead, 6 x 16.
#include "codec/scaled/ymm_decoded.h"
#include "fp8/variant.h"
#include "fp8/ymm.h"

namespace ktk::fp8 {
namespace {

template <class Layout>
using Kernel = YmmKernel<Decoder, Layout>;

template <class Layout>
using DecodedKernel = YmmDecodedKernel<Decoder, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x16_avx2", 4, gemm_by_layout<Formats, Kernel>),
      ukernel("gemm_decoded_6x16_avx2", gemm_by_layout<Formats, DecodedKernel>, ymm_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)

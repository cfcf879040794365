// E2M1 with AVX2: int16 rows, up to 2 rows x 32 columns, 4 x 16 or, with codes looked up ahead, 6
// x 16.
#include "mxfp4/variant.h"
#include "mxfp4/ymm_i16_decoded.h"

namespace ktk::mxfp4 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActI16;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x16_avx2", 4, gemm_by_layout<Formats, I16CodesKernel>, i16_parts_size),
      ukernel("gemm_decoded_6x16_avx2", gemm_by_layout<Formats, I16DecodedKernel>,
              i16_scratch_size)};
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)

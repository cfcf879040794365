// FP8 with AVX-512 FMA: f32 rows, up to 12 rows x 32 columns.
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_12x32", multiply<DecodeF32>)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)

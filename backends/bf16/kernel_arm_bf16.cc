// BF16 with bfmmla: bf16 rows.
#include "bf16/neon_bf16.h"
#include "bf16/variant.h"

namespace ktk::bf16 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x16_arm_bf16", gemm<NeonKernel<SumsBf16>>)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

// BF16Z with bfmmla: bf16 rows.
#include "bf16/neon_bf16.h"
#include "bf16z/decode_neon.h"
#include "bf16z/variant.h"

namespace ktk::bf16z {
namespace {

struct Variant {
  using Weight = WeightCodec<NeonDecoder>;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      decoding_ukernel<bf16::NeonKernel<bf16::SumsBf16>, NeonDecoder>("gemm_4x16_arm_bf16")};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

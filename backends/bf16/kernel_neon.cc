// BF16 with plain Armv8-A: f32 rows.
#include "bf16/neon_f32.h"
#include "bf16/variant.h"

namespace ktk::bf16 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_4x16_neon", gemm<NeonKernel<SumsF32>>)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

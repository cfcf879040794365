// BF16Z with plain Armv8-A: f32 rows.
#include "bf16/neon_f32.h"
#include "bf16z/decode_neon.h"
#include "bf16z/variant.h"

namespace ktk::bf16z {
namespace {

struct Variant {
  using Weight = WeightCodec<NeonDecoder>;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      decoding_ukernel<bf16::NeonKernel<bf16::SumsF32>, NeonDecoder>("gemm_4x16_neon")};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

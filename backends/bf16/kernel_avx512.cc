// BF16 with AVX-512 FMA: f32 rows.
#include "bf16/variant.h"
#include "bf16/zmm_f32.h"

namespace ktk::bf16 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512", gemm<ZmmKernel<DotF32>>)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

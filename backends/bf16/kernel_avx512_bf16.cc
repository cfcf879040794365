// BF16 with vdpbf16ps: bf16 rows.
#include "bf16/variant.h"
#include "bf16/zmm_bf16.h"

namespace ktk::bf16 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_bf16", gemm<ZmmKernel<DotBf16>>)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

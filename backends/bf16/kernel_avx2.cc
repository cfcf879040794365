// BF16 with AVX2 and FMA: f32 rows.
#include "bf16/variant.h"
#include "bf16/ymm_tile.h"

namespace ktk::bf16 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_6x16_avx2", gemm<YmmKernel>)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

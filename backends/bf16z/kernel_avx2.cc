// BF16Z with AVX2 and FMA: f32 rows.
#include "bf16z/variant.h"
#include "bf16z/ymm_kernel.h"

namespace ktk::bf16z {
namespace {

struct Variant {
  using Weight = WeightCodec<YmmDecoder>;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      register_ukernel<YmmKernel, bf16::YmmKernel>("gemv_1x32_avx2", 1),
      decoding_ukernel<bf16::YmmKernel, YmmDecoder>("gemm_6x16_avx2")};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

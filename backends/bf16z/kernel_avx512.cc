// BF16Z with AVX-512 FMA: f32 rows.
#include "bf16/zmm_f32.h"
#include "bf16z/variant.h"
#include "bf16z/zmm_f32_kernel.h"
#include "bf16z/zmm_kernel.h"

namespace ktk::bf16z {
namespace {

using Plain = bf16::ZmmKernel<bf16::DotF32>;

struct Variant {
  using Weight = WeightCodec<ZmmDecoder>;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      register_ukernel<ZmmKernel<bf16::DotF32>, Plain>("gemv_11x32_avx512", 11),
      ukernel("gemm_12x32_avx512", run<gemm<ZmmF32Kernel>, gemm<Plain>>, scratch_size)};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

// BF16Z with vdpbf16ps: bf16 rows.
#include "bf16/zmm_bf16.h"
#include "bf16z/variant.h"
#include "bf16z/zmm_kernel.h"

namespace ktk::bf16z {
namespace {

using Plain = bf16::ZmmKernel<bf16::DotBf16>;

struct Variant {
  using Weight = WeightCodec<ZmmDecoder>;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      register_ukernel<ZmmKernel<bf16::DotBf16>, Plain>("gemm_12x32_avx512_bf16", SIZE_MAX)};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

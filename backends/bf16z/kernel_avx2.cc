// BF16Z with AVX2 and FMA: f32 rows.
#include "bf16/ymm_tile.h"
#include "bf16z/decode_ymm.h"
#include "bf16z/variant.h"

namespace ktk::bf16z {
namespace {

struct Variant {
  using Weight = WeightCodec<YmmDecoder>;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      decoding_ukernel<bf16::YmmKernel, YmmDecoder>("gemm_6x16_avx2")};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

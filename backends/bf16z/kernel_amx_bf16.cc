// BF16Z with AMX: bf16 rows, tdpbf16ps for any number of rows.
#include "bf16/amx_tile.h"
#include "bf16z/decode_zmm.h"
#include "bf16z/variant.h"

namespace ktk::bf16z {
namespace {

void run_decoded(const ktk_matmul* mm) {
  const TileRows rows(mm->m);
  gemm<DecodedKernel<bf16::AmxKernel, ZmmDecoder>>(mm);
}

struct Variant : AmxVariant {
  using Weight = WeightCodec<ZmmDecoder>;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_32x32_amx_bf16", run<run_decoded, bf16::run_amx>, scratch_size)};
};

}  // namespace
}  // namespace ktk::bf16z

KTK_EXPORT_VARIANT(bf16z, ktk::bf16z::Variant)

// BF16 with AMX: bf16 rows, tdpbf16ps for any number of rows.
#include "bf16/amx_tile.h"
#include "bf16/variant.h"

namespace ktk::bf16 {
namespace {

struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_32x32_amx_bf16", run_amx)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)

// MXFP4 with AMX: bf16 rows, up to 32 rows x 32 columns.
#include "common/scaled_amx.h"
#include "mxfp4/variant.h"
#include "mxfp4/zmm.h"

namespace ktk::mxfp4 {
namespace {

constexpr ktk_ukernel kUkernel =
    make_ukernel("gemm_32x32", multiply_amx<DecodeBf16, Layout>, amx_scratch_size);

}  // namespace
}  // namespace ktk::mxfp4

extern "C" {
extern const ktk_variant KTK_VARIANT(mxfp4);
constexpr ktk_variant KTK_VARIANT(mxfp4) = ktk::mxfp4::make_variant<ktk::mxfp4::ActBf16>(
    ktk::mxfp4::kUkernel, ktk::kTileRows, ktk::enter_amx, ktk::leave_amx);
}

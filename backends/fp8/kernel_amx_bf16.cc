// FP8 with AMX: bf16 rows, up to 32 rows x 32 columns. Every CPU with AMX has AVX512-VBMI.
#include "common/scaled_amx.h"
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

void multiply(const ktk_matmul* mm) {
  dispatch(mm->matrix,
           [&](auto codec) { multiply_amx<DecodeBf16, typename decltype(codec)::Layout>(mm); });
}

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_32x32", multiply, amx_scratch_size);

}  // namespace
}  // namespace ktk::fp8

extern "C" {
extern const ktk_variant KTK_VARIANT(fp8);
constexpr ktk_variant KTK_VARIANT(fp8) = ktk::fp8::make_variant<ktk::fp8::ActBf16>(
    ktk::fp8::kUkernel, KTK_ISA_AVX512_VBMI, ktk::kTileRows, ktk::enter_amx, ktk::leave_amx);
}

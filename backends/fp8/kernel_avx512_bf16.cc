// FP8 with vdpbf16ps: bf16 rows, up to 12 rows x 32 columns.
//
// The tables of bf16 values need AVX512-VBMI, which all CPUs with AVX512-BF16 have but Cooper Lake.
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_12x32", multiply<DecodeBf16>);

}  // namespace
}  // namespace ktk::fp8

extern "C" {
extern const ktk_variant KTK_VARIANT(fp8);
constexpr ktk_variant KTK_VARIANT(fp8) =
    ktk::fp8::make_variant<ktk::fp8::ActBf16>(ktk::fp8::kUkernel, KTK_ISA_AVX512_VBMI);
}

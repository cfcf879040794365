// FP8 with AVX-512 FMA: f32 rows, up to 12 rows x 32 columns.
#include "fp8/variant.h"
#include "fp8/zmm.h"

namespace ktk::fp8 {
namespace {

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_12x32", multiply<DecodeF32>);

}  // namespace
}  // namespace ktk::fp8

extern "C" {
extern const ktk_variant KTK_VARIANT(fp8);
constexpr ktk_variant KTK_VARIANT(fp8) =
    ktk::fp8::make_variant<ktk::fp8::ActF32>(ktk::fp8::kUkernel);
}

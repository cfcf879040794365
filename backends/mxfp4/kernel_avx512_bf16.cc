// MXFP4 with vdpbf16ps: bf16 rows, up to 12 rows x 32 columns.
#include "mxfp4/variant.h"
#include "mxfp4/zmm.h"

namespace ktk::mxfp4 {
namespace {

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_12x32", multiply_zmm<DecodeBf16, Layout>);

}  // namespace
}  // namespace ktk::mxfp4

extern "C" {
extern const ktk_variant KTK_VARIANT(mxfp4);
constexpr ktk_variant KTK_VARIANT(mxfp4) =
    ktk::mxfp4::make_variant<ktk::mxfp4::ActBf16>(ktk::mxfp4::kUkernel);
}

// AMX-INT8: Sapphire Rapids and later servers.
#include "common/int4/amx.h"
#include "common/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("vnni_4x32", int4::kVectorRows,
                 int4::multiply<int4::Vnni512, Act, int4::kVectorRows, 2>),
    make_ukernel("amx_32x32", SIZE_MAX, int4::multiply_amx<Act>, int4::amx_scratch_size),
};

}  // namespace
}  // namespace ktk::rawint4

extern "C" {
extern const ktk_variant KTK_VARIANT(rawint4);
constexpr ktk_variant KTK_VARIANT(rawint4) = ktk::int4::make_variant<ktk::rawint4::Act>(
    ktk::int4::pack_ready, ktk::rawint4::kUkernels, ktk::int4::kTileRows, ktk::enter_amx,
    ktk::leave_amx);
}

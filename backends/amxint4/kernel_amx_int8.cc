// AMX-INT8: Sapphire Rapids and later servers.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "common/int4/amx.h"
#include "common/int4/variant.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<>;

constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("vnni_4x32", int4::kVectorRows,
                 int4::multiply<int4::Vnni512, TargetAct, int4::kVectorRows, 2>),
    make_ukernel("amx_32x32", SIZE_MAX, int4::multiply_amx<TargetAct>, int4::amx_scratch_size),
};

}  // namespace
}  // namespace ktk::amxint4

extern "C" {
extern const ktk_variant KTK_VARIANT(amxint4);
constexpr ktk_variant KTK_VARIANT(amxint4) = ktk::int4::make_variant<ktk::amxint4::TargetAct>(
    ktk::amxint4::pack_weight, ktk::amxint4::kUkernels, ktk::int4::kTileRows, ktk::enter_amx,
    ktk::leave_amx);
}

// AMX-INT8: Sapphire Rapids and later servers.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/amx.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<>;

struct Variant : AmxVariant {
  using Weight = amxint4::WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("vnni_4x32", int4::kVectorRows,
              int4::multiply<int4::Vnni512, TargetAct, int4::kVectorRows, 2>),
      ukernel("amx_32x32", SIZE_MAX, int4::multiply_amx<TargetAct>, int4::amx_scratch_size),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)

// AVX-512 with vpdpbusd on CPUs that also have vdpbf16ps, which this does not use: Zen 4 and Zen 5,
// where splitting nibbles has ports of its own, so that every tile does it again.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/tile.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

// Registers: 24 accumulators, 4 weights, a mask.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = amxint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)

// AVX-VNNI, vpdpbusd on 256 bits: client CPUs without AVX-512.
#include "amxint8/matmul.h"
#include "amxint8/variant.h"
#include "amxint8/ymm.h"

namespace ktk::amxint8 {
namespace {

struct Dot : Ymm {
  using Weight = Int;
  using Act = Int;
  static Weight load_weight(const uint8_t* p) { return load_bytes(p); }
  static Act broadcast_act(const uint8_t* p) { return broadcast(p); }
  static Int dot(Int acc, Weight w, Act a) { return _mm256_dpbusd_avx_epi32(acc, w, a); }
};

using TargetAct = Act<ByteCodes, 128>;

// Registers: 12 accumulators, 2 weights, a broadcast.
constexpr ktk_ukernel kUkernels[] = {
    {
        .struct_size = sizeof(ktk_ukernel),
        .name = "gemv",
        .m_max = 3,
        .scratch_size = nullptr,
        .run = multiply<Dot, TargetAct, 3, 4, 4>,
    },
    {
        .struct_size = sizeof(ktk_ukernel),
        .name = "gemm",
        .m_max = SIZE_MAX,
        .scratch_size = nullptr,
        .run = multiply<Dot, TargetAct, 6, 2, 8>,
    },
};

}  // namespace
}  // namespace ktk::amxint8

extern "C" {
extern const ktk_variant KTK_VARIANT(amxint8);
constexpr ktk_variant KTK_VARIANT(amxint8) =
    ktk::amxint8::make_variant<ktk::amxint8::TargetAct>(ktk::amxint8::kUkernels);
}

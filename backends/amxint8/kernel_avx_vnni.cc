// AVX-VNNI, vpdpbusd on 256 bits: client CPUs without AVX-512.
#include "amxint8/matmul.h"
#include "amxint8/variant.h"
#include "simd/ymm.h"

namespace ktk::amxint8 {
namespace {

struct Dot : Ymm {
  static constexpr int kAddLatency = 5;
  using Weight = Int;
  using Act = Int;
  static Weight load_weight(const uint8_t* p) { return load_bytes(p); }
  static Act broadcast_act(const uint8_t* p) { return broadcast(p); }
  static Int dot(Int acc, Weight w, Act a) {
    // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));
    return acc;
  }
};

using TargetAct = Act<ByteCodes, 256>;

// Registers: 12 accumulators, 2 weights, a broadcast.
struct Variant {
  using Weight = WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv", 3, multiply_thin<Dot, TargetAct, 3>),
      ukernel("gemm", SIZE_MAX, multiply<Dot, TargetAct, 6, 2, 8>),
  };
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)

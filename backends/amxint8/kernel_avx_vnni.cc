// AVX-VNNI, vpdpbusd on 256 bits: client CPUs without AVX-512.
#include "amxint8/variant.h"
#include "amxint8/vector_kernel.h"
#include "simd/ymm.h"

namespace ktk::amxint8 {
namespace {

struct Vnni256 : Ymm {
  static constexpr size_t kLineProducts = 1;
  using Weight = Int;
  using Act = Int;
  static Weight load_weight(const char* p) { return load_bytes(p); }
  static Act broadcast_act(const char* p) { return broadcast(p); }
  static Int dot(Int sums, Weight w, Act a) {
    // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(a));
    return sums;
  }
};

// Registers: 12 accumulators, 2 weights, a broadcast.
struct Variant {
  using Weight = WeightCodec;
  using Act = ActBytes<256>;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_6x16_avx_vnni", gemm<VectorKernel<Vnni256, Act, 6, 3>>)};
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)

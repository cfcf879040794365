// AMX: 2 x 2 tiles of 16 x 16 sums, and vectors for one or two rows.
#include "amxint8/amx_kernel.h"
#include "amxint8/variant.h"
#include "amxint8/vector_kernel.h"
#include "amxint8/vnni512.h"

namespace ktk::amxint8 {
namespace {

void run(const ktk_matmul* mm) {
  const TileRows rows(mm->m);
  tile_memory_barrier();
  gemm<AmxKernel>(mm);
}

// For one or two rows the vector kernel reads memory a little faster. Group sums are exact in both
// and end in the same way, so the bits are the same.
struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = AmxAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_2x32_avx512_vnni", 2, gemm<VectorKernel<Vnni512, AmxAct, 2, 2>>),
      ukernel("gemm_32x32_amx_int8", run, scratch_size),
  };
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)

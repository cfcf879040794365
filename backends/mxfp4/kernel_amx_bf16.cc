// E2M1 with AMX: bf16 rows, up to 32 rows x 32 columns.
#include "codec/scaled/amx_vector.h"
#include "mxfp4/variant.h"
#include "mxfp4/zmm.h"

namespace ktk::mxfp4 {
namespace {

template <class Layout>
using Kernel = AmxKernel<DecodeBf16<typename Layout::Scales>, Layout>;

// Few rows wait for memory, or for decoding: the vector kernel, with the same bits, stores nothing.
template <class Layout>
using VectorKernel = AmxVectorKernel<DecodeF32<typename Layout::Scales>, Layout, 2>;

struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_2x32_avx512", 2, gemm_by_layout<Formats, VectorKernel>,
              amx_vector_scratch_size),
      ukernel("gemm_32x32_amx_bf16", gemm_by_layout<Formats, Kernel>, amx_scratch_size)};
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)

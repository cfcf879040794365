// AMX-INT8: Sapphire Rapids and later servers, for more than a dozen rows of block types. Fewer are
// avx512_vnni, the same code: they wait for memory, or would wait for operands and sums.
#include "llamafile/amx.h"
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

// The micro-kernel of avx512_vnni with this number.
template <size_t kIndex>
void multiply_vectors(const ktk_matmul* mm) {
  ktk_llamafile_avx512_vnni.ukernels[kIndex].run(mm);
}
template <size_t kIndex>
size_t vectors_scratch_size(const ktk_matrix* matrix, size_t m) {
  const auto size = ktk_llamafile_avx512_vnni.ukernels[kIndex].scratch_size;
  return size ? size(matrix, m) : 0;
}

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_2x32_avx512_vnni", kGemvRows, multiply_vectors<0>, vectors_scratch_size<0>),
      ukernel("gemm_12x32_avx512_vnni", kFewRows, multiply_vectors<1>, vectors_scratch_size<1>),
      ukernel("gemm_32x32_amx_int8", multiply_amx, amx_scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats>, AmxVariant {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_32x32_amx_int8"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
